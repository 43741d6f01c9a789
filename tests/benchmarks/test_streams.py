"""Streams: what the kernels move, which layout is the limit, and what has none."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import streams
from benchmarks.harness.streams import LAYOUTS, Stream, fill, find_limit, stream_units
from triax.benchmark import CallTiming

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
    source = fill((reads, WORDS))
    actual = stream_units(source, writes, LAYOUTS[layout])
    expected = expected_units(np.asarray(source), writes, LAYOUTS[layout])
    np.testing.assert_array_equal(actual, expected)


@pytest.fixture
def times(monkeypatch):
    """How long each layout takes, and by which method, by name; 50 µs by default."""
    times = {}
    names = {layout: name for name, layout in LAYOUTS.items()}

    def time_program(program, source):
        us, method = times.get(names[program.keywords["layout"]], (50.0, "events"))
        return CallTiming(us, us, us, 20, method)

    # The kernels themselves stay out: they are tested above, and the interpreter is slow.
    def units(source, writes, layout):
        moved = jnp.asarray(expected_units(np.asarray(source), writes, layout))
        return moved.at[times["spoiled"]].add(1) if "spoiled" in times else moved

    monkeypatch.setattr(streams, "time_program", time_program)
    monkeypatch.setattr(streams, "stream_units", units)
    return times


def test_the_fastest_layout_is_the_limit(times):
    first, second, *others = LAYOUTS
    times |= {first: (1.0, "host-bound"), second: (10.0, "events")}
    limit = find_limit(Stream(1, 8, 10**5))
    assert (limit["reads"], limit["writes"]) == (1, 8)
    assert (limit["median_us"], limit["config"]) == (10.0, second)
    # As many bytes as asked for, rounded up to whole blocks.
    assert 9 * 10**5 <= limit["bytes"] < 9 * (10**5 + streams.UNIT_BYTES)
    assert limit["terabytes_per_second"] == pytest.approx(limit["bytes"] / 10.0 / 1e6)
    times.update(dict.fromkeys((second, *others), (1.0, "host-bound")))
    with pytest.raises(RuntimeError, match="the host is too slow"):
        find_limit(Stream(2, 1, 10**5))


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_wrong_streams_are_no_limit(times, place):
    times["spoiled"] = place
    with pytest.raises(RuntimeError, match="moved its data wrongly"):
        find_limit(Stream(3, 2, 10**5))
