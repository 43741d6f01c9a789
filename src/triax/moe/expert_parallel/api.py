"""Expert parallelism: tokens go to the devices that hold their experts, and come back summed.

`dispatch` and `combine` run inside `jax.shard_map`, over a mesh axis along which the experts are
split. A token goes once to each device that holds one of its experts, with its choices and weights,
no matter how many of its experts are there. That device copies it to its experts' rows, sums its
experts' outputs for the token, and returns one row.

In: a device's own tokens. Out: the rows of its own experts, sorted by expert, and back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.expert_parallel.arrivals import (
    Dispatched,
    DispatchPlan,
    by_expert,
    combined,
    exchanged,
)
from triax.moe.permutation.ops import as_known_words
from triax.moe.quantization.scaled import DTYPES, ScaledArray, of_rows, tokens
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array, AxisName
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.moved import refuses_moved_keywords


@refuses_moved_keywords
def dispatch(
    x: Array | ScaledArray,
    weights: Array,
    experts: Array,
    num_experts: int,
    axis_name: AxisName,
    *,
    capacity: int | None = None,
    num_rows: int | None = None,
    scales: Array | None = None,
    implementation: Implementation | None = None,
) -> Dispatched:
    """Sends each token to the devices that hold its experts, and sorts what arrives by expert.

        @jax.shard_map(mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P("x")), out_specs=P("x"))
        def layer(x, logits, w_up, w_down):
            weights, experts = moe.route(logits, moe.Router(8))
            sent = moe.dispatch(x, weights, experts, num_experts=256, axis_name="x")
            h = jax.nn.silu(moe.ragged_dot(sent.rows, w_up, sent.group_sizes))
            y = moe.ragged_dot(h, w_down, sent.group_sizes)
            return moe.combine(y, sent.plan, weights=sent.weights)

    Call it inside `jax.shard_map` over `axis_name`. Of the axis' D devices, device d holds experts
    from ``d * num_experts // D`` on. Rows of one expert keep the order of devices, tokens and
    slots: the result is that of one device with all tokens, if nothing is dropped.

    The host reads no counts, and no shape depends on one. Gradients travel the same way back.

    Between the GPUs of one host, of one process or of several, a kernel writes each token straight
    into the other GPU's memory, and waits for the others' tokens. It needs `cuda-bindings`, and a
    `shard_map` over all axes of the mesh. If a process of the job ends, the programs of the others
    end with an error. Elsewhere `all_to_all` exchanges room for `capacity` tokens, full or not,
    between any two devices.

    Args:
      x: [tokens, hidden], this device's tokens, of any dtype that `permute` takes. A `ScaledArray`
        with scales for each token travels in half of bfloat16's bytes, and arrives as one: `rows`.
      weights: float [tokens, top_k], the router's weights.
      experts: integer [tokens, top_k], of all `num_experts`; ids out of range mean "not routed".
      num_experts: the number of experts on all devices, a multiple of the axis' size.
      axis_name: the mesh axis, or a tuple of axes.
      capacity: at least 1: the most tokens that a device sends to any one device; None for no
        limit. The first `capacity` tokens are sent there, the others are not. A device's memory has
        room for `capacity` tokens of each device.
      num_rows: the number of rows on each device; pairs that do not fit are dropped. None for
        enough rows in the worst case, in which all tokens choose experts of one device:
        ``D * capacity * top_k``, where D is the number of the axis' devices, and `capacity` is
        all tokens if it is None. The time of matmuls does not depend on it.
      scales: [tokens, scales], sent along: the scales of quantized tokens.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      `Dispatched`: rows, their weights and scales, group_sizes, group_counts, num_dropped, plan.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range, or there is no mesh
        axis of that name: the call is outside of `shard_map`.
    """
    whole = x if isinstance(x, ScaledArray) else None
    if isinstance(x, ScaledArray):
        x, scales = tokens("x", x, scales)
    x = arguments.array("x", x, ("tokens", "hidden"))
    experts = arguments.array("experts", experts, ("tokens", "top_k"), jnp.integer)
    weights = arguments.array("weights", weights, ("tokens", "top_k"), jnp.floating)
    messages.check_sizes_known("experts", experts.shape)
    arguments.check_pairs(experts.shape)
    axis_name, num_devices = arguments.mesh_axis(axis_name, "dispatch")
    num_experts = arguments.integer("num_experts", num_experts, 1)
    if num_experts % num_devices:
        raise ArgumentValueError(
            f"Argument `num_experts` must be a multiple of the {num_devices} devices of axis "
            f"{axis_name!r}; got {num_experts}."
        )
    if not x.shape[0] == weights.shape[0] == experts.shape[0] or weights.shape != experts.shape:
        raise ArgumentValueError(
            "Arguments `x`, `weights` and `experts` must have the same number of tokens, and the "
            f"last two the same `top_k`; got {x.shape}, {weights.shape} and {experts.shape}."
        )
    scale_dtype: Any = None
    if scales is not None:
        sizes = {"tokens": x.shape[0]}
        scales = arguments.array("scales", scales, ("tokens", "scales"), sizes=sizes, of="`x`")
        scale_dtype = scales.dtype
        scales = as_known_words(scales)
    if capacity is not None:
        capacity = arguments.integer("capacity", capacity, 1)
    if num_rows is not None:
        num_rows = arguments.integer("num_rows", num_rows, 0)
    implementations.check(implementation, x=x, weights=weights, scales=scales)
    sent = exchanged(
        x,
        weights,
        arguments.as_int32(experts),
        num_experts,
        axis_name,
        capacity=capacity,
        num_rows=num_rows,
        scales=scales,
        implementation=implementation,
    )
    sent = by_expert(sent, implementation)
    if sent.scales is not None and sent.scales.dtype != scale_dtype:
        sent = sent._replace(scales=jax.lax.bitcast_convert_type(sent.scales, scale_dtype))
    if whole is None:
        return sent
    rows: Any = of_rows(whole, sent.rows, sent.scales)
    return sent._replace(rows=rows, scales=None)


def combine(
    rows: Array,
    plan: DispatchPlan,
    *,
    weights: Array | None,
    exchange_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums each token's rows, multiplied by their weights, on the token's own device.

        y = moe.combine(rows, sent.plan, weights=sent.weights)  # [tokens, hidden]
        y = moe.combine(rows, sent.plan, weights=None)  # `moe.glu` has applied sent.weights already

    The inverse of `dispatch`: call it inside the same `shard_map`. A device sums the rows of
    its experts for each received token, in float32 or wider, and rounds the sum once to the dtype
    of `rows`; the token's device sums the returned rows in the same way.

    Args:
      rows: float [rows, hidden], the outputs of this device's experts for `Dispatched.rows`.
      plan: `Dispatched.plan`.
      weights: float [rows], the factor of each row: `Dispatched.weights`; None if the rows have
        been multiplied already, as `glu` does in its own kernel. There is no default.
      exchange_dtype: float8_e4m3fn or float8_e5m2: returned rows are rounded to this dtype, with a
        scale for each 128 numbers, and travel in half the bytes of bfloat16. Gradients travel
        unrounded, and gradients of rows ignore the rounding.
      implementation: as for `dispatch`.

    Returns:
      [tokens, hidden] in the dtype of `rows`. A token without rows is exactly zero.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape.
    """
    if not isinstance(plan, DispatchPlan):
        raise ArgumentTypeError(
            f"Argument `plan` must be the plan of `dispatch`; got {type(plan).__name__}."
        )
    of_plan: dict[str, Any] = {"sizes": {"rows": plan.num_rows}, "of": "the plan"}
    rows = arguments.array("rows", rows, ("rows", "hidden"), jnp.floating, **of_plan)
    if weights is not None:
        if getattr(weights, "ndim", 1) != 1:
            raise ArgumentValueError(
                "Argument `weights` must have shape [rows], like the `weights` that `dispatch` "
                f"returns; got {weights.shape}."
            )
        weights = arguments.array("weights", weights, ("rows",), jnp.floating, **of_plan)
    dtype = None if exchange_dtype is None else _exchange_dtype(exchange_dtype, rows)
    implementations.check(implementation, rows=rows, weights=weights)
    return combined(rows, plan, weights, dtype, implementation=implementation)


def _exchange_dtype(dtype: Any, rows: jax.Array) -> str:
    """Returns the name of an 8-bit float dtype; raises if `rows` cannot be rounded to it."""
    name = arguments.dtype("exchange_dtype", dtype, DTYPES[:2], ", or None for that of `rows`").name
    if rows.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ArgumentTypeError(
            f"Argument `exchange_dtype` is {name}, to which float32, bfloat16 and float16 are "
            f"rounded, and `rows` are of {rows.dtype}. Cast them, or leave it out."
        )
    return name
