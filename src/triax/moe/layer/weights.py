"""Weights in 8 bits as a recipe has them, made once for several calls of the layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.layer.recipes import BLOCK, Recipe, Scaling, resolve
from triax.moe.quantization.api import quantize
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation

PRODUCTS = "forward", "rows_gradient"
"""Those of a recipe that weights are an operand of."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecipeWeights:
    """What `quantize_weights` makes of weights, a pytree; None for a product that is not in 8 bits.

    Attributes:
      forward: the weights as the first products have them, [experts, depth, columns].
      rows_gradient: the same, [experts, columns, depth], for the gradient of the rows.
      scalings: those of the recipe for the two products.
      transpose_weights: whether the weights were [experts, columns, depth].
    """

    forward: ScaledArray | None
    rows_gradient: ScaledArray | None
    scalings: tuple[Scaling | None, ...] = dataclasses.field(metadata={"static": True})
    transpose_weights: bool = dataclasses.field(metadata={"static": True})


def quantize_weights(
    weights: Array,
    recipe: Recipe | Scaling,
    *,
    transpose_weights: bool = False,
    implementation: Implementation | None = None,
) -> RecipeWeights:
    """Weights in 8 bits, for all microbatches of a step.

    `feed_forward` with a recipe quantizes its weights for the result and again for the gradient of
    the tokens, in each call. Where weights stay the same for some calls, do it once:

        quantized = [moe.quantize_weights(w, "rows") for w in (w_gate_up, w_down)]
        for x, logits in microbatches:
            out = moe.feed_forward(x, logits, w_gate_up, w_down, top_k=8, recipe="rows",
                                   quantized_weights=quantized)

    The results and gradients are the same bits. It must be made again when the weights change,
    which `feed_forward` does not notice. It takes as many bytes as weights of 16 bits, and has no
    gradient: that of the weights comes from the call.

    Args:
      weights: float [experts, depth, columns], 32 bits or less.
      recipe: as for `feed_forward`.
      transpose_weights: whether weights are [experts, columns, depth], as for `feed_forward`.
      implementation: as in `quantize`.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range.
    """
    weights = arguments.array("weights", weights, ("experts", "depth", "columns"), jnp.floating)
    arguments.check_wide("weights", weights, "They are in 8 bits already.")
    messages.check_bool(transpose_weights=transpose_weights)
    found = resolve(recipe, weights, of="weights")
    if found is None:
        raise ArgumentTypeError("Argument `recipe` must say how to quantize the weights; got None.")
    weights = jax.lax.stop_gradient(weights)
    scalings = tuple(getattr(found, product) for product in PRODUCTS)
    forward, rows_gradient = (
        scaling and in_8_bits(scaling, weights, product, transpose_weights, implementation)
        for product, scaling in zip(PRODUCTS, scalings, strict=True)
    )
    return RecipeWeights(forward, rows_gradient, scalings, transpose_weights)


def in_8_bits(
    scaling: Scaling, weights: jax.Array, product: str, transposed: bool, implementation: Any
) -> ScaledArray:
    """Weights for one of the products, with what is summed up innermost."""
    depth = 2 if (product == "forward") == transposed else 1
    block: list[int | None] = [1, 1, 1] if scaling == "rows" else [1, BLOCK, BLOCK]
    if scaling == "rows":
        block[depth] = None
    swapped = depth == 1
    how = {"transposed": swapped, "implementation": implementation}
    found = quantize(weights, block=tuple(block), **how)
    return found if swapped else found.mT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """Weights with what was made of them before."""

    weights: jax.Array
    quantized: RecipeWeights


def prepare(
    given: Any, weights: tuple[Any, Any], recipe: Recipe | None, transposed: bool
) -> tuple[Any, Any]:
    """The two weights with those of the argument `quantized_weights`."""
    if given is None:
        return weights
    if recipe is None:
        raise ArgumentTypeError(
            "Argument `quantized_weights` is given, and `recipe` is not. Pass the recipe that they "
            "were made for."
        )
    if not isinstance(given, (tuple, list)) or len(given) != len(weights):
        raise ArgumentTypeError(
            "Argument `quantized_weights` must be a tuple of two, what `quantize_weights` makes of "
            f"`w_gate_up` and of `w_down`; got {messages.shown(given)}."
        )
    first, second = (
        _prepare(name, of, made, recipe, transposed)
        for name, of, made in zip(("w_gate_up", "w_down"), weights, given, strict=True)
    )
    return first, second


def _prepare(name: str, weights: Any, given: Any, recipe: Recipe, transposed: bool) -> Any:
    if isinstance(weights, tuple):
        if not isinstance(given, (tuple, list)) or len(given) != len(weights):
            raise ArgumentTypeError(
                f"Argument `quantized_weights` must have two for `{name}`, as that is a tuple of "
                f"two; got {messages.shown(given)}."
            )
        both = enumerate(zip(weights, given, strict=True))
        return tuple(
            _prepare(f"{name}[{i}]", of, made, recipe, transposed) for i, (of, made) in both
        )
    if not isinstance(given, RecipeWeights):
        raise ArgumentTypeError(
            f"Argument `quantized_weights` must have what `quantize_weights` makes of `{name}`; "
            f"got {messages.shown(given)}."
        )
    wanted = tuple(getattr(recipe, product) for product in PRODUCTS)
    if given.scalings != wanted:
        raise ArgumentValueError(
            f"Argument `quantized_weights` has for `{name}` weights of another recipe: scalings "
            f"{given.scalings}, and `recipe` has {wanted}."
        )
    straight, swapped = weights.shape, (weights.shape[0], *weights.shape[:0:-1])
    wanted_shapes = (swapped, straight) if transposed else (straight, swapped)
    shapes = [(of := getattr(given, product)) and of.shape for product in PRODUCTS]
    alike = all(s in (None, w) for s, w in zip(shapes, wanted_shapes, strict=True))
    if given.transpose_weights != transposed or not alike:
        raise ArgumentValueError(
            f"Argument `quantized_weights` must have for `{name}`, {weights.shape}, what "
            f"`quantize_weights` makes of it with transpose_weights={transposed}; got one with "
            f"transpose_weights={given.transpose_weights} and the shapes {shapes}."
        )
    return Prepared(weights, given)
