"""What the examples end with: how far they are from plain JAX and, on a GPU, how long both take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CALLS = 20  # at a time, because starting one takes the host longer than many kernels run
COMPARED: list[dict[str, Any]] = []  # what `compare` has found in this process


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def compare(
    name: str, ours: Callable[..., Any], plain: Callable[..., Any], *args: Any, state: int = 0
) -> float:
    """Prints the largest difference of the results, of the largest value, and returns it.

    The first `state` arguments are what the functions return anew: they are donated, and each call
    that is timed gets the results of the one before, as in a training loop.
    """
    ours, plain = (jax.jit(f, donate_argnums=range(state)) for f in (ours, plain))
    fresh = lambda: [*map(jnp.copy, args[:state]), *args[state:]]
    results = (jax.tree.leaves(function(*fresh())) for function in (ours, plain))
    difference = max(_difference(*pair) for pair in zip(*results, strict=True))
    print(f"{name}: differs from plain JAX by at most {difference:.1e}")
    found = {"name": name, "difference": difference}
    if on_gpu():
        found["ours_us"], found["plain_us"] = (_time_us(f, fresh(), state) for f in (ours, plain))
        print("  {ours_us:.1f} µs, plain JAX {plain_us:.1f} µs".format_map(found))
    COMPARED.append(found)
    return difference


def _difference(actual: jax.Array, expected: jax.Array) -> float:
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.max(jnp.abs(actual - expected)) / jnp.max(jnp.abs(expected)))


def _time_us(function: Callable[..., Any], args: list[Any], state: int) -> float:
    """The median time of a call, by the host's clock; `triax.benchmark` takes more care."""

    def once() -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            result = function(*args)
            if state:
                args[:state] = result
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / CALLS * 1e6

    once()
    return statistics.median(once() for _ in range(10))
