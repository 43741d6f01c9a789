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
from triax.moe.layer.experts import Matrix, in_8_bits
from triax.moe.layer.recipes import BLOCK, DTYPES, Scaling
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.reference import Plan
from triax.moe.quantization.api import quantize
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.quantized_outer.api import quantized_outer
from triax.moe.shared.order import after
from triax.sharding import explicit


@dataclasses.dataclass(frozen=True)
class Products:
    """How a layer's products are computed: as a recipe says, of weights in a layout.

    `precision` is JAX's of matmuls, in force where the layer is called. Most methods need a recipe.
    """

    recipe: Any  # a Recipe, or None
    transposed: bool
    implementation: Any
    precision: str | None = dataclasses.field(
        default_factory=lambda: jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    )

    def multiply(
        self,
        rows: jax.Array,
        matrix: Matrix,
        group_sizes: jax.Array,
        bias_weights: jax.Array | None = None,
        quantized: ScaledArray | None = None,
        source: Plan | None = None,
        target: Plan | None = None,
    ) -> jax.Array:
        """`ragged_dot` of arrays that are quantized as the recipe says.

        `quantized` are the rows as `quantized_tokens` has them, if they are there already. With
        `source`, a plan, `rows` are the tokens that it sends to rows; with `target` the result's
        rows are summed up to tokens.
        """
        bias_weights = None if matrix.bias is None else bias_weights
        if self.recipe is None:
            bias = {"bias": matrix.bias, "bias_weights": bias_weights}
            how = {"transpose_weights": self.transposed} | bias
            return self.dot(rows, matrix.weights, group_sizes, **how)
        moves = quantized, source, target
        return self._run(_multiply, rows, matrix, group_sizes, bias_weights, *moves)

    def quantized_tokens(self, x: jax.Array, plan: Plan) -> ScaledArray | None:
        """The tokens' rows in 8 bits: tokens are fewer, and so are the bytes that then move."""
        scaling = self.recipe.forward
        if scaling is None:
            return None
        found: ScaledArray = self.moved(self.quantized(scaling, jax.lax.stop_gradient(x)), plan)
        return found

    def glu_multiply(
        self,
        gate_up: Any,
        row_weights: jax.Array | None,
        matrix: Matrix,
        group_sizes: jax.Array,
        target: Plan | None = None,
        **kind: Any,
    ) -> jax.Array:
        """`multiply` of what `glu` makes of gate and up, which is made again for the gradient.

        `kind` are glu's options. An activation must not close over traced arrays.
        """
        run = lambda how, *operands: _glu_multiply(how, kind, *operands)
        return self._run(run, gate_up, row_weights, matrix, group_sizes, target)

    def _run(self, function: Any, *operands: Any) -> jax.Array:
        """Calls it with operands of which the last is a plan for the result's rows, or None."""
        # Inside shard_map, gradients vary over all of the operands' mesh axes; the casts'
        # transposes sum them.
        varying = jax_private.insert_varying_casts(jax.tree.leaves(operands))
        out = function(self, *jax.tree.unflatten(jax.tree.structure(operands), varying))
        name = "triax_ragged_dot" if operands[-1] is None else "triax_unpermuted_tokens"
        return checkpoint_name(out, name)

    def quantized(self, scaling: Scaling | None, rows: jax.Array, dtype: str = DTYPES[0]) -> Any:
        """The rows in 8 bits; as they are without a scaling."""
        if scaling is None:
            return rows
        block = (1, None if scaling == "rows" else BLOCK)
        return quantize(rows, dtype, block=block, implementation=self.implementation)

    def dot(self, rows: Any, weights: Any, sizes: Any, **options: Any) -> jax.Array:
        # Not by name: None is the precision in force, which may be another where JAX traces this.
        with jax.default_matmul_precision(self.precision):
            return ragged_dot(rows, weights, sizes, implementation=self.implementation, **options)

    def product(
        self, name: str, rows: Any, matrix: Matrix, sizes: Any, dtype: Any, **more: Any
    ) -> jax.Array:
        """One of a recipe's, of rows that are quantized if it says so; `more` are plan and bias."""
        scaling, weights = getattr(self.recipe, name), matrix.weights
        if scaling is None:
            more["transpose_weights"] = self.transposed == (name == "forward")
        elif matrix.in_8_bits is not None:
            weights = matrix.in_8_bits[name]
        else:
            weights = in_8_bits(scaling, weights, name, self.transposed, self.implementation)
        if self.recipe.fast_sums and scaling is not None:
            more["precision"] = FAST_SUMS
        rows = self.moved(rows, more.pop("plan", None))
        return self.dot(rows, weights, sizes, preferred_element_type=dtype, **more)

    def moved(self, tokens: Any, plan: Plan | None) -> Any:
        """The rows of tokens; with no plan they are rows."""
        return tokens if plan is None else permute(tokens, plan, implementation=self.implementation)

    def summed(self, rows: jax.Array, plan: Plan | None) -> jax.Array:
        """The tokens of rows; with no plan, rows."""
        return rows if plan is None else unpermute(rows, plan, implementation=self.implementation)

    def named(self, plan: Plan | None) -> jax.Array | None:
        """Which token each row is; with no plan, nothing."""
        if plan is None:
            return None
        number = jnp.arange(1, plan.row_of.shape[0] + 1, dtype=jnp.int32)
        rows: jax.Array = self.moved(number[:, None], plan)[:, 0]
        return rows - 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    how: Products,
    rows: Any,
    matrix: Matrix,
    sizes: Any,
    bias_weights: Any,
    quantized: Any,
    source: Any,
    target: Any,
) -> Any:
    if quantized is None:
        quantized = how.moved(how.quantized(how.recipe.forward, rows), source)
    bias = {"bias": matrix.bias, "bias_weights": bias_weights}
    return how.summed(how.product("forward", quantized, matrix, sizes, rows.dtype, **bias), target)


def _forward(how: Products, *operands: Any) -> Any:
    *others, _, source, target = operands  # what is quantized is made again
    return _multiply(how, *operands), (*others, source, target)


def _backward(how: Products, operands: Any, gradient: Any) -> Any:
    rows, matrix, sizes, bias_weights, source, target = operands
    d_matrix, d_bias_weights = _other_gradients(
        how, rows, matrix, sizes, bias_weights, source, target, gradient
    )
    d_rows = _rows_gradient(how, gradient, rows.dtype, matrix, sizes, target)
    d_rows = explicit.cast(how.summed(d_rows, source), explicit.type_of(rows))
    # Group sizes and plans have no gradient, and that of the rows is all of what is quantized, too.
    return d_rows, d_matrix, None, d_bias_weights, None, None, None


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _glu_multiply(
    how: Products,
    kind: dict[str, Any],
    gate_up: Any,
    row_weights: Any,
    matrix: Matrix,
    sizes: Any,
    target: Any,
) -> Any:
    made: dict[str, Any] = {**kind, "implementation": how.implementation}
    scaling = how.recipe.forward
    if scaling == "rows":
        inner: Any = quantized_glu(gate_up, row_weights, DTYPES[0], **made)
    else:
        inner = how.quantized(scaling, glu(gate_up, row_weights, **made))
    dtype = jax.tree.leaves(gate_up)[0].dtype
    bias = {"bias": matrix.bias, "bias_weights": None if matrix.bias is None else row_weights}
    return how.summed(how.product("forward", inner, matrix, sizes, dtype, **bias), target)


def _glu_forward(how: Products, kind: dict[str, Any], *operands: Any) -> Any:
    return _glu_multiply(how, kind, *operands), operands


def _glu_backward(how: Products, kind: dict[str, Any], operands: Any, gradient: Any) -> Any:
    gate_up, row_weights, matrix, sizes, target = operands
    gate, *rest = gate_up if isinstance(gate_up, tuple) else (gate_up,)
    d_inner = _rows_gradient(how, gradient, gate.dtype, matrix, sizes, target)
    of_glu, inner = glu_gradients(
        gate_up, row_weights, d_inner, again=True, implementation=how.implementation, **kind
    )
    bias_weights = None if matrix.bias is None else row_weights
    d_matrix, d_bias_weights = _other_gradients(
        how, inner, matrix, sizes, bias_weights, None, target, gradient
    )
    d_row_weights = of_glu["row_weights"]
    if d_bias_weights is not None:
        d_row_weights += d_bias_weights
    d_gate = after(of_glu["gate_up"], d_matrix.weights)  # whose operands are freed first
    d_gate_up: Any = explicit.cast(d_gate, explicit.type_of(gate))
    if rest:
        d_gate_up = d_gate_up, explicit.cast(of_glu["up"], explicit.type_of(rest[0]))
    return d_gate_up, d_row_weights, d_matrix, None, None


_glu_multiply.defvjp(_glu_forward, _glu_backward)


def _rows_gradient(
    how: Products, gradient: Any, dtype: Any, matrix: Matrix, sizes: Any, target: Plan | None
) -> jax.Array:
    gradient = how.quantized(how.recipe.rows_gradient, gradient, how.recipe.gradient_dtype)
    return how.product("rows_gradient", gradient, matrix, sizes, dtype, plan=target)


def _other_gradients(
    how: Products,
    rows: Any,
    matrix: Matrix,
    sizes: Any,
    bias_weights: Any,
    source: Plan | None,
    target: Plan | None,
    gradient: Any,
) -> tuple[Matrix, Any]:
    """The gradients by weights and bias, and by the weights of the bias."""
    moving = {"bias": matrix.bias, "bias_weights": bias_weights}
    found: dict[str, Any] = dict.fromkeys(moving)
    if how.recipe.weight_gradient is None:
        moving["weights"] = matrix.weights
    else:
        sides: list[Any] = [
            (rows, how.named(source), DTYPES[0]),
            (gradient, how.named(target), how.recipe.gradient_dtype),
        ]
        (left, right), sources, dtypes = zip(*sides[:: -1 if how.transposed else 1], strict=True)
        of_weights = quantized_outer(
            left,
            right,
            sizes,
            sources=sources,
            dtypes=dtypes,
            result_dtype=matrix.weights.dtype,
            fast_sums=how.recipe.fast_sums,
            implementation=how.implementation,
        )
        found["weights"] = explicit.cast(of_weights, explicit.type_of(matrix.weights))
    if jax.tree.leaves(moving):
        rows, gradient = how.moved(rows, source), how.moved(gradient, target)

        def plain(moving: dict[str, Any]) -> jax.Array:
            given = {"weights": matrix.weights} | moving
            return how.dot(rows, sizes=sizes, transpose_weights=how.transposed, **given)

        # Products in 8 bits may be cut over other explicit axes than those of arrays.
        out, pull = jax.vjp(plain, moving)
        found |= pull(explicit.cast(gradient, explicit.type_of(out)))[0]
    return Matrix(found["weights"], found["bias"]), found["bias_weights"]
