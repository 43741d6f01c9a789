"""Chooses which of the layer's products have 8-bit operands in training."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from triax import messages
from triax.errors import ArgumentTypeError

Scaling = Literal["rows", "blocks"]
_SCALINGS = ("rows", "blocks")
DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""The dtypes of quantized gradients; rows and weights have the first."""
BLOCK = 128
"""The numbers of a row, and the depth and the columns of weights, per scale of "blocks"."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Chooses which products of `feed_forward` have 8-bit operands.

    "rows": a scale for each row of the left operand and each column of the weights. "blocks": a
    scale for each 128 numbers of a row and each 128 × 128 weights (DeepSeek-V3). None leaves a
    product in the dtype of `x`. Scales are computed from the current values, as in `quantize`. Bias
    gradients are computed in the dtype of `x`.

    Attributes:
      forward: the scaling of rows times weights.
      rows_gradient: the scaling of the incoming gradient times weights.
      gradient_dtype: the dtype of the quantized gradient; rows and weights are float8_e4m3fn.
      fast_sums: accumulate entirely in tensor cores (about 14 bits), if no scale is of blocks;
        otherwise promote to float32 every 128 products.
      weight_gradient: the scaling of rows times the incoming gradient, summed over each expert's
        rows. "rows" has a scale for each expert and column, of the rows and of the gradient; if
        rows are sharded over devices, for each device too.

    Raises:
      ArgumentTypeError: `fast_sums` is not a bool.
      ArgumentValueError: an argument is not one of its choices.
    """

    forward: Scaling | None = "rows"
    rows_gradient: Scaling | None = "rows"
    gradient_dtype: str = "float8_e4m3fn"
    fast_sums: bool = True
    weight_gradient: Literal["rows"] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "rows_gradient"):
            messages.check_choice(name, getattr(self, name), (*_SCALINGS, None))
        remedy = " Blocks of 128 rows would span experts."
        messages.check_choice("weight_gradient", self.weight_gradient, ("rows", None), remedy)
        messages.check_choice("gradient_dtype", self.gradient_dtype, DTYPES)
        messages.check_bool(fast_sums=self.fast_sums)


def resolve(recipe: Any, x: Any, of: str = "x") -> Recipe | None:
    """Returns the argument `recipe` as a `Recipe` or None, if it supports the dtype of `x`."""
    if recipe is None or isinstance(recipe, Recipe):
        resolved = recipe
    elif isinstance(recipe, str) and recipe in _SCALINGS:
        resolved = Recipe(recipe, recipe)  # type: ignore[arg-type]
    else:
        raise ArgumentTypeError(
            "Argument `recipe` must be 'rows', 'blocks', a moe.Recipe or None; got "
            f"{messages.shown(recipe)}."
        )
    if resolved is not None and x.dtype.itemsize > 4:
        raise ArgumentTypeError(
            f"Argument `recipe` does not support {x.dtype}, the dtype of `{of}`. Cast tokens and "
            "weights to float32 or less."
        )
    return resolved
