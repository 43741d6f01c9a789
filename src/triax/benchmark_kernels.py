"""Kernels of `triax.benchmark`: one streams memory, one waits. The module needs Triton."""

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
    # Writes the xor of READS units, which depends on every load, to each of WRITES units. A unit is
    # a whole number of blocks; together the units can exceed 2**31 words.
    step = tl.cast(words, tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + block)
    for unit in tl.static_range(1, READS):
        value ^= tl.load(source_ptr + unit * step + block)
    for unit in tl.static_range(WRITES):
        tl.store(out_ptr + unit * step + block, value, cache_modifier=".cs")


@functools.partial(jax.jit, static_argnums=1)
def stream(source: jax.Array, writes: int) -> jax.Array:
    """Streams memory: the xor of all units of `source`, int32 [reads, words] → [writes, words]."""
    reads, words = source.shape
    options = {"kernel": _stream_kernel, "grid": words // BLOCK, "num_warps": 4, "name": "stream"}
    options |= {"out_type": jax.ShapeDtypeStruct((writes, words), source.dtype)}
    return triton_call(source, words, READS=reads, WRITES=writes, BLOCK=BLOCK, **options)


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
    """Returns `nanoseconds`, int32 [], after that time."""
    return triton_call(nanoseconds, kernel=_delay_kernel, out_type=nanoseconds, grid=1)
