"""The layers of models, what they read, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import moe


class Inputs(NamedTuple):
    """The arrays of a layer: x [tokens, hidden], logits [tokens, experts], and the weights."""

    x: jax.Array
    logits: jax.Array
    experts: moe.Experts


class Layer(NamedTuple):
    """An MoE layer as one GPU of some has it, with the experts that it holds."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    width: int

    def inputs(self) -> Inputs:
        """What `moe.feed_forward` takes, but for the router."""
        wide = self.experts, self.hidden, 2 * self.width
        return Inputs(
            normal(0, self.tokens, self.hidden),
            normal(1, self.tokens, self.experts, dtype="float32"),
            moe.Experts(
                normal(2, *wide, scale=self.hidden**-0.5),
                normal(3, self.experts, self.width, self.hidden, scale=self.width**-0.5),
            ),
        )


LAYERS = {
    "mixtral-8x7b": Layer(16384, 4096, 8, 2, 14336),
    "deepseek-v3": Layer(8192, 7168, 32, 8, 2048),
    "qwen3-235b": Layer(8192, 4096, 16, 8, 1536),
    "gpt-oss-120b": Layer(16384, 2880, 16, 4, 2880),
    "fine-grained": Layer(16384, 2560, 64, 4, 1280),
    "deepseek-v2-lite": Layer(16384, 2048, 64, 6, 1408),
    "qwen3-30b": Layer(16384, 2048, 128, 8, 768),
}


def normal(
    seed: int, *shape: int, dtype: Any = "bfloat16", scale: float = 1.0, out_shardings: Any = None
) -> jax.Array:
    """Normal numbers times `scale`, the same for a seed and a shape."""
    make = lambda: (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)
    return jax.jit(make, out_shardings=out_shardings)()


def with_gradients(function: Callable[[Any], Any], gradient: Any = None) -> Callable[[Any], Any]:
    """The result and the gradients of all operands.

    They start from the result, which has to be there before, or from what `gradient` makes of it.
    """

    def run(operands: Any) -> Any:
        out, pull = jax.vjp(function, operands)
        return out, pull(gradient(out) if gradient else out)[0]

    return run


def dense_products(given: Inputs, top_k: int) -> Any:
    """A layer's six products, forward and backward, of rows that all have one expert's weights."""
    rows = jnp.repeat(given.x, top_k, axis=0)
    up, down = given.experts.w_gate_up[0], given.experts.w_down[0]
    wide = rows @ up
    narrow = wide[:, : down.shape[0]]
    return wide @ up.T, rows.T @ wide, rows @ down.T, narrow @ down, narrow.T @ rows
