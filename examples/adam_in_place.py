"""Adam as one kernel that updates parameters and both of its means in place, through Refs.

    python examples/adam_in_place.py

The buffers stay where they are: the kernel reads four values for each element and writes three.
Where the caller donates them, as for `train_step` below, nothing is copied.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
STEPS = 60


@triton.jit
def adam_kernel(
    p_ptr,
    mean_ptr,
    square_ptr,
    gradient_ptr,
    rate_ptr,
    n,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    gradient = tl.load(gradient_ptr + at, mask=mask).to(tl.float32)
    mean = BETA1 * tl.load(mean_ptr + at, mask=mask) + (1 - BETA1) * gradient
    square = BETA2 * tl.load(square_ptr + at, mask=mask) + (1 - BETA2) * gradient * gradient
    p = tl.load(p_ptr + at, mask=mask)
    p -= tl.load(rate_ptr) * mean / (tl.sqrt(square) + EPSILON)
    tl.store(p_ptr + at, p, mask=mask)
    tl.store(mean_ptr + at, mean, mask=mask)
    tl.store(square_ptr + at, square, mask=mask)


def corrected_rate(rate, step):
    """The learning rate, corrected for means that start at zero; `step` counts from 1."""
    return rate * jnp.sqrt(1 - BETA2**step) / (1 - BETA1**step)


def adam(p, mean, square, gradient, rate) -> None:
    """One step of Adam on the Refs `p`, `mean` and `square`, for one parameter."""
    triax.triton_call(
        p,
        mean,
        square,
        gradient,
        jnp.reshape(rate, 1),
        n=gradient.size,
        BETA1=BETA1,
        BETA2=BETA2,
        EPSILON=EPSILON,
        BLOCK=1024,
        kernel=adam_kernel,
        out_type=(),
        grid=triton.cdiv(gradient.size, 1024),
    )


def in_place(p, mean, square, gradient, rate):
    """The same on arrays, which are copied first unless the caller donates them."""
    refs = [jax.new_ref(array) for array in (p, mean, square)]
    adam(*refs, gradient, rate)
    return tuple(ref[...] for ref in refs)


def plain(p, mean, square, gradient, rate):
    mean = BETA1 * mean + (1 - BETA1) * gradient
    square = BETA2 * square + (1 - BETA2) * gradient**2
    return p - rate * mean / (jnp.sqrt(square) + EPSILON), mean, square


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, step, x, y):
    """A step of least squares; what the caller donates is updated where it lies."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(state[0])
    return in_place(*state, gradient, corrected_rate(0.1, step)), loss


def main() -> float:
    size = 1 << 26 if on_gpu() else 3000
    p, gradient = jax.random.normal(jax.random.key(0), (2, size))
    means = jnp.zeros(size), jnp.zeros(size)
    rate = corrected_rate(0.01, 1)
    difference = compare("a step of Adam", in_place, plain, p, *means, gradient, rate, state=3)

    x = jax.random.normal(jax.random.key(1), (64, 8))
    y = x @ jnp.arange(8.0)
    state = jnp.zeros(8), jnp.zeros(8), jnp.zeros(8)
    for step in range(1, STEPS + 1):
        state, loss = train_step(state, step, x, y)
        if step in (1, STEPS):
            print(f"loss of a linear model at step {step}: {loss:.3f}")
    return difference


if __name__ == "__main__":
    main()
