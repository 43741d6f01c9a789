"""The scripts in `benchmarks/` at small sizes, and what they share."""

from __future__ import annotations

import functools
import importlib
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import adopting, decode, same_bits
from benchmarks.harness import inputs, record, timing
from triax import moe, settings
from triax.benchmark import CallTiming

SCRIPTS = {
    path.stem: path
    for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")
    if path.stem != "__main__"
}


DOT = moe.ragged_dot


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - {"tuning_quality", "weak_scaling"}))
def test_a_script_says_what_it_measures_and_how_it_is_run(name):
    """And it can be imported: tuning_quality changes the environment for that, the other draws."""
    module = importlib.import_module(f"benchmarks.{name}")
    assert f"python -m benchmarks.{name}" in module.__doc__


def test_differences():
    ones = jnp.ones(4)
    nan = ones.at[1].set(math.nan)
    assert record.difference([ones], [ones]) == 0
    assert record.difference([ones, ones], [ones, 2 * ones]) == 0.5
    assert record.difference([nan], [ones]) == math.inf
    assert record.difference([ones], [nan]) == math.inf
    assert record.difference(jnp.arange(3), jnp.arange(3)) == 0
    assert record.difference(jnp.arange(3), jnp.arange(1, 4)) == math.inf
    record.check("near", 1.009 * ones, ones, 0.01)
    with pytest.raises(SystemExit, match=r"far: wrong by 0\.011"):
        record.check("far", 1.011 * ones, ones, 0.01)


def test_what_was_found_before_a_wrong_result_is_kept(tmp_path, capsys):
    def measure():
        yield "first", {"median_us": 12.3456, "sizes": [1, 2]}
        record.check("second", jnp.ones(1), jnp.zeros(1))

    path = tmp_path / "record.json"
    with pytest.raises(SystemExit, match="second: wrong"):
        record.keep(path, measure(), rows=3)
    found = json.loads(path.read_text())
    assert found["results"] == {"first": {"median_us": 12.3456, "sizes": [1, 2]}}
    assert found["rows"] == 3
    assert {"written", "device", "versions"} < set(found)
    assert record.where(found).startswith("cpu, triax ")
    assert capsys.readouterr().out == "first {'median_us': 12.35, 'sizes': [1, 2]}\n"
    assert [*tmp_path.iterdir()] == [path]


def test_a_record_is_of_one_kind_of_device(tmp_path):
    path = tmp_path / "record.json"
    record.write(path, results={"one": 1})
    assert record.known(path)["results"] == {"one": 1}
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "NVIDIA H200"'))
    with pytest.raises(SystemExit, match=r"record.json is of one NVIDIA H200, and this is one cpu"):
        record.known(path)


def test_scripts_end_without_a_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script"])
    with pytest.raises(SystemExit, match="This needs an NVIDIA GPU"):
        record.parse(record.parser("script.py", "A script."))


@pytest.mark.slow("it tests a tool, not the package")
def test_a_layer_and_its_dense_products():
    shape = inputs.Layer(tokens=6, hidden=8, experts=4, top_k=2, width=3)
    given = jax.tree.map(lambda array: array.astype("float32"), shape.inputs())
    products = inputs.dense_products(given, shape.top_k)
    assert [p.shape for p in products] == [(12, 8), (8, 6), (12, 3), (12, 8), (3, 8)]
    out, gradients = inputs.with_gradients(lambda given: 3 * given.x)(given)
    np.testing.assert_array_equal(gradients.x, 3 * out)
    _, gradients = inputs.with_gradients(lambda x: 3 * x, jnp.ones_like)(given.x)
    np.testing.assert_array_equal(gradients, np.full((6, 8), 3.0))


class TestOneOfMany:
    def test_is_the_difference(self, monkeypatch):
        """What it takes to start the program falls out."""
        us = lambda runs, _, **how: CallTiming(4.0 + runs * 5.0, 0, 0, 20, "events")
        monkeypatch.setattr(timing, "time_program", us)
        assert timing.one_of_many_us(lambda repeats: repeats, None) == pytest.approx(5.0)

    @pytest.mark.parametrize(("many_us", "method"), [(200.0, "host-bound"), (90.0, "events")])
    def test_is_not_known(self, monkeypatch, many_us, method):
        us = lambda runs, _, **how: CallTiming(many_us if runs > 4 else 100.0, 0, 0, 20, method)
        monkeypatch.setattr(timing, "time_program", us)
        assert timing.one_of_many_us(lambda repeats: repeats, None) is None

    def test_runs_depend_on_each_other(self):
        """Four runs in one program give what four programs give, and none is left out."""
        program = jax.jit(lambda inputs: {"sum": inputs["x"] + inputs["step"]})
        chain = lambda inputs, outputs: {**inputs, "x": outputs["sum"]}
        given = {"x": jnp.zeros(3), "step": jnp.arange(3.0)}
        run = functools.partial(timing.chained, program, chain)
        np.testing.assert_array_equal(run(4)(given)["sum"], 4 * np.arange(3.0))
        np.testing.assert_array_equal(run(1)(given)["sum"], np.arange(3.0))


def test_a_way_that_raises_finds_no_kernel_that_another_one_traced(monkeypatch):
    monkeypatch.setattr(adopting, "ROUNDS", 1)
    there = []

    @jax.jit
    def kernel(x):
        if not there:
            raise AttributeError("dot")
        return 2 * x

    def with_dot(x):
        there.append("dot")
        try:
            return kernel(x)
        finally:
            there.clear()

    ways = {"auto": lambda x: kernel(x), "with dot": with_dot, "patched": lambda x: x + x}
    found = adopting.measure(ways, jnp.ones(4))
    assert found["auto"] == {"error": "AttributeError: dot"}
    assert {"ms", "of_patched"} < set(found["with dot"])


@pytest.mark.nightly("it tests a tool, not the package")
def test_decoding_is_measured_against_a_read_of_the_weights_in_use(monkeypatch):
    small = {"HIDDEN": 64, "WIDTH": 32, "TOP_K": 1, "TOKENS": (3,), "LAYERS": 2}
    small["ROUTER"] = moe.Router(1)
    for name, value in small.items():
        monkeypatch.setattr(decode, name, value)
    found = decode.measure_weights(experts=16, rate=1000.0)
    assert [each["what"] for each in found] == ["gate and up", "down", "layer"]
    both = 64 * 64 * 2, 32 * 64 * 2  # bytes of an expert
    for each, num_bytes in zip(found, (*both, sum(both)), strict=True):
        assert 1 <= each["experts_in_use"] <= 3
        assert each["read_us"] == pytest.approx(each["experts_in_use"] * num_bytes / 1000)
        assert each["fraction_of_read"] == pytest.approx(each["read_us"] / each["median_us"])


def test_batches_that_give_a_row_the_same_bits(monkeypatch):
    """Those that do for the first row and for the last."""

    def run(batch, most):
        other = batch.count > most or (batch.last and batch.count == 5)
        return [jnp.float32(other and not settings.one_order_of_sums())]

    monkeypatch.setitem(same_bits.CASES, "a case", (run, (1, 5, 9, 20), 9))
    found = same_bits.bits("a case")
    assert found == {"without": [[1, 9], [5], [20]], "with": [[1, 5, 9, 20]]}


@pytest.mark.parametrize("name", ["8 bits, blocks", "weights of int4 in groups of 32 in tiles"])
def test_the_price_of_the_same_bits(monkeypatch, name):
    """Only of products whose last rows are right."""
    monkeypatch.setattr(same_bits, "SHAPES", {"others": (128, 64)})
    monkeypatch.setattr(same_bits, "TOKENS", {6: 2})
    found = same_bits.price(name, 6)
    assert found["ratio"] == found["median_us"]["with"] / found["median_us"]["without"]
    sizes = same_bits.sizes_of(6)
    assert (sizes.sum(1) == 6 * same_bits.TOP_K).all()
    assert (sizes[0] != sizes[1]).any()
    monkeypatch.setattr(moe, "ragged_dot", lambda *given, **how: 1.03 * DOT(*given, **how))
    with pytest.raises(SystemExit, match=r"6 tokens, without: wrong by 0\.03"):
        same_bits.price(name, 6)
