"""`feed_forward`: checks its arguments and runs the layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.activations.reference import Activation
from triax.moe.layer import parts
from triax.moe.layer.parts import FeedForward, Options
from triax.moe.router.api import Score
from triax.moe.shared import arguments
from triax.moe.shared.implementation import Implementation


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
    score: Score = "softmax",
    bias: Any = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    normalize: bool = False,
    scale: float = 1.0,
    implementation: Implementation | None = None,
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

    Routing is in float32. Matmuls sum in float32 and round their results to the dtype of `x`. The
    activation, its product and the router's weight are computed in float32 and rounded once, and so
    is the sum over a token's experts. Each gradient has the dtype of its argument.

    The residuals are the routing, the permuted rows, the results of the first matmul and the
    activation's, all with their ops' names for `jax.checkpoint`. The experts' outputs are not kept.

    Args:
      x: float [tokens, hidden], 16 bits or more.
      logits: float [tokens, experts], usually from a matmul in float32.
      w_gate_up: [experts, hidden, 2 * width] in the dtype of `x`, with the gate's columns first.
      w_down: [experts, width, hidden] in the dtype of `x`.
      top_k: experts per token.
      activation: "swiglu", or "geglu" with the tanh form of GELU.
      capacity: the most pairs an expert takes, first come first served; None for no limit. A pair
        that is dropped contributes nothing to its token. A capacity also bounds the rows made.
      align_size: each group of rows is padded to a multiple of this; `ragged_dot` needs no padding.
      score, bias, num_groups, top_groups, normalize, scale: how experts are chosen and weighted, as
        in `route`.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      `FeedForward`: the tokens, group_counts and num_dropped.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range.
    """
    x = _float_array("x", x, ("tokens", "hidden"))
    logits = arguments.array("logits", logits, ("tokens", "experts"), jnp.floating)
    w_down = _float_array("w_down", w_down, ("experts", "width", "hidden"))
    messages.check_sizes_known("x", x.shape)
    num_tokens, hidden = x.shape
    num_experts = logits.shape[1]
    width = w_down.shape[1 if w_down.shape[2] == hidden else 2]
    _check_shape("logits", logits, (num_tokens, num_experts), "the tokens of `x`")
    _check_shape("w_down", w_down, (num_experts, width, hidden), "`x` and `logits`")
    w_gate_up = _float_array("w_gate_up", w_gate_up, ("experts", "hidden", "2 * width"))
    shape = (num_experts, hidden, 2 * width)
    _check_shape("w_gate_up", w_gate_up, shape, "`x`, `logits` and `w_down`")
    _check_dtypes(x, w_gate_up=w_gate_up, w_down=w_down)
    router = {
        "score": score,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "normalize": normalize,
        "scale": scale,
    }
    options = Options(top_k, activation, capacity, align_size, implementation, router)
    return parts.feed_forward(options, x, logits, w_gate_up, w_down, bias)


def _float_array(name: str, value: Any, axes: tuple[str, ...]) -> jax.Array:
    value = arguments.array(name, value, axes, jnp.floating)
    arguments.check_wide(name, value, "For 8-bit floats, call `ragged_dot` with scales.")
    return value


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...], of: str) -> None:
    if array.shape != shape:
        swapped = len(shape) == 3 and array.shape == (shape[0], shape[2], shape[1])
        raise ArgumentValueError(
            f"Argument `{name}` must have shape {shape} to go with {of}; got {array.shape}."
            + (arguments.transpose_remedy(name) if swapped else "")
        )


def _check_dtypes(x: jax.Array, **weights: jax.Array) -> None:
    for name, array in weights.items():
        if array.dtype != x.dtype:
            raise ArgumentTypeError(
                f"Argument `{name}` must have the dtype of `x`, {x.dtype}; got {array.dtype}. Cast "
                f"it, `{name}.astype(x.dtype)`, and its gradient still has its own dtype; or cast "
                "`x`, which makes the matmuls many times slower if that is float32."
            )
