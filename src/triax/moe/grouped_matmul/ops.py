"""The ops of ragged_dot, a product that is linear in its rows and in its weights.

The gradient of the rows is the same product with the weights transposed; that of the weights is
`group_outer`, whose own gradients are products of the first kind again. So derivatives of any
order are made of these three.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from triax.errors import DifferentiationError
from triax.moe.grouped_matmul import launchers, reference
from triax.moe.grouped_matmul.launchers import Options
from triax.moe.shared import linear
from triax.moe.shared.ops import Call, Op
from triax.moe.shared.sharding import Shard


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    """The tangent of a product, which is linear in left and in right.

    Each of the two is needed, and kept for the gradient, only where the other one has a tangent.
    """
    _check_differentiable(*primals[:5])
    bias, bias_weights = primals[5:] or (None, None)
    d_bias, d_bias_weights = tangents[5:] or (None, None)
    num_rows = primals[0].shape[0]
    left, right = (
        primal if other is not None else None
        for primal, other in zip(primals[:2], tangents[1::-1], strict=True)
    )

    def along(residuals: Any, moving: dict[str, jax.Array]) -> Any:
        left, right, group_sizes, bias, bias_weights = residuals
        terms = []
        if "left" in moving:
            terms.append(call(moving["left"], right, group_sizes))
        if "right" in moving:
            terms.append(call(left, moving["right"], group_sizes))
        spread = spread_bias.of(call.implementation, dtype=out.dtype, num_rows=num_rows)
        if "bias" in moving:
            terms.append(spread(moving["bias"], group_sizes, bias_weights))
        if "bias_weights" in moving:
            terms.append(spread(bias, group_sizes, moving["bias_weights"]))
        return functools.reduce(jnp.add, terms)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        left, right, group_sizes, bias, bias_weights = residuals
        gradient = gradient.astype(dtype)
        options = Options(dtype, call.options["options"].precision)
        cotangents = {}
        if "bias" in moving_dtypes:
            kind = moving_dtypes["bias"]
            add_up = group_sum.of(call.implementation, dtype=kind, num_rows=num_rows)
            cotangents["bias"] = add_up(gradient, group_sizes, bias_weights)
        if "bias_weights" in moving_dtypes:
            kind = moving_dtypes["bias_weights"]
            multiply = bias_products.of(call.implementation, dtype=kind, num_rows=num_rows)
            cotangents["bias_weights"] = multiply(gradient, group_sizes, bias)
        for name, (other, op, order) in _GRADIENTS[call.op.name].items():
            operands = {"left": left, "right": right, "gradient": gradient}
            if operands[other] is not None:
                multiply = call.like(op, options=options)
                cotangents[name] = multiply(*(operands[key] for key in order), group_sizes)
        return cotangents

    names = "left", "right", "bias", "bias_weights"
    moving = dict(zip(names, (*tangents[:2], d_bias, d_bias_weights), strict=True))
    moving_dtypes = {name: of.dtype for name, of in moving.items() if of is not None}
    dtype = primals[0].dtype
    saved = left, right, primals[2], bias, bias_weights
    return linear.call(along, back, saved, moving, out)


def _check_differentiable(rows: jax.Array, _: Any, __: Any, *scales: Any) -> None:
    if rows.dtype.itemsize == 1:
        raise DifferentiationError(
            f"moe.ragged_dot of {rows.dtype} has no derivative: 8 bits do not hold one. Multiply "
            "in bfloat16 where you differentiate, or write the gradient with jax.custom_vjp."
        )
    if any(scale is not None for scale in scales):
        raise DifferentiationError(
            "moe.ragged_dot with `row_scales` or `group_scales` has no derivative. Scale the "
            "rows or the result outside of it where you differentiate."
        )


def _part(call: Call, shard: Shard, left: Any, right: Any, sizes: Any, *others: Any) -> jax.Array:
    """Of a part of the rows or of the sum, which is rounded after parts are added up."""
    sizes = _sizes_of_part(shard, sizes, left.shape[0])
    summed = "r" if call.op is group_outer else "k"
    if shard.count(summed) == 1:
        return call.run(left, right, sizes, *others)
    options = call.options["options"]
    wide = call.like(options=options.for_partial_sums())
    sums = shard.sum(summed, wide.run(left, right, sizes, *others[:2]))
    if any(array is not None for array in others[2:]):  # once, not in every part
        bias, weights = others[2:]
        how = {"dtype": sums.dtype, "num_rows": left.shape[0]}
        sums += reference.spread_bias_reference(bias, sizes, weights, **how)
    return sums.astype(options.dtype)


def _sizes_of_part(shard: Shard, sizes: jax.Array, num_rows: int) -> jax.Array:
    """How many rows of each group are among the `num_rows` of a part."""
    part, count = shard.index("r"), shard.count("r")
    if count == 1:
        return sizes
    ends = reference.group_ends(sizes, num_rows * count) - part * num_rows
    return jnp.diff(jnp.clip(ends, 0, num_rows), prepend=0)


_product = functools.partial(Op, cut="rkn", derivative=_derivative, part=_part)

# Each row times the weights of its group. Of rows, weights, group sizes, and optionally scales of
# rows and of groups, a bias of each group, and the rows' weights of that.
ragged_dot = _product(
    "ragged_dot",
    arguments=("rk", "gkn", "g", "r", "g", "gn", "r"),
    results="rn",
    kernels=functools.partial(launchers.ragged_dot, transposed=False),
    xla=functools.partial(reference.ragged_dot_reference, transposed=False),
)

# The same with the weights transposed.
ragged_dot_transposed = _product(
    "ragged_dot_transposed",
    arguments=("rk", "gnk", "g", "r", "g", "gn", "r"),
    results="rn",
    kernels=functools.partial(launchers.ragged_dot, transposed=True),
    xla=functools.partial(reference.ragged_dot_reference, transposed=True),
)

# For each group the sum over its rows of left × right. Of left, right and group sizes.
group_outer = _product(
    "group_outer",
    arguments=("rk", "rn", "g"),
    results="gkn",
    kernels=launchers.group_outer,
    xla=reference.group_outer_reference,
)

# The gradients of each op's left and right operand: the operand that is needed, the op, its order.
_GRADIENTS: dict[str, dict[str, tuple[str, Op, tuple[str, str]]]] = {
    "ragged_dot": {
        "left": ("right", ragged_dot_transposed, ("gradient", "right")),
        "right": ("left", group_outer, ("left", "gradient")),
    },
    "ragged_dot_transposed": {
        "left": ("right", ragged_dot, ("gradient", "right")),
        "right": ("left", group_outer, ("gradient", "left")),
    },
    "group_outer": {
        "left": ("right", ragged_dot_transposed, ("right", "gradient")),
        "right": ("left", ragged_dot, ("left", "gradient")),
    },
}


# --- the bias ------------------------------------------------------------------------------------
# With the sum over rows and columns of rows × bias × weights, each of these is its derivative by
# the third operand, from the two others.


def _bias_derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    first, group_sizes, second = primals
    names = _BIAS[call.op.name][:2]
    held = dict(zip(names, (first, second), strict=True))
    moving = dict(zip(names, (tangents[0], tangents[2]), strict=True))
    kinds = {name: of.dtype for name, of in moving.items() if of is not None}

    def along(residuals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        group_sizes, held = residuals
        terms = []
        for name, tangent in moving.items():
            operands = held | {name: tangent}
            terms.append(call(operands[names[0]], group_sizes, operands[names[1]]))
        return functools.reduce(jnp.add, terms)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        group_sizes, held = residuals
        operands = held | {_BIAS[call.op.name][2]: gradient}
        cotangents = {}
        for op in (spread_bias, group_sum, bias_products):
            first, second, result = _BIAS[op.name]
            if result in kinds:
                of_result = call.like(op, dtype=kinds[result])
                cotangents[result] = of_result(operands[first], group_sizes, operands[second])
        return cotangents

    return linear.call(along, back, (group_sizes, held), moving, out)


def _part_of_bias(call: Call, shard: Shard, first: Any, sizes: Any, second: Any) -> jax.Array:
    num_rows = call.options["num_rows"] // shard.count("r")
    sizes = _sizes_of_part(shard, sizes, num_rows)
    summed = {"group_sum": "r", "bias_products": "n"}.get(call.op.name, "")
    found = call.like(num_rows=num_rows).run(first, sizes, second)
    return shard.sum(summed, found) if summed else found


_of_bias = functools.partial(Op, derivative=_bias_derivative, part=_part_of_bias)

# Each row's bias, of biases, group sizes and weights or None.
spread_bias = _of_bias(
    "spread_bias",
    arguments=("gn", "g", "r"),
    results="rn",
    cut="n",
    xla=reference.spread_bias_reference,
)

# Each group's sum of its rows, of rows, group sizes and weights or None.
group_sum = _of_bias(
    "group_sum",
    arguments=("rn", "g", "r"),
    results="gn",
    cut="rn",
    kernels=launchers.group_sum,
    xla=reference.group_sum_reference,
)

# Each row's product with its bias, of rows, group sizes and biases.
bias_products = _of_bias(
    "bias_products",
    arguments=("rn", "g", "gn"),
    results="r",
    cut="rn",
    xla=reference.bias_products_reference,
)

# The operands of each, and its result.
_BIAS = {
    "spread_bias": ("bias", "weights", "rows"),
    "group_sum": ("rows", "weights", "bias"),
    "bias_products": ("rows", "bias", "weights"),
}
