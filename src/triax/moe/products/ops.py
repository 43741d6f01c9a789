"""The ops of ragged_dot, a product that is linear in its rows and in its weights.

The gradient of the rows is the same product with transposed weights. The gradient of the weights is
`group_outer`, whose own gradients are again products of rows and weights. So derivatives of any
order consist of these products. The ops take `Groups` instead of group sizes.

`multiply` calls them with checked arguments, for the public `ragged_dot` and for what is made of
it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.errors import DifferentiationError
from triax.moe.activations.ops import glu
from triax.moe.products import any_gpu_gradients, choose, few_rows, reference
from triax.moe.products.operands import dims, pieces
from triax.moe.products.options import Groups, Options
from triax.moe.quantization.scaled import ScaledArray, widened
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Call, Op, not_differentiable
from triax.moe.shared.order import after
from triax.sharding import explicit, linear
from triax.sharding.splits import Shard

_NAMES = "left", "right", "groups", "bias", "bias_weights"

# How the gradients of a product's operands are computed, in this order: from which residual, by
# which product, of which operands. Products are named by `transposed`, or None for `group_outer`.
_GRADIENTS: dict[bool | None, dict[str, tuple[str, bool | None, tuple[str, str]]]] = {
    False: {
        "right": ("left", None, ("left", "gradient")),
        "left": ("right", True, ("gradient", "right")),
    },
    True: {
        "right": ("left", None, ("gradient", "left")),
        "left": ("right", False, ("gradient", "right")),
    },
    None: {
        "left": ("right", True, ("right", "gradient")),
        "right": ("left", False, ("left", "gradient")),
    },
}


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    """Returns the tangent of a product, which is linear in left and in right.

    An operand is kept as a residual only if the other operand has a tangent.
    """
    operands, active = (dict(zip(_NAMES, of, strict=False)) for of in (primals, tangents))
    _check_differentiable(operands, active)
    num_rows, dtype, out_dtype = operands["left"].shape[0], operands["left"].dtype, out.dtype
    active = {name: of for name, of in active.items() if jax.tree.leaves(of)}
    active_dtypes = {name: of.dtype for name, of in active.items()}
    for name, other in (("left", "right"), ("right", "left")):
        if other not in active:
            operands[name] = None

    def along(residuals: dict[str, Any], tangents: dict[str, jax.Array]) -> Any:
        groups = residuals["groups"]
        terms = []
        if "left" in tangents:
            terms.append(call(tangents["left"], residuals["right"], groups))
        if "right" in tangents:
            terms.append(call(residuals["left"], tangents["right"], groups))
        spread = spread_bias.of(call.implementation, dtype=out_dtype, num_rows=num_rows)
        if "bias" in tangents:
            terms.append(spread(tangents["bias"], groups, residuals["bias_weights"]))
        if "bias_weights" in tangents:
            terms.append(spread(residuals["bias"], groups, tangents["bias_weights"]))
        return functools.reduce(jnp.add, terms)

    def back(residuals: dict[str, Any], gradient: jax.Array) -> dict[str, jax.Array]:
        gradient = gradient.astype(dtype)
        kinds = {name: kind for name, kind in active_dtypes.items() if "bias" in name}
        cotangents = _of_bias(call, gradient, residuals, kinds) if kinds else {}
        options = dataclasses.replace(call.options["options"], dtype=dtype)
        operands = residuals | {"gradient": gradient, "right": _in(dtype, residuals["right"], call)}
        for name, (other, transposed, order) in _GRADIENTS[call.options.get("transposed")].items():
            if operands[other] is None:
                continue
            if "right" in cotangents:  # first, to free the rows
                operands["gradient"] = after(gradient, cotangents["right"])
            product: Any = group_outer.of(call.implementation, options=options)
            if transposed is not None:
                product = call.replace(ragged_dot, options=options, transposed=transposed)
            cotangents[name] = product(*(operands[key] for key in order), residuals["groups"])
        return cotangents

    return linear.call(along, back, operands, active, out)


def _in(dtype: Any, weights: Any, call: Call) -> Any:
    """Returns weights for the gradient of the rows, with a `ScaledArray` in the rows' dtype."""
    if not isinstance(weights, ScaledArray):
        return weights
    if weights.tiled:
        return dequantize_tiles.of(call.implementation, dtype=dtype)(weights)
    # Explicit axes may shard values and scales differently.
    gathered: Any = jax.tree.map(explicit.gathered, weights)
    return widened(dataclasses.replace(gathered, values=weights.values), dtype)


def _of_bias(
    call: Call, gradient: jax.Array, residuals: dict[str, Any], kinds: dict[str, Any]
) -> dict[str, jax.Array]:
    """Returns the gradients of "bias" and "bias_weights" that `kinds` names, in its dtypes."""
    groups, bias, weights = residuals["groups"], residuals["bias"], residuals["bias_weights"]
    options: dict[str, Any] = {"implementation": call.implementation, "num_rows": gradient.shape[0]}
    if len(kinds) == 2:
        dtypes = kinds["bias"], kinds["bias_weights"]
        both = bias_gradients(gradient, groups, weights, bias, dtypes=dtypes, **options)
        return dict(zip(("bias", "bias_weights"), both, strict=True))
    if "bias" in kinds:
        return {"bias": group_sum(gradient, groups, weights, dtype=kinds["bias"], **options)}
    dtype = kinds["bias_weights"]
    return {"bias_weights": bias_products(gradient, groups, bias, dtype=dtype, **options)}


def _check_differentiable(operands: dict[str, Any], active: dict[str, Any]) -> None:
    """Raises if rows have 8 bits, or if weights of 8 or 4 bits have a tangent."""
    for name in ("left", "right"):
        dtype = operands[name].dtype
        if dtype.itemsize == 1 and (name == "left" or jax.tree.leaves(active[name])):
            raise DifferentiationError(
                f"moe.ragged_dot has no derivative by numbers of {dtype} or their scales, and none "
                "at all if the rows have 8 bits. Use rows of 16 bits or more, and differentiate by "
                "other arrays than the weights, or multiply the result of `dequantize`."
            )


def _local(call: Call, shard: Shard, left: Any, right: Any, groups: Groups, *biases: Any) -> Any:
    """Multiplies a device's shard; partial sums are added up before they are rounded."""
    groups = groups_of_shard(shard, groups, left.shape[0])
    summed = "r" if call.op is group_outer else "k"
    if shard.count(summed) == 1:
        return call.run(left, right, groups, *biases)
    options = call.options["options"]
    wide = call.replace(options=options.for_partial_sums())
    sums = shard.sum(summed, wide.run(left, right, groups))
    if any(array is not None for array in biases):  # added once, not to every shard
        shape = {"dtype": sums.dtype, "num_rows": left.shape[0]}
        sums += reference.spread_bias_reference(biases[0], groups, biases[1], **shape)
    return sums.astype(options.dtype)


def groups_of_shard(shard: Shard, groups: Groups, num_rows: int) -> Groups:
    """Returns the groups among the `num_rows` rows of a shard."""
    index, count = shard.index("r"), shard.count("r")
    if count == 1:
        return groups
    before = index * num_rows
    ends = reference.group_ends(groups, num_rows * count) - before
    first = reference.first_row(groups, num_rows * count) - before
    first = jnp.clip(first, 0, num_rows)
    sizes = jnp.diff(jnp.clip(ends, 0, num_rows), prepend=first)
    return Groups(sizes, None if groups.first_row is None else first)


def dims_of_groups(groups: Groups) -> list[str]:
    """Returns the dimensions of `Groups`."""
    return ["g", ""][: len(jax.tree.leaves(groups))]


def _dims(rows: Any, weights: Any, *_: Any, transposed: bool, **__: Any) -> Any:
    """Allows shards between blocks that share a scale, a byte or a tile."""
    of_weights = "gnk" if transposed else "gkn"
    most = pieces(((rows, "rk"), (weights, of_weights)))
    operands = dims(rows, "rk"), dims(weights, of_weights), dims_of_groups, "gn", "r"
    return operands, "rn", "".join(dim for dim in "rkn" if most.get(dim) != 1), most


def _dims_of_tiles(weights: ScaledArray, **_: Any) -> Any:
    most = pieces(((weights, "gab"),))
    shardable = "".join(dim for dim in "gab" if most.get(dim) != 1)
    return (dims(weights, "gab"),), "gab", shardable, most


# Dequantizes weights in tiles, for the gradient of rows. Operands: weights, as a `ScaledArray`.
dequantize_tiles = Op(
    "dequantize_tiles",
    dims=_dims_of_tiles,
    kernels=few_rows.dequantize_tiles,
    xla=lambda weights, *, dtype: widened(weights, dtype),
    derivative=not_differentiable("Weights in tiles have no derivative."),
)


# Multiplies each row by the weights of its group, which may be `transposed`. Operands: rows,
# weights, groups, and optionally a bias of each group, and its weight in each row.
ragged_dot = Op(
    "ragged_dot",
    dims=_dims,
    derivative=_derivative,
    local=_local,
    kernels=choose.ragged_dot,
    xla=reference.ragged_dot_reference,
)


def _without_glu(call: Call) -> Call:
    options = {name: call.options[name] for name in ("transposed", "options")}
    return ragged_dot.of(call.implementation, **options)


def _derivative_with_glu(call: Call, primals: Any, tangents: Any, results: Any) -> Any:
    if not jax.tree.leaves((tangents[:2], tangents[3])):
        return None, None
    primals, tangents = ((*of[:4], None) for of in (primals, tangents))
    return _derivative(_without_glu(call), primals, tangents, results[0]), None


def _local_with_glu(
    call: Call, shard: Shard, left: Any, right: Any, groups: Groups, bias: Any, row_weights: Any
) -> Any:
    """Multiplies a device's shard. If it is one of depth or columns, `glu` is an op of its own: it
    takes whole sums of all columns, which are less to send than the weights."""
    if shard.count("k") == shard.count("u") == 1:
        groups = groups_of_shard(shard, groups, left.shape[0])
        return call.run(left, right, groups, bias, row_weights)
    gate_up = whole = _local(_without_glu(call), shard, left, right, groups, bias, None)
    if axes := shard.mesh_axes.get("u"):
        whole = jax.lax.all_gather(gate_up, axes, axis=1, tiled=True)
    apart = glu.of(call.implementation, spec=call.options["spec"])
    inner = apart.run(whole, None, row_weights)
    return gate_up if call.options["keep_product"] else None, inner


def _dims_with_glu(*_: Any, transposed: bool, **__: Any) -> Any:
    of_weights = "guk" if transposed else "gku"
    return ("rk", of_weights, dims_of_groups, "gu", "r"), ("ru", "rw"), "rku"


# Multiplies as `ragged_dot` does, and applies `glu` to the result, gate and up; returns both, the
# first only with `keep_product`. The second has no derivative: it is for an op that is
# differentiated by gate and up. Operands: rows, weights, groups, biases or None, row weights or
# None.
ragged_dot_glu = Op(
    "ragged_dot_glu",
    dims=_dims_with_glu,
    derivative=_derivative_with_glu,
    local=_local_with_glu,
    kernels=choose.ragged_dot_glu,
    xla=reference.ragged_dot_glu_reference,
)

# Sums left × right over the rows of each group. Operands: left, right, groups.
group_outer = Op(
    "group_outer",
    arguments=("rk", "rn", dims_of_groups),
    results="gkn",
    shardable="rkn",
    derivative=_derivative,
    local=_local,
    kernels=choose.group_outer,
    xla=reference.group_outer_reference,
)


# --- the bias ------------------------------------------------------------------------------------
# Each op is the derivative of the sum over rows and columns of rows × bias × weights by one factor,
# from the two others.


def _bias_derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> Any:
    first, groups, second = primals
    names = _BIAS[call.op.name][:2]
    held = dict(zip(names, (first, second), strict=True))
    named = dict(zip(names, (tangents[0], tangents[2]), strict=True))
    kinds = {name: of.dtype for name, of in named.items() if of is not None}

    def along(residuals: Any, tangents: dict[str, jax.Array]) -> jax.Array:
        groups, held = residuals
        terms = []
        for name, tangent in tangents.items():
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
                of_result = call.replace(op, dtype=kinds[result])
                cotangents[result] = of_result(operands[first], groups, operands[second])
        return cotangents

    return linear.call(along, back, (groups, held), named, out)


def _local_bias(call: Call, shard: Shard, first: Any, groups: Any, second: Any) -> jax.Array:
    """Runs an op on a device's shard; partial sums are added up before they are rounded."""
    num_rows = call.options["num_rows"] // shard.count("r")
    groups = groups_of_shard(shard, groups, num_rows)
    summed = {"group_sum": "r", "bias_products": "n"}.get(call.op.name)
    if summed is None or shard.count(summed) == 1:
        return call.replace(num_rows=num_rows).run(first, groups, second)
    dtype = call.options["dtype"]
    wide = call.replace(num_rows=num_rows, dtype=at_least_float32(dtype))
    return shard.sum(summed, wide.run(first, groups, second)).astype(dtype)


_bias_op = functools.partial(Op, derivative=_bias_derivative, local=_local_bias)

# Returns each row's bias, times its weight. Operands: biases, groups, weights or None.
spread_bias = _bias_op(
    "spread_bias",
    arguments=("gn", dims_of_groups, "r"),
    results="rn",
    shardable="n",
    xla=reference.spread_bias_reference,
)

# Sums the rows of each group, times their weights. Operands: rows, groups, weights or None.
group_sum = _bias_op(
    "group_sum",
    arguments=("rn", dims_of_groups, "r"),
    results="gn",
    shardable="rn",
    kernels=any_gpu_gradients.group_sum,
    xla=reference.group_sum_reference,
)

# Returns each row's dot product with its bias. Operands: rows, groups, biases.
bias_products = _bias_op(
    "bias_products",
    arguments=("rn", dims_of_groups, "gn"),
    results="r",
    shardable="rn",
    xla=reference.bias_products_reference,
)


def _local_bias_gradients(
    call: Call, shard: Shard, rows: Any, groups: Groups, weights: Any, bias: Any
) -> tuple[jax.Array, jax.Array]:
    num_rows, dtypes = rows.shape[0], call.options["dtypes"]
    wide = tuple(
        at_least_float32(dtype) if shard.count(summed) > 1 else dtype
        for dtype, summed in zip(dtypes, "rn", strict=True)
    )
    run = call.replace(num_rows=num_rows, dtypes=wide).run
    gradients = run(rows, groups_of_shard(shard, groups, num_rows), weights, bias)
    d_bias, d_weights = map(shard.sum, "rn", gradients)
    return d_bias.astype(dtypes[0]), d_weights.astype(dtypes[1])


# Runs group_sum and bias_products in one read. Operands: rows, groups, weights, biases.
bias_gradients = Op(
    "bias_gradients",
    arguments=("rn", dims_of_groups, "r", "gn"),
    results=("gn", "r"),
    shardable="rn",
    kernels=any_gpu_gradients.bias_gradients,
    xla=reference.bias_gradients_reference,
    derivative="xla",
    local=_local_bias_gradients,
)

# The operands of each bias op, and its result.
_BIAS = {
    "spread_bias": ("bias", "weights", "rows"),
    "group_sum": ("rows", "weights", "bias"),
    "bias_products": ("rows", "bias", "weights"),
}


def multiply(
    rows: Any,
    weights: Any,
    groups: Groups,
    bias: jax.Array | None,
    bias_weights: jax.Array | None,
    transposed: bool,
    options: Options,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """Multiplies every row by the weights of its group, as `ragged_dot` does.

    The precision in `options` is for float32, or for 8 bits if it is FAST_SUMS.
    """
    only_weights = isinstance(weights, ScaledArray) and not isinstance(rows, ScaledArray)
    result = jax.ShapeDtypeStruct((), options.dtype)
    floats = rows, None if only_weights else weights, result, bias, bias_weights
    implementation = implementations.fit(implementation, *floats, floats=True)
    num_groups, *sizes = weights.shape
    columns = sizes[0 if transposed and not isinstance(weights, ScaledArray) else 1]
    shape = rows.shape[0], columns
    if not (rows.shape[0] and rows.shape[1] and num_groups and columns):
        # Empty sums are zero, but depend on the operands, so that these have gradients.
        empty = jnp.zeros(shape, result.dtype)
        for values in (getattr(of, "values", of) for of in (rows, weights)):
            empty += jnp.sum(values[:0]).astype(result.dtype)
        if bias is None or not (num_groups and empty.size):
            return empty
        spreading = {"dtype": result.dtype, "num_rows": shape[0], "implementation": implementation}
        return empty + spread_bias(bias, groups, bias_weights, **spreading)
    if rows.dtype.itemsize < 4 and not (rows.dtype.itemsize == 1 and options.fast_sums):
        options = dataclasses.replace(options, precision=None)
    operands = rows, weights, groups, bias, bias_weights
    out = ragged_dot(
        *operands, transposed=transposed, options=options, implementation=implementation
    )
    return checkpoint_name(out, "triax_ragged_dot")
