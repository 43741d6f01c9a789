"""Softmax over rows, with its gradient: one kernel forward, one backward.

    python examples/softmax.py

A program holds a whole row, so a row is read and written once each way. The backward kernel
computes the softmax again from x: who asks for the gradient alone then writes nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax


@triton.jit
def softmax_of(x):
    e = tl.exp(x - tl.max(x))
    return e / tl.sum(e)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    x = tl.load(x_ptr + at, mask=mask, other=-float("inf")).to(tl.float32)
    tl.store(y_ptr + at, softmax_of(x), mask=mask)


@triton.jit
def softmax_grad_kernel(x_ptr, d_y_ptr, d_x_ptr, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    y = softmax_of(tl.load(x_ptr + at, mask=mask, other=-float("inf")).to(tl.float32))
    d_y = tl.load(d_y_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(d_x_ptr + at, y * (d_y - tl.sum(y * d_y)), mask=mask)


def _call(kernel, *operands: jax.Array) -> jax.Array:
    rows, width = operands[0].shape
    block = triton.next_power_of_2(width)
    return triax.triton_call(
        *operands,
        width=width,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
        kernel=kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), operands[0].dtype),
        grid=rows,
    )


@jax.custom_vjp
def softmax(x: jax.Array) -> jax.Array:
    """The softmax of each row of x, [rows, width], computed in float32."""
    return _call(softmax_kernel, x)


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return softmax(x), x


def _backward(x: jax.Array, d_y: jax.Array) -> tuple[jax.Array]:
    return (_call(softmax_grad_kernel, x, d_y),)


softmax.defvjp(_forward, _backward)


def main() -> float:
    shape = (8192, 4000) if on_gpu() else (30, 100)
    x, weights = jax.random.normal(jax.random.key(0), (2, *shape))
    gradient = lambda f: jax.grad(lambda x: jnp.sum(weights * f(x)))
    return max(
        compare("softmax", softmax, jax.nn.softmax, x),
        compare("its gradient", gradient(softmax), gradient(jax.nn.softmax), x),
    )


if __name__ == "__main__":
    main()
