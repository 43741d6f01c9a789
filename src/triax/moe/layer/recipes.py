"""Training in 8 bits: which of the layer's products are of quantized operands, and how.

A product of rows and weights becomes one of `quantize`d ones, and so does that of the incoming
gradient and the weights. The weights' gradient is computed from the rows and the gradient as they
are, so the weights that are trained keep all their bits.
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
from triax.moe.shared import sharding

Scaling = Literal["rows", "blocks"]
_SCALINGS = ("rows", "blocks")
_BLOCK = 128
_DTYPES = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which products of `feed_forward` are in 8 bits.

    "rows" is a scale for each row of the left operand and each column of the weights; "blocks" one
    for each 128 numbers of a row and each 128 × 128 weights (DeepSeek-V3). None leaves a product in
    the dtype of `x`. Scales are those of the current values, as in `quantize`. Gradients by weights
    and biases are computed in the dtype of `x`.

    Attributes:
      forward: for rows times weights.
      rows_gradient: for the incoming gradient times weights.
      gradient_dtype: of the incoming gradient; rows and weights are float8_e4m3fn.
      fast_sums: whether tensor cores add up the whole depth, with about 14 bits, where scales allow
        it; if not, each 128 products are added in float32.
    """

    forward: Scaling | None = "rows"
    rows_gradient: Scaling | None = "rows"
    gradient_dtype: str = "float8_e4m3fn"
    fast_sums: bool = True


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

    def plain(weights: Any, bias: Any, bias_weights: Any) -> jax.Array:
        return ragged_dot(
            rows,
            weights,
            sizes,
            bias=bias,
            bias_weights=bias_weights,
            transpose_weights=how.transposed,
            implementation=how.implementation,
        )

    # Products in 8 bits may be cut over other explicit axes than those of arrays.
    out, pull = jax.vjp(plain, weights, bias, bias_weights)
    by_weights = pull(sharding.cast(gradient, sharding.type_of(out)))
    if (scaling := how.recipe.rows_gradient) is None:
        options["transpose_weights"] = not how.transposed
    else:
        gradient = _quantized_rows(
            scaling, gradient, how.recipe.gradient_dtype, implementation=how.implementation
        )
        weights = _quantized_weights(how, scaling, weights, 1 if how.transposed else 2)
    d_rows = sharding.cast(ragged_dot(gradient, weights, sizes, **options), sharding.type_of(rows))
    # Group sizes have no gradient, and that of the rows is all of what is quantized, too.
    return d_rows, by_weights[0], None, *by_weights[1:], None


_multiply.defvjp(_forward, _backward)


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
