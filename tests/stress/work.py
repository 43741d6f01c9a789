"""What the scenarios compute: many small programs whose results are known.

On a GPU the kernels run. Elsewhere `triton_call` is interpreted, the MoE ops run in plain JAX, and
each program is lowered for CUDA too: what it has of Triton is a result that must stay the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import resource
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from tests import cases, kernels
from tests.moe.case import ModelSizes
from tests.moe.cases import SIZED
from triax.devices import is_cuda


def on_gpu():
    return is_cuda(jax.devices()[0])


@triton.jit
def scaled_kernel(x_ptr, out_ptr, n, ALPHA: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * ALPHA, mask=mask)


def scaled(x, alpha):
    """A kernel of its own for each `alpha`."""
    return cases.blockwise(scaled_kernel, x, ALPHA=alpha, BLOCK=128)


def _floats(rng, size):
    return jnp.asarray(rng.standard_normal(size), "float32")


def _add(number, rng):
    x = _floats(rng, 100 + 37 * number)
    return functools.partial(cases.blockwise, kernels.add_kernel, BLOCK=128), (x, x[::-1])


def _tuned(number, rng):
    x = _floats(rng, (1000, 5000)[number % 2])
    return functools.partial(cases.blockwise, kernels.autotuned_add_kernel), (x, x[::-1])


def _case(name, number, rng):
    sizes = ModelSizes(
        3 + number, 32 * (1 + number % 3), 32, 4, 2, ("float32", "bfloat16")[number % 2]
    )
    case = SIZED[name](None, sizes)
    return case.everything, (jax.tree.map(jnp.asarray, case.normal(case.draw(rng), rng)),)


OPS = "feed_forward, by hand", "ragged_dot", "feed_forward"
KINDS = _add, _tuned, *(functools.partial(_case, name) for name in OPS)
COUNT = 20


@functools.cache
def item(number):
    """A function and its arguments."""
    with jax.ensure_compile_time_eval():
        return KINDS[number % len(KINDS)](number // len(KINDS), np.random.default_rng(number))


def results(number):
    """Of a program that is traced and compiled again."""
    function, args = item(number)
    program = jax.jit(lambda *args: function(*args))
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(program(*args))]
    if not on_gpu() and number % len(KINDS) < 2:
        lowered = program.trace(*args).lower(lowering_platforms=("cuda",))
        found.append(np.frombuffer(lowered.as_text().encode(), np.uint8))
    return found


def digest(numbers):
    """Of the bits of some results: the same in every process."""
    found = hashlib.sha256()
    for number in numbers:
        for array in results(number):
            found.update(array.tobytes())
    return found.hexdigest()


class Expected:
    """The results of one thread, before there are others."""

    def __init__(self, count=COUNT):
        self.numbers = range(count)
        self._results = {number: results(number) for number in self.numbers}

    def wrong(self, number):
        """What is wrong with a result that is computed now, or None."""
        found, expected = results(number), self._results[number]
        if all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)):
            return None
        return f"program {number} gave another result"


def disturbed():
    """The clock and the disk of this process, as the scenario that started it wants them."""
    if os.environ.get("STRESS_CLOCK"):
        real, rng = time.time, random.Random(0)
        time.time = lambda: real() + rng.uniform(-10, 10) * 86400
    if size := os.environ.get("STRESS_FILE_BYTES"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))


if __name__ == "__main__":  # a process of its own: which programs, and their digest
    disturbed()
    print("digest", digest(map(int, sys.argv[1].split(","))))
