"""The limits: how fast this device streams as many bytes as an op, in the same ratio.

A stream reads and writes memory in order, without an index, in several ways; the fastest of them
is the limit. Each is measured once, in the run whose ops are compared with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from triax.bench.cases import Case, Stream
from triax.bench.timing import time_program
from triax.call import triton_call

# Units are whole numbers of the largest block, so that no kernel needs a mask.
UNIT_BYTES = 4 * 1024
_TARGET_MS = 12.5

# Ways to stream: whether the units of a program are one run of memory, or each a part of its array;
# the words of each unit that a program moves; the cache modifier of what it stores.
LAYOUTS = {
    "apart 512 words 4w": (False, 512, ""),
    "apart 512 words 4w .cs": (False, 512, ".cs"),
    "apart 1024 words 4w": (False, 1024, ""),
    "together 512 words 4w": (True, 512, ""),
    "together 512 words 4w .cs": (True, 512, ".cs"),
    "together 1024 words 4w": (True, 1024, ""),
}


def limit_us(
    case: Case, known: dict[Stream, dict[str, Any]], find: Callable[[Stream], Any] | None = None
) -> float | None:
    """How long the streams of a case take; None where it has none.

    Those that are not `known` are measured and added. That takes as much memory as the op itself,
    so call it before the op's inputs are made.
    """
    total_us = 0.0
    for stream, num_bytes in case.passes:
        if stream.reads and stream.writes:
            if stream not in known:
                known[stream] = (find or find_limit)(stream)
            total_us += num_bytes / known[stream]["bytes"] * known[stream]["median_us"]
    return total_us or None


def find_limit(stream: Stream, time: Any = time_program, units: Any = None) -> dict[str, Any]:
    """Measures a stream in all ways there are, and checks that the fastest one moved its data."""
    reads, writes, unit_bytes = stream
    unit_bytes = -(-unit_bytes // UNIT_BYTES) * UNIT_BYTES
    source = _fill((reads, unit_bytes // 4))
    programs: dict[str, Any] = {
        name: functools.partial(units or stream_units, writes=writes, layout=layout)
        for name, layout in LAYOUTS.items()
    }
    if (reads, writes) == (1, 1):
        programs["XLA's copy"] = jax.jit(jnp.copy)
    timings = {name: time(p, source, target_ms=_TARGET_MS) for name, p in programs.items()}
    times_us = {name: t.median_us for name, t in timings.items() if t.method != "host-bound"}
    if not times_us:
        raise RuntimeError(f"the host is too slow to measure the stream {stream}")
    best = min(times_us, key=times_us.__getitem__)
    together, block, _ = LAYOUTS.get(best, (False, 0, ""))
    run = block if together else source.shape[1]
    if int(_count_wrong(source, programs[best](source), run)):
        raise RuntimeError(f"the stream {stream} of layout {best} moved its data wrongly")
    num_bytes = (reads + writes) * unit_bytes
    return {
        "reads": reads,
        "writes": writes,
        "bytes": num_bytes,
        "dtype": "int32",
        "median_us": times_us[best],
        "terabytes_per_second": 1e-6 * num_bytes / times_us[best],
        "config": best,
    }


@functools.partial(jax.jit, static_argnames=("writes", "layout"))
def stream_units(source: jax.Array, writes: int, layout: tuple[bool, int, str]) -> jax.Array:
    """The xor of all units of `source` [reads, words], int32, in each of `writes` units."""
    from triax.bench.stream_kernels import _stream_kernel

    reads, unit_words = source.shape
    together, block, stores = layout
    return triton_call(
        source,
        unit_words,
        kernel=_stream_kernel,
        out_type=jax.ShapeDtypeStruct((writes, unit_words), jnp.int32),
        grid=unit_words // block,
        num_warps=4,
        name="stream",
        READS=reads,
        WRITES=writes,
        TOGETHER=together,
        STORES=stores,
        BLOCK=block,
    )


@functools.partial(jax.jit, static_argnums=0)
def _fill(shape: tuple[int, int]) -> jax.Array:
    unit, word = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (word ^ (unit << 27)) * jnp.int32(0x2545F491)


@functools.partial(jax.jit, static_argnums=2)
def _count_wrong(source: jax.Array, target: jax.Array, run: int) -> jax.Array:
    """How many words differ from the xor, where `run` words of each unit lie together."""
    source = source.reshape(-1, source.shape[0], run)
    target = target.reshape(-1, target.shape[0], run)
    expected = functools.reduce(jnp.bitwise_xor, (source[:, n] for n in range(source.shape[1])))
    return jnp.sum(target != expected[:, None], dtype=jnp.float32)
