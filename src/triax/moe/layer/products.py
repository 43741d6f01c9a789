"""The layer's products in 8 bits, with their gradients, as a recipe says.

A product of rows and weights becomes one of `quantize`d ones, and so does that of the incoming
gradient and the weights. The weights' gradient is computed from the rows and the gradient as they
are, unless the recipe says otherwise; the weights that are trained keep all their bits either way.

The rows of the first product are tokens, and those of the second become tokens. A token is
quantized before it is copied, and so is its gradient: tokens are fewer than rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.compat import jax_private
from triax.moe.activations.api import glu, glu_gradients, quantized_glu
from triax.moe.grouped_matmul.api import ragged_dot
from triax.moe.grouped_matmul.options import FAST_SUMS
from triax.moe.layer.recipes import BLOCK, DTYPES, Recipe, Scaling
from triax.moe.layer.weights import Prepared, in_8_bits
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.reference import Plan
from triax.moe.quantization.api import quantize
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.quantized_outer.api import quantized_outer
from triax.moe.shared.order import after
from triax.sharding import explicit


@dataclasses.dataclass(frozen=True)
class _How:
    recipe: Recipe
    transposed: bool
    implementation: Any
    precision: str | None

    @classmethod
    def here(cls, recipe: Recipe, transposed: bool, implementation: Any) -> _How:
        """With JAX's precision of matmuls that is in force."""
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        return cls(recipe, transposed, implementation, precision)

    def quantized_rows(self, scaling: Scaling, rows: jax.Array, dtype: str) -> ScaledArray:
        block = (1, None if scaling == "rows" else BLOCK)
        return quantize(rows, dtype, block=block, implementation=self.implementation)

    def weights(self, product: str, weights: Any) -> ScaledArray:
        """Weights of a product in 8 bits."""
        if isinstance(weights, Prepared):
            found: ScaledArray = getattr(weights.quantized, product)
            return found
        scaling = getattr(self.recipe, product)
        return in_8_bits(scaling, weights, product, self.transposed, self.implementation)

    def options(self, dtype: Any, scaling: Scaling | None) -> dict[str, Any]:
        """Those of `ragged_dot`."""
        fast = self.recipe.fast_sums and scaling is not None
        options = {"preferred_element_type": dtype, "implementation": self.implementation}
        return options | ({"precision": FAST_SUMS} if fast else {})

    def dot(self, *operands: Any, **options: Any) -> jax.Array:
        # Not by name: None is the precision in force, which may be another where JAX traces this.
        with jax.default_matmul_precision(self.precision):
            return ragged_dot(*operands, **options)

    def moved(self, tokens: Any, plan: Plan | None) -> Any:
        """The rows of tokens; with no plan they are rows."""
        return tokens if plan is None else permute(tokens, plan, implementation=self.implementation)

    def summed(self, rows: jax.Array, plan: Plan | None) -> jax.Array:
        """The tokens of rows; with no plan, rows."""
        if plan is None:
            return rows
        return unpermute(rows, plan, implementation=self.implementation)

    def named(self, plan: Plan | None) -> jax.Array | None:
        """Which token each row is; with no plan, nothing."""
        if plan is None:
            return None
        number = jnp.arange(1, plan.row_of.shape[0] + 1, dtype=jnp.int32)
        rows: jax.Array = self.moved(number[:, None], plan)[:, 0]
        return rows - 1


def multiply(
    recipe: Recipe,
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None,
    bias_weights: jax.Array | None = None,
    transpose_weights: bool,
    implementation: Any,
    quantized: ScaledArray | None = None,
    source: Plan | None = None,
    target: Plan | None = None,
) -> jax.Array:
    """`ragged_dot` of arrays that are quantized as the recipe says.

    `quantized` are the rows as `quantized_tokens` has them, if they are there already. With
    `source`, a plan, `rows` are the tokens that it sends to rows; with `target` the result's rows
    are summed up to tokens.
    """
    how = _How.here(recipe, transpose_weights, implementation)
    operands = rows, weights, group_sizes, bias, bias_weights, quantized, source, target
    # Inside shard_map, gradients vary over all of these mesh axes; the casts' transposes sum them.
    varying = jax_private.insert_varying_casts(jax.tree.leaves(operands))
    out = _multiply(how, *jax.tree.unflatten(jax.tree.structure(operands), varying))
    return checkpoint_name(out, "triax_ragged_dot" if target is None else "triax_unpermuted_tokens")


def quantized_tokens(
    recipe: Recipe, x: jax.Array, plan: Plan, implementation: Any
) -> ScaledArray | None:
    """The tokens' rows in 8 bits: tokens are fewer, and so are the bytes that then move."""
    if recipe.forward is None:
        return None
    how = _How.here(recipe, False, implementation)
    rows: ScaledArray = how.moved(
        how.quantized_rows(recipe.forward, jax.lax.stop_gradient(x), DTYPES[0]), plan
    )
    return rows


def glu_multiply(
    recipe: Recipe,
    gate_up: Any,
    row_weights: jax.Array | None,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None,
    transpose_weights: bool,
    implementation: Any,
    target: Plan | None = None,
    **kind: Any,
) -> jax.Array:
    """`multiply` of what `glu` makes of gate and up, which is made again for the gradient.

    `kind` are glu's options. An activation must not close over traced arrays.
    """
    how = _How.here(recipe, transpose_weights, implementation)
    operands = gate_up, row_weights, weights, group_sizes, bias, target
    varying = jax_private.insert_varying_casts(jax.tree.leaves(operands))
    out = _glu_multiply(how, kind, *jax.tree.unflatten(jax.tree.structure(operands), varying))
    return checkpoint_name(out, "triax_ragged_dot" if target is None else "triax_unpermuted_tokens")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    how: _How,
    rows: Any,
    weights: Any,
    sizes: Any,
    bias: Any,
    bias_weights: Any,
    quantized: Any,
    source: Any,
    target: Any,
) -> Any:
    scaling = how.recipe.forward
    if scaling is None:
        of_experts = how.moved(rows, source)
    elif quantized is None:
        of_experts = how.moved(how.quantized_rows(scaling, rows, DTYPES[0]), source)
    else:
        of_experts = quantized
    out = _product(how, of_experts, rows.dtype, weights, sizes, bias, bias_weights)
    return how.summed(out, target)


def _forward(how: _How, *operands: Any) -> Any:
    quantized = 5  # is made again
    return _multiply(how, *operands), (*operands[:quantized], None, *operands[quantized + 1 :])


def _backward(how: _How, operands: Any, gradient: Any) -> Any:
    rows, weights, sizes, bias, bias_weights, _, source, target = operands
    found = _other_gradients(
        how, rows, weights, sizes, bias, bias_weights, source, target, gradient
    )
    d_rows = _rows_gradient(how, gradient, rows.dtype, weights, sizes, target)
    d_rows = explicit.cast(how.summed(d_rows, source), explicit.type_of(rows))
    # Group sizes and plans have no gradient, and that of the rows is all of what is quantized, too.
    d_weights = _alike(weights, found["weights"])
    return d_rows, d_weights, None, found["bias"], found["bias_weights"], None, None, None


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _glu_multiply(
    how: _How,
    kind: dict[str, Any],
    gate_up: Any,
    row_weights: Any,
    weights: Any,
    sizes: Any,
    bias: Any,
    target: Any,
) -> Any:
    made: dict[str, Any] = {**kind, "implementation": how.implementation}
    scaling = how.recipe.forward
    if scaling == "rows":
        inner: Any = quantized_glu(gate_up, row_weights, DTYPES[0], **made)
    else:
        inner = glu(gate_up, row_weights, **made)
        inner = inner if scaling is None else how.quantized_rows(scaling, inner, DTYPES[0])
    dtype = jax.tree.leaves(gate_up)[0].dtype
    bias_weights = None if bias is None else row_weights
    return how.summed(_product(how, inner, dtype, weights, sizes, bias, bias_weights), target)


def _glu_forward(how: _How, kind: dict[str, Any], *operands: Any) -> Any:
    return _glu_multiply(how, kind, *operands), operands


def _glu_backward(how: _How, kind: dict[str, Any], operands: Any, gradient: Any) -> Any:
    gate_up, row_weights, weights, sizes, bias, target = operands
    gate, *rest = gate_up if isinstance(gate_up, tuple) else (gate_up,)
    d_inner = _rows_gradient(how, gradient, gate.dtype, weights, sizes, target)
    of_glu, inner = glu_gradients(
        gate_up, row_weights, d_inner, again=True, implementation=how.implementation, **kind
    )
    bias_weights = None if bias is None else row_weights
    found = _other_gradients(how, inner, weights, sizes, bias, bias_weights, None, target, gradient)
    d_row_weights = of_glu["row_weights"]
    if found["bias_weights"] is not None:
        d_row_weights += found["bias_weights"]
    d_gate = after(of_glu["gate_up"], found["weights"])  # what this takes is in memory no longer
    d_gate_up: Any = explicit.cast(d_gate, explicit.type_of(gate))
    if rest:
        d_gate_up = d_gate_up, explicit.cast(of_glu["up"], explicit.type_of(rest[0]))
    d_weights = _alike(weights, found["weights"])
    return d_gate_up, d_row_weights, d_weights, None, found["bias"], None


_glu_multiply.defvjp(_glu_forward, _glu_backward)


def _trained(weights: Any) -> jax.Array:
    found: jax.Array = weights.weights if isinstance(weights, Prepared) else weights
    return found


def _alike(weights: Any, gradient: Any) -> Any:
    """The gradient of weights; what was made of them before has none."""
    return Prepared(gradient, None) if isinstance(weights, Prepared) else gradient  # type: ignore[arg-type]


def _product(
    how: _How, rows: Any, dtype: Any, weights: Any, sizes: Any, bias: Any, bias_weights: Any
) -> jax.Array:
    """Of rows that are quantized, if the recipe says so."""
    options = how.options(dtype, how.recipe.forward)
    if how.recipe.forward is None:
        weights = _trained(weights)
        options["transpose_weights"] = how.transposed
    else:
        weights = how.weights("forward", weights)
    return how.dot(rows, weights, sizes, bias=bias, bias_weights=bias_weights, **options)


def _rows_gradient(
    how: _How, gradient: Any, dtype: Any, weights: Any, sizes: Any, target: Plan | None
) -> jax.Array:
    options = how.options(dtype, how.recipe.rows_gradient)
    if (scaling := how.recipe.rows_gradient) is None:
        weights = _trained(weights)
        options["transpose_weights"] = not how.transposed
    else:
        gradient = how.quantized_rows(scaling, gradient, how.recipe.gradient_dtype)
        weights = how.weights("rows_gradient", weights)
    return how.dot(how.moved(gradient, target), weights, sizes, **options)


def _other_gradients(
    how: _How,
    rows: Any,
    weights: Any,
    sizes: Any,
    bias: Any,
    bias_weights: Any,
    source: Plan | None,
    target: Plan | None,
    gradient: Any,
) -> dict[str, Any]:
    """The gradients by weights, bias and its weights."""
    weights = _trained(weights)
    moving = {"bias": bias, "bias_weights": bias_weights}
    found: dict[str, Any] = dict.fromkeys(moving)
    if how.recipe.weight_gradient is None:
        moving["weights"] = weights
    else:
        sides, sources = (rows, gradient), (how.named(source), how.named(target))
        found["weights"] = _outer(how, sides, sources, sizes, weights)
    if not jax.tree.leaves(moving):
        return found
    rows, gradient = how.moved(rows, source), how.moved(gradient, target)

    def plain(moving: dict[str, Any]) -> jax.Array:
        return how.dot(
            rows,
            group_sizes=sizes,
            transpose_weights=how.transposed,
            implementation=how.implementation,
            **{"weights": weights} | moving,
        )

    # Products in 8 bits may be cut over other explicit axes than those of arrays.
    out, pull = jax.vjp(plain, moving)
    return found | pull(explicit.cast(gradient, explicit.type_of(out)))[0]


def _outer(
    how: _How,
    sides: tuple[jax.Array, jax.Array],
    sources: tuple[jax.Array | None, jax.Array | None],
    sizes: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """The weights' gradient in 8 bits, of rows and gradient."""
    dtypes = DTYPES[0], how.recipe.gradient_dtype
    if how.transposed:
        sides, sources, dtypes = sides[::-1], sources[::-1], dtypes[::-1]
    found = quantized_outer(
        *sides,
        sizes,
        sources=sources,
        dtypes=dtypes,
        result_dtype=weights.dtype,
        fast_sums=how.recipe.fast_sums,
        implementation=how.implementation,
    )
    return explicit.cast(found, explicit.type_of(weights))
