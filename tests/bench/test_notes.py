"""What the notes of a record say."""

import pytest

from tests.bench.shapes import TINY, small_case
from triax.bench import notes
from triax.bench.cases import Case
from triax.bench.presets import PRESETS, SUITES, on_host
from triax.bench.selection import Request, select

QUICK, FULL = SUITES["quick"], SUITES["full"]
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION raises that"


def of_selection(request):
    suite = SUITES[request.suite]
    return notes.of_selection(request, suite, select(request, suite))


def test_nothing_to_tell():
    assert of_selection(Request()) == of_selection(Request(suite="full", memory=True)) == []
    assert (
        of_selection(Request(presets=["kimi-k2"], tokens=[64], ops=["plan", "sort_chunks"])) == []
    )


def test_where_the_competitors_are():
    request = Request(suite="full", presets=["deepseek-v3"], tokens=[8192])
    assert of_selection(request) == [
        "no competitors: suite `full` measures them at 16,384 tokens, uniform routing, for "
        "deepseek-v3, qwen3-235b, mixtral-8x7b and ops route+grad, permute, unpermute, sort_chunks"
    ]
    assert of_selection(Request(suite="scaling")) == [
        "no competitors: suite `scaling` measures none"
    ]
    assert of_selection(Request(suite="scaling", competitors=False)) == []


def test_flags_without_effect():
    request = Request(ops=["sort_chunks"], tokens=[64], presets=["kimi-k2"], memory=True)
    assert of_selection(request) == [
        "without effect: --presets, --tokens; the chunk sort has a shape of its own, "
        "524,288 × 4,096 in 64 chunks",
        "without effect: --memory; it is of a model's route, and no model is run",
    ]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request(), "here: sizes are small (128 tokens; --tokens chooses others), the ops"),
        (Request(tokens=[8192, 64]), "here: models get 8,192, 64 tokens, the ops"),
        (Request(ops=["sort_chunks"]), "here: sizes are small, the ops"),
    ],
)
def test_sizes_on_the_host(request_, text):
    assert text in notes.on_host(request_, select(request_, on_host(QUICK)))


def test_memory_that_is_missing(monkeypatch):
    case = Case.routed("route+grad", PRESETS["deepseek-v3"], 524288, "bfloat16", "uniform")
    label = "route+grad deepseek-v3 T=524288 H=7168 bfloat16 uniform"
    monkeypatch.setattr(notes.machine, "memory_limit_bytes", lambda: 97 * 10**9)
    need = f"about 150 GB, JAX may use 97 GB: {FRACTION}"
    assert notes.too_large(case) == f"left out, too large: {label}; it needs {need}"
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    what = f"left out, out of memory: {label}"
    assert notes.out_of_memory(case, None, error) == f"{what}; it needs {need}"
    by = notes.out_of_memory(case, "argsort+take", error)
    assert by == f"{what} by argsort+take; Triax needs {need}"
    # JAX's share of the memory is what PyTorch lacks.
    theirs = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})()
    assert notes.out_of_memory(case, "torch.index_select", theirs) == (
        f"{what} by torch.index_select, which has the memory that JAX leaves"
    )
    monkeypatch.setattr(notes.machine, "memory_limit_bytes", lambda: None)
    assert notes.too_large(case) == f"left out, too large: {label}; it needs about 150 GB"


def test_a_stream_without_a_limit(monkeypatch):
    monkeypatch.setattr(notes.machine, "memory_limit_bytes", lambda: 97 * 10**9)
    shape = (PRESETS["deepseek-v3"], 524288, "bfloat16", "uniform")
    cases = [Case.routed(op, *shape) for op in ("plan", "permute", "unpermute", "route")]
    (stream, _) = cases[2].streams[0]
    assert notes.without_limit(cases, stream, "RESOURCE_EXHAUSTED: Out of memory, 56 GiB") == (
        "no fraction of a stream for unpermute, route of deepseek-v3 at 524,288 tokens, bfloat16: "
        "the stream that reads 8 and writes 1 arrays of 7.5 GB could not be measured: out of "
        f"memory; it needs about 68 GB, JAX may use 97 GB: {FRACTION}"
    )
    told = notes.without_limit(cases, stream, "the host is too slow")
    assert told is not None
    assert told.endswith("could not be measured: the host is too slow")
    assert notes.without_limit([small_case("permute", preset=TINY)], stream, "anything") is None
    sort = small_case("sort_chunks")
    (stream, _) = sort.streams[0]
    told = notes.without_limit([sort], stream, "anything")
    assert told is not None
    assert told.startswith("no fraction of a stream for sort_chunks of the chunk sort, float32")
