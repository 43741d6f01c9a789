"""Training in 8 bits: which of the layer's products are of quantized operands."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from triax import messages
from triax.errors import ArgumentTypeError

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

    Raises:
      ArgumentValueError: an argument is none of those.
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


def resolve(recipe: Any, x: Any, of: str = "x") -> Recipe | None:
    """The `Recipe` that the argument `recipe` is, or names, for what has the dtype of `x`."""
    if recipe is None or isinstance(recipe, Recipe):
        found = recipe
    elif isinstance(recipe, str) and recipe in _SCALINGS:
        found = Recipe(recipe, recipe)  # type: ignore[arg-type]
    else:
        raise ArgumentTypeError(
            "Argument `recipe` must be 'rows', 'blocks', a moe.Recipe or None; got "
            f"{messages.shown(recipe)}."
        )
    if found is not None and x.dtype.itemsize > 4:
        raise ArgumentTypeError(
            f"Argument `recipe` is given, and `{of}` is of {x.dtype}, which is not quantized. "
            "Cast tokens and weights to float32 or less."
        )
    return found
