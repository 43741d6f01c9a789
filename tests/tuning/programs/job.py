"""One process of a `jax.distributed` job that tunes with random times on the CPU."""

import json
import os
import random
import sys
import time

import jax

address, count, index, seed, dies = sys.argv[1], *map(int, sys.argv[2:6])
jax.distributed.initialize(address, count, index)

import numpy as np  # noqa: E402

import triax  # noqa: E402
from tests.cases import blockwise  # noqa: E402
from tests.kernels import autotuned_add_kernel  # noqa: E402
from triax import devices  # noqa: E402
from triax.compat import jax_private  # noqa: E402
from triax.devices import Device  # noqa: E402
from triax.tuning import agree, measure  # noqa: E402
from triax.tuning.store import Timing  # noqa: E402
from triax.tuning.worker import client  # noqa: E402

rng = random.Random(seed * 100 + index)


def measured(job, device, progress, timings):
    if dies == index:
        service.set_first("test/dies", "now", 1000)
        os._exit(9)  # in the middle of measuring, before anything is published
    time.sleep(rng.random() / 5)
    timings |= {c.label: Timing(c.label, rng.random(), 3) for c in job.candidates}


measure.measure = measured
client.start = lambda device: None
measure.unavailable = lambda: None
measure.drain = lambda index: None
devices.for_tuning = lambda *_: Device(0, "Imaginary GPU")

agree._CLAIMED_S = 5.0
jax.devices()  # each process waits for all others to come here
service = jax_private.key_value_client()
if dies not in (-1, index):
    while service.find("test/dies") is None:  # it is to be the one that the others wait for
        time.sleep(0.05)
sizes = [64, 128, 192, 256, 320, 384]
rng.shuffle(sizes)
found = {}
for size in sizes:
    x = np.zeros(size, np.float32)
    (call,) = triax.explain(lambda x: blockwise(autotuned_add_kernel, x, x), x)
    found[size] = call.config[0]
print(json.dumps(found), flush=True)
# The first process serves the others: all stay until the test has heard from each. Then out
# without the shutdown barrier, which would wait for a process that died on purpose.
sys.stdin.read()
os._exit(0)
