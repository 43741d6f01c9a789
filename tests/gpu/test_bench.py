"""The benchmark's clock and a small run of it, on a GPU."""

from __future__ import annotations

import jax
import pytest

from triax.bench import clock, runner
from triax.bench.clock import CudaClock
from triax.bench.selection import Request

pytestmark = pytest.mark.gpu


def test_the_delay_takes_as_long_as_it_is_asked_to():
    found = CudaClock.of(jax.devices()[0])
    jax.block_until_ready(clock.delay(found, 1.0))  # compiles it, and finds out how fast it is
    for us in (300.0, 3000.0):
        # Behind another, which lasts until the host has asked for both.
        found.record(0, first := clock.delay(found, 20_000.0))
        found.record(1, second := clock.delay(found, us))
        assert found.is_pending(0)
        found.wait(1)
        assert us / 2 < found.between_us(0, 1) < 2 * us
        del first, second


def test_a_run_is_right_and_times_the_device():
    """Ops that the host can keep up with, ops that need a busy device, and ops in a graph."""
    ops = ("plan", "permute", "unpermute_grad", "route+grad")
    request = Request(ops=ops, presets=("gpt-oss-120b",), tokens=(128, 8192), competitors=False)
    record = runner.run(request)
    results = record["results"]
    assert [r["op"] for r in results] == [*ops, *ops]
    for result in results:
        assert result["error"] is None, result
        assert result["seconds_method"] in ("events", "graph"), result
        # No faster than the memory, but for what stays in the cache.
        limit = 1.05 if result["tokens"] == 8192 else 2.0
        assert result["op"] == "plan" or 0.3 < result["fraction_of_stream"] < limit, result
    assert {(s["reads"], s["writes"]) for s in record["streams"]} == {(1, 4), (4, 1), (5, 4)}
