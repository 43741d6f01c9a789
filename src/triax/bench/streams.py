"""The limits: how fast this device streams as many bytes as an op, in the same ratio.

A stream reads and writes memory in order, without an index, in several ways; the fastest of them
is the limit. Each is measured once, in the run whose ops are compared with it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.bench.cases import Case, Stream
from triax.bench.timing import time_program
from triax.binding.launch import KernelImplementation
from triax.call import triton_call

_WORD_BYTES = 4
# Units are whole numbers of the largest block, so that no kernel needs a mask.
_UNIT_WORDS = 2048
_NUM_WARPS = 4


class Layout(NamedTuple):
    """One way to stream: where the units lie, and how the kernel is cut into programs."""

    together: bool  # the units of a program are one run of memory, or each a part of its array
    block: int  # words of each unit that a program moves
    stores: str  # their cache modifier: none, or ".cs" for what is touched once

    def __str__(self) -> str:
        place = "together" if self.together else "apart"
        return f"{place} {self.block} words {_NUM_WARPS}w {self.stores}".rstrip()


_BLOCKS = ((512, ""), (512, ".cs"), (1024, ""), (2048, ""))
LAYOUTS = tuple(Layout(at, *block) for at, block in itertools.product((False, True), _BLOCKS))


class Limits:
    """The limits of one run, each measured at its first use and kept, by stream."""

    def __init__(self, target_ms: float):
        self._target_ms = target_ms
        self.records: dict[Stream, dict[str, Any]] = {}
        self._problems: dict[Stream, Exception] = {}

    def measure(self, case: Case) -> list[tuple[Stream, Exception]]:
        """Measures what a case is compared with, where that has not been done; what went wrong.

        It takes as much memory as the op itself, so it is done before the op's inputs are made.
        """
        streams = dict(case.streams)
        for stream in streams:
            if stream not in self.records and stream not in self._problems:
                try:
                    self.records[stream] = find_limit(stream, self._target_ms)
                except Exception as error:  # out of memory, above all: others can still be measured
                    self._problems[stream] = error.with_traceback(None)  # which holds arrays
        return [(stream, error) for stream, error in self._problems.items() if stream in streams]

    def time_us(self, case: Case) -> float | None:
        """How long the streams of a case take; None where it has none, or one is not known."""
        if not case.streams or any(stream not in self.records for stream, _ in case.streams):
            return None
        rates = ((self.records[stream], num_bytes) for stream, num_bytes in case.streams)
        return sum(num_bytes / found["bytes"] * found["median_us"] for found, num_bytes in rates)


def find_limit(stream: Stream, target_ms: float) -> dict[str, Any]:
    """Measures a stream in all ways there are, and checks that the fastest one moved its data."""
    unit_words = -(-stream.unit_bytes // (_WORD_BYTES * _UNIT_WORDS)) * _UNIT_WORDS
    source = _fill(stream.reads, unit_words)
    programs = {str(layout): _stream_program(stream.writes, layout) for layout in LAYOUTS}
    if (stream.reads, stream.writes) == (1, 1):
        programs["XLA's copy"] = jax.jit(jnp.copy)
    timings = {name: time_program(p, source, target_ms=target_ms) for name, p in programs.items()}
    timings = {name: timing for name, timing in timings.items() if timing.method != "host-bound"}
    if not timings:
        raise RuntimeError(f"the host is too slow to measure the stream {stream}")
    best = min(timings, key=lambda name: timings[name].median_us)
    runs = {str(layout): layout.block for layout in LAYOUTS if layout.together}
    if int(_count_wrong(source, programs[best](source), runs.get(best, unit_words))):
        raise RuntimeError(f"the stream {stream} of layout {best} moved its data wrongly")
    num_bytes = (stream.reads + stream.writes) * unit_words * _WORD_BYTES
    return {
        "reads": stream.reads,
        "writes": stream.writes,
        "bytes": num_bytes,
        "dtype": "int32",
        "median_us": timings[best].median_us,
        "terabytes_per_second": 1e-6 * num_bytes / timings[best].median_us,
        "config": best,
    }


def stream_units(
    source: jax.Array,
    writes: int,
    layout: Layout,
    implementation: KernelImplementation | None = None,
) -> jax.Array:
    """The xor of all units of `source` [reads, words], int32, in each of `writes` units."""
    from triax.bench.stream_kernels import _stream_kernel

    reads, unit_words = source.shape
    return triton_call(
        source,
        unit_words,
        kernel=_stream_kernel,
        out_type=jax.ShapeDtypeStruct((writes, unit_words), jnp.int32),
        grid=unit_words // layout.block,
        num_warps=_NUM_WARPS,
        name="stream",
        implementation=implementation,
        READS=reads,
        WRITES=writes,
        TOGETHER=layout.together,
        STORES=layout.stores,
        BLOCK=layout.block,
    )


@functools.cache
def _stream_program(writes: int, layout: Layout) -> Callable[[Any], Any]:
    return jax.jit(lambda source: stream_units(source, writes, layout))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(units: int, words: int) -> jax.Array:
    place = jax.lax.broadcasted_iota(jnp.int32, (units, words), 1)
    unit = jax.lax.broadcasted_iota(jnp.int32, (units, words), 0)
    return (place ^ (unit << 27)) * jnp.int32(0x2545F491)


@functools.partial(jax.jit, static_argnums=2)
def _count_wrong(source: jax.Array, target: jax.Array, run: int) -> jax.Array:
    """How many words differ from the xor, where `run` words of each unit lie together."""
    source = source.reshape(-1, source.shape[0], run)
    target = target.reshape(-1, target.shape[0], run)
    expected = functools.reduce(jnp.bitwise_xor, (source[:, n] for n in range(source.shape[1])))
    return jnp.sum(target != expected[:, None], dtype=jnp.float32)
