"""Exports a decode step of two MoE layers, for a GPU that need not be here.

    TRIAX_CUDA_ARCH=90 TRIAX_GPU="NVIDIA H200" python examples/serving/export_step.py exported

Writes one file for each number of tokens, for CUDA and for the CPU. `serve.py` runs them without
Triton and Triax. A program is compiled for fixed sizes: a server pads its tokens to the next one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

import triax
from triax import moe

Params = dict[str, Any]
LAYERS, ROUTER = 2, moe.Router(8, normalize=True)


def parameters(hidden: int, width: int, experts: int) -> Params:
    """What the weights are: shapes and dtypes, which is all that compiling needs."""
    array = jax.ShapeDtypeStruct
    return {
        "router": array((LAYERS, hidden, experts), jnp.float32),
        "gate_up": array((LAYERS, experts, hidden, 2 * width), jnp.bfloat16),
        "down": array((LAYERS, experts, width, hidden), jnp.bfloat16),
    }


def decode_step(params: Params, total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step for one token of each sequence.

    Args:
      params: the weights, stacked over layers.
      total: float32 [tokens, hidden], the sum of all steps' results, which stands for a model's
        state from step to step, such as keys and values.
      x: [tokens, hidden].

    Returns:
      The new total, and [tokens, hidden]. Arrays alone (and tuples, lists and dictionaries of
      them) can be loaded where Triax is not: `moe.feed_forward` returns more.
    """

    def layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
        normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        logits = normal.astype(jnp.float32) @ params["router"]
        experts = moe.Experts(params["gate_up"], params["down"])
        out = moe.feed_forward(normal, logits, experts, ROUTER)
        return x + out.tokens, None

    x, _ = jax.lax.scan(layer, x, params)
    return total + x, x


def export(tokens: int, params: Params, platforms: tuple[str, ...]) -> jax.export.Exported:
    """The step for a number of tokens, compiled by Triton, for XLA to compile where it runs."""
    hidden = params["router"].shape[1]
    return jax.export.export(
        jax.jit(decode_step), platforms=platforms, disabled_checks=triax.export_checks()
    )(
        params,
        jax.ShapeDtypeStruct((tokens, hidden), jnp.float32),
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--platforms", nargs="+", default=["cuda", "cpu"])
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    params = parameters(args.hidden, args.width, args.experts)
    for tokens in args.tokens:
        data = export(tokens, params, tuple(args.platforms)).serialize()
        path = args.folder / f"decode_step_{tokens}.bin"
        path.write_bytes(data)
        print(f"{path}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
