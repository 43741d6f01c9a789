"""`ScaledArray`: numbers of 8 or 4 bits with a scale for each block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization import packing
from triax.moe.quantization.packing import E2M1, E4M3, E8M0, PACKED, TILED
from triax.moe.shared import arguments
from triax.sharding import explicit

DTYPES = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8)))
"""The dtypes of 8-bit values."""
FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
"""The dtypes of wide scales: 8-bit numbers have the first, 4-bit ones any."""
_ONES = {E8M0: 127, E4M3: 56}  # the byte of 1
Block = tuple[int | None, ...]
_OPTIONAL = "zeros", "global_scales"
_PARTS = "values", "scales", *_OPTIONAL
_STATIC = "block", "transposed", "packed", "tiles", "shard"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledArray:
    """An array in 8 or 4 bits, with a scale for each block: ``(values - zeros) * scales``.

        w = moe.ScaledArray(values, scales, block=(1, 128, 128))
        w[3].shape, len(w), w.nbytes  # of one expert; experts; bytes of all parts
        w.dequantize(jnp.bfloat16)  # or w.astype(jnp.bfloat16)

    `quantize` returns it, or make one from the arrays of a quantized checkpoint. It is a pytree of
    `values`, `scales`, `zeros` and `global_scales`, so it goes through `jit`, `vmap`, `scan` and
    checkpoints like an array.

    `shape`, `block` and indices refer to the dimensions of the array. The pytree's arrays have the
    stored layout: with `transposed` their last two dimensions are swapped.

    Attributes:
      values: float8_e4m3fn, float8_e5m2 or int8, of any rank. With `packed`, uint8: two numbers in
        each byte, the lower half first along the last dimension; or int32: words from `tile`.
      scales: float32, float8_e8m0fnu (powers of two, as in MX formats), or, of 4-bit numbers,
        bfloat16 or float16, and of float4_e2m1fn also float8_e4m3fn (NVFP4); of the same rank. Each
        size is the number of blocks along that dimension.
      block: the size of a block along each dimension of the array, as in `quantize`: None for a
        whole dimension. A last block may be partial.
      transposed: whether the values are stored with the array's last two dimensions swapped, as
        weights [experts, depth, columns] whose values are [experts, columns, depth].
      packed: the dtype of numbers in bytes, "float4_e2m1fn" or "int4" (two's complement), or in
        words from `tile`, also "float8_e4m3fn" or "int8"; otherwise None.
      zeros: int8 or float32, in the shape of `scales`: the zero point of each block. For "int4"
        alone; None is zero.
      global_scales: float32, in the shape of `scales` but with 1 as the last dimension; each
        multiplies all numbers along it once more. For scales of float8_e4m3fn alone; None is one.
      tiles: the version of the tiles' layout, from `tile`; None for numbers that are not in tiles.
        Another version than this one of Triax is an error.
      shard: with `tiles`, the sizes of a shard along the last two dimensions of the array, if
        `tile` has filled its last tiles up with zeros. `shape` does not count these.

    Raises:
      ArgumentTypeError: an array has an unsupported dtype, or a size of `block` is not an int.
      ArgumentValueError: the shapes do not match.
    """

    values: jax.Array
    scales: jax.Array
    block: Block
    transposed: bool = False
    packed: str | None = None
    zeros: jax.Array | None = None
    global_scales: jax.Array | None = None
    tiles: int | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if hasattr(self.values, "dtype") or hasattr(self.scales, "dtype"):
            vars(self)["block"] = _checked(self)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        parts = [(jax.tree_util.GetAttrKey(name), part) for name, part in self._parts()]
        return parts, tuple(getattr(self, name) for name in _STATIC)

    @classmethod
    def tree_unflatten(cls, static: Any, parts: Any) -> ScaledArray:
        """Skips the checks: JAX, and sharding specs, put anything in an array's place."""
        new = object.__new__(cls)
        vars(new).update(zip((*_PARTS, *_STATIC), (*parts, *static), strict=True))
        return new

    def _parts(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in _PARTS]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, dequantized."""
        shape = swapped(self._stored()) if self.transposed else self._stored()
        if self.shard is None:
            return shape
        sizes = zip(shape[-2:], self.shard, strict=True)
        return (*shape[:-2], *(size // packing.whole_tiles(of) * of for size, of in sizes))

    def _stored(self) -> tuple[int, ...]:
        """The shape of the numbers in the stored layout."""
        shape = tuple(self.values.shape)
        if self.tiled:
            return (*shape[:-3], packing.TILE * shape[-3], packing.TILE * shape[-2])
        return (*shape[:-1], 2 * shape[-1]) if self.packed else shape

    @property
    def tiled(self) -> bool:
        """Whether the values are in tiles, from `tile`."""
        return self.tiles is not None

    @property
    def scales_tiled(self) -> bool:
        """Whether `tile` has reordered scales and zeros, too: it does if a column has several."""
        return self.tiled and _are_of_columns(stored_block(self))

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers in `values`."""
        return TILED[self.packed] if self.packed else self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of values, scales, zeros and global scales."""
        return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(self))

    @property
    def mT(self) -> ScaledArray:
        """The array with its last two dimensions swapped. No data moves."""
        new: dict[str, Any] = {"block": swapped(self.block), "transposed": not self.transposed}
        new["shard"] = self.shard and self.shard[::-1]
        return dataclasses.replace(self, **new)

    def dequantize(self, dtype: Any = "float32") -> jax.Array:
        """Returns the array in a float dtype: each value times its scale in float32, rounded once.

        If `zeros` are floats, ``values - zeros`` is rounded first. A value times a scale of
        float8_e4m3fn is exact, and so `global_scales` round it once.

        Args:
          dtype: any float.

        Returns:
          An array of shape `shape`.

        Raises:
          ArgumentTypeError: `dtype` is not a float.
        """
        check("self", self)
        array = widened(self, _float(dtype))
        return jnp.swapaxes(array, -1, -2) if self.transposed else array

    def tile(self, shards: tuple[int, int] = (1, 1)) -> ScaledArray:
        """Reorders weights for `ragged_dot` with few rows; numbers and their bytes stay the same.

        From compute capability 8.0 on, kernels for few bfloat16 rows read tiles, and widen them in
        registers. Call it once, where weights are loaded. Kernels read tiles for the rows'
        gradient, too; plain JAX reorders them back in each call.

        A tile has 64 columns and 64 of their depth. The values are int32 [..., columns / 64, depth
        / 64, 512], or 1024 in 8 bits. Scales and zeros for blocks of the depth, [..., columns,
        blocks], become [..., columns / 64, 64 · blocks]. NumPy arrays stay on the host. Tiles may
        be sharded along columns and depth, scales at the same places.

            w = w.tile(shards=(2, 1))  # gpt-oss's depth of 2,880 over two devices: 2 × 23 tiles

        Args:
          shards: into how many shards the last two dimensions will be cut. The last tiles of a
            shard whose size is no multiple of 64 are filled up with zeros; products then copy
            their rows and results.

        Returns:
          A `ScaledArray` of the same numbers; this one if it is tiled.

        Raises:
          ArgumentTypeError: the numbers are float8_e5m2, or `shards` are no ints.
          ArgumentValueError: there are fewer than two dimensions, or shards would not have the same
            size and whole blocks of scales.
        """
        return tiled("self", self, shards)

    def untile(self) -> ScaledArray:
        """Returns the array as it was before `tile`."""
        check("self", self)
        if not self.tiled:
            return self
        assert self.packed is not None
        parts: dict[str, Any] = {"values": packing.untile(_whole(self.values, 3), self.packed)}
        if self.scales_tiled:
            parts |= _reordered(vars(self), packing.untile_scales)
        packed = self.packed if self.dtype in PACKED else None
        whole = {**parts, "packed": packed, "tiles": None, "shard": None}
        if self.shard is not None:
            whole |= _in_shards(self, whole, self.shard, fills=False)
        return dataclasses.replace(self, **whole)

    def astype(self, dtype: Any) -> jax.Array:
        """Calls `dequantize`; arrays have this method too."""
        return self.dequantize(dtype)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("A ScaledArray without dimensions has no len().")
        return self.shape[0]

    def __getitem__(self, index: Any) -> ScaledArray:
        """Returns a part along the first dimension: ``w[3]`` is one expert, ``w[2:5]`` several."""
        check("self", self)
        messages.check_sizes_known("self", self.shape)
        is_integer = isinstance(index, int) or (
            getattr(index, "ndim", None) == 0 and jnp.issubdtype(index.dtype, jnp.integer)
        )
        is_integer = is_integer and not isinstance(index, bool)
        one, shared = not isinstance(index, slice), self.ndim == 0 or self.scales.shape[0] <= 1
        is_matrix = self.transposed or self.tiled  # as its last two dimensions are stored
        if self.ndim < 2 + is_matrix or not (shared or self.block[0] == 1):
            raise ArgumentValueError(
                "A ScaledArray is indexed along a first dimension that is stored first, if its "
                f"entries share no scales, or share all; got {self}. Index the result of "
                "`dequantize`."
            )
        if one and not is_integer:
            raise ArgumentTypeError(
                "A ScaledArray is indexed by an int or a slice of its first dimension; got "
                f"{messages.shown(index)}. Index the result of `dequantize`."
            )
        if isinstance(index, int | np.integer) and not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range for a ScaledArray of {len(self)}.")
        at = index
        if shared:
            at = 0 if one else slice(len(range(len(self))[index][:1]))
        parts: Any = {name: of if of is None else of[at] for name, of in self._parts()}
        parts["values"] = self.values[index]
        return dataclasses.replace(self, **parts, block=self.block[one:])

    def __repr__(self) -> str:
        known = getattr(self.values, "ndim", 0) >= len(self.block)
        array = f"{messages.short(self)}, " if known else ""
        parts = ", ".join(f"{n}={messages.short(of)}" for n, of in self._parts() if of is not None)
        layout = f"block={self.block}, transposed={self.transposed}"
        return f"ScaledArray({array}{layout},\n            {parts})"

    def __eq__(self, other: object) -> NoReturn:
        raise ArgumentTypeError(
            "A ScaledArray has no ==: different values and scales may mean one number. Compare "
            "results of `dequantize`, or `values` and `scales` one by one."
        )

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentTypeError(
            "A ScaledArray is not converted implicitly. Call `dequantize(dtype)`. Its numbers "
            "without scales are in `values`."
        )

    __jax_array__ = __array__


def swapped(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Returns sizes with the last two swapped."""
    return (*sizes[:-2], *sizes[:-3:-1])


def stored_block(array: ScaledArray) -> Block:
    """Returns the block along the dimensions of the values."""
    return swapped(array.block) if array.transposed else array.block


def num_blocks(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Returns the number of blocks along each dimension: the shape of the scales."""
    sizes = zip(shape, block, strict=True)
    return tuple(int(size != 0) if of is None else -(-size // of) for size, of in sizes)


def widened(array: ScaledArray, dtype: Any) -> jax.Array:
    """Dequantizes a scaled array to a float dtype, in the stored layout."""
    array = array.untile() if array.tiled else array
    values, scales, packed, block = array.values, array.scales, array.packed, stored_block(array)
    wide = jnp.dtype("float64" if dtype == "float64" else "float32")
    if packed is None:
        numbers = jnp.asarray(values).astype(wide)
    else:
        numbers = packing.unpack(explicit.gathered(values, *range(values.ndim - 1)), packed, wide)
    if array.zeros is not None:
        numbers -= spread(array.zeros.astype(wide), numbers.shape, block)
    if scales.dtype != E8M0:
        numbers *= spread(scales.astype(wide), numbers.shape, block)
        if array.global_scales is not None:
            of_all = (*block[:-1], None)
            numbers *= spread(array.global_scales.astype(wide), numbers.shape, of_all)
        return numbers.astype(dtype)
    codes = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    power, half = packing.powers_of_two(spread(codes, numbers.shape, block), wide)
    return (numbers * half * power).astype(dtype)


def spread(scales: jax.Array, shape: tuple[int, ...], block: Block) -> jax.Array:
    """Repeats scales for each number of their blocks, where they do not broadcast."""
    repeats = [
        of if of != 1 and count > 1 else None for of, count in zip(block, scales.shape, strict=True)
    ]
    scales = explicit.gathered(scales, *(i for i, of in enumerate(repeats) if of is None))
    for axis, of in enumerate(repeats):
        if of is not None:
            repeated = jnp.repeat(scales, of, axis=axis)
            scales = jax.lax.slice_in_dim(repeated, 0, shape[axis], axis=axis)
    return scales


def tokens(name: str, x: ScaledArray, scales: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the values [tokens, hidden] and scales [tokens, …] of the argument `name`.

    Raises:
      ArgumentTypeError: `scales` is given too.
      ArgumentValueError: tokens share scales, `x` is not [tokens, hidden], or has an optional part.
    """
    check(name, x)
    if scales is not None:
        raise ArgumentTypeError(
            f"Argument `scales` is given, and `{name}` is a ScaledArray, which has scales. Leave "
            "`scales` out."
        )
    if x.ndim != 2 or x.transposed or x.scales.shape[0] != x.shape[0]:
        raise ArgumentValueError(
            f"Argument `{name}` must be [tokens, hidden] with separate scales for each token: "
            f"`block=(1, …)`; got shape {x.shape}, block {x.block} and transposed={x.transposed}."
        )
    if x.tiled:
        raise ArgumentValueError(
            f"Argument `{name}` must not be in tiles, each of which has 64 tokens; got shape "
            f"{x.shape}. Leave out `tile`, which is for weights."
        )
    if part := next((part for part in _OPTIONAL if getattr(x, part) is not None), None):
        raise ArgumentValueError(
            f"Argument `{name}` has `{part}`, which do not move with their tokens. Quantize "
            "without them, as `moe.quantize` does."
        )
    return x.values, x.scales


def of_rows(x: ScaledArray, values: Any, scales: Any) -> ScaledArray:
    """Returns moved tokens as a `ScaledArray` of rows, with their tokens' scales."""
    return dataclasses.replace(x, values=values, scales=scales, block=(1, *x.block[1:]))


def tiled(name: str, array: ScaledArray, shards: Any = (1, 1)) -> ScaledArray:
    """Returns the argument `name` in tiles, as `ScaledArray.tile` does."""
    check(name, array)
    if array.tiled:
        return array
    if array.dtype.name not in TILED:
        raise ArgumentTypeError(
            f"Argument `{name}` must have numbers of {', '.join(TILED)} to be tiled; got "
            f"{array.dtype}. Leave it as it is."
        )
    if array.ndim < 2 or not array.size:
        raise ArgumentValueError(
            f"Argument `{name}` must have columns and a depth to be tiled; got shape "
            f"{array.shape}. Leave it as it is."
        )
    shard = _checked_shard(array, shards)
    packed = array.dtype.name
    # A shard of the depth may have one scale for each column, but has the order of many.
    block = tuple(
        None if of is not None and of >= size > 1 else of
        for of, size in zip(array.block, array.shape, strict=True)
    )
    whole: dict[str, Any] = {"block": block, "transposed": array.transposed}
    whole |= {part: of if of is None else _whole(of, 2) for part, of in array._parts()}
    if shard is not None:
        whole |= _in_shards(array, whole, shard, fills=True)
    parts: dict[str, Any] = {"values": packing.tile(whole["values"], packed)}
    if _are_of_columns(swapped(block) if array.transposed else block):
        parts |= _reordered(whole, packing.tile_scales)
    new = {**whole, **parts, "packed": packed, "tiles": packing.TILES_VERSION, "shard": shard}
    return dataclasses.replace(array, **new)


def _checked_shard(array: ScaledArray, shards: Any) -> tuple[int, int] | None:
    """Returns the sizes of shards whose last tiles are filled up; None if all tiles are full."""
    if not isinstance(shards, tuple | list) or len(shards) != 2:
        raise ArgumentTypeError(
            "Argument `shards` must be two ints, for the last two dimensions; got "
            f"{messages.shown(shards)}."
        )
    sizes = []
    for axis, (size, of, count) in enumerate(
        zip(array.shape[-2:], array.block[-2:], shards, strict=True)
    ):
        count = arguments.integer(f"shards[{axis}]", count, 1)
        one, rest = divmod(size, count)
        if rest or (count > 1 and of is not None and of < size and one % of):
            raise ArgumentValueError(
                f"Argument `shards[{axis}]` must cut {size} into equal shards with whole blocks of "
                f"scales, {messages.short(of)}; got {count}."
            )
        sizes.append(one if one % packing.TILE else packing.TILE)
    return None if sizes == [packing.TILE] * 2 else (sizes[0], sizes[1])


def _in_shards(
    array: ScaledArray, whole: dict[str, Any], shard: tuple[int, int], *, fills: bool
) -> dict[str, Any]:
    """Fills up the last tiles of shards in the stored parts `whole` of an array, or undoes it.

    Numbers and zeros are filled up with 0, scales of both kinds with 1.
    """
    sizes = shard[::-1] if array.transposed else shard
    blocks = stored_block(array)[-2:]
    parts = {part: whole.get(part, of) for part, of in array._parts()}
    for part, of in parts.items():
        if of is None:
            continue
        new = of.view(np.uint8) if of.dtype.itemsize == 1 else of
        value = _ONES.get(of.dtype, 1) if part.endswith("scales") else 0
        for axis, size, block in zip((-2, -1), sizes, blocks, strict=True):
            in_one = block if part != "global_scales" or axis == -2 else None
            if part == "values":
                in_one = 2 if axis == -1 and array.dtype in PACKED else 1
            if in_one is not None:
                size, to = (-(-of // in_one) for of in (size, packing.whole_tiles(size)))
                if fills:
                    new = packing.fill(new, axis, size, to, value)
                else:
                    new = packing.unfill(new, axis, size, to)
        parts[part] = new.view(of.dtype)
    return parts


def filled(array: ScaledArray) -> ScaledArray:
    """Returns an array in tiles with the zeros that fill its shards as a part of it."""
    return ScaledArray.tree_unflatten(
        tuple(None if name == "shard" else getattr(array, name) for name in _STATIC),
        [of for _, of in array._parts()],
    )


def _are_of_columns(block: Block) -> bool:
    """Whether each stored column has scales of its own, each for a part of the column."""
    *_, columns, deep = block
    return columns == 1 and deep is not None


def _reordered(parts: dict[str, Any], reorder: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns an array's scales and zeros, reordered in their last two dimensions."""
    of_blocks = {part: parts[part] for part in ("scales", "zeros") if parts[part] is not None}
    return {part: reorder(_whole(of, 2)) for part, of in of_blocks.items()}


def _whole(values: Any, rank: int) -> Any:
    """Returns values whose last dimensions, `rank` of them, are not sharded over explicit axes."""
    if isinstance(values, np.ndarray):
        return values
    return explicit.gathered(values, *range(values.ndim - rank))


# --- checks --------------------------------------------------------------------------------------


def check(name: str, scaled: Any) -> None:
    """Raises unless `scaled`, the argument `name`, is a `ScaledArray` of arrays that match.

    Parts may have been replaced since it was made, as by `jax.tree.map`.

    Raises:
      ArgumentTypeError: `scaled` is no `ScaledArray`, or a part has the wrong type.
      ArgumentValueError: the parts' shapes do not match.
    """
    if not isinstance(scaled, ScaledArray):
        raise ArgumentTypeError(
            f"Argument `{name}` must be a ScaledArray; got {messages.shown(scaled)}. Make one with "
            "`moe.quantize`."
        )
    for part in _PARTS:
        value = getattr(scaled, part)
        if not jax_private.is_array(value) and not (part in _OPTIONAL and value is None):
            raise ArgumentTypeError(
                f"Argument `{name}` must have an array as its `{part}`; got "
                f"{messages.shown(value)}. "
                f"{messages.remedy(name, value, 'Make one with `moe.quantize`.')}"
            )
    try:
        _checked(scaled)
    except (ArgumentTypeError, ArgumentValueError) as error:
        raise type(error)(
            f"Argument `{name}` is a ScaledArray with a mistake: {error} `jax.tree.map` "
            "leaves it whole with `is_leaf=lambda leaf: isinstance(leaf, moe.ScaledArray)`."
        ) from None


def checked_block(block: Any, shape: tuple[int, ...], transposed: Any) -> Block:
    """Returns the argument `block` as a tuple, checked for an array's shape and storage order."""
    messages.check_bool(transposed=transposed)
    if transposed and len(shape) < 2:
        raise ArgumentValueError(
            "Argument `transposed` must be False for an array of fewer than two dimensions; got "
            f"shape {shape}. Leave it out."
        )
    if not isinstance(block, tuple | list):
        raise ArgumentTypeError(
            "Argument `block` must be a tuple of an int or None for each dimension of the array; "
            f"got {messages.shown(block)}."
        )
    if len(block) != len(shape):
        raise ArgumentValueError(
            "Argument `block` must have an int or None for each dimension of the array, which has "
            f"shape {shape}; got {messages.short(block)}."
        )
    return tuple(
        None if of is None else arguments.integer(f"block[{axis}]", of, 1)
        for axis, of in enumerate(block)
    )


def check_no_bytes(name: str, array: Any, ranks: range) -> None:
    """Raises if weights, the argument `name`, look like a checkpoint's bytes of 4-bit numbers.

    Arrays of other ranks than `ranks` may be integer weights.

    Raises:
      ArgumentTypeError: `array` is uint8 of a rank in `ranks`.
    """
    if getattr(array, "dtype", None) == jnp.uint8 and getattr(array, "ndim", -1) in ranks:
        raise ArgumentTypeError(
            f"Argument `{name}` must be weights, or a ScaledArray; got uint8 of shape "
            f"{array.shape}. Convert MXFP4 blocks with `moe.from_mxfp4(blocks, scales)`, and "
            "other 4-bit numbers with `moe.ScaledArray(…, packed=…)`."
        )


def _checked(array: ScaledArray) -> Block:
    """Returns the block of an array, and checks its parts, which may be types of arrays."""
    values, packed = array.values, array.packed
    if array.tiles not in (None, packing.TILES_VERSION):
        raise ArgumentValueError(
            f"Argument `tiles` must be {packing.TILES_VERSION}, the version of this Triax's tiles, "
            f"or None; got {messages.short(array.tiles)}. Call `tile` again on numbers that are "
            "not in tiles."
        )
    names = [dtype.name for dtype in PACKED]
    messages.check_choice("packed", packed, (None, *(TILED if array.tiled else names)))
    remedy = ""
    if not packed and getattr(values, "dtype", None) in (*PACKED, jnp.uint8):
        remedy = (
            " 4-bit numbers are stored in uint8, two to a byte, with "
            f"`packed={names[0]!r}` or `packed={names[1]!r}`."
        )
    elif packed and getattr(values, "dtype", None) == jnp.int32:
        remedy = " Words of tiles have their version, `tiles`: call `tile` on stored numbers."
    of_packed = np.dtype("int32" if array.tiled else "uint8")
    arguments.check_dtype("values", values, (of_packed,) if packed else DTYPES, remedy)
    remedy = " Cast them."
    if getattr(array.scales, "dtype", None) == jnp.uint8:
        remedy = " For MX formats use `scales.view(jnp.float8_e8m0fnu)`."
    of_scales = (*(FLOATS if array.dtype in PACKED else FLOATS[:1]), E8M0)
    of_scales += (E4M3,) * (array.dtype == E2M1)
    arguments.check_dtype("scales", array.scales, of_scales, remedy)
    if packed and not values.ndim:
        raise ArgumentValueError("Argument `values` must have a dimension or more to be packed.")
    words = packing.words_of_tile(packed) if array.tiled else 0
    if array.tiled and (values.ndim < 3 or values.shape[-1] != words):
        raise ArgumentValueError(
            f"Argument `values` must have shape [..., columns / 64, depth / 64, {words}] where "
            f"{packed} is packed in int32; got {values.shape}. Call `tile` on stored numbers."
        )
    block = checked_block(array.block, array.shape, array.transposed)
    wanted = num_blocks(filled(array).shape, block)
    wanted = swapped(wanted) if array.transposed else wanted
    _check_global_scales(array, (*wanted[:-1], 1))
    if array.scales_tiled:
        wanted = (*wanted[:-2], wanted[-2] // packing.TILE, packing.TILE * wanted[-1])
    if array.scales.shape != wanted:
        raise ArgumentValueError(
            f"Argument `scales` must have shape {wanted}, one for each block of {block} of an array"
            f" of shape {array.shape}, transposed={array.transposed}; got {array.scales.shape}."
        )
    if array.zeros is None:
        return block
    if packed != "int4":
        raise ArgumentValueError(
            "Argument `zeros` must be None unless values are packed as int4; got values of "
            f"{array.dtype}. Leave it out."
        )
    arguments.check_dtype(
        "zeros", array.zeros, (np.dtype("int8"), np.dtype("float32")), " Cast them."
    )
    if array.zeros.shape != wanted:
        raise ArgumentValueError(
            f"Argument `zeros` must have the shape of `scales`, {wanted}; got {array.zeros.shape}."
        )
    return block


def _check_global_scales(array: ScaledArray, wanted: tuple[int, ...]) -> None:
    if array.global_scales is None:
        return
    if getattr(array.scales, "dtype", None) != E4M3:
        raise ArgumentValueError(
            "Argument `global_scales` must be None unless scales are float8_e4m3fn; got scales of "
            f"{array.scales.dtype}. Multiply the scales with it."
        )
    arguments.check_dtype("global_scales", array.global_scales, FLOATS[:1], " Cast them.")
    if array.global_scales.shape != wanted:
        raise ArgumentValueError(
            f"Argument `global_scales` must have shape {wanted}, one for all blocks along the last "
            f"dimension of `scales`; got {array.global_scales.shape}."
        )


def _float(dtype: Any) -> np.dtype:
    try:
        as_dtype = jnp.dtype(dtype)
    except TypeError:
        as_dtype = None
    if as_dtype is None or not jnp.issubdtype(as_dtype, jnp.floating):
        raise ArgumentTypeError(
            "Argument `dtype` must be a float such as jnp.bfloat16; got "
            f"{messages.short(dtype)}. The numbers without their scales are in `values`."
        )
    return as_dtype
