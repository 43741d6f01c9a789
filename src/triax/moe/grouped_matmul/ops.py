"""The ops of ragged_dot, a product that is linear in its rows and in its weights.

The gradient of the rows is the same product with the weights transposed; that of the weights is
`group_outer`, whose own gradients are products of the first kind again. So derivatives of any
order are made of these three. The ops take `Groups` where `moe.ragged_dot` takes group sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from triax.errors import DifferentiationError
from triax.moe.grouped_matmul import launchers, reference
from triax.moe.grouped_matmul.options import Groups, Options
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.ops import Call, Op
from triax.moe.shared.order import after
from triax.sharding import linear
from triax.sharding.splits import Shard


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    """The tangent of a product, which is linear in left and in right.

    Each of the two is needed, and kept for the gradient, only where the other one has a tangent.
    Weights of 8 or 4 bits have none, and are in the rows' dtype while that of rows is computed.
    """
    _check_differentiable(call, primals, tangents)
    only_weights = primals[1].dtype.itemsize == 1 < primals[0].dtype.itemsize
    bias, bias_weights = primals[5:] or (None, None)
    d_bias, d_bias_weights = tangents[5:] or (None, None)
    num_rows = primals[0].shape[0]
    left, right = (
        primal if other is not None else None
        for primal, other in zip(primals[:2], tangents[1::-1], strict=True)
    )
    scales = primals[4] if only_weights else None

    def along(residuals: Any, moving: dict[str, jax.Array]) -> Any:
        left, right, groups, scales, bias, bias_weights = residuals
        terms = []
        if "left" in moving:
            scaled = (None, scales) if only_weights else ()
            terms.append(call(moving["left"], right, groups, *scaled))
        if "right" in moving:
            terms.append(call(left, moving["right"], groups))
        spread = spread_bias.of(call.implementation, dtype=out.dtype, num_rows=num_rows)
        if "bias" in moving:
            terms.append(spread(moving["bias"], groups, bias_weights))
        if "bias_weights" in moving:
            terms.append(spread(bias, groups, moving["bias_weights"]))
        return functools.reduce(jnp.add, terms)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        left, right, groups, scales, bias, bias_weights = residuals
        gradient = gradient.astype(dtype)
        options = call.options["options"]
        if only_weights and right is not None:
            right = reference.scaled_weights(
                right, scales, options, at_least_float32(dtype), transposed=call.op in _TRANSPOSED
            )
            right = right.astype(dtype)
        options = Options(dtype, options.precision, options.share)
        cotangents = {}
        if kinds := {name: kind for name, kind in moving_dtypes.items() if name in names[2:]}:
            cotangents = _of_bias(call, gradient, groups, bias, bias_weights, kinds)
        for name, (other, op, order) in _GRADIENTS[_plain(call.op.name)].items():
            operands = {"left": left, "right": right, "gradient": gradient}
            if operands[other] is None:
                continue
            if "right" in cotangents:  # which takes the rows: they need not be kept any longer
                operands["gradient"] = after(gradient, cotangents["right"])
            pair = [operands[key] for key in order]
            cotangents[name] = call.like(op, options=options)(*pair, groups)
        return cotangents

    names = "left", "right", "bias", "bias_weights"
    moving = dict(zip(names, (*tangents[:2], d_bias, d_bias_weights), strict=True))
    moving_dtypes = {name: of.dtype for name, of in moving.items() if of is not None}
    dtype = primals[0].dtype
    saved = left, right, primals[2], scales, bias, bias_weights
    return linear.call(along, back, saved, moving, out)


def _of_bias(
    call: Call,
    gradient: jax.Array,
    groups: Groups,
    bias: jax.Array,
    weights: jax.Array | None,
    kinds: dict[str, Any],
) -> dict[str, jax.Array]:
    """The gradients, of dtypes `kinds`, of "bias" and "bias_weights", or of one of them."""
    how: dict[str, Any] = {"implementation": call.implementation, "num_rows": gradient.shape[0]}
    if len(kinds) == 2:
        dtypes = kinds["bias"], kinds["bias_weights"]
        both = bias_gradients(gradient, groups, weights, bias, dtypes=dtypes, **how)
        return dict(zip(("bias", "bias_weights"), both, strict=True))
    if "bias" in kinds:
        return {"bias": group_sum(gradient, groups, weights, dtype=kinds["bias"], **how)}
    dtype = kinds["bias_weights"]
    return {"bias_weights": bias_products(gradient, groups, bias, dtype=dtype, **how)}


def _plain(name: str) -> str:
    """The op of arrays that are not scaled."""
    return name.replace("_of_blocks", "").replace("_packed", "")


def _check_differentiable(call: Call, primals: Any, tangents: Any) -> None:
    rows, weights, _, row_scales, group_scales = (*primals, None, None)[:5]
    if rows.dtype.itemsize == 1:
        raise DifferentiationError(
            f"moe.ragged_dot of {rows.dtype} has no derivative: 8 bits do not hold one. Multiply "
            "in bfloat16 where you differentiate, or write the gradient with jax.custom_vjp."
        )
    if weights.dtype.itemsize == 1:
        if jax.tree.leaves((tangents[1], tangents[3:5])):
            of = call.options["options"].packed or weights.dtype
            raise DifferentiationError(
                f"moe.ragged_dot has no derivative by weights of {of} or their scales. "
                "Differentiate by the rows alone, or multiply by weights of the rows' dtype."
            )
        group_scales = None  # they are the weights'
    if not (row_scales is None and group_scales is None):
        raise DifferentiationError(
            "moe.ragged_dot with `row_scales` or `group_scales` has no derivative. Scale the "
            "rows or the result outside of it where you differentiate."
        )


def _part(call: Call, shard: Shard, left: Any, right: Any, groups: Any, *others: Any) -> Any:
    """Of a part of the rows or of the sum, which is rounded after parts are added up."""
    groups = groups_of_part(shard, groups, left.shape[0])
    summed = "r" if call.op is group_outer else "k"
    if shard.count(summed) == 1:
        return call.run(left, right, groups, *others)
    options = call.options["options"]
    wide = call.like(options=options.for_partial_sums())
    sums = shard.sum(summed, wide.run(left, right, groups, *others[:2]))
    if any(array is not None for array in others[2:]):  # once, not in every part
        bias, weights = others[2:]
        how = {"dtype": sums.dtype, "num_rows": left.shape[0]}
        sums += reference.spread_bias_reference(bias, groups, weights, **how)
    return sums.astype(options.dtype)


def groups_of_part(shard: Shard, groups: Groups, num_rows: int) -> Groups:
    """The groups among the `num_rows` rows of a part."""
    part, count = shard.index("r"), shard.count("r")
    if count == 1:
        return groups
    before = part * num_rows
    ends = reference.group_ends(groups, num_rows * count) - before
    first = reference.first_row(groups, num_rows * count) - before
    first = jnp.clip(first, 0, num_rows)
    sizes = jnp.diff(jnp.clip(ends, 0, num_rows), prepend=first)
    return Groups(sizes, None if groups.first_row is None else first)


def letters_of_groups(groups: Groups) -> list[str]:
    """The letters of `Groups`."""
    return ["g", ""][: len(jax.tree.leaves(groups))]


def _of_group_scales(scales: Any) -> list[str]:
    return [] if scales is None else ["gn"[: scales.ndim]]


def _of_row_scales(scales: Any) -> list[str]:
    return [] if scales is None else ["r_"[: scales.ndim]]


def _dot(name: str, cut: str, *, transposed: bool, packed: bool = False) -> Op:
    of_groups = _of_group_scales if "n" in cut else None
    weights = "gnk" if transposed else "gkn"
    plain: Any = reference.ragged_dot_reference
    if packed:
        weights = weights[:-1] + "_"
        plain = reference.with_unpacked_weights(plain)
    ways = launchers.ragged_dot, plain
    kernels, xla = (functools.partial(way, transposed=transposed) for way in ways)
    return Op(
        name,
        arguments=("rk", weights, letters_of_groups, _of_row_scales, of_groups, "gn", "r"),
        results="rn",
        cut=cut,
        derivative=_derivative,
        part=_part,
        kernels=kernels,
        xla=xla,
    )


# Each row times the weights of its group. Of rows, weights, groups, and optionally scales of rows
# and of groups or their columns, a bias of each group, and the rows' weights of that.
ragged_dot = _dot("ragged_dot", "rkn", transposed=False)

# The same with the weights transposed.
ragged_dot_transposed = _dot("ragged_dot_transposed", "rkn", transposed=True)

# The same with scales of blocks of the depth or of columns, which are not cut.
ragged_dot_of_blocks = _dot("ragged_dot_of_blocks", "r", transposed=False)
ragged_dot_of_blocks_transposed = _dot("ragged_dot_of_blocks_transposed", "r", transposed=True)

# The same with weights of 4 bits, two to a byte, and their `PackedScales`.
ragged_dot_packed = _dot("ragged_dot_packed", "r", transposed=False, packed=True)
ragged_dot_packed_transposed = _dot(
    "ragged_dot_packed_transposed", "r", transposed=True, packed=True
)

_TRANSPOSED = (
    ragged_dot_transposed,
    ragged_dot_of_blocks_transposed,
    ragged_dot_packed_transposed,
)

# By whether weights are transposed, and by `Options.kind`.
DOTS = {
    (False, ""): ragged_dot,
    (True, ""): ragged_dot_transposed,
    (False, "of_blocks"): ragged_dot_of_blocks,
    (True, "of_blocks"): ragged_dot_of_blocks_transposed,
    (False, "packed"): ragged_dot_packed,
    (True, "packed"): ragged_dot_packed_transposed,
}

# For each group the sum over its rows of left × right. Of left, right and groups.
group_outer = Op(
    "group_outer",
    arguments=("rk", "rn", letters_of_groups),
    results="gkn",
    cut="rkn",
    derivative=_derivative,
    part=_part,
    kernels=launchers.group_outer,
    xla=reference.group_outer_reference,
)

# The gradients of each op's left and right operand, in the order in which they are computed: the
# operand that is needed, the op, its order.
_GRADIENTS: dict[str, dict[str, tuple[str, Op, tuple[str, str]]]] = {
    "ragged_dot": {
        "right": ("left", group_outer, ("left", "gradient")),
        "left": ("right", ragged_dot_transposed, ("gradient", "right")),
    },
    "ragged_dot_transposed": {
        "right": ("left", group_outer, ("gradient", "left")),
        "left": ("right", ragged_dot, ("gradient", "right")),
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
    first, groups, second = primals
    names = _BIAS[call.op.name][:2]
    held = dict(zip(names, (first, second), strict=True))
    moving = dict(zip(names, (tangents[0], tangents[2]), strict=True))
    kinds = {name: of.dtype for name, of in moving.items() if of is not None}

    def along(residuals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        groups, held = residuals
        terms = []
        for name, tangent in moving.items():
            operands = held | {name: tangent}
            terms.append(call(operands[names[0]], groups, operands[names[1]]))
        return functools.reduce(jnp.add, terms)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        groups, held = residuals
        operands = held | {_BIAS[call.op.name][2]: gradient}
        cotangents = {}
        for op in (spread_bias, group_sum, bias_products):
            first, second, result = _BIAS[op.name]
            if result in kinds:
                of_result = call.like(op, dtype=kinds[result])
                cotangents[result] = of_result(operands[first], groups, operands[second])
        return cotangents

    return linear.call(along, back, (groups, held), moving, out)


def _part_of_bias(call: Call, shard: Shard, first: Any, groups: Any, second: Any) -> jax.Array:
    """Of a part of the rows or columns; sums are rounded after parts are added up."""
    num_rows = call.options["num_rows"] // shard.count("r")
    groups = groups_of_part(shard, groups, num_rows)
    summed = {"group_sum": "r", "bias_products": "n"}.get(call.op.name)
    if summed is None or shard.count(summed) == 1:
        return call.like(num_rows=num_rows).run(first, groups, second)
    dtype = call.options["dtype"]
    wide = call.like(num_rows=num_rows, dtype=at_least_float32(dtype))
    return shard.sum(summed, wide.run(first, groups, second)).astype(dtype)


_bias_op = functools.partial(Op, derivative=_bias_derivative, part=_part_of_bias)

# Each row's bias, of biases, groups and weights or None.
spread_bias = _bias_op(
    "spread_bias",
    arguments=("gn", letters_of_groups, "r"),
    results="rn",
    cut="n",
    xla=reference.spread_bias_reference,
)

# Each group's sum of its rows, of rows, groups and weights or None.
group_sum = _bias_op(
    "group_sum",
    arguments=("rn", letters_of_groups, "r"),
    results="gn",
    cut="rn",
    kernels=launchers.group_sum,
    xla=reference.group_sum_reference,
)

# Each row's product with its bias, of rows, groups and biases.
bias_products = _bias_op(
    "bias_products",
    arguments=("rn", letters_of_groups, "gn"),
    results="r",
    cut="rn",
    xla=reference.bias_products_reference,
)


def _part_of_bias_gradients(
    call: Call, shard: Shard, rows: Any, groups: Groups, weights: Any, bias: Any
) -> tuple[jax.Array, jax.Array]:
    num_rows, dtypes = rows.shape[0], call.options["dtypes"]
    wide = tuple(
        at_least_float32(dtype) if shard.count(summed) > 1 else dtype
        for dtype, summed in zip(dtypes, "rn", strict=True)
    )
    run = call.like(num_rows=num_rows, dtypes=wide).run
    found = run(rows, groups_of_part(shard, groups, num_rows), weights, bias)
    d_bias, d_weights = map(shard.sum, "rn", found)
    return d_bias.astype(dtypes[0]), d_weights.astype(dtypes[1])


# group_sum and bias_products in one read, of rows, groups, weights and biases.
bias_gradients = Op(
    "bias_gradients",
    arguments=("rn", letters_of_groups, "r", "gn"),
    results=("gn", "r"),
    cut="rn",
    kernels=launchers.bias_gradients,
    xla=reference.bias_gradients_reference,
    derivative="xla",
    part=_part_of_bias_gradients,
)

# The operands of each, and its result.
_BIAS = {
    "spread_bias": ("bias", "weights", "rows"),
    "group_sum": ("rows", "weights", "bias"),
    "bias_products": ("rows", "bias", "weights"),
}
