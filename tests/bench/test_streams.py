"""Streams: what the kernels move, which layout is the limit, and what has none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.shapes import small_case
from triax.bench import streams
from triax.bench.cases import Stream
from triax.bench.stream_kernels import _delay_kernel
from triax.bench.streams import LAYOUTS, Limits, find_limit, stream_units
from triax.bench.timing import CallTiming
from triax.call import triton_call
from triax.emitting.reading import triton_calls

WORDS = 4096


def expected_units(source, writes, layout):
    """The xor of what each program reads, to all that it writes."""
    reads, words = source.shape
    run = layout.block if layout.together else words
    xor = np.bitwise_xor.reduce(source.reshape(words // run, reads, run), axis=1)
    return np.repeat(xor[:, None], writes, axis=1).reshape(writes, words)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("reads", "writes"), [(1, 8), (3, 2), (8, 1)])
def test_kernels_move_their_units(reads, writes, layout):
    source = streams._fill(reads, WORDS)
    actual = stream_units(source, writes, layout, "interpret")
    expected = expected_units(np.asarray(source), writes, layout)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_kernels_lower(layout, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    source = jax.ShapeDtypeStruct((9, WORDS), jnp.int32)
    program = jax.jit(functools.partial(stream_units, writes=8, layout=layout))
    (call,) = triton_calls(program.trace(source).lower(lowering_platforms=("cuda",)))
    assert call.grid == ((WORDS // layout.block, 1, 1),)


def test_the_delay_computes_every_step():
    def steps_by_hand(steps):
        value = np.array([steps | 1], np.int32)
        for _ in range(steps):
            value ^= value << 13
            value ^= value >> 17
            value ^= value << 5
        return value[0]

    out_type = jax.ShapeDtypeStruct((), jnp.int32)
    for steps in (0, 1, 1000):
        done = triton_call(jnp.int32(steps), kernel=_delay_kernel, out_type=out_type, grid=1)
        assert int(done) == steps_by_hand(steps)


# --- limits --------------------------------------------------------------------------


def took(median_us, method="events"):
    return CallTiming(median_us, median_us, median_us, 20, method)


@pytest.fixture
def times(monkeypatch):
    """How long each layout takes, by its place in the order of measuring; 50 µs by default."""
    times = {}
    measured = []

    def time_program(program, source, *, target_ms):
        measured.append(source.shape)
        return times.get(len(measured) - 1, took(50.0))

    # The kernels themselves stay out: they are tested above, and the interpreter is slow.
    def units(source, writes, layout):
        moved = jnp.asarray(expected_units(np.asarray(source), writes, layout))
        return moved.at[times["spoiled"]].add(1) if "spoiled" in times else moved

    program = lambda writes, layout: lambda source: units(source, writes, layout)
    monkeypatch.setattr(streams, "time_program", time_program)
    monkeypatch.setattr(streams, "_stream_program", program)
    return times


def test_the_fastest_layout_is_the_limit(times):
    times[3] = took(10.0)
    limit = find_limit(Stream(1, 8, 10**5), 1.0)
    assert (limit["reads"], limit["writes"]) == (1, 8)
    assert (limit["median_us"], limit["config"]) == (10.0, str(LAYOUTS[3]))
    # As many bytes as asked for, rounded up to whole blocks.
    assert 9 * 10**5 <= limit["bytes"] < 9 * (10**5 + 4 * streams._UNIT_WORDS)
    assert limit["terabytes_per_second"] == pytest.approx(limit["bytes"] / 10.0 / 1e6)


def test_times_of_the_host_are_no_limit(times):
    times[0] = took(1.0, "host-bound")
    assert find_limit(Stream(2, 1, 10**5), 1.0)["median_us"] == 50.0
    times.update({index: took(1.0, "host-bound") for index in range(100)})
    with pytest.raises(RuntimeError, match="the host is too slow"):
        find_limit(Stream(2, 1, 10**5), 1.0)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_wrong_streams_are_no_limit(times, place):
    times["spoiled"] = place
    with pytest.raises(RuntimeError, match="moved its data wrongly"):
        find_limit(Stream(3, 2, 10**5), 1.0)


def test_limits_are_measured_once_and_added_up(monkeypatch):
    found = []

    def find(stream, target_ms):
        found.append(stream)
        if len(found) > 2:
            raise MemoryError("out of memory")
        return {"bytes": 10**4, "median_us": 10.0 * len(found)}

    monkeypatch.setattr(streams, "find_limit", find)
    limits = Limits(1.0)
    permute, route, other = map(small_case, ("permute", "route", "unpermute_grad"))
    assert limits.time_us(permute) is None
    for case in (permute, route, permute):
        assert limits.measure(case) == []
    (there, there_bytes), (back, back_bytes) = route.streams
    assert found == [there, back]
    # As far as the ops' bytes go at the rate of the stream.
    assert limits.time_us(permute) == pytest.approx(10.0 * there_bytes / 10**4)
    expected = (10.0 * there_bytes + 20.0 * back_bytes) / 10**4
    assert limits.time_us(route) == pytest.approx(expected)
    assert limits.time_us(small_case("plan")) is None
    for _ in range(2):
        ((stream, error),) = limits.measure(other)
        assert (stream, str(error)) == (other.streams[0][0], "out of memory")
    assert limits.time_us(other) is None
    assert len(found) == 3
