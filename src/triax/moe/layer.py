"""The whole layer as one function: a composition of the package's ops, with no kernels of its own.

Tokens, their router logits and the experts' weights come in; what the experts made of each token
comes out, with the counts that losses and logs need. Gradients are those of the ops.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.glu.api import glu
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.api import make_plan
from triax.moe.ragged_dot.api import ragged_dot
from triax.moe.router.api import route
from triax.moe.shared import arguments


class FeedForward(NamedTuple):
    """What `feed_forward` returns.

    Attributes:
      tokens: [tokens, hidden], in the dtype of `x`.
      group_counts: int32 [experts], the pairs routed to each expert, those dropped included: what
        `load_balancing_loss` wants.
      num_dropped: int32 [], the pairs that found their expert full.
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
    activation: str = "swiglu",
    capacity: int | None = None,
    align_size: int = 1,
    implementation: str | None = None,
    **router: Any,
) -> FeedForward:
    """Sends each token through its best experts, gated feed-forward networks, and sums them up.

        out = moe.feed_forward(x, x @ w_router, w_gate_up, w_down, top_k=8, normalize=True)
        out.tokens  # [tokens, hidden]
        loss = task_loss + 0.01 * moe.load_balancing_loss(logits, out.group_counts)

    ``tokens[t] = sum over k of weights[t, k] * ffn[experts[t, k]](x[t])``, where `route` gives
    weights and experts, and expert e is

        ffn[e](x) = (activation(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]

    This is `route`, `make_plan`, `permute`, `ragged_dot`, `glu`, `ragged_dot` and `unpermute`, one
    after the other: for anything else between them, call them yourself.

    Routing is in float32. Matmuls sum in float32 and their results are rounded to the dtype of
    `x`; where the weights' is wider, both are multiplied in that. The activation, its product and
    the router's weight are computed in float32 and rounded once, and so is the sum over a token's
    experts. Each gradient has the dtype of what it belongs to.

    For its gradient it keeps the permuted rows, the results of the first matmul and what the
    activation makes of them, and the routing, all under their ops' names for `jax.checkpoint`; not
    the rows that come out of the experts.

    Args:
      x: float [tokens, hidden], of 16 bits or more, as the weights.
      logits: float [tokens, experts]. Their matmul is usually in float32.
      w_gate_up: float [experts, hidden, 2 * width], the gate's columns first.
      w_down: float [experts, width, hidden].
      top_k: experts per token.
      activation: "swiglu", or "geglu" with the tanh form of GELU.
      capacity: the most pairs an expert takes, its first ones; None for no bound. What is over
        adds nothing to its token. With a capacity, no more rows are made than all experts take.
      align_size: what each group of rows is filled up to a multiple of; `ragged_dot` needs none.
      implementation: None picks by the platform the program is lowered for: the Triton
        kernels on CUDA, plain JAX elsewhere. "triton", "interpret" (the kernels in
        Triton's interpreter, on the CPU) and "xla" insist.
      **router: further keywords of `route`: score, bias, num_groups, top_groups, normalize, scale.

    Returns:
      `FeedForward`: the tokens, group_counts and num_dropped.

    Raises:
      ArgumentTypeError: an argument is not of the type told here.
      ArgumentValueError: an argument has the wrong shape or is out of its range.
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
    """The rows that full experts take, where that is fewer than `make_plan` would make."""
    if capacity is None:
        return None
    align_size = arguments.integer("align_size", align_size, 1)
    full = -(-arguments.integer("capacity", capacity, 0) // align_size) * align_size
    most = (num_pairs + num_experts * (align_size - 1)) // align_size * align_size
    return min(num_experts * full, most)


def _float_array(name: str, value: Any, axes: tuple[str, ...]) -> jax.Array:
    value = arguments.array(name, value, axes, jnp.floating)
    if value.dtype.itemsize < 2:
        raise ArgumentTypeError(
            f"Argument `{name}` must be a float of 16 bits or more; got {value.dtype}. For 8 bits, "
            "call `ragged_dot` with scales."
        )
    return value


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...], of: str) -> None:
    if array.shape != shape:
        raise ArgumentValueError(
            f"Argument `{name}` must have shape {shape} to go with {of}; got {array.shape}."
        )
