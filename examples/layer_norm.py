"""Layer norm over rows and its gradients.

    python examples/layer_norm.py

The kernels do what goes over a row. The gradients of weight and bias go over all rows: a program
adds up its share of them, and plain JAX sums the shares, so that no atomics change the order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax

SHARES = 128  # programs of the backward pass


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, scale_ptr, width, eps, BLOCK: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(x) / width
    centred = tl.where(mask, x - mean, 0)
    scale = tl.rsqrt(tl.sum(centred * centred) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, centred * scale * weight + bias, mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(scale_ptr + row, scale)


@triton.jit
def backward_kernel(
    x_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    d_out_ptr,
    d_x_ptr,
    d_weight_ptr,
    d_bias_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
):
    share, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(share, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        scale = tl.load(scale_ptr + row)
        x = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
        normal = tl.where(mask, (x - tl.load(mean_ptr + row)) * scale, 0)
        d_out = tl.load(d_out_ptr + at, mask=mask, other=0).to(tl.float32)
        d_normal = d_out * weight
        inner = normal * (tl.sum(d_normal * normal) / width) + tl.sum(d_normal) / width
        tl.store(d_x_ptr + at, (d_normal - inner) * scale, mask=mask)
        d_weight += d_out * normal
        d_bias += d_out
    tl.store(d_weight_ptr + share * width + columns, d_weight, mask=mask)
    tl.store(d_bias_ptr + share * width + columns, d_bias, mask=mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Each row of x, [rows, width], with mean 0 and variance 1, times weight plus bias [width]."""
    return _forward(x, weight, bias, eps)[0]


def _forward(x, weight, bias, eps):
    rows, width = x.shape
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    out, mean, scale = triax.triton_call(
        x,
        weight,
        bias,
        width=width,
        eps=eps,
        BLOCK=triton.next_power_of_2(width),
        kernel=forward_kernel,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), statistic, statistic),
        grid=rows,
    )
    return out, (x, weight, mean, scale)


def _backward(eps, kept, d_out):
    rows, width = d_out.shape
    shares = min(SHARES, rows)
    partial = jax.ShapeDtypeStruct((shares, width), jnp.float32)
    d_x, d_weight, d_bias = triax.triton_call(
        *kept,
        d_out,
        rows=rows,
        width=width,
        BLOCK=triton.next_power_of_2(width),
        kernel=backward_kernel,
        out_type=(jax.ShapeDtypeStruct(d_out.shape, d_out.dtype), partial, partial),
        grid=shares,
    )
    dtype = kept[1].dtype
    return d_x, d_weight.sum(0).astype(dtype), d_bias.sum(0).astype(dtype)


layer_norm.defvjp(_forward, _backward)


def plain(x, weight, bias, eps=1e-5):
    centred = x - x.mean(1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + eps) * weight + bias


def main() -> float:
    rows, width = (16384, 4096) if on_gpu() else (20, 100)
    keys = jax.random.split(jax.random.key(0), 4)
    x, d_out = jax.random.normal(keys[0], (2, rows, width))
    arguments = x, jax.random.normal(keys[1], (width,)), jax.random.normal(keys[2], (width,))
    gradient = lambda f: lambda *args: jax.vjp(f, *args)[1](d_out)
    return max(
        compare("layer norm", layer_norm, plain, *arguments),
        compare("its gradients", gradient(layer_norm), gradient(plain), *arguments),
    )


if __name__ == "__main__":
    main()
