"""The limits: how fast this device streams as many bytes as an op, in the same ratio.

A stream reads and writes memory in order, without an index, in several ways; the fastest of them
is the limit. Each is measured once, in the run whose ops are compared with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from triax.bench.cases import Case, Stream
from triax.bench.timing import Timing, time_program
from triax.bridge.call import triton_call

_WORD_BYTES = 4
# Units are whole numbers of the largest block, so that no kernel needs a mask.
_UNIT_WORDS = 2048


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to stream: where the units lie, and how the kernel is cut into programs.

    Attributes:
      together: whether the units of a program are one run of memory, or each a part of an array
        of its own.
      block: words of each unit that a program moves.
      num_warps: of a program.
      stores: their cache modifier: none, or ".cs" for what is touched once.
    """

    together: bool
    block: int
    num_warps: int
    stores: str = ""

    def __str__(self) -> str:
        place = "together" if self.together else "apart"
        return f"{place} {self.block} words {self.num_warps}w {self.stores}".rstrip()


LAYOUTS = tuple(
    Layout(together, block, 4, stores)
    for together in (False, True)
    for block, stores in ((512, ""), (512, ".cs"), (1024, ""), (2048, ""))
)


@dataclasses.dataclass(frozen=True)
class Limit:
    """The fastest way that was found for one stream."""

    stream: Stream
    num_bytes: int
    timing: Timing
    config: str

    @property
    def us_per_byte(self) -> float:
        return self.timing.median_us / self.num_bytes

    def as_record(self) -> dict[str, Any]:
        return {
            "reads": self.stream.reads,
            "writes": self.stream.writes,
            "bytes": self.num_bytes,
            "dtype": "int32",
            "median_us": self.timing.median_us,
            "terabytes_per_second": 1e-6 / self.us_per_byte,
            "config": self.config,
        }


class Limits:
    """The limits of one run, each measured at its first use and kept.

    Attributes:
      problems: what went wrong, by stream; such a stream has no limit.
    """

    def __init__(self, target_ms: float):
        self._target_ms = target_ms
        self._found: dict[Stream, Limit] = {}
        self.problems: dict[Stream, str] = {}

    def measure(self, case: Case) -> None:
        """Measures what a case is compared with, where that has not been done.

        It takes as much memory as the op itself, so it is done before the op's inputs are made.
        """
        for stream, _ in case.streams:
            if stream in self._found or stream in self.problems:
                continue
            try:
                self._found[stream] = find_limit(stream, self._target_ms)
            except Exception as error:  # out of memory, above all: the others can still be measured
                self.problems[stream] = str(error).partition("\n")[0]

    def time_us(self, case: Case) -> float | None:
        """How long the streams of a case take; None where it has none, or one is not known."""
        streams = case.streams
        if not streams or any(stream not in self._found for stream, _ in streams):
            return None
        return sum(num_bytes * self._found[stream].us_per_byte for stream, num_bytes in streams)

    def records(self) -> list[dict[str, Any]]:
        return [limit.as_record() for limit in self._found.values()]


def find_limit(stream: Stream, target_ms: float) -> Limit:
    """Measures a stream in all ways there are, and checks that the fastest one moved its data.

    Raises:
      RuntimeError: it did not, or its device time could not be measured.
    """
    unit_words = -(-stream.unit_bytes // (_WORD_BYTES * _UNIT_WORDS)) * _UNIT_WORDS
    source = _fill(stream.reads, unit_words)
    programs: dict[str, tuple[Callable[[Any], Any], bool]] = {
        str(layout): (_stream_program(stream.writes, layout), layout.together) for layout in LAYOUTS
    }
    if (stream.reads, stream.writes) == (1, 1):
        programs["XLA's copy"] = (jax.jit(jnp.copy), False)
    timings = {
        name: time_program(program, source, target_ms=target_ms)
        for name, (program, _) in programs.items()
    }
    timings = {name: timing for name, timing in timings.items() if timing.method != "host-bound"}
    if not timings:
        raise RuntimeError(f"the host is too slow to measure the stream {stream}")
    best = min(timings, key=lambda name: timings[name].median_us)
    program, together = programs[best]
    block = next((layout.block for layout in LAYOUTS if str(layout) == best), unit_words)
    if int(_count_wrong(source, program(source), block if together else unit_words)):
        raise RuntimeError(f"the stream {stream} of layout {best} moved its data wrongly")
    num_bytes = (stream.reads + stream.writes) * unit_words * _WORD_BYTES
    return Limit(stream, num_bytes, timings[best], best)


def stream_units(
    source: jax.Array, writes: int, layout: Layout, implementation: str | None = None
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
        num_warps=layout.num_warps,
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
    reads, unit_words = source.shape
    writes = target.shape[0]
    source = source.reshape(unit_words // run, reads, run)
    target = target.reshape(unit_words // run, writes, run)
    expected = functools.reduce(jnp.bitwise_xor, (source[:, unit] for unit in range(reads)))
    return jnp.sum(target != expected[:, None], dtype=jnp.float32)
