"""Writes the tables of figures in README and docs from the records under `benchmarks/`.

    python tools/figures.py            # writes them
    python tools/figures.py --check    # says which are out of date, and exits with 1

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`, one of `TABLES`.
Those with a row for each entry of a record are in figures.toml. Figures may also stand inside a
line, with both comments: a line that begins with a comment would end the sentence before it. No
figure is typed by hand.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import string
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from triax import architectures

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        *sorted(ROOT.glob("benchmarks/*.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    )
    if "<!-- figures: " in path.read_text()
]
ROWS: dict[str, Any] = tomllib.loads((ROOT / "tools" / "figures.toml").read_text("utf-8"))
BLOCK = re.compile(r"(<!-- figures: (\S+) -->(\n?)).*?(<!-- end of figures -->)", re.DOTALL)

NAMES = {
    "plan": "plan",
    "permute": "permute",
    "permute+plan": "plan and permute",
    "unpermute": "unpermute, weighted",
    "permute_grad": "gradient of permute",
    "unpermute_grad": "gradient of unpermute",
    "moves": "plan, permute, unpermute",
    "moves+grad": "the same, forward and backward",
    "sort_chunks": "chunk sort",
    "sort_chunks_grad": "gradient of the chunk sort",
}
PRESETS = {
    "deepseek-v3": "DeepSeek-V3",
    "kimi-k2": "Kimi K2",
    "qwen3-235b": "Qwen3-235B",
    "gpt-oss-120b": "gpt-oss-120b",
    "mixtral-8x7b": "Mixtral 8x7B",
    "llama4-maverick": "Llama 4 Maverick",
    "fine-grained": "64 small experts",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "qwen3-30b": "Qwen3-30B",
}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")
CODEBASES = ("maxtext", "haliax", "jax-llm-examples", "skyrl")
MOVES = ("permute", "permute+plan", "unpermute", "permute_grad", "unpermute_grad")


@functools.cache
def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def find(implementation: str = "triax", source: str = "h200", **what: Any) -> list[dict[str, Any]]:
    """The results of the benchmark that agree with `what`; wrong ones are none."""
    what = {"implementation": implementation, "error": None} | what
    results = record(source)["results"]
    return [r for r in results if all(r[name] == value for name, value in what.items())]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


class _Fields(string.Formatter):
    """The fields of a row, with the conversions that figures.toml names."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        by_name: dict[str, Callable[[Any], Any]] = {
            "k": lambda x: x / 1e3,
            "G": lambda x: x / 1e9,
            "m": lambda x: sum(x) / len(x),
            "n": len,
            "u": _us,
            "p": PRESETS.__getitem__,
        }
        return by_name[conversion](value) if conversion else value


def of_rows(name: str) -> str:
    """A table of figures.toml."""
    made = ROWS[name]
    cells = [_Fields().vformat(made["row"], *of).split(" | ") for of in entries(**made)]
    return table(made["head"].split(" | "), cells)


def entries(
    entries: str, depth: int = 1, only: Any = None, start: str = "", without: str = "", **_: Any
) -> Iterator[tuple[list[str], Any]]:
    """The entries of records with their names, as figures.toml describes them."""
    source, *parts = entries.split("/")
    for first, found in of_several_gpus() if "*" in source else [([], record(source))]:
        for part in parts or ["results"]:
            found = found.get(part, {})
        for names, entry in _named(found, depth):
            *others, last = names or [""]
            agrees = all(
                bool(entry[field]) if value is True else entry[field] == value
                for field, value in (only or {}).items()
            )
            if agrees and last.startswith(start) and (not without or last != without):
                way = last.removeprefix(start).removesuffix(", forward and backward")
                yield [*first, *others, way.replace("1 parts", "1 part")], entry


def _named(found: Any, depth: int) -> Iterator[tuple[list[str], Any]]:
    for name, entry in [([], of) for of in found] if isinstance(found, list) else found.items():
        inner = _named(entry, depth - 1) if depth > 1 else [([], entry)]
        yield from (([name, *names] if name else names, of) for names, of in inner)


def _us(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} µs" if value < 100 else f"{value:,.0f} µs"


def _inside_us(result: dict[str, Any]) -> str:
    """The time inside a larger program, with a star, where that was measured."""
    inside = result["graph_us"]  # also where it stands for all that could be measured
    return _us(result["median_us"]) if inside is None else _us(inside) + _star("graph")


def _star(method: str) -> str:
    """The mark of a time that is that of one of many runs inside one program."""
    return " *" if method == "graph" else ""


def _share(result: dict[str, Any]) -> str:
    share = result["fraction_of_stream"]
    return "–" if share is None else f"{share:.1%}"


def where(source: str = "h200") -> str:
    """On what and when the benchmark ran."""
    run = record(source)
    return f"One {run['device']}, {versions(run)}, {run['written'][:10]}.\n"


def versions(run: dict[str, Any], names: Iterable[str] = ("jax", "triton")) -> str:
    return ", ".join(f"{name} {run['versions'][name]}" for name in names)


def ops() -> str:
    """Each op at DeepSeek-V3's shape and 16,384 tokens, and the chunk sort."""
    shape = {"preset": "deepseek-v3", "tokens": 16384, "routing": "uniform", "dtype": "bfloat16"}
    found = find(**shape) + find(preset=None)
    rows = [[_name(r["op"]), _inside_us(r), _share(r)] for r in found]
    return table(["", "time", "of the stream limit"], rows)


def _name(op: str) -> str:
    return f"{NAMES[op]} (`{op}`)"


def _ratio(name: str, shape: dict[str, Any]) -> str:
    """How many times as long a competitor took as Triax; a dash where one was not measured."""
    own, theirs = find(**shape), find(name, **shape)
    of_device = ("events", "graph", "bursts")
    if not own or not theirs or any(r["seconds_method"] not in of_device for r in own + theirs):
        return "–"
    return f"{theirs[0]['median_us'] / own[0]['median_us']:.2f}×"


def _against(columns: Sequence[dict[str, Any]], titles: Sequence[str]) -> str:
    names = dict.fromkeys(r["implementation"] for r in record("h200")["results"])
    rows = [[f"`{name}`", *(_ratio(name, shape) for shape in columns)] for name in names]
    rows = [row for row in rows if row[0] != "`triax`" and any(cell != "–" for cell in row[1:])]
    return table(["against", *titles], rows)


def against() -> str:
    """The moves forward and backward, how many times as fast as each competitor."""
    presets = ("deepseek-v3", "qwen3-235b", "mixtral-8x7b")
    shape = {"op": "moves+grad", "tokens": 16384, "routing": "uniform"}
    columns = [shape | {"preset": preset} for preset in presets]
    return _against(columns, [PRESETS[preset] for preset in presets])


def single_ops() -> str:
    """The same for single ops, at DeepSeek-V3's shape, and for the chunk sort."""
    shape = {"preset": "deepseek-v3", "tokens": 16384, "routing": "uniform"}
    columns = [shape | {"op": op} for op in ("permute", "unpermute")]
    columns += [{"preset": None, "op": op} for op in ("sort_chunks", "sort_chunks_grad")]
    return _against(columns, [_name(column["op"]) for column in columns])


def models() -> str:
    """The least share of the stream, over token counts and routings, by model and op."""
    rows = []
    for preset, name in PRESETS.items():
        for tokens in (8192, 32768) if find(preset=preset) else ():
            cells = []
            for op in MOVES:
                found = find(preset=preset, tokens=tokens, op=op)
                assert {r["routing"] for r in found} == {"uniform", "skewed"}, (preset, tokens, op)
                least = min(found, key=lambda r: r["fraction_of_stream"] or 0.0)
                cells.append(_share(least) + _star(least["seconds_method"]))
            rows.append([name, f"{tokens:,}", *cells])
    return table(["", "tokens", *(f"`{op}`" for op in MOVES)], rows)


def small() -> str:
    """DeepSeek-V3's shape from few tokens to many: the plan and the moves."""
    ops = ("plan", "moves", "moves+grad")
    shape = {"preset": "deepseek-v3", "routing": "uniform"}
    rows = []
    for tokens in sorted({r["tokens"] for r in find(**shape)}):
        found = [find(tokens=tokens, op=op, **shape) for op in ops]
        rows.append([f"{tokens:,}", *(_inside_us(one[0]) if one else "–" for one in found)])
    return table(["tokens", *(f"`{op}`" for op in ops)], rows)


def router() -> str:
    """Choosing experts, alone and with the gradient."""
    rows = []
    for own in find(source="router", op="router+grad"):
        shape = {name: own[name] for name in ("preset", "tokens")}
        (alone,) = find(source="router", op="router", **shape)
        plain = find("top_k", source="router", op="router", **shape)
        ratio = f"{plain[0]['median_us'] / alone['median_us']:.1f}×" if plain else "–"
        name = f"{PRESETS[own['preset']]}, {own['top_k']} of {own['experts']}"
        rows.append([name, f"{own['tokens']:,}", _us(alone["median_us"]), _inside_us(own), ratio])
    return table(["", "tokens", "`route`", "with its gradient", "against `lax.top_k`"], rows)


def matmuls() -> str:
    """Each product's TFLOP/s, of the dense matmul beside it, by kind of groups."""
    ops = ("ragged_dot", "ragged_dot_grad_rows", "ragged_dot_grad_weights")
    rows = []
    for first in find(source="matmuls", op=ops[0], routing="even"):
        cells = []
        for op in ops:
            found = [
                find(source="matmuls", op=op, preset=first["preset"], routing=routing)[0]
                for routing in ("even", "uneven", "half")
            ]
            cells.append(
                f"{found[0]['teraflops_per_second']:.0f}, "
                + " / ".join(f"{r['fraction_of_dense']:.2f}" for r in found)
            )
        count = first["tokens"] * first["top_k"]
        shape = f"{count:,} × {first['hidden']} × {first['width']}, {first['experts']}"
        rows.append([PRESETS[first["preset"]], shape, *cells])
    head = ["", "rows × depth × columns, groups", "forward", "rows' gradient", "weights' gradient"]
    return table(head, rows)


def profile() -> str:
    """What the profiler says of each product's kernel and of cuBLAS's."""
    kernels = record("matmul_profile")["kernels"]
    rows = []
    for preset in dict.fromkeys(kernel["preset"] for kernel in kernels):
        of_preset = [kernel for kernel in kernels if kernel["preset"] == preset]
        names = ("forward", "rows' gradient", "weights' gradient")
        for name, own, dense in zip(names, of_preset[:3], of_preset[3:], strict=True):
            cells = [f"{PRESETS[preset]}, {name}"]
            for kernel in (own, dense):
                cells += [
                    f"{kernel['duration (ns)'] / 1e6:.2f} ms",
                    f"{kernel['compute_throughput (%)']:.0f}%",
                    f"{kernel['sm_frequency (hz)'] / 1e9:.2f} GHz",
                ]
            rows.append(cells)
    head = ["", "Triax", "tensor cores", "clock", "cuBLAS", "tensor cores", "clock"]
    return table(head, rows)


def decode() -> str:
    """The matmuls and the layer of few tokens, of a read of the weights in use."""
    rows: dict[tuple[int, int], list[str]] = {}
    for r in record("decode")["weights"]:
        cells = rows.setdefault((r["experts"], r["tokens"]), [])
        cells.append(f"{r['fraction_of_read']:.2f}")
        if r["what"] == "layer":
            cells.append(_us(r["median_us"]))
    head = ["experts", "tokens", "gate and up", "down", "layer", "layer's time"]
    return table(head, [[*map(str, shape), *cells] for shape, cells in rows.items()])


def decode_rivals() -> str:
    """Of a read by Triax, and the time of the faster rival over Triax's, by tokens.

    A dash stands for arrays that do not fit the GPU's memory.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, found in record("decode_rivals")["results"].items():
        model, weights, tokens = name.split(", ")
        cell = "–"
        if isinstance(found["Triax"], dict):
            names = found.keys() & {"Marlin", "triton_kernels"}
            best = min(found[rival]["over_triax"] for rival in names)
            cell = f"{found['Triax']['of_read']:.2f}, {best:.2f}"
        rows.setdefault((model, weights), {})[tokens.removesuffix(" tokens")] = cell
    tokens = list(next(iter(rows.values())))
    head = ["", "weights", *(f"{count} tokens" if count != "1" else "1 token" for count in tokens)]
    return table(head, [[*which, *cells.values()] for which, cells in rows.items()])


def decode_nvfp4() -> str:
    """The time with int4 in groups of 32 over NVFP4's, which reads as many bytes, by tokens."""
    results = record("decode_nvfp4")["results"]
    rows: dict[str, list[str]] = {}
    for name, found in results.items():
        model, weights, tokens = name.split(", ")
        if weights == "NVFP4":
            other = results[f"{model}, int4-32, {tokens}"]["Triax"]["us"]
            rows.setdefault(model, []).append(f"{other / found['Triax']['us']:.2f}")
    head = ["", "1 token", "8 tokens", "32 tokens"]
    return table(head, [[model, *cells] for model, cells in rows.items()])


def serve() -> str:
    """What `examples/serving/serve.py` printed on a GPU: means of its runs, without the weights."""
    runs = record("serve")["runs"]
    rows = []
    for part in [part for part in runs[0]["seconds"] if part != "weights"]:
        found = [
            [r["seconds"][part] for r in runs if r["in_jax_cache"] == at] for at in (False, True)
        ]
        rows.append([part, *(f"{sum(times) / len(times) * 1000:,.0f} ms" for times in found)])
    return table(["", "exported", "in JAX's cache"], rows)


def of_several_gpus() -> list[tuple[list[str], dict[str, Any]]]:
    """The GPUs and the record of each of expert parallelism."""
    paths = sorted((ROOT / "benchmarks").glob("expert_parallel_*.json"))
    records = sorted((record(path.stem) for path in paths), key=lambda found: found["gpus"])
    return [([f"{found['gpus']} × {found['device']}"], found) for found in records]


def where_expert_parallel() -> str:
    of_each = [f"{gpus}: {versions(r)}, {r['written'][:10]}" for (gpus,), r in of_several_gpus()]
    return "; ".join(of_each) + ".\n"


def expert_parallel() -> str:
    """Sending tokens to their experts' GPUs and back, in milliseconds and against by hand."""
    rows = []
    for (gpus,), run in of_several_gpus():
        forward, both = (run["results"][name] for name in ("forward", "forward and backward"))
        for way in [way for way in forward if way != "triax" or "ragged" not in forward]:
            cells = [f"{r[way]['ms']:.2f} ms, {r[way]['ratio']:.2f}" for r in (forward, both)]
            rows.append([gpus, way, *cells])
    head = ["", "", "there and back, of by hand", "forward and backward, of by hand"]
    return table(head, rows)


def _layer_shape(name: str) -> str:
    tokens, _, experts, top_k, _ = record("layer_memory")["shapes"][name]
    return f"{name}: {tokens:,} tokens, {top_k} of {experts}"


def layer_memory() -> str:
    """What the layer keeps and has in memory, as it is and keeping all; and what that costs."""
    rows = []
    for name, found in record("layer_memory")["results"].items():
        ways = found["as it is"], found["keeping all"]
        kept = (f"{way['kept_bytes']:,.0f}" for way in ways)
        peak = (f"{way['peak_bytes'] / 1e9:.2f} GB" for way in ways)
        cost = ways[0]["median_us"] / ways[1]["median_us"] - 1
        rows.append([_layer_shape(name), *kept, *peak, f"{cost:+.1%}"])
    head = ["", "kept, bytes a token", "all kept", "peak", "all kept", "time"]
    return table(head, rows)


def layer_budget() -> str:
    """Where the layer's time goes, beside that of its dense products."""
    parts = {
        "products": ("ragged_dot", "group_outer"),
        "moves": ("permute", "unpermute"),
        "activation": ("glu", "glu_grad"),
    }
    rows = []
    for name, found in record("layer_memory")["results"].items():
        as_is, kernels = found["as it is"], found["as it is"]["kernels_us"]
        times = [sum(kernels[kind] for kind in kinds) for kinds in parts.values()]
        times = [*times, sum(kernels.values()) - sum(times)]
        of_layer = found["dense"]["median_us"] / as_is["median_us"]
        each = (f"{us / 1000:.2f}" for us in (found["dense"]["median_us"], *times))
        rows.append([name, *each, f"{as_is['median_us'] / 1000:.2f} ms", f"{of_layer:.2f}"])
    return table(["", "dense", *parts, "router, plan, rest", "the layer", "of dense"], rows)


def numerics() -> str:
    """Errors of the ops in units of the last place: the mean, and what one in 1,000 exceeds."""
    ways = ("kernels", "plain JAX", "torch")
    rows = []
    for op, by_terms in record("numerics")["results"].items():
        for terms, found in by_terms.items():
            each = (
                f"{found[way]['mean']:.2f}, {found[way]['p999']:.2f}" if way in found else "–"
                for way in ways
            )
            rows.append([op, f"{int(terms):,}", *each])
    return table(["", "terms of a sum", *ways], rows)


def same_bits() -> str:
    """Among which numbers of rows bits are the same, both ways; the ratio of times, by tokens."""
    run, rows = record("same_bits")["results"], []
    cases = {name: of for name, of in run.items() if name != "example"}
    tokens = list(max((of["prices"] for of in cases.values()), key=len))
    for name, of in cases.items():
        ratios = (of["prices"].get(count) for count in tokens)
        cells = [f"{price['ratio']:.2f}" if price else "–" for price in ratios]
        rows.append([name, *map(_ranges, of["same_bits"].values()), *cells])
    head = [f"{int(count):,} {'token' if count == '1' else 'tokens'}" for count in tokens]
    return table(["", "without it", "with it", *head], rows)


def _ranges(parts: list[list[int]]) -> str:
    """Numbers in parts, as ranges; "all" if there is one."""
    if len(parts) == 1:
        return "all"
    return "; ".join(
        f"{part[0]:,} to {part[-1]:,}" if len(part) > 1 else f"{part[0]:,}" for part in parts
    )


def fuzz() -> str:
    """How much was fuzzed, by op and path: cases of distinct programs."""
    results = record("fuzz")["results"]
    ops = sorted({op for by_op in results.values() for op in by_op})
    rows = []
    for op in ops:
        found = [by_op.get(op) for by_op in results.values()]
        cells = [f"{of['cases']:,} of {of['programs']:,}" if of else "–" for of in found]
        rows.append([op, *cells, f"{sum(of['wrong'] for of in found if of)}"])
    every = [[*by_op.values()] for by_op in results.values()]
    sums = [{what: sum(of[what] for of in all_) for what in all_[0]} for all_ in every]
    cells = [f"{of['cases']:,} of {of['programs']:,}" for of in sums]
    rows.append(["all", *cells, f"{sum(of['wrong'] for of in sums)}"])
    return table(["", *(f"`{path}`" for path in results), "wrong"], rows)


def where_fuzz() -> str:
    run = record("fuzz")
    machines = "; ".join(f"`{path}`: {machine}" for path, machine in run["ran_on"].items())
    cases = sum(of["cases"] for by_op in run["results"].values() for of in by_op.values())
    return f"{cases:,} cases. {machines}. {run['written'][:10]}.\n"


def fuzz_forms() -> str:
    """What was fuzzed on each pair of versions, every second program in a form."""
    rows = []
    for name in ("fuzz_forms", "fuzz_forms_newest"):
        run = record(name)
        by_op = [*run["results"]["triton"].values()]
        sums = {what: sum(of[what] for of in by_op) for what in by_op[0]}
        least = min(of["programs"] for of in by_op)
        cells = f"{sums['programs']:,}", f"{least}", f"{sums['cases']:,}", f"{sums['wrong']}"
        rows.append([run["ran_on"]["triton"], *cells])
    return table(["", "programs", "of each op at least", "cases", "wrong"], rows)


def covered() -> str:
    """How much of each package the tests ran through."""
    packages = record("coverage")["packages"]
    of_all = {key: sum(of[key] for of in packages.values()) for key in packages["triax"]}
    rows = []
    for name, of in (packages | {"**all**": of_all}).items():
        statements, branches = of["num_statements"], of["num_branches"]
        done = of["covered_lines"] + of["covered_branches"]
        rows.append(
            [name, f"{statements:,}", f"{branches:,}", f"{done / (statements + branches):.1%}"]
        )
    return table(["", "statements", "branches", "of both covered"], rows)


def sanitizers() -> str:
    """What each tool ran, and what it found."""
    run = record("sanitizers")["nvidia"]
    tool = run["compute_sanitizer"].partition(" (")[0].lower()
    below = f"One {run['device']}, compute-sanitizer {tool}, {run['written'][:10]}."
    return f"{of_rows('sanitizers')}\n{below}\n"


def untrusted() -> str:
    """The inputs that were tried on what reads text and arguments of others."""
    run = record("untrusted")
    below = f"A CPU, {versions(run, run['versions'])}, {run['written']}."
    return f"{of_rows('untrusted')}\n{below}\n"


def _on_a_cpu(source: str, first: str, names: Iterable[str] = ("jax", "triton")) -> str:
    run = record(source)
    return f"A CPU, {first}{versions(run, names)}, {run['written'][:10]}.\n"


def ran_on_gpus() -> dict[tuple[str, str], str]:
    """The GPUs on which there are measurements, by JAX and Triton."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        run = json.loads(path.read_text())
        run = run if isinstance(run, dict) else {}
        if "versions" in run and run.get("device", "").startswith("NVIDIA"):
            for of in (run["versions"], *(of["versions"] for of in run.get("entries", []))):
                found.setdefault((of["jax"], of["triton"]), set()).add(run["device"])
    return {of: ", ".join(sorted(devices)) for of, devices in found.items()}


def matrix() -> str:
    """The tests that passed with each JAX and Triton on a CPU, and which of these ran on a GPU."""
    on_gpus = ran_on_gpus()
    rows = [
        [
            *(of["jax"], of["triton"], of["python"]),
            *(f"{of[count]:,}" for count in ("passed", "failed", "skipped")),
            on_gpus.get((of["jax"], of["triton"]), "no"),
        ]
        for of in record("matrix")
    ]
    head = ["JAX", "Triton", "Python", "tests passed", "failed", "skipped", "ran on a GPU"]
    return table(head, rows)


def where_matrix() -> str:
    runs = record("matrix")
    passed, failed = (sum(of[count] for of in runs) for count in ("passed", "failed"))
    counts = f"{len(runs)} environments: {passed:,} tests passed, {failed} failed."
    return f"{counts} {max(of['written'] for of in runs)}.\n"


def by_version() -> str:
    """Times of the layer and its kernels by versions, of the first ones', and without TMA."""
    entries = record("versions")["entries"]
    first = entries[0]["results"]

    def title(entry: dict[str, Any]) -> str:
        jax, triton = entry["versions"].values()
        return f"JAX {jax}, Triton {triton}" + ("" if entry["descriptors"] else ", no TMA")

    def cell(us: float | None, base: float) -> str:
        return "–" if us is None else f"{us / base:.2f}"

    rows = [
        [name, _us(base), *(cell(of["results"][name], base) for of in entries[1:])]
        for name, base in first.items()
    ]
    return table(["", *map(title, entries)], rows)


def pointers() -> str:
    """How much longer layers take where JAX encodes no TMA descriptors."""
    entries = record("versions")["entries"]
    (without,) = (each["results"] for each in entries if not each["descriptors"])
    ratios = [without[name] / us for name, us in entries[0]["results"].items() if "layer" in name]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times as long as with TMA, on one H100\n"


def cards() -> str:
    """What each card has, and what the matmuls of many rows compile to on it."""
    rows = []
    for card, kernels in record("cards")["cards"].items():
        known = architectures.of(int(card))
        (product, *_) = sorted(
            (k for k in kernels if k["kernel"] == "ragged_dot" and k["products"] != "none"),
            key=lambda k: -k["shared_bytes"],
        )
        most = max(k["shared_bytes"] for k in kernels)
        rows.append(
            [
                *(f"sm_{card}", known.cards, f"{known.shared_bytes >> 10} KiB"),
                *(f"{most / 1024:.0f} KiB", f"`{product['products']}`"),
                *("TMA" if product["loads"] == "descriptors" else "`cp.async`", str(len(kernels))),
                "measured" if card == "90" else "compiled only",
            ]
        )
    head = ["", "cards", "shared memory of a block", "most taken", "products", "loads"]
    return table([*head, "kernels", ""], rows)


def card_kernels() -> str:
    """Of each kernel's configs on a card: most shared memory, most registers, bytes spilled."""
    found = record("cards")["cards"]
    names = sorted({k["kernel"] for kernels in found.values() for k in kernels})

    def cell(name: str, kernels: list[dict[str, Any]]) -> str:
        own = [k for k in kernels if k["kernel"] == name]
        if not own:
            return "–"
        shared, registers, spilled = (
            max(k[of] for k in own) for of in ("shared_bytes", "registers", "spilled_bytes")
        )
        return f"{shared / 1024:.0f} / {registers}" + (f" ({spilled})" if spilled else "")

    rows = [[f"`{n}`", *(cell(n, kernels) for kernels in found.values())] for n in names]
    return table(["", *(f"sm_{card}" for card in found)], rows)


def where_cards() -> str:
    of = record("cards")
    programs = f"{of['programs']} programs for each card, {len(of['problems'])} problems"
    return f"{programs}. {versions(of, of['versions'])}, {of['written'][:10]}.\n"


def eight_bit_products() -> str:
    """TFLOP/s of products in 8 bits."""
    rows = []
    for name, ways in record("eight_bits")["products"].items():
        rates = [" / ".join(f"{rate:,.0f}" for rate in found.values()) for found in ways.values()]
        rows.append([name, *rates])
    return table(["even / uneven groups", *ways], rows)


def eight_bit_weight_gradients() -> str:
    """TFLOP/s of the weights' gradients in 8 bits."""
    found = record("eight_bits").get("weight_gradients")
    if not found:
        return "Not measured yet.\n"
    rows = [
        [name, *(" / ".join(f"{x:{_digits(x)}}" for x in of.values()) for of in ways.values())]
        for name, ways in found.items()
    ]
    return table(["even / uneven groups", *next(iter(found.values()))], rows)


def _digits(value: float) -> str:
    """The format of a rate, or of a fraction."""
    return ",.0f" if value > 10 else ".2f"


def adopting() -> str:
    """What the patches of other codebases are, and what their tests say."""
    rows = []
    for key, found in record("adopting_tests")["codebases"].items():
        page = f"[{found['name']}]({key}.md)"
        lines = f"+{found['added']} −{found['removed']}"
        rows.append([page, f"{found['source']}, {found['version']}", lines, _speedups(key)])
    head = ["", "patched", "lines", "times as fast on a GPU"]
    return table(head, rows)


def adopting_tests(key: str) -> str:
    """A codebase's tests before and after the patch."""
    rows = []
    for found in record("adopting_tests")["codebases"][key]["tests"]:
        files = ", ".join(f"`{name}`" for name in found["files"].split(", "))
        counts = [
            ", ".join(f"{count} {what}" for what, count in found[when].items() if count)
            for when in ("before", "after")
        ]
        rows.append([files, found["jax"], *counts])
    return table(["tests", "JAX", "before", "after"], rows)


def _adopting_times() -> Any:
    path = ROOT / "benchmarks" / "adopting.json"
    return record("adopting")["results"] if path.exists() else {}


def _speedups(key: str) -> str:
    """The least and the greatest over a codebase's cases, against the best that runs there."""
    found = [
        min((way["of_patched"] for name, way in case.items() if name != "patched" and "ms" in way))
        for case in _adopting_times().get(key, {}).values()
        if any(name != "patched" and "ms" in way for name, way in case.items())
    ]
    return f"{min(found):.1f} to {max(found):.1f}" if found else "–"


def adopting_times(key: str) -> str:
    """Each case before and after the patch."""
    cases = _adopting_times().get(key)
    if not cases:
        return "Not measured yet.\n"
    rows = []
    for name, ways in cases.items():
        for way, found in ways.items():
            cells = ["–", found.get("error", "").partition(":")[0]]
            if "ms" in found:
                cells = [f"{found['ms']:.2f} ms", f"{found.get('of_patched', 1.0):.2f}"]
            rows.append([name, way, *cells])
    return table(["", "", "time", "times the patched one's"], rows)


def elsewhere() -> str:
    """Mixtral's experts in other codebases, by what multiplies them."""
    cases = (("maxtext", "Mixtral 8x7B, 8,192 tokens"), ("haliax", "experts"))
    ways = {"original": "`jax.lax.ragged_dot`", "original, xla": "`jax.lax.ragged_dot`"}
    ways["patched"] = "Triax"
    rows = []
    for key, case in cases:
        name = f"[{record('adopting_tests')['codebases'][key]['name']}](adopting/{key}.md)"
        for way, found in record("adopting")["results"][key][case].items():
            what = ways.get(way, "haliax's Pallas kernels")
            rows.append([name, what, f"{found['ms']:.1f} ms", f"{found['of_patched']:.2f}"])
    return table(["Mixtral 8x7B's experts in", "multiplied by", "time", "times Triax's time"], rows)


def _layers(implementation: str, field: str, shown: str = "{:.2f}") -> str:
    """The least and the greatest figure of the whole layer."""
    found = [r[field] for r in find(implementation, "layers_rivals")]
    return f"{shown.format(min(found))} to {shown.format(max(found))}"


def _layer_rates() -> str:
    return _layers("triax", "teraflops_per_second", "{:.0f}")


def front() -> str:
    """Two figures for the front page, both against what JAX has."""
    times = record("adopting")["results"]["maxtext"]["Mixtral 8x7B, 8,192 tokens"]
    before, after = (times[way]["ms"] for way in ("original", "patched"))
    (device,) = {record(name)["device"] for name in ("layers_rivals", "adopting")}
    *names, last = dict.fromkeys(PRESETS[r["preset"]] for r in find(source="layers_rivals"))
    sonic, torch = (_layers(name, "over_triax") for name in ("SonicMoE", "torch grouped_mm"))
    return (
        f"- **{_layer_rates()} TFLOP/s** for a whole MoE layer, forward and backward, in the "
        f"shapes of {', '.join(names)} and {last}. SonicMoE takes {sonic} times as long, torch's "
        f"`grouped_mm` {torch} times.\n"
        f"- **{before / after:.1f} times as fast** in MaxText: the MoE block of Mixtral, 8,192 "
        f"tokens, forward and backward, takes {after:.1f} ms; with MaxText's own `ragged_dot` "
        f"{before:.1f}.\n\nBoth were measured on one {device}, in bfloat16.\n"
    )


def layers_rivals(field: str, shown: str, scale: float = 1.0) -> str:
    """A figure of the layer by Triax and by others; a dash stands for what has no result."""
    rows: dict[str, dict[str, str]] = {}
    for r in record("layers_rivals")["results"]:
        bound = "≤ " if field == "over_triax" and r["seconds_method"] == "host-bound" else ""
        cells = rows.setdefault(PRESETS[r["preset"]], {})
        cells[r["implementation"]] = bound + shown.format(scale * r[field])
    names = [*dict.fromkeys(name for cells in rows.values() for name in cells)]
    names.sort(key=lambda name: (name == "dense", name != "triax"))
    shapes = [[shape, *(cells.get(name, "–") for name in names)] for shape, cells in rows.items()]
    return table(["shape of", *names], shapes)


def ragged_dot_rates() -> str:
    """The TFLOP/s of a layer with `jax.lax.ragged_dot`, by the number of experts."""
    rates: dict[int, list[float]] = {}
    for r in find("jax.lax.ragged_dot", "layers_rivals"):
        rates.setdefault(r["experts"], []).append(r["teraflops_per_second"])
    shown = [
        (experts, " and ".join(f"{rate:.0f}" for rate in sorted(found)))
        for experts, found in sorted(rates.items())
    ]
    (first, rate), *others = shown
    return f"{rate} TFLOP/s with {first} experts" + "".join(f", {r} with {n}" for n, r in others)


def transformers() -> str:
    """The layer against transformers' blocks: where they are, and the largest errors."""
    run = record("models")
    address = "https://github.com/huggingface/transformers/blob/v{}/src/transformers/models"
    address = address.format(run["versions"]["transformers"])
    rows = []
    for name, result in run["results"].items():
        links = [f"[{n}]({address}/{at})" for n, at in result["sources"].items()]
        errors = dict(result["errors"])
        values = errors.pop("tokens")
        rows.append([name, ", ".join(links), f"{values:.1e}", f"{max(errors.values()):.1e}"])
    return table(["", "its code", "values", "gradients"], rows)


def gallery() -> str:
    """The gallery's examples beside plain JAX, those that gain most first."""
    found = sorted(record("gallery")["results"], key=lambda r: r["ours_us"] / r["plain_us"])
    rows = [
        [f"`{r['example']}.py`: {r['name']}", _us(r["ours_us"]), _us(r["plain_us"])] for r in found
    ]
    return table(["", "Triax", "plain JAX"], rows)


def first_call() -> str:
    calls = {(c["implementation"], c["cached"]): c for c in record("h200")["first_call"]}
    rows = []
    for cached, state in ((False, "nothing cached"), (True, "all cached")):
        own = calls["triax", cached]
        rows.append([state, f"{own['total_s']:.2f} s", f"{own['over_xla_s']:.2f} s"])
    return table(["", "first call", "of that more than plain JAX"], rows)


def experiments(group: str) -> str:
    """Variants against shapes; a star where the time is that of many runs in one program."""
    results = [r for r in record("experiments")["results"] if r["group"] == group]
    cells = {}
    for result in results:
        time = "wrong" if result["median_us"] is None else _us(result["median_us"])
        cells[result["variant"], result["shape"]] = time + _star(result["method"])
    shapes = list(dict.fromkeys(result["shape"] for result in results))
    variants = dict.fromkeys(result["variant"] for result in results)
    rows = [[name, *(cells.get((name, shape), "–") for shape in shapes)] for name in variants]
    return table(["variant", *shapes], rows)


def configs() -> str:
    rows = []
    for result in record("default_configs")["results"]:
        rows.append(
            [
                NAMES[result["op"]],
                f"{result['width']} {result['dtype']}",
                str(result["top_k"]) if result["op"] != "sort_chunks" else "–",
                _shape(result["formula"]),
                _shape(result["best"]),
                f"{result['loss']:.1%}".replace("-0.0%", "0.0%"),
            ]
        )
    return table(["op", "row", "choices", "formula", "best", "loss"], rows)


def _shape(config: dict[str, int]) -> str:
    """Tokens or rows, elements and warps of a program; and the rows it writes at once, if two."""
    slots = config.get("block_slots", 1)
    shape = "×".join(str(value) for name, value in config.items() if name != "block_slots")
    return shape if slots == 1 else f"{shape}, {slots} at once"


def mutants() -> str:
    """What became of the changes, by package, and the date."""
    found = record("mutants")
    columns = "mutants", "killed", "timed out", "survived", "explained"
    parts = {**found["modules"], "**all**": found["all"]}
    rows = [[name, *(f"{of.get(column, 0):,}" for column in columns)] for name, of in parts.items()]
    left = found["all"].get("survived", 0) / found["all"]["mutants"]
    head = ["", "changes", "seen", "timed out", "left", "of them explained"]
    drawn = f"seed {found['seed']}, of {found['population']:,} changes"
    return table(head, rows) + f"\n{found['written'][:10]}, {drawn}: {left:.1%} left.\n"


# Records whose date and GPU stand below a table.
PLACES = "layers_rivals matmuls router eight_bits learning quantize group_offset gpt_oss stress"
PLACES += " flags scans numerics layer_memory float32 start serve gallery adopting decode_rivals"
PLACES += " decode_nvfp4 same_bits folders"

TABLES: dict[str, Callable[[], str]] = {
    **{name: functools.partial(of_rows, name) for name in ROWS},
    **{f"where/{name}": functools.partial(where, name) for name in PLACES.split()},
    "where": where,
    "where/by_version": lambda: where("versions"),
    "where/coverage": lambda: _on_a_cpu("coverage", f"Python {record('coverage')['python']}, "),
    "where/transformers": lambda: _on_a_cpu("models", "", ("transformers", "torch", "jax")),
    "where/logits": lambda: _on_a_cpu("logits", "", ("transformers", "torch", "jax")),
    "where/cards": where_cards,
    "where/expert_parallel": where_expert_parallel,
    "where/fuzz": where_fuzz,
    "where/matrix": where_matrix,
    "sanitizers": sanitizers,
    "untrusted": untrusted,
    "gallery": gallery,
    "ops": ops,
    "router": router,
    "matmuls": matmuls,
    "profile": profile,
    "expert_parallel": expert_parallel,
    "eight_bits/products": eight_bit_products,
    "eight_bits/weight_gradients": eight_bit_weight_gradients,
    "layer_memory": layer_memory,
    "layer_budget": layer_budget,
    "fuzz": fuzz,
    "fuzz_forms": fuzz_forms,
    "coverage": covered,
    "matrix": matrix,
    "by_version": by_version,
    "pointers": pointers,
    "cards": cards,
    "cards/kernels": card_kernels,
    "numerics": numerics,
    "adopting": adopting,
    "elsewhere": elsewhere,
    "front": front,
    "layers/others": lambda: layers_rivals("over_triax", "{:.2f}"),
    "layers/memory": lambda: layers_rivals("peak_bytes", "{:.2f} GB", 1e-9),
    "rates": _layer_rates,
    "rates/ragged_dot": ragged_dot_rates,
    **{f"adopting/{key}": functools.partial(adopting_times, key) for key in CODEBASES},
    **{f"adopting_tests/{key}": functools.partial(adopting_tests, key) for key in CODEBASES},
    "decode": decode,
    "decode_rivals": decode_rivals,
    "decode_nvfp4": decode_nvfp4,
    "same_bits": same_bits,
    "serve": serve,
    "against": against,
    "single_ops": single_ops,
    "models": models,
    "transformers": transformers,
    "small": small,
    "first_call": first_call,
    "mutants": mutants,
    "configs": configs,
    **{
        f"experiments/{group.replace(' ', '-')}": functools.partial(experiments, group)
        for group in ("plan", "few pairs", "chunk sort", "permute", "unpermute")
    },
}


def filled(text: str) -> str:
    """A page with every table as the records have it."""
    if text.count("<!-- figures: ") != text.count("<!-- end of figures -->"):
        raise ValueError("a page has a table of figures without an end, or an end too many")

    def current(match: re.Match[str]) -> str:
        begin, name, newline, end = match.groups()
        made = TABLES[name]()
        return begin + (made if newline else made.rstrip()) + end

    return BLOCK.sub(current, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        if filled(text) != text:
            old.append(name)
            if not check:
                page.write_text(filled(text))
    for name in old:
        print(f"{name} {'is out of date' if check else 'is written'}", file=sys.stderr)
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
