"""Exports a decoder's step, for a GPU that need not be here.

    TRIAX_CUDA_ARCH=90 python examples/serving/export_decoder.py FOLDER step.bin weights.bin

FOLDER is a checkpoint as `examples/decoder.py` takes it. The step takes the weights' arrays, the
cache and each sequence's last token, and returns the cache and the next tokens.
`serve_decoder.py` runs it with the weights, without Triton and Triax. For `--devices 2` the experts
are spread over two; to export where there are fewer, set
XLA_FLAGS=--xla_force_host_platform_device_count=2 and JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import triax
from triax import moe

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import arrays
import decoder


def export(
    config: decoder.Config, params: Any, batch: int, length: int, platforms: Sequence[str]
) -> jax.export.Exported:
    """Exports the step for `batch` sequences of at most `length` tokens.

    `params` may be `ShapeDtypeStruct`s. The step takes ``jax.tree.leaves(params)``: a process
    without Triax has no `moe.Experts`.
    """
    leaves, structure = jax.tree.flatten(params)
    shardings = None
    if config.mesh is not None:
        everywhere = NamedSharding(config.mesh, PartitionSpec())
        shardings = [leaf.sharding for leaf in leaves], everywhere, everywhere
    cache = jax.eval_shape(lambda: decoder.make_cache(config, params, batch, length))

    def step(leaves: Any, cache: decoder.Cache, tokens: jax.Array) -> decoder.Result:
        return decoder.step(config, jax.tree.unflatten(structure, leaves), cache, tokens)

    return jax.export.export(
        jax.jit(step, in_shardings=shardings),
        platforms=platforms,
        disabled_checks=triax.export_checks(),
    )(leaves, cache, jax.ShapeDtypeStruct((batch,), jnp.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("step", type=Path, help="the file to write the step to")
    parser.add_argument("weights", type=Path, nargs="?", help="the file for the weights")
    parser.add_argument("--devices", type=int, default=1, help="that the experts are spread over")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096, help="the most tokens of a sequence")
    parser.add_argument("--platforms", nargs="+", default=["cuda", "cpu"])
    args = parser.parse_args()
    mesh = None
    if args.devices > 1:
        mesh = Mesh(np.array(jax.devices()[: args.devices]), ("expert",))
    config, params = decoder.load(moe.Checkpoint(args.folder), mesh=mesh)
    data = export(config, params, args.batch, args.length, args.platforms).serialize()
    args.step.write_bytes(data)
    print(f"{args.step}: {len(data):,} bytes")
    if args.weights:
        arrays.save(args.weights, jax.tree.leaves(params))
        print(f"{args.weights}: {args.weights.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
