"""Kernels of `triax.benchmark`, imported only where Triton is: one that streams, one that waits."""

# The text of a kernel is Triton's language, which only looks like Python.
# mypy: ignore-errors

import functools

import jax
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from triax.call import triton_call

BLOCK = 512


@triton.jit
def _stream_kernel(
    source_ptr, words, out_ptr, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr
):
    # Reads the same block of each of READS units, and writes their xor, which needs all of them, to
    # each of WRITES units. Units are whole blocks. Together they can pass 2**31 words.
    step = tl.cast(words, tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + block)
    for unit in tl.static_range(1, READS):
        value ^= tl.load(source_ptr + unit * step + block)
    for unit in tl.static_range(WRITES):
        tl.store(out_ptr + unit * step + block, value, cache_modifier=".cs")


@functools.partial(jax.jit, static_argnums=1)
def stream(source: jax.Array, writes: int) -> jax.Array:
    """The xor of all units of `source` [reads, words], int32, in each of `writes` units."""
    reads, words = source.shape
    how = {"kernel": _stream_kernel, "grid": words // BLOCK, "num_warps": 4, "name": "stream"}
    how |= {"out_type": jax.ShapeDtypeStruct((writes, words), source.dtype)}
    return triton_call(source, words, READS=reads, WRITES=writes, BLOCK=BLOCK, **how)


@triton.jit
def _delay_kernel(nanoseconds_ptr, out_ptr):
    nanoseconds = tl.load(nanoseconds_ptr)
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
    tl.store(out_ptr, nanoseconds)


@jax.jit
def delay(nanoseconds: jax.Array) -> jax.Array:
    """`nanoseconds`, int32 [], after so long."""
    return triton_call(nanoseconds, kernel=_delay_kernel, out_type=nanoseconds, grid=1)
