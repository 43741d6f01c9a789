"""One process of a `jax.distributed` job that lowers one kernel and says what it chose.

Whether it can measure depends on the driver that it finds; the worker is the real one.
"""

import json
import os
import sys
import time

import jax


def explain():
    import numpy as np

    import triax
    from tests.cases import blockwise
    from tests.kernels import autotuned_add_kernel

    x = np.zeros(1003, np.float32)
    (call,) = triax.explain(lambda x: blockwise(autotuned_add_kernel, x, x), x)
    return {"source": call.source, "grid": call.grid[0][0]}


def main(address, count, index, delay_s):
    jax.distributed.initialize(address, int(count), int(index))

    from triax import devices

    devices.for_tuning = lambda *_: devices.Device(0, "Imaginary GPU")
    time.sleep(float(delay_s))
    print(json.dumps(explain()), flush=True)
    sys.stdin.read()  # the first process serves the others: all stay until each was heard
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
