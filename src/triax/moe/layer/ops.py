"""The layer's two products as ops with gradients of their own.

The second op recomputes the activation in the backward pass, and orders w_down's gradient before
the first product's gradients, to lower peak memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from triax.moe.activations.ops import activate, activate_gradients, activate_quantized
from triax.moe.activations.options import ResolvedActivation
from triax.moe.layer.experts import Matrix
from triax.moe.layer.products import Products
from triax.moe.layer.recipes import DTYPES
from triax.moe.plans.reference import Plan
from triax.moe.products.ops import ragged_dot_glu
from triax.moe.products.options import Groups, Options
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import implementation as implementations
from triax.moe.shared.ops import Call, Op, not_differentiable
from triax.moe.shared.order import after
from triax.sharding import linear


class _Fixed(NamedTuple):
    """The operands without a gradient; `source` and `target` are plans, as in `multiply`.

    `made` is the result of `glu` if there is one. Derivatives compute it again.
    """

    sizes: jax.Array
    in_8_bits: Any
    quantized: ScaledArray | None = None
    source: Plan | None = None
    target: Plan | None = None
    made: jax.Array | None = None


def multiply(
    how: Products,
    rows: jax.Array,
    matrix: Matrix,
    sizes: jax.Array,
    bias_weights: jax.Array | None = None,
    quantized: ScaledArray | None = None,
    source: Plan | None = None,
    target: Plan | None = None,
) -> jax.Array:
    """Multiplies rows by weights with `ragged_dot`, both quantized as the recipe says.

    `quantized` is the result of `Products.quantized_tokens`, if it exists. With the plan `source`,
    `rows` are tokens, still to be permuted; with the plan `target`, the result is summed to tokens.
    """
    bias_weights = None if matrix.bias is None else bias_weights
    if how.recipe is None:
        bias = {"bias": matrix.bias, "bias_weights": bias_weights}
        return how.forward(rows, matrix, sizes, rows.dtype, **bias)
    fixed = _Fixed(sizes, matrix.in_8_bits, quantized, source, target)
    operands = rows, matrix.weights, matrix.bias, bias_weights, fixed
    return _kept(_dot(*operands, how=how, implementation=how.implementation), target)


def multiply_glu(
    how: Products,
    rows: jax.Array,
    matrices: list[Matrix],
    sizes: jax.Array,
    row_weights: jax.Array,
    activation: ResolvedActivation,
) -> tuple[jax.Array, jax.Array] | None:
    """Multiplies rows as `multiply` does, and applies `glu`; returns both results.

    Returns None where no kernel does both: it takes 16 bits, and gate and up in one array.
    """
    (weights, bias, _), *more = matrices
    simple = how.recipe is None and not isinstance(weights, ScaledArray)
    arrays = [a for a in (rows, weights, bias, row_weights) if a is not None]
    fit = rows.dtype.itemsize == 2 and all(a.size and a.dtype.itemsize <= 4 for a in arrays)
    if more or activation.function is not None or not (simple and fit):
        return None
    gate_up, out = ragged_dot_glu(
        rows,
        weights,
        Groups(sizes),
        bias,
        row_weights,
        spec=activation.spec,
        transposed=how.transposed,
        options=Options(rows.dtype, None),
        implementation=implementations.fit(how.implementation, rows, floats=True),
    )
    return checkpoint_name(gate_up, "triax_ragged_dot"), out


def glu_multiply(
    how: Products,
    gate_up: Any,
    row_weights: jax.Array | None,
    matrix: Matrix,
    sizes: jax.Array,
    activation: ResolvedActivation,
    target: Plan | None = None,
    made: jax.Array | None = None,
) -> jax.Array:
    """Applies `glu` to gate and up, and multiplies its result as `multiply` does.

    `made` is the result of `glu` if there is one already. The activation must not close over JAX
    arrays.
    """
    gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    fixed = _Fixed(sizes, matrix.in_8_bits, target=target, made=made)
    operands = gate, up, row_weights, matrix.weights, matrix.bias, fixed
    options = {"how": how, "activation": activation}
    if activation.function is not None:  # a function made anew in each call would fill the cache
        out = Call(_glu_dot, how.implementation, options)(*operands)
    else:
        out = _glu_dot(*operands, implementation=how.implementation, **options)
    return out if how.recipe is None else _kept(out, target)


def _kept(out: jax.Array, target: Plan | None) -> jax.Array:
    name = "triax_ragged_dot" if target is None else "triax_unpermuted_tokens"
    return checkpoint_name(out, name)


def _multiply(
    rows: Any,
    weights: Any,
    bias: Any,
    bias_weights: Any,
    fixed: _Fixed,
    *,
    how: Products,
    implementation: Any,
) -> jax.Array:
    quantized: Any = fixed.quantized
    if quantized is None:
        quantized = how.moved(how.quantized(how.recipe.forward, rows), fixed.source)
    matrix = Matrix(weights, bias, fixed.in_8_bits)
    biases = {"bias": bias, "bias_weights": bias_weights}
    out = how.forward(quantized, matrix, fixed.sizes, rows.dtype, **biases)
    return how.summed(out, fixed.target)


def _multiply_derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    how: Products = call.options["how"]

    def back(moving: set[str], operands: Any, gradient: jax.Array) -> dict[str, Any]:
        rows, weights, bias, bias_weights, fixed = operands
        matrix, moves = Matrix(weights, bias, fixed.in_8_bits), (fixed.source, fixed.target)
        found = how.other_gradients(
            moving, rows, gradient, matrix, fixed.sizes, bias_weights, *moves
        )
        d_rows = how.rows_gradient(gradient, matrix, fixed.sizes, rows.dtype, fixed.target)
        return found | {"rows": how.summed(d_rows, fixed.source)}

    # `quantized` gets no gradient: the gradient of `rows` is complete.
    primals = *primals[:-1], primals[-1]._replace(quantized=None)
    names = "rows", "weights", "bias", "bias_weights"
    return _linear(call, back, names, primals, tangents, out)


def _glu_multiply(
    gate: Any,
    up: Any,
    row_weights: Any,
    weights: Any,
    bias: Any,
    fixed: _Fixed,
    *,
    how: Products,
    activation: ResolvedActivation,
    implementation: Any,
) -> jax.Array:
    operands = gate, up, row_weights, activation
    scaling = None if how.recipe is None else how.recipe.forward
    inner: Any = fixed.made
    if scaling == "rows":
        inner = activate_quantized(*operands, DTYPES[0], implementation=implementation)
    elif inner is None:
        inner = activate(*operands, implementation=implementation)
    if scaling == "blocks":
        inner = how.quantized(scaling, inner)
    matrix = Matrix(weights, bias, fixed.in_8_bits)
    biases = {"bias": bias, "bias_weights": None if bias is None else row_weights}
    return how.summed(how.forward(inner, matrix, fixed.sizes, gate.dtype, **biases), fixed.target)


def _glu_multiply_derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    how: Products = call.options["how"]

    def back(moving: set[str], operands: Any, gradient: jax.Array) -> dict[str, Any]:
        gate, up, row_weights, weights, bias, fixed = operands
        matrix = Matrix(weights, bias, fixed.in_8_bits)
        d_inner = how.rows_gradient(gradient, matrix, fixed.sizes, gate.dtype, fixed.target)
        found, inner = activate_gradients(
            *(gate, up, row_weights, call.options["activation"], d_inner),
            again="weights" in moving,
            implementation=call.implementation,
        )
        inner = d_inner if inner is None else inner  # bias gradients do not read it
        wanted = moving | ({"bias_weights"} if "row_weights" in moving else set())
        others = how.other_gradients(
            wanted,
            inner,
            gradient,
            matrix,
            fixed.sizes,
            None if bias is None else row_weights,
            None,
            fixed.target,
        )
        if "bias_weights" in others:
            found["row_weights"] += others.pop("bias_weights")
        if "weights" in others:
            found["gate_up"] = after(found["gate_up"], others["weights"])
        return found | others

    primals = *primals[:-1], primals[-1]._replace(made=None)
    names = "gate_up", "up", "row_weights", "weights", "bias"
    return _linear(call, back, names, primals, tangents, out)


def _linear(
    call: Call,
    back: Any,
    names: tuple[str, ...],
    primals: Any,
    tangents: Any,
    out: jax.Array,
) -> Any:
    """Returns the result's tangent; ``back(moving, primals, gradient)`` returns gradients."""
    named = zip(names, tangents, strict=False)
    moving = {name: tangent for name, tangent in named if tangent is not None}
    if not moving:  # only operands without a gradient have tangents
        return None
    back = functools.partial(back, {*moving})

    def along(primals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        at = [names.index(name) for name in moving]
        run, values = linear.in_active(call.run, primals, at)
        return jax.jvp(run, values, [*moving.values()])[1]

    if call.options["how"].recipe is None:
        return linear.call(along, back, primals, moving, out)
    once = lambda primals, gradient: back(*_first_order(primals, gradient))
    return linear.call(_refuse, once, primals, moving, out)


_refuse = not_differentiable(
    "With `recipe` a layer has gradients, but no forward mode and no second derivatives: rounding "
    "to 8 bits has none. Leave `recipe` out where you need them."
)


@jax.custom_jvp
def _first_order(primals: Any, gradient: jax.Array) -> Any:
    """Returns its arguments; differentiating through it raises."""
    return primals, gradient


_first_order.defjvp(_refuse)

_dot = Op("recipe_ragged_dot", xla=_multiply, derivative=_multiply_derivative, inline=True)
_glu_dot = Op("glu_ragged_dot", xla=_glu_multiply, derivative=_glu_multiply_derivative, inline=True)
