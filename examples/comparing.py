"""What the examples end with: how far they are from plain JAX and, on a GPU, how long both take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CALLS = 20  # at a time, because starting one takes the host longer than many kernels run


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def compare(name: str, ours: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> float:
    """Prints the largest difference of the results, of the largest value, and returns it."""
    ours, plain = jax.jit(ours), jax.jit(plain)
    pairs = zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(plain(*args)), strict=True)
    difference = max(_difference(actual, expected) for actual, expected in pairs)
    print(f"{name}: differs from plain JAX by at most {difference:.1e}")
    if on_gpu():
        print(f"  {_time_us(ours, *args):.1f} µs, plain JAX {_time_us(plain, *args):.1f} µs")
    return difference


def _difference(actual: jax.Array, expected: jax.Array) -> float:
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.max(jnp.abs(actual - expected)) / jnp.max(jnp.abs(expected)))


def _time_us(function: Callable[..., Any], *args: Any) -> float:
    """The median time of a call, by the host's clock; `triax bench` takes more care."""

    def once() -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            result = function(*args)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / CALLS * 1e6

    once()
    return statistics.median(once() for _ in range(10))
