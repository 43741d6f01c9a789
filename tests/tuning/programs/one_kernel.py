"""One process of a `jax.distributed` job that lowers one kernel and says what it chose.

Whether it can measure depends on the driver that it finds; the worker is the real one.
"""

import json
import os
import sys
import time

import jax

address, count, index, delay_s = sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4])
jax.distributed.initialize(address, count, index)

import numpy as np  # noqa: E402
import triton  # noqa: E402

import triax  # noqa: E402
from tests import kernels  # noqa: E402
from triax import devices  # noqa: E402
from triax.devices import Device  # noqa: E402

devices.for_tuning = lambda *_: Device(0, "Imaginary GPU")
x = np.zeros(1003, np.float32)


def add(x):
    return triax.triton_call(
        x,
        x,
        n=x.size,
        kernel=kernels.autotuned_add_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),),
    )


time.sleep(delay_s)
(call,) = triax.explain(add, x)
print(json.dumps({"source": call.source, "grid": call.grid[0][0]}), flush=True)
sys.stdin.read()  # the first process serves the others: all stay until each was heard
os._exit(0)
