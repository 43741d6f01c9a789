"""The layer's two products as ops with gradients of their own.

To lower peak memory, the second op recomputes the activation in its backward pass, which waits for
gate and up, and computes w_down's gradient before the first product's gradients.
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


class _Consts(NamedTuple):
    """The operands without a gradient; `source` and `target` are plans, as in `multiply`.

    `made` is the result of `glu`, if the first product's kernel has computed it. Derivatives do not
    read it: they compute it again.
    """

    sizes: jax.Array
    in_8_bits: Any
    quantized: ScaledArray | None = None
    source: Plan | None = None
    target: Plan | None = None
    made: jax.Array | None = None


def multiply(
    products: Products,
    rows: jax.Array,
    matrix: Matrix,
    sizes: jax.Array,
    bias_weights: jax.Array | None = None,
    quantized: ScaledArray | None = None,
    source: Plan | None = None,
    target: Plan | None = None,
) -> jax.Array:
    """Multiplies rows by weights with `ragged_dot`, both quantized as the recipe says.

    `quantized` are the rows in 8 bits, if the recipe has made them already. With the plan `source`,
    `rows` are tokens, still to be permuted; with the plan `target`, the result is summed to tokens.
    """
    bias_weights = None if matrix.bias is None else bias_weights
    if products.recipe is None:
        bias = {"bias": matrix.bias, "bias_weights": bias_weights}
        out = products.product("forward", rows, matrix, sizes, rows.dtype, **bias)
        return products.summed(out, target)
    consts = _Consts(sizes, matrix.in_8_bits, quantized, source, target)
    operands = rows, matrix.weights, matrix.bias, bias_weights, consts
    return _residual(
        _dot(*operands, products=products, implementation=products.implementation), target
    )


def multiply_glu(
    products: Products,
    rows: jax.Array,
    matrices: list[Matrix],
    sizes: jax.Array,
    row_weights: jax.Array,
    activation: ResolvedActivation,
    keep_product: bool,
) -> tuple[jax.Array | None, jax.Array] | None:
    """Multiplies rows as `multiply` does, and applies `glu`; returns both results, or the second.

    Returns None where no kernel does both. The one that does takes floats of 16 bits, with gate and
    up in one array.
    """
    (weights, bias, _), *more = matrices
    simple = products.recipe is None and not isinstance(weights, ScaledArray)
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
        transposed=products.transposed,
        options=Options(rows.dtype, None),
        keep_product=keep_product,
        implementation=implementations.fit(products.implementation, rows, floats=True),
    )
    return checkpoint_name(gate_up, "triax_ragged_dot") if keep_product else None, out


def glu_multiply(
    products: Products,
    gate: jax.Array,
    up: jax.Array | None,
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
    consts = _Consts(sizes, matrix.in_8_bits, target=target, made=made)
    operands = gate, up, row_weights, matrix.weights, matrix.bias, consts
    options = {"products": products, "activation": activation}
    if activation.function is not None:  # a function made anew in each call would fill the cache
        out = Call(_glu_dot, products.implementation, options)(*operands)
    else:
        out = _glu_dot(*operands, implementation=products.implementation, **options)
    return _residual(out, target)


def _residual(out: jax.Array, target: Plan | None) -> jax.Array:
    name = "triax_ragged_dot" if target is None else "triax_unpermuted_tokens"
    return checkpoint_name(out, name)


def _multiply(
    rows: Any,
    weights: Any,
    bias: Any,
    bias_weights: Any,
    consts: _Consts,
    *,
    products: Products,
    implementation: Any,
) -> jax.Array:
    quantized: Any = consts.quantized
    if quantized is None:
        quantized = products.moved(products.quantized(products.recipe.forward, rows), consts.source)
    matrix = Matrix(weights, bias, consts.in_8_bits)
    biases = {"bias": bias, "bias_weights": bias_weights}
    out = products.product("forward", quantized, matrix, consts.sizes, rows.dtype, **biases)
    return products.summed(out, consts.target)


def _multiply_derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    products: Products = call.options["products"]

    def back(active: set[str], operands: Any, gradient: jax.Array) -> dict[str, Any]:
        rows, weights, bias, bias_weights, consts = operands
        matrix, moves = Matrix(weights, bias, consts.in_8_bits), (consts.source, consts.target)
        gradients = products.other_gradients(
            active, rows, gradient, matrix, consts.sizes, bias_weights, *moves
        )
        d_rows = products.rows_gradient(gradient, matrix, consts.sizes, rows.dtype, consts.target)
        return gradients | {"rows": products.summed(d_rows, consts.source)}

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
    consts: _Consts,
    *,
    products: Products,
    activation: ResolvedActivation,
    implementation: Any,
) -> jax.Array:
    operands = gate, up, row_weights, activation
    scaling = None if products.recipe is None else products.recipe.forward
    inner: Any = consts.made
    if scaling == "rows":
        inner = activate_quantized(*operands, DTYPES[0], implementation=implementation)
    elif inner is None:
        inner = activate(*operands, implementation=implementation)
    if scaling == "blocks":
        inner = products.quantized(scaling, inner)
    matrix = Matrix(weights, bias, consts.in_8_bits)
    biases = {"bias": bias, "bias_weights": None if bias is None else row_weights}
    out = products.product("forward", inner, matrix, consts.sizes, gate.dtype, **biases)
    return products.summed(out, consts.target)


def _glu_multiply_derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    products: Products = call.options["products"]

    def back(active: set[str], operands: Any, gradient: jax.Array) -> dict[str, Any]:
        gate, up, row_weights, weights, bias, consts = operands
        matrix, target = Matrix(weights, bias, consts.in_8_bits), consts.target
        # The gradient may be known before gate and up, as where `jax.checkpoint` recomputes them.
        # Then XLA would make rows of it early, and hold them beside the first product's rows.
        gradient = after(gradient, gate)
        if products.recipe is None:
            gradient, target = products.moved(gradient, target), None
        d_inner = products.rows_gradient(gradient, matrix, consts.sizes, gate.dtype, target)
        gradients, inner = activate_gradients(
            *(gate, up, row_weights, call.options["activation"], d_inner),
            again="weights" in active,
            implementation=call.implementation,
        )
        inner = d_inner if inner is None else inner  # bias gradients do not read it
        wanted = active | ({"bias_weights"} if "row_weights" in active else set())
        others = products.other_gradients(
            wanted,
            inner,
            gradient,
            matrix,
            consts.sizes,
            None if bias is None else row_weights,
            None,
            target,
        )
        if "bias_weights" in others:
            gradients["row_weights"] += others.pop("bias_weights")
        if "weights" in others:
            gradients["gate_up"] = after(gradients["gate_up"], others["weights"])
        return gradients | others

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
    """Returns the result's tangent; ``back(active, primals, gradient)`` returns gradients."""
    named = zip(names, tangents, strict=False)
    active = {name: tangent for name, tangent in named if tangent is not None}
    if not active:  # only operands without a gradient have tangents
        return None
    back = functools.partial(back, {*active})

    def along(primals: Any, tangents: dict[str, jax.Array]) -> jax.Array:
        at = [names.index(name) for name in tangents]
        run, values = linear.in_active(call.run, primals, at)
        return jax.jvp(run, values, [*tangents.values()])[1]

    if call.options["products"].recipe is None:
        return linear.call(along, back, primals, active, out)
    once = lambda primals, gradient: back(*_first_order(primals, gradient))
    return linear.call(_refuse, once, primals, active, out)


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
