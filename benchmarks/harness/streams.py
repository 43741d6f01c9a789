"""The limit of memory: how fast this device streams so many bytes, in this ratio of both ways.

A stream reads and writes memory in order, without an index, in several ways; the fastest of them
is the limit. It is measured in the run whose ops are compared with it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.benchmark import HOST_BOUND, time_program
from triax.call import triton_call

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
UNIT_BYTES = 4 * 1024  # units are whole numbers of the largest block: no kernel needs a mask


class Stream(NamedTuple):
    """A sequential pass over memory: `reads` units in for `writes` units out, of `unit_bytes`."""

    reads: int
    writes: int
    unit_bytes: int


def find_limit(stream: Stream) -> dict[str, Any]:
    """Measures a stream in all ways there are, and checks that the fastest one moved its data."""
    reads, writes, unit_bytes = stream
    unit_bytes = -(-unit_bytes // UNIT_BYTES) * UNIT_BYTES
    source = fill((reads, unit_bytes // 4))
    programs: dict[str, Any] = {
        name: functools.partial(stream_units, writes=writes, layout=layout)
        for name, layout in LAYOUTS.items()
    }
    if (reads, writes) == (1, 1):
        programs["XLA's copy"] = jax.jit(jnp.copy)
    timings = {name: time_program(program, source) for name, program in programs.items()}
    times_us = {name: t.median_us for name, t in timings.items() if t.method != HOST_BOUND}
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
    from benchmarks.harness.stream_kernels import _stream_kernel

    reads, unit_words = source.shape
    together, block, stores = layout
    how = {"TOGETHER": together, "STORES": stores, "BLOCK": block, "READS": reads, "WRITES": writes}
    out_type = jax.ShapeDtypeStruct((writes, unit_words), jnp.int32)
    how |= {"kernel": _stream_kernel, "out_type": out_type, "grid": unit_words // block}
    return triton_call(source, unit_words, num_warps=4, name="stream", **how)


@functools.partial(jax.jit, static_argnums=0)
def fill(shape: tuple[int, int]) -> jax.Array:
    """What a stream reads."""
    unit, word = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (word ^ (unit << 27)) * jnp.int32(0x2545F491)


@functools.partial(jax.jit, static_argnums=2)
def _count_wrong(source: jax.Array, target: jax.Array, run: int) -> jax.Array:
    """How many words differ from the xor, where `run` words of each unit lie together."""
    source = source.reshape(-1, source.shape[0], run)
    target = target.reshape(-1, target.shape[0], run)
    expected = functools.reduce(jnp.bitwise_xor, (source[:, n] for n in range(source.shape[1])))
    return jnp.sum(target != expected[:, None], dtype=jnp.float32)
