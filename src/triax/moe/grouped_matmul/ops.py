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
    _check_differentiable(*primals)
    left, right = (
        primal if other is not None else None
        for primal, other in zip(primals[:2], tangents[1::-1], strict=True)
    )

    def along(residuals: Any, moving: dict[str, jax.Array]) -> Any:
        left, right, group_sizes = residuals
        terms = []
        if "left" in moving:
            terms.append(call(moving["left"], right, group_sizes))
        if "right" in moving:
            terms.append(call(left, moving["right"], group_sizes))
        return functools.reduce(jnp.add, terms)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        left, right, group_sizes = residuals
        dtype = (right if left is None else left).dtype
        gradient = gradient.astype(dtype)
        options = Options(dtype, call.options["options"].precision)
        cotangents = {}
        for name, (other, op, order) in _GRADIENTS[call.op.name].items():
            operands = {"left": left, "right": right, "gradient": gradient}
            if operands[other] is not None:
                multiply = call.like(op, options=options)
                cotangents[name] = multiply(*(operands[key] for key in order), group_sizes)
        return cotangents

    moving = {"left": tangents[0], "right": tangents[1]}
    return linear.call(along, back, (left, right, primals[2]), moving, out)


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


def _part(call: Call, shard: Shard, left: Any, right: Any, sizes: Any, *scales: Any) -> jax.Array:
    """Of a part of the rows or of the sum, which is rounded after parts are added up."""
    part, count = shard.index("r"), shard.count("r")
    if count > 1:  # how many rows of each group are among this part's
        num_rows = left.shape[0]
        ends = reference.group_ends(sizes, num_rows * count) - part * num_rows
        sizes = jnp.diff(jnp.clip(ends, 0, num_rows), prepend=0)
    summed = "r" if call.op is group_outer else "k"
    if shard.count(summed) == 1:
        return call.run(left, right, sizes, *scales)
    options = call.options["options"]
    wide = call.like(options=options.for_partial_sums())
    return shard.sum(summed, wide.run(left, right, sizes, *scales)).astype(options.dtype)


_product = functools.partial(Op, cut="rkn", derivative=_derivative, part=_part)

# Each row times the weights of its group. Of rows, weights, group sizes, and optionally scales of
# rows and of groups.
ragged_dot = _product(
    "ragged_dot",
    arguments=("rk", "gkn", "g", "r", "g"),
    results="rn",
    kernels=functools.partial(launchers.ragged_dot, transposed=False),
    xla=functools.partial(reference.ragged_dot_reference, transposed=False),
)

# The same with the weights transposed.
ragged_dot_transposed = _product(
    "ragged_dot_transposed",
    arguments=("rk", "gnk", "g", "r", "g"),
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
