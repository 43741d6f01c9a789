"""Checks of the arguments of the MoE ops, with the same messages for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.messages import check_choice as check_choice

MAX_ROWS = 2**31 - 1

Array: TypeAlias = jax.Array | np.ndarray  # the arrays that ops accept
AxisName: TypeAlias = str | tuple[str, ...]  # mesh axes


def array(
    name: str,
    value: Any,
    axes: tuple[str, ...],
    dtype_class: Any = None,
    remedy: str = "",
    *,
    wide: str | None = None,
    sizes: Mapping[str, int] | None = None,
    of: str = "",
    convert: bool = True,
) -> jax.Array:
    """Returns `value` as a JAX array, or raises if its rank or its dtype is of the wrong class.

    `remedy` replaces the advice to cast a wrong dtype. 8-bit floats raise if their remedy, `wide`,
    is given. `sizes` are the sizes of some axes, which `value` must share with another argument,
    `of`. Without `convert` an array of NumPy stays one.
    """
    if not (isinstance(value, jax.Array) or jax_private.is_array(value)):
        instead = messages.remedy(name, value, "Use jnp.asarray.")
        if hasattr(value, name):
            instead = f"Use its `{name}`."
        elif hasattr(value, "dequantize"):
            instead = f"Use `{name}.dequantize(dtype)`."
        elif fields := getattr(value, "_fields", ()):
            instead = f"Use one of its fields: {', '.join(fields)}."
        raise ArgumentTypeError(
            f"Argument `{name}` must be an array of shape [{', '.join(axes)}]; got "
            f"{messages.shown(value)}. {instead}"
        )
    if value.ndim != len(axes):
        shape = f"[{', '.join(axes)}]"
        remedy = f" Reshape leading batch dimensions to {shape}, and the results back."
        raise ArgumentValueError(
            f"Argument `{name}` must have shape {shape}; got {value.shape}."
            f"{remedy if value.ndim > len(axes) > 0 else ''}"
        )
    if dtype_class is not None and not jnp.issubdtype(value.dtype, dtype_class):
        wanted = "an integer" if dtype_class is jnp.integer else "a floating-point"
        cast = f"`{name}.astype(jnp.{'int32' if dtype_class is jnp.integer else 'float32'})`"
        raise ArgumentTypeError(
            f"Argument `{name}` must have {wanted} dtype; got {value.dtype}. "
            f"{remedy or f'Cast it with {cast}.'}"
        )
    if wide is not None and value.dtype.itemsize < 2:
        raise ArgumentTypeError(
            f"Argument `{name}` must be a float of 16 bits or more; got {value.dtype}. {wide}"
        )
    if sizes is not None:
        check_shape(name, value.shape, [sizes.get(axis, axis) for axis in axes], of)
    if convert and not isinstance(value, jax.core.Tracer):
        value = as_jax(value)
    array_: jax.Array = value
    return array_


def check_array(
    name: str, value: Any, dtypes: Sequence[np.dtype], wanted: Any, of: str, remedy: str = ""
) -> tuple[int, ...]:
    """Returns the shape of an argument, an array of one of `dtypes`, or raises.

    In `wanted`, a name stands for any size, and `...` in front for any dimensions.
    """
    check_dtype(name, value, dtypes, remedy)
    if wanted[:1] == (...,):
        wanted = *value.shape[: max(value.ndim - len(wanted) + 1, 0)], *wanted[1:]
    check_shape(name, value.shape, wanted, of, remedy)
    return tuple(value.shape)


def check_dtype(name: str, value: Any, dtypes: Sequence[np.dtype], remedy: str = "") -> None:
    """Raises unless an argument is an array, or the type of one, of one of `dtypes`."""
    if not hasattr(value, "dtype") or value.dtype not in dtypes:
        raise ArgumentTypeError(
            f"Argument `{name}` must be an array of {' or '.join(of.name for of in dtypes)}; got "
            f"{messages.shown(value)}.{remedy}"
        )


def check_shape(
    name: str, shape: tuple[int, ...], wanted: Sequence[int | str], of: str, remedy: str = ""
) -> None:
    """Raises unless an argument has the sizes in `wanted`, where a name stands for any size."""
    pairs = itertools.zip_longest(shape, wanted)
    if any(size != want and (size is None or not isinstance(want, str)) for size, want in pairs):
        text = ", ".join(map(str, wanted)) + ("," if len(wanted) == 1 else "")
        raise ArgumentValueError(
            f"Argument `{name}` must have shape ({text}) to go with {of}; got {shape}.{remedy}"
        )


def as_jax(value: Array) -> jax.Array:
    """Returns a JAX array, with integers clamped to the range of the dtype that JAX gives them.

    Without 64-bit types JAX itself keeps the low half: an id of 2**32 + 1 would be expert 1.
    """
    if value.dtype.kind in "iu" and not isinstance(value, jax.core.Tracer):
        held = jax.dtypes.canonicalize_dtype(value.dtype)
        if held.itemsize < value.dtype.itemsize:
            limits = np.iinfo(held)
            return jnp.asarray(np.asarray(value).clip(limits.min, limits.max).astype(held))
    return jnp.asarray(value)


def dtype(name: str, value: Any, choices: Sequence[np.dtype], beside: str = "") -> np.dtype:
    """Returns `value`, a dtype or the name of one, if it is one of `choices`, or raises."""
    try:
        as_dtype = jnp.dtype(value)
    except TypeError:
        as_dtype = None
    if as_dtype is None or as_dtype not in choices:
        *names, last = (choice.name for choice in choices)
        raise ArgumentValueError(
            f"Argument `{name}` must be {', '.join(names)} or {last}{beside}; got "
            f"{messages.short(value)}."
        )
    return as_dtype


def integer(name: str, value: Any, least: int) -> int:
    """Returns `value` as a Python int from `least` to 2**31 - 1, or raises."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        traced = isinstance(value, jax.core.Tracer)
        remedy = " Under jax.jit, mark it static (static_argnames)." if traced else ""
        raise ArgumentTypeError(
            f"Argument `{name}` must be a Python int, because array shapes depend on it; got "
            f"{messages.shown(value)}.{remedy}"
        )
    if not least <= value <= MAX_ROWS:
        raise ArgumentValueError(
            f"Argument `{name}` must be at least {least} and at most 2**31 - 1; got {value}."
        )
    return int(value)


def mesh_axis(axis_name: Any, caller: str) -> tuple[Any, int]:
    """Returns a mesh axis, or several as a tuple, and the number of devices along it, or raises."""
    if isinstance(axis_name, list):
        axis_name = tuple(axis_name)
    try:
        size = int(jax.lax.axis_size(axis_name))
    except (NameError, ValueError, TypeError) as error:
        raise ArgumentValueError(
            "Argument `axis_name` must name a mesh axis of the jax.shard_map that "
            f"`{caller}` is called in; got {messages.short(axis_name)}."
        ) from error
    if isinstance(axis_name, tuple) and len(set(axis_name)) < len(axis_name):
        raise ArgumentValueError(
            f"Argument `axis_name` must name each mesh axis once; got {axis_name!r}."
        )
    return axis_name, size


def check_mask(name: str, mask: jax.Array) -> None:
    """Raises unless a mask [tokens, experts] has booleans or integers, and an expert."""
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"Argument `{name}` must have a boolean or integer dtype; got {mask.dtype}. Use "
            f"`{name} != 0`."
        )
    messages.check_sizes_known(name, mask.shape)
    if mask.shape[1] == 0:
        raise ArgumentValueError(
            f"Argument `{name}` must have at least one expert; got shape {mask.shape}."
        )


def check_pairs(shape: tuple[int, ...]) -> None:
    """Raises if pairs of token and slot, [tokens, top_k], are too many to be numbered in int32."""
    if math.prod(shape) > MAX_ROWS:
        raise ArgumentValueError(
            f"There must be at most 2**31 - 1 pairs of token and slot; got shape {shape}. "
            "Route the tokens in parts."
        )


def as_int32(values: jax.Array) -> jax.Array:
    """Returns integers as int32, clamped, so that numbers out of range stay out of range."""
    if values.dtype.itemsize < 4 or values.dtype == jnp.int32:
        return values.astype(jnp.int32)
    limits = jnp.iinfo(jnp.int32)
    least = limits.min if values.dtype.kind == "i" else 0
    return jnp.clip(values, least, limits.max).astype(jnp.int32)
