"""Loads an exported decode step and runs it, with JAX and flatbuffers alone.

    python examples/serving/serve.py exported/decode_step_128.bin

Neither Triton nor Triax is imported, and no file is written. Prints how long each part of the start
took, as JSON. Its weights are random numbers, where a server loads its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

DONATED = 1  # the state, whose memory the step may use again


def main() -> None:
    seconds, before = {}, time.perf_counter()

    def took(name: str) -> None:
        nonlocal before
        seconds[name] = round(time.perf_counter() - before, 4)
        before = time.perf_counter()

    device = jax.devices()[0]
    took("find the device")
    exported = jax.export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    args, _ = jax.tree.unflatten(exported.in_tree, types)
    took("deserialize")
    # What was donated when the program was exported is not donated by `call`: it is said here.
    step = jax.jit(exported.call, donate_argnums=DONATED).lower(*args).compile()
    took("compile")
    random = np.random.default_rng(0)
    fill = lambda a: jnp.asarray(random.standard_normal(a.shape, np.float32) / 16, a.dtype)
    params, state, x = jax.block_until_ready(jax.tree.map(fill, args))
    took("weights")
    # A server is ready when it has run each step once: on a GPU that loads the kernels.
    for name in ("first step", "second step"):
        state, x = jax.block_until_ready(step(params, state, x))
        took(name)
    begins = jax.tree.leaves(state)[0].ravel()[:4].tolist()
    print(json.dumps({"device": device.device_kind, "seconds": seconds, "state begins": begins}))


if __name__ == "__main__":
    main()
