"""The fuzzer: a few hundred cases of it, and that it finds faults that are planted."""

from __future__ import annotations

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import known, many, state
from tests.moe import bounds
from tests.moe.case import Case
from tests.moe.cases import RANDOM
from triax import moe
from triax.moe.layer import ops as layer_ops
from triax.moe.layer import parts, products

NUM_OPS = len(RANDOM)


def first_of(op):
    """The number of the op's first program: ops are drawn in turn."""
    return [of.__name__.removeprefix("draw_") for of in RANDOM].index(op)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("path", "each"), [("xla", 16), ("interpret", 1)])
def test_random_cases_are_right(path, each):
    for number in range(NUM_OPS):
        _, done, failure = many.run(many.Job(path, 2026, number, each, repeat=path == "xla"))
        assert failure is None, failure.reproduction
        assert done.cases == each


@pytest.mark.slow("it tests a tool, not the package")
def test_known_bugs_are_not_here():
    for name, text in known.run_all("xla", cases=2):
        assert text == "right" or (name == "latency_hiding" and text.startswith("skipped")), text


# --- planted faults ------------------------------------------------------------------------------


def two_units_off(original, *args, **options):
    """One number is off by two of its last bits."""
    out = original(*args, **options)
    at = jnp.argmax(jnp.where(jnp.isfinite(out), jnp.abs(out), 0))
    return out.at[jnp.unravel_index(at, out.shape)].multiply(1 + 2 * jnp.finfo(out.dtype).eps)


def rows_swapped(original, x, plan, *args, **options):
    out = original(x, plan, *args, **options)
    swapped = lambda rows: rows[jnp.arange(len(rows)).at[:2].set(jnp.array([1, 0])[: len(rows)])]
    return out._replace(rows=swapped(out.rows)) if isinstance(out, tuple) else swapped(out)


def nan_leaks(original, rows, *args, **options):
    """The last row of all takes part in the first, times zero."""
    out = original(rows, *args, **options)
    return out.at[0].add(0 * jnp.sum(rows[-1]).astype(out.dtype))


def gradient_without_a_row(original, rows, *args, **options):
    """One row has no part in the gradient of the weights."""
    out = original(rows, *args, **options)
    return out.at[0].set(jax.lax.stop_gradient(out[0]))


def row_without_a_gradient(original, *args, **options):
    found, out = original(*args, **options)
    return found | {"gate_up": found["gate_up"].at[0].set(0)}, out


def first_expert_alone(original, rows, weights, sizes, **options):
    sizes = jnp.zeros_like(sizes).at[0].set(jnp.sum(sizes))
    return original(rows, weights, sizes, **options)


def one_more_dropped(original, *args, **options):
    plan = original(*args, **options)
    return type(plan)(**{**vars(plan), "num_dropped": plan.num_dropped + 1})


def last_weight_unscaled(original, *args, **options):
    out = original(*args, **options)
    return out._replace(weights=out.weights.at[:, -1].multiply(1 + 1e-4))


@pytest.mark.sampled(0, 6)
@pytest.mark.parametrize(
    ("op", "name", "fault", "where"),
    [
        ("ragged_dot", "ragged_dot", two_units_off, "out"),
        ("ragged_dot", "ragged_dot", nan_leaks, "out"),
        ("ragged_dot", "ragged_dot", gradient_without_a_row, "d_"),
        ("ragged_dot", "ragged_dot", first_expert_alone, ""),
        ("scaled", "ragged_dot", first_expert_alone, "out"),
        ("permute", "permute", rows_swapped, "rows"),
        ("unpermute", "unpermute", two_units_off, ""),
        ("unpermute", "unpermute", gradient_without_a_row, "d_"),
        ("plan", "make_plan", one_more_dropped, "num_dropped"),
        ("glu", "glu", gradient_without_a_row, "d_"),
        ("route", "route", last_weight_unscaled, "weights"),
        ("feed_forward", "multiply", gradient_without_a_row, "d_"),
        ("feed_forward", "activate_gradients", row_without_a_gradient, "d_"),
        ("feed_forward", "permute", rows_swapped, ""),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_faults_are_found(monkeypatch, op, name, fault, where):
    of_layer = {"multiply": products, "activate_gradients": layer_ops}
    module = of_layer.get(name, parts) if op == "feed_forward" else moe
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: fault(original, *args, **options))
    for number in range(first_of(op), 5 * NUM_OPS, NUM_OPS):
        _, done, failure = many.run(many.Job("xla", 5, number, 6))
        if failure is not None:
            break
    assert failure is not None
    assert where in failure.text
    assert done.wrong > 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(failure.reproduction, {})
    assert printed.getvalue().strip() == failure.text.split(": ", 1)[1]


def test_other_bits_in_a_second_run_are_found(monkeypatch):
    runs = []
    original = Case.run

    def run(self, batch):
        runs.append(original(self, batch))
        found = runs[-1][0]["out"]
        runs[-1][0]["out"] = np.nextafter(found, np.float32(9)) if len(runs) == 2 else found
        return runs[-1]

    monkeypatch.setattr(Case, "run", run)
    _, done, failure = many.run(many.Job("xla", 5, first_of("ragged_dot"), 3, repeat=True))
    assert done.wrong == 1
    assert "other bits" in failure.text


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        (np.float32([1]), bounds.exact([1.0]), None),
        (np.float32([np.nextafter(np.float32(1), 2)]), bounds.exact([1.0]), "within 0;"),
        (np.float32([np.inf]), bounds.exact([1e39]), None),
        (np.float32([np.nan]), bounds.exact([1e39]), "is nan"),
        (np.float32([0]), bounds.exact([np.nan]), "not nan"),
        (np.float32([1e-40]), bounds.Near(np.zeros(1), np.zeros(1)), "within 0;"),
        (np.float32([-0.0]), np.float32([0]), "1 of 1 are wrong"),
        (np.float16([1]), np.float32([1]), "is float16"),
        (np.float32([1, 2]), bounds.exact([1.0]), "has shape"),
    ],
)
def test_what_a_fault_is(got, want, message):
    found = bounds.fault("x", got, want)
    assert (found is None) == (message is None)
    assert message is None or message in found


# --- state and processes -------------------------------------------------------------------------


def test_states_are_kept_and_merged(tmp_path):
    one, two = state.State(), state.State()
    one.add("xla/0/0", state.Done("glu", "a", 3, 0, 0.5), None)
    two.add("xla/0/0", state.Done("glu", "a", 3, 0, 0.5), None)
    two.add("xla/1/0", state.Done("glu", "a", 4, 1, 0.5), state.Failure("bad", "program"))
    one.save(tmp_path / "one.json")
    kept = state.State.load(tmp_path / "one.json")
    kept.merge(two)
    assert len(kept.done) == 2
    assert kept.failures == {"xla/1/0": state.Failure("bad", "program")}
    assert kept.table().splitlines()[-1].split() == ["all", "7", "1", "1", "1"]
    json.loads((tmp_path / "one.json").read_text())


@pytest.mark.slow("it tests a tool, not the package")
def test_the_command_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    file = tmp_path / "state.json"
    monkeypatch.setattr(known, "run_all", lambda path: iter([("race", "right")]))
    plain = moe.ragged_dot

    def command(*more):
        given = ["fuzz", "--path", "xla", "--seed", "5", "--state", str(file), *more]
        monkeypatch.setattr("sys.argv", given)
        return fuzz.main()

    monkeypatch.setattr(moe, "ragged_dot", lambda *args, **how: 1 + plain(*args, **how))
    assert command("--cases", "4", "--each", "4") == 1
    assert "program = programs.program(5, 0, " in capsys.readouterr().out
    monkeypatch.setattr(moe, "ragged_dot", plain)
    assert command("--cases", "5", "--each", "4") == 1
    done = {name: of.cases for name, of in state.State.load(file).done.items()}
    assert done == {"xla/5/0": 4, "xla/5/1": 4, "xla/5/2": 1}
    assert command("--cases", "4", "--each", "4", "--again") == 0
    other = tmp_path / "other.json"
    monkeypatch.setattr("sys.argv", ["fuzz", "--state", str(other), "--merge", str(file)])
    assert fuzz.main() == 0
    assert state.State.load(other) == state.State.load(file)


def test_a_process_that_ends_is_a_failure(monkeypatch):
    class Pool:
        def submit(self, *_):
            raise many.BrokenProcessPool

    monkeypatch.setattr(many.concurrent.futures, "ProcessPoolExecutor", lambda *_, **__: Pool())
    jobs = [many.Job("xla", 0, number, 1) for number in range(3)]
    results = list(many.run_all(iter(jobs), 2, float("inf")))
    assert {job for job, _, _ in results} == {*jobs}
    assert {failure.text for _, _, failure in results} == {"The process ended."}
