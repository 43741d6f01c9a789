"""Streams: what the kernels move, which layout is the limit, and what has none."""

import functools
import importlib
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.shared import small_case
from triax.bench import streams
from triax.bench.cases import Stream
from triax.bench.streams import LAYOUTS, find_limit, limit_us, stream_units
from triax.bench.timing import CallTiming, _delay
from triax.emitting.reading import triton_calls

WORDS = 2048


def expected_units(source, writes, layout):
    """The xor of what each program reads, to all that it writes."""
    together, block, _ = layout
    reads, words = source.shape
    run = block if together else words
    xor = np.bitwise_xor.reduce(source.reshape(words // run, reads, run), axis=1)
    return np.repeat(xor[:, None], writes, axis=1).reshape(writes, words)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("reads", "writes"), [(1, 4), (3, 2), (4, 1)])
def test_kernels_move_their_units(reads, writes, layout):
    source = streams._fill((reads, WORDS))
    actual = stream_units(source, writes, LAYOUTS[layout])
    expected = expected_units(np.asarray(source), writes, LAYOUTS[layout])
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_lower(layout, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    source = jax.ShapeDtypeStruct((9, WORDS), jnp.int32)
    program = jax.jit(functools.partial(stream_units, writes=8, layout=LAYOUTS[layout]))
    (call,) = triton_calls(program.trace(source).lower(lowering_platforms=("cuda",)))
    assert call.grid == ((WORDS // LAYOUTS[layout][1], 1, 1),)


def test_the_delay_takes_as_long_as_it_is_told():
    _delay(jnp.int32(0))  # compiles
    start = time.perf_counter()
    jax.block_until_ready(_delay(jnp.int32(3e7)))
    assert time.perf_counter() - start > 0.03


# --- limits --------------------------------------------------------------------------


@pytest.fixture
def times():
    """How long each layout takes, and by which method, by name; 50 µs by default."""
    times = {}
    names = {layout: name for name, layout in LAYOUTS.items()}

    def time_program(program, source, *, target_ms):
        us, method = times.get(names[program.keywords["layout"]], (50.0, "events"))
        return CallTiming(us, us, us, 20, method)

    # The kernels themselves stay out: they are tested above, and the interpreter is slow.
    def units(source, writes, layout):
        moved = jnp.asarray(expected_units(np.asarray(source), writes, layout))
        return moved.at[times["spoiled"]].add(1) if "spoiled" in times else moved

    times["how"] = time_program, units
    return times


def test_the_fastest_layout_is_the_limit(times):
    first, second, *others = LAYOUTS
    times |= {first: (1.0, "host-bound"), second: (10.0, "events")}
    limit = find_limit(Stream(1, 8, 10**5), *times["how"])
    assert (limit["reads"], limit["writes"]) == (1, 8)
    assert (limit["median_us"], limit["config"]) == (10.0, second)
    # As many bytes as asked for, rounded up to whole blocks.
    assert 9 * 10**5 <= limit["bytes"] < 9 * (10**5 + streams.UNIT_BYTES)
    assert limit["terabytes_per_second"] == pytest.approx(limit["bytes"] / 10.0 / 1e6)
    times.update(dict.fromkeys((second, *others), (1.0, "host-bound")))
    with pytest.raises(RuntimeError, match="the host is too slow"):
        find_limit(Stream(2, 1, 10**5), *times["how"])


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_wrong_streams_are_no_limit(times, place):
    times["spoiled"] = place
    with pytest.raises(RuntimeError, match="moved its data wrongly"):
        find_limit(Stream(3, 2, 10**5), *times["how"])


def test_limits_are_measured_once_and_added_up():
    rates = iter([10.0, 20.0])
    find = lambda stream: {"bytes": 10**4, "median_us": next(rates)}
    known = {}
    # As far as the ops' bytes go at the rate of the stream.
    (_, there), (_, back) = small_case("moves").passes
    for op, us in [("permute", 10 * there), ("moves", 10 * there + 20 * back)] * 2:
        assert limit_us(small_case(op), known, find) == pytest.approx(us / 10**4)
    assert limit_us(small_case("plan"), known) is None
    with pytest.raises(StopIteration):
        limit_us(small_case("unpermute_grad"), known, find)


def test_the_decode_benchmark_measures_against_a_read_of_the_weights_in_use(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    decode = importlib.import_module("decode")
    small = {"HIDDEN": 64, "WIDTH": 32, "TOP_K": 1, "TOKENS": (3,), "LAYERS": 2}
    for name, value in small.items():
        monkeypatch.setattr(decode, name, value)
    found = decode.measure_weights(experts=16, rate=1000.0)
    assert [each["what"] for each in found] == ["gate and up", "down", "layer"]
    both = 64 * 64 * 2, 32 * 64 * 2  # bytes of an expert
    for each, num_bytes in zip(found, (*both, sum(both)), strict=True):
        assert 1 <= each["experts_in_use"] <= 3
        assert each["read_us"] == pytest.approx(each["experts_in_use"] * num_bytes / 1000)
        assert each["fraction_of_read"] == pytest.approx(each["read_us"] / each["median_us"])
