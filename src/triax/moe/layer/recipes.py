"""Training in 8 bits: which of the layer's products are of quantized operands, and how.

A product of rows and weights becomes one of `quantize`d ones, and so does that of the incoming
gradient and the weights. The weights' gradient is computed from the rows and the gradient as they
are, unless the recipe says otherwise; the weights that are trained keep all their bits either way.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.grouped_matmul.api import ragged_dot
from triax.moe.grouped_matmul.options import FAST_SUMS
from triax.moe.permutation.api import permute
from triax.moe.plans.reference import Plan
from triax.moe.quantization.api import quantize
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.quantized_outer.api import quantized_outer
from triax.sharding import explicit

Scaling = Literal["rows", "blocks"]
_SCALINGS = ("rows", "blocks")
_BLOCK = 128
_DTYPES = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which products of `feed_forward` are in 8 bits.

    "rows" is a scale for each row of the left operand and each column of the weights; "blocks" one
    for each 128 numbers of a row and each 128 × 128 weights (DeepSeek-V3). None leaves a product in
    the dtype of `x`. Scales are those of the current values, as in `quantize`. Gradients by biases
    are computed in the dtype of `x`.

    Attributes:
      forward: for rows times weights.
      rows_gradient: for the incoming gradient times weights.
      gradient_dtype: of the incoming gradient; rows and weights are float8_e4m3fn.
      fast_sums: whether tensor cores add up the whole depth, or all of an expert's rows, with about
        14 bits, where scales allow it; if not, each 128 products are added in float32.
      weight_gradient: for rows times the incoming gradient, summed over each expert's rows. "rows"
        is a scale for each expert's numbers in one column of the rows, and of the gradient; where
        rows are cut over devices, for those on one device.
    """

    forward: Scaling | None = "rows"
    rows_gradient: Scaling | None = "rows"
    gradient_dtype: str = "float8_e4m3fn"
    fast_sums: bool = True
    weight_gradient: Literal["rows"] | None = None


def resolve(recipe: Any, x: jax.Array) -> Recipe | None:
    """The `Recipe` that the argument `recipe` is, or names, for tokens of the dtype of `x`."""
    if recipe is None:
        return None
    if x.dtype.itemsize > 4:
        raise ArgumentTypeError(
            f"Argument `recipe` is given, and `x` is of {x.dtype}, which is not quantized. Cast "
            "`x` and the weights to float32 or less."
        )
    if isinstance(recipe, str) and recipe in _SCALINGS:
        return Recipe(recipe, recipe)  # type: ignore[arg-type]
    if not isinstance(recipe, Recipe):
        raise ArgumentTypeError(
            "Argument `recipe` must be 'rows', 'blocks', a moe.Recipe or None; got "
            f"{messages.shown(recipe)}."
        )
    for name in ("forward", "rows_gradient"):
        if getattr(recipe, name) not in (None, *_SCALINGS):
            raise ArgumentValueError(
                f"Argument `recipe.{name}` must be 'rows', 'blocks' or None; got "
                f"{messages.short(getattr(recipe, name))}."
            )
    if recipe.weight_gradient not in (None, "rows"):
        raise ArgumentValueError(
            "Argument `recipe.weight_gradient` must be 'rows' or None, because blocks of 128 rows "
            f"would span experts; got {messages.short(recipe.weight_gradient)}."
        )
    if recipe.gradient_dtype not in _DTYPES:
        raise ArgumentValueError(
            f"Argument `recipe.gradient_dtype` must be one of {', '.join(_DTYPES)}; got "
            f"{messages.short(recipe.gradient_dtype)}."
        )
    return recipe


@dataclasses.dataclass(frozen=True)
class _How:
    recipe: Recipe
    transposed: bool
    implementation: Any


def multiply(
    recipe: Recipe,
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None,
    bias_weights: jax.Array | None,
    transpose_weights: bool,
    implementation: Any,
    quantized: ScaledArray | None = None,
) -> jax.Array:
    """`ragged_dot` of arrays that are quantized as the recipe says.

    `quantized` are the rows as `quantized_rows` has them, if they are there already.
    """
    how = _How(recipe, transpose_weights, implementation)
    operands = rows, weights, group_sizes, bias, bias_weights, quantized
    # Inside shard_map, gradients vary over all of these mesh axes; the casts' transposes sum them.
    varying = jax_private.insert_varying_casts(jax.tree.leaves(operands))
    out = _multiply(how, *jax.tree.unflatten(jax.tree.structure(operands), varying))
    return checkpoint_name(out, "triax_ragged_dot")


def quantized_rows(recipe: Recipe, x: jax.Array, plan: Plan, **how: Any) -> ScaledArray | None:
    """The tokens' rows in 8 bits: tokens are fewer, and so are the bytes that then move."""
    if recipe.forward is None:
        return None
    x8 = _quantized_rows(recipe.forward, jax.lax.stop_gradient(x), _DTYPES[0], **how)
    rows: Any = permute(x8, plan, **how)
    return rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    how: _How, rows: Any, weights: Any, sizes: Any, bias: Any, bias_weights: Any, quantized: Any
) -> Any:
    options = _options(how, rows.dtype, how.recipe.forward)
    if (scaling := how.recipe.forward) is None:
        options["transpose_weights"] = how.transposed
    else:
        rows = quantized or _quantized_rows(
            scaling, rows, _DTYPES[0], implementation=how.implementation
        )
        weights = _quantized_weights(how, scaling, weights, 2 if how.transposed else 1)
    return ragged_dot(rows, weights, sizes, bias=bias, bias_weights=bias_weights, **options)


def _forward(how: _How, *operands: Any) -> Any:
    return _multiply(how, *operands), operands[:-1]


def _backward(how: _How, operands: Any, gradient: Any) -> Any:
    rows, weights, sizes, bias, bias_weights = operands
    options = _options(how, rows.dtype, how.recipe.rows_gradient)

    moving = {"bias": bias, "bias_weights": bias_weights}
    if how.recipe.weight_gradient is None:
        moving["weights"] = weights

    def plain(moving: dict[str, Any]) -> jax.Array:
        return ragged_dot(
            rows,
            group_sizes=sizes,
            transpose_weights=how.transposed,
            implementation=how.implementation,
            **{"weights": weights} | moving,
        )

    # Products in 8 bits may be cut over other explicit axes than those of arrays.
    out, pull = jax.vjp(plain, moving)
    (found,) = pull(explicit.cast(gradient, explicit.type_of(out)))
    d_weights = found.get("weights")
    if d_weights is None:
        d_weights = _quantized_outer(how, rows, gradient, sizes, weights)
    if (scaling := how.recipe.rows_gradient) is None:
        options["transpose_weights"] = not how.transposed
    else:
        gradient = _quantized_rows(
            scaling, gradient, how.recipe.gradient_dtype, implementation=how.implementation
        )
        weights = _quantized_weights(how, scaling, weights, 1 if how.transposed else 2)
    d_rows = explicit.cast(ragged_dot(gradient, weights, sizes, **options), explicit.type_of(rows))
    # Group sizes have no gradient, and that of the rows is all of what is quantized, too.
    return d_rows, d_weights, None, found["bias"], found["bias_weights"], None


_multiply.defvjp(_forward, _backward)


def _quantized_outer(
    how: _How, rows: jax.Array, gradient: jax.Array, sizes: jax.Array, weights: jax.Array
) -> jax.Array:
    """The weights' gradient in 8 bits."""
    sides, dtypes = (rows, gradient), (_DTYPES[0], how.recipe.gradient_dtype)
    if how.transposed:
        sides, dtypes = sides[::-1], dtypes[::-1]
    found = quantized_outer(
        *sides,
        sizes,
        dtypes=dtypes,
        result_dtype=weights.dtype,
        fast_sums=how.recipe.fast_sums,
        implementation=how.implementation,
    )
    return explicit.cast(found, explicit.type_of(weights))


def _options(how: _How, dtype: Any, scaling: Scaling | None) -> dict[str, Any]:
    fast = {"precision": FAST_SUMS} if how.recipe.fast_sums and scaling is not None else {}
    return {"preferred_element_type": dtype, "implementation": how.implementation} | fast


def _quantized_rows(
    scaling: Scaling, rows: jax.Array, dtype: str, *, implementation: Any
) -> ScaledArray:
    block = (1, None if scaling == "rows" else _BLOCK)
    return quantize(rows, dtype, block=block, implementation=implementation)


def _quantized_weights(how: _How, scaling: Scaling, weights: jax.Array, depth: int) -> ScaledArray:
    """Weights whose depth, the axis `depth` of these, lies innermost: [experts, depth, columns]."""
    block: list[int | None] = [1, 1, 1] if scaling == "rows" else [1, _BLOCK, _BLOCK]
    if scaling == "rows":
        block[depth] = None
    swapped = depth == 1
    found = quantize(
        weights, block=tuple(block), transposed=swapped, implementation=how.implementation
    )
    return found if swapped else dataclasses.replace(found, transposed=True)
