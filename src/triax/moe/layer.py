"""The whole layer as one function, composed of the package's ops without kernels of its own.

In: tokens, their router logits and the experts' weights. Out: the experts' output for each token,
and the counts that losses and logs need. Gradients are those of the ops.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.errors import ArgumentValueError
from triax.moe.glu.api import glu
from triax.moe.glu.reference import Activation
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.api import make_plan
from triax.moe.ragged_dot.api import ragged_dot
from triax.moe.router.api import route
from triax.moe.shared import arguments
from triax.moe.shared.implementation import Implementation


class FeedForward(NamedTuple):
    """What `feed_forward` returns.

    Attributes:
      tokens: [tokens, hidden], in the dtype of `x`.
      group_counts: int32 [experts], the pairs routed to each expert, including those dropped, as
        `load_balancing_loss` expects.
      num_dropped: int32 [], the pairs dropped because their expert was full.
    """

    tokens: jax.Array
    group_counts: jax.Array
    num_dropped: jax.Array


def feed_forward(
    x: Any,
    logits: Any,
    w_gate_up: Any,
    w_down: Any,
    *,
    top_k: int,
    activation: Activation = "swiglu",
    capacity: int | None = None,
    align_size: int = 1,
    implementation: Implementation | None = None,
    **router: Any,
) -> FeedForward:
    """Runs each token through its best experts, gated feed-forward networks, and sums their
    outputs.

        out = moe.feed_forward(x, x @ w_router, w_gate_up, w_down, top_k=8, normalize=True)
        out.tokens  # [tokens, hidden]
        loss = task_loss + 0.01 * moe.load_balancing_loss(logits, out.group_counts)

    ``tokens[t] = sum over k of weights[t, k] * ffn[experts[t, k]](x[t])``, with the weights and
    experts that `route` returns, where expert e is

        ffn[e](x) = (activation(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]

    This calls `route`, `make_plan`, `permute`, `ragged_dot`, `glu`, `ragged_dot` and `unpermute` in
    turn. If you need anything else in between, call them yourself.

    Routing is in float32. Matmuls sum in float32 and round their results to the dtype of `x`, or to
    that of the weights if it is wider. The activation, its product and the router's weight are
    computed in float32 and rounded once, and so is the sum over a token's experts. Each gradient
    has the dtype of its argument.

    The residuals are the routing, the permuted rows, the results of the first matmul and the
    activation's, all with their ops' names for `jax.checkpoint`. The experts' outputs are not kept.

    Args:
      x: float [tokens, hidden], 16 bits or more, like the weights.
      logits: float [tokens, experts], usually from a matmul in float32.
      w_gate_up: float [experts, hidden, 2 * width], with the gate's columns first.
      w_down: float [experts, width, hidden].
      top_k: experts per token.
      activation: "swiglu", or "geglu" with the tanh form of GELU.
      capacity: the most pairs an expert takes, first come first served; None for no limit. A pair
        that is dropped contributes nothing to its token. A capacity also bounds the rows made.
      align_size: each group of rows is padded to a multiple of this; `ragged_dot` needs no padding.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.
      **router: other keywords of `route`: score, bias, num_groups, top_groups, normalize, scale.

    Returns:
      `FeedForward`: the tokens, group_counts and num_dropped.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range.
    """
    x = _float_array("x", x, ("tokens", "hidden"))
    logits = arguments.array("logits", logits, ("tokens", "experts"), jnp.floating)
    w_down = _float_array("w_down", w_down, ("experts", "width", "hidden"))
    num_tokens, hidden = x.shape
    num_experts, width = logits.shape[1], w_down.shape[1]
    _check_shape("logits", logits, (num_tokens, num_experts), "the tokens of `x`")
    _check_shape("w_down", w_down, (num_experts, width, hidden), "`x` and `logits`")
    w_gate_up = _float_array("w_gate_up", w_gate_up, ("experts", "hidden", "2 * width"))
    shape = (num_experts, hidden, 2 * width)
    _check_shape("w_gate_up", w_gate_up, shape, "`x`, `logits` and `w_down`")

    weights, experts = route(logits, top_k, implementation=implementation, **router)
    plan = make_plan(
        experts,
        num_experts,
        capacity=capacity,
        num_rows=_num_rows(experts.size, num_experts, capacity, align_size),
        align_size=align_size,
        implementation=implementation,
    )
    rows, row_weights, _ = permute(x, plan, weights=weights, implementation=implementation)
    matmul = functools.partial(
        ragged_dot, group_sizes=plan.group_sizes, implementation=implementation
    )
    rows = glu(
        matmul(rows, w_gate_up), row_weights, activation=activation, implementation=implementation
    )
    rows = matmul(rows, w_down)
    tokens = unpermute(rows, plan, implementation=implementation)
    return FeedForward(tokens.astype(x.dtype), plan.group_counts, plan.num_dropped)


def _num_rows(
    num_pairs: int, num_experts: int, capacity: int | None, align_size: int
) -> int | None:
    """The rows of full experts, if those are fewer than `make_plan` would make by default."""
    if capacity is None:
        return None
    align_size = arguments.integer("align_size", align_size, 1)
    full = -(-arguments.integer("capacity", capacity, 0) // align_size) * align_size
    return min(num_experts * full, arguments.most_rows(num_pairs, num_experts, align_size))


def _float_array(name: str, value: Any, axes: tuple[str, ...]) -> jax.Array:
    value = arguments.array(name, value, axes, jnp.floating)
    arguments.check_wide(name, value, "For 8-bit floats, call `ragged_dot` with scales.")
    return value


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...], of: str) -> None:
    if array.shape != shape:
        raise ArgumentValueError(
            f"Argument `{name}` must have shape {shape} to go with {of}; got {array.shape}."
        )
