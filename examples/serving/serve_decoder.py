"""Continues a prompt by a decoder's exported step and its weights, with JAX and flatbuffers alone.

    python examples/serving/serve_decoder.py step.bin weights.bin --prompt 1 2 3 --steps 16

`export_decoder.py` wrote the files. Neither Triton nor Triax is imported, and no file is written.
The step runs on as many devices as it was exported for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import arrays

CACHE = 1  # the argument whose memory the step may use again


def load(step: Path, weights: Path) -> tuple[Any, list[Any], Any]:
    """The step, its weights on the devices, and the types of cache and tokens."""
    exported = jax.export.deserialize(bytearray(step.read_bytes()))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: exported.nr_devices]), ("expert",))
    shardings = exported.in_shardings_jax(mesh)
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    (leaves, cache, tokens), _ = jax.tree.unflatten(exported.in_tree, types)
    placed = []
    for wanted, array in zip(leaves, arrays.load(weights), strict=True):
        if (wanted.shape, wanted.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"The step wants {wanted}, and the file has {array.dtype}{array.shape}."
            )
        placed.append(jax.device_put(array, wanted.sharding))
    # What was donated when the program was exported is not donated by `call`: it is said here.
    return jax.jit(exported.call, donate_argnums=CACHE), placed, (cache, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--prompt", type=int, nargs="+", default=[*range(32)])
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    step, weights, (cache, tokens) = load(args.step, args.weights)
    batch = tokens.shape[0]
    empty = lambda of: jax.device_put(jnp.zeros(of.shape, of.dtype), of.sharding)
    state = jax.tree.map(empty, cache)
    put = lambda values: jax.device_put(jnp.asarray(values, tokens.dtype), tokens.sharding)
    for token in args.prompt:  # as in `decoder.step`: one token of each sequence
        state, following = step(weights, state, put(np.full(batch, token)))
    found = [following]
    for _ in range(args.steps - 1):
        state, following = step(weights, state, put(found[-1]))
        found.append(following)
    print("next tokens:", *np.stack(found, axis=1)[0])


if __name__ == "__main__":
    main()
