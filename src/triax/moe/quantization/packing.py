"""Packs 4-bit numbers, two to a byte, reorders tiles, and decodes scales that are powers of two.

The lower half of a byte holds the first of its two numbers along the last dimension, as in
gpt-oss's checkpoint and in the int32 words of GPTQ.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

PACKED = tuple(map(np.dtype, (ml_dtypes.float4_e2m1fn, ml_dtypes.int4)))
"""The 4-bit dtypes, whose numbers are stored two to a byte."""

E2M1 = PACKED[0]

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
"""A scale of 8 bits: 2**(code - 127), and NaN for the code 255."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
"""A scale of 8 bits that is no power of two, of NVFP4."""

TILE = 64
"""The columns, and the depth, of a tile."""

LEAST_SCALED = 32
"""Divides the depth of every block with a scale, in weights that kernels read themselves; 16 does
if scales are of E4M3."""

TILES_VERSION = 1
"""The version of the order of bits in tiles, of scales in them, and of the sizes of a tile."""

TILED = {
    dtype.name: dtype for dtype in (*PACKED, *map(np.dtype, (ml_dtypes.float8_e4m3fn, "int8")))
}
"""The dtypes of numbers that may be in tiles."""

# A word of a tile has four pairs of 4-bit numbers. For each pair: the places in the word of the
# first number's bits, lowest bit first. The second number's are 16 bits further, modulo 32. From
# these places widening is cheap: of e2m1 the first pair becomes bfloat16 by a mask, the next two by
# a rotation and a mask, the last by a mask, a product and a mask.
_BITS = {
    "int4": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    "float4_e2m1fn": ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3)),
}


def pack(codes: jax.Array) -> jax.Array:
    """Packs the lowest four bits of integers [..., n] into bytes [..., n / 2]."""
    codes = codes & 15
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(jnp.uint8)


def unpack(values: jax.Array, packed: str, dtype: Any) -> jax.Array:
    """Unpacks bytes [..., n / 2] to floats [..., n], exactly."""
    both = jnp.repeat(values.astype(jnp.int32), 2, axis=-1)
    odd = jax.lax.broadcasted_iota(jnp.int32, both.shape, both.ndim - 1) & 1
    code = both >> 4 * odd & 15
    if packed == "int4":
        return ((code ^ 8) - 8).astype(dtype)
    size = code & 7
    # Twice the number: 0, 1, 2, 3, 4, 6, 8, 12.
    twice = jnp.where(size < 2, size, (2 | size & 1) << jnp.maximum((size >> 1) - 1, 0))
    number = twice.astype(dtype) * 0.5
    return jnp.where(code >= 8, -number, number)


def powers_of_two(codes: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns two factors of the powers that E8M0 codes stand for, neither of them subnormal.

    XLA flushes subnormals to zero on CPUs, and 2**-127 is subnormal in float32.
    """
    codes = codes.astype(jnp.int32)
    bits = jnp.where(codes == 255, 0x7FC00000, jnp.maximum(codes, 1) << 23)
    powers = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return powers.astype(dtype), jnp.where(codes == 0, 0.5, 1).astype(dtype)


def least_scaled(scales: Any) -> int:
    """Returns what divides the depth of every block with one of these scales, for kernels."""
    return LEAST_SCALED // 2 if scales is not None and scales.dtype == E4M3 else LEAST_SCALED


def whole_tiles(size: int) -> int:
    """Returns the size of the tiles that hold `size`."""
    return -(-size // TILE) * TILE


def words_of_tile(packed: str | None) -> int:
    """Returns how many int32 words hold the numbers of a tile."""
    return TILE**2 // (8 if packed in _BITS else 4)


def tile(values: Any, packed: str) -> Any:
    """Reorders numbers [..., columns, depth] to words of tiles, int32 [..., 64s, 64s, words].

    A tile has 64 columns and 64 of their depth, in the order in which the threads of four warps
    hold a left operand of tensor cores. A warp has 16 of the columns, and its threads stand in 8
    rows of 4. A thread in row r has columns r and r + 8. Of each 32 of the depth, thread t of a row
    has the 8 neighbours from 8 t on.

    In 8 bits a word has two neighbours of both columns, the first column's in its bytes 0 and 2. A
    warp has all its words of the first 32 before those of the second, four for each thread. In 4
    bits `values` are bytes [..., columns, depth / 2]. A word has four neighbours of both columns,
    and a thread's four words are next to each other, two for each 32.

    Columns and depth are multiples of 64. NumPy arrays stay on the host.
    """
    if not isinstance(values, np.ndarray):
        return _tiled(values, packed)
    *lead, columns, size = values.shape
    count = math.prod(lead) * columns // TILE
    rows = values.reshape(count, TILE, size)
    depth = size * (2 if packed in _BITS else 1)
    words = np.empty((count, depth // TILE, words_of_tile(packed)), np.int32)

    def fill(row: int) -> None:
        words[row] = _tiled(rows[row], packed)[0]

    with ThreadPoolExecutor() as threads:  # each row of tiles fits into a core's cache
        list(threads.map(fill, range(count)))
    return words.reshape(*lead, columns // TILE, *words.shape[1:])


def _tiled(values: Any, packed: str) -> Any:
    n = values.ndim - 2
    num_words, order = _of_threads(packed)
    values = _split(_split(values, n + 1, (-1, 2, 4, num_words, 2)), n, (-1, 4, 2, 8))
    values = values.transpose(*range(n), *(n + i for i in order))
    values = _merged(_merged(values, n + 7, 2), n + 2, 5)
    if packed not in _BITS:
        if isinstance(values, np.ndarray):
            return np.ascontiguousarray(values).view(np.int32)[..., 0]
        return jax.lax.bitcast_convert_type(values, jnp.int32)
    words: Any = 0
    for pair, bits in enumerate(_BITS[packed]):
        of_pair = values[..., pair]
        if isinstance(values, np.ndarray):  # far fewer operations on the host
            words = words | _words_of(np.arange(256, dtype=np.int32), bits)[of_pair]
        else:
            words = words | _words_of(of_pair.astype(jnp.int32), bits)
    return words


def _of_threads(packed: str) -> tuple[int, tuple[int, ...]]:
    """Returns how many words a thread has of each 32 of the depth, and the order of dimensions.

    The order is a permutation of the dimensions of untiled weights. Columns are split into tiles,
    warps, a thread's two columns, and rows of threads; the depth into tiles, 32s, threads, words,
    and what a word has of it.
    """
    if packed in _BITS:
        return 2, (0, 4, 1, 3, 6, 5, 7, 8, 2)
    return 4, (0, 4, 1, 5, 3, 6, 7, 8, 2)


def _words_of(byte: Any, bits: tuple[int, ...]) -> Any:
    """Returns words with the bits of both numbers of a byte in their places."""
    words = byte & 0
    for bit, to in enumerate(bits):
        words = words | (byte >> bit & 1) << to | (byte >> 4 + bit & 1) << (to + 16) % 32
    return words


def untile(words: Any, packed: str) -> Any:
    """Returns the numbers, as they were before `tile`, of words of tiles."""
    numpy = np if isinstance(words, np.ndarray) else jnp
    n = words.ndim - 3
    values: Any
    if packed in _BITS:
        pairs = []
        for bits in _BITS[packed]:
            pair = words & 0
            for bit, at in enumerate(bits):
                pair = pair | (words >> at & 1) << bit | (words >> (at + 16) % 32 & 1) << 4 + bit
            pairs.append(pair.astype(np.uint8))
        values = numpy.stack(pairs, -1)
    elif isinstance(words, np.ndarray):
        values = np.ascontiguousarray(words)[..., None].view(TILED[packed])
    else:
        values = jax.lax.bitcast_convert_type(words, TILED[packed])
    num_words, order = _of_threads(packed)
    sizes = {1: 4, 3: 8, 5: 2, 6: 4, 7: num_words}  # of the dimensions as stored
    values = _split(_split(values, n + 3, (2, 2)), n + 2, tuple(sizes[i] for i in order[2:7]))
    values = values.transpose(*range(n), *(n + order.index(i) for i in range(9)))
    return _merged(_merged(values, n + 4, 5), n, 4)


def tile_scales(scales: Any) -> Any:
    """Reorders scales or zeros [..., columns, parts] to [..., 64s of columns, 64 · parts].

    The 64 of a part are in the order of threads: first all columns of the first row of threads (0,
    8, 16, …), then those of the second.
    """
    n = scales.ndim - 2
    scales = _split(scales, n, (-1, 8, 8))
    return _merged(scales.transpose(*range(n), n, n + 3, n + 2, n + 1), n + 1, 3)


def untile_scales(scales: Any) -> Any:
    """Returns scales or zeros [..., columns, parts] as before `tile_scales`."""
    n = scales.ndim - 2
    scales = _split(scales, n + 1, (-1, 8, 8))
    return _merged(scales.transpose(*range(n), n, n + 3, n + 2, n + 1), n, 3)


def fill(array: Any, axis: int, size: int, to: int, value: int = 0) -> Any:
    """Fills each `size` along a dimension up with a value, so that it is `to`."""
    axis %= array.ndim
    pad = [(0, 0)] * (array.ndim + 1)
    pad[axis + 1] = (0, to - size)
    split = _split(array, axis, (-1, size))
    padded = (np if isinstance(array, np.ndarray) else jnp).pad(split, pad, constant_values=value)
    return _merged(padded, axis, 2)


def unfill(array: Any, axis: int, size: int, to: int) -> Any:
    """Returns what `fill` was given."""
    axis %= array.ndim
    split = _split(array, axis, (-1, to))
    return _merged(split[(*(slice(None),) * (axis + 1), slice(size))], axis, 2)


# One dimension at a time: `reshape` wants that of arrays that are sharded over explicit axes.


def _split(array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
    sizes = tuple(array.shape[axis] // -math.prod(sizes) if n < 0 else n for n in sizes)
    return array.reshape(*array.shape[:axis], *sizes, *array.shape[axis + 1 :])


def _merged(array: Any, axis: int, count: int) -> Any:
    size = math.prod(array.shape[axis : axis + count])
    return array.reshape(*array.shape[:axis], size, *array.shape[axis + count :])
