"""The clock of `triax.benchmark`, and a small run of `make bench`, on a GPU."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import triax
from benchmarks.ops import run
from triax.benchmark import clock_of

pytestmark = pytest.mark.gpu


def test_the_delay_takes_as_long_as_it_is_asked_to():
    found = clock_of(jax.devices()[0])
    jax.block_until_ready(found.hold(1.0))  # compiles it
    for us in (300.0, 3000.0):
        # Behind another, which lasts until the host has asked for both.
        found.record(0, first := found.hold(20_000.0))
        found.record(1, second := found.hold(us))
        assert found.is_pending(0)
        assert us / 2 < found.between_us(0, 1) < 2 * us
        del first, second


def test_a_run_is_right_and_times_the_device(tmp_path):
    """Ops that the host can keep up with, that need a busy device, in a graph, and matmuls."""
    words = "--ops plan permute unpermute_grad moves+grad router ragged_dot layer "
    words += "--presets gpt-oss-120b --tokens 128 8192 --no-competitors --json"
    assert run.main([*words.split(), str(tmp_path / "record.json")]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    for result in record["results"]:
        assert result["error"] is None, result
        if result["width"]:
            assert result["seconds_method"] == "bursts" or result["tokens"] == 128, result
        else:
            assert result["seconds_method"] in ("events", "graph"), result
        # No faster than the memory, but for what stays in the cache.
        limit = 1.05 if result["tokens"] == 8192 else 2.0
        assert result["stream_us"] is None or 0.3 < result["fraction_of_stream"] < limit, result
        if result["op"] in ("ragged_dot", "layer") and result["tokens"] == 8192:
            assert 0.5 < result["fraction_of_dense"] < 1.1, result
    assert {(s["reads"], s["writes"]) for s in record["streams"]} == {(1, 4), (4, 1), (5, 4)}


def test_functions_of_one_s_own():
    """A copy is about as fast as the memory; one that is written twice takes longer."""
    x = jnp.ones(1 << 26)
    twice = lambda x: jax.lax.optimization_barrier(x + 1) - 1
    found = triax.benchmark(lambda x: -x, x, against={"twice": twice}, compare=False)
    assert {t.method for t in found.times.values()} == {"events"}
    assert found.stream_us is not None
    assert 0.8 < found.stream_us / found.times["function"].median_us < 1.05
    assert 1.8 < found.ratios["twice"].median < 2.2
