"""Training in 8 bits: which of the layer's products are of quantized operands."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError

Scaling = Literal["rows", "blocks"]
_SCALINGS = ("rows", "blocks")
DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""What is quantized becomes; rows and weights the first."""
BLOCK = 128
"""Of the numbers of a row, and of the depth and the columns of weights, in "blocks"."""


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


def resolve(recipe: Any, x: jax.Array, of: str = "x") -> Recipe | None:
    """The `Recipe` that the argument `recipe` is, or names, for what has the dtype of `x`."""
    if recipe is None:
        return None
    if x.dtype.itemsize > 4:
        raise ArgumentTypeError(
            f"Argument `recipe` is given, and `{of}` is of {x.dtype}, which is not quantized. "
            "Cast tokens and weights to float32 or less."
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
    if recipe.gradient_dtype not in DTYPES:
        raise ArgumentValueError(
            f"Argument `recipe.gradient_dtype` must be one of {', '.join(DTYPES)}; got "
            f"{messages.short(recipe.gradient_dtype)}."
        )
    return recipe
