"""RMSNorm and its gradient: what users call, and how the kernels are launched."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

import triax

# Triton is for Linux only, and a gigabyte: images for TPUs or CPUs may leave it out.
if HAS_TRITON := importlib.util.find_spec("triton") is not None:
    import triton

    from triax_example_norms.kernels import rms_norm_bwd_kernel, rms_norm_fwd_kernel

SHARES = 512  # programs of the backward pass; each has a row of d_weight to be summed


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x², last dimension) + eps) * weight; sums are in float32.

    Without Triton it is `rms_norm_reference`.

    Args:
      x: floating point [..., width].
      weight: floating point [width].
      eps: a Python number.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: the shapes do not fit.
    """
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"`weight` must be {x.shape[-1:]}, x's last size; got {weight.shape}.")
    if x.size == 0:
        return x
    if not HAS_TRITON:
        return rms_norm_reference(x, weight, eps)
    return _rms_norm(x.reshape(-1, x.shape[-1]), weight, float(eps)).reshape(x.shape)


def rms_norm_reference(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """`rms_norm` in plain JAX."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return _forward(x, weight, eps)[0]


def _forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    rows, width = x.shape
    out, scale = triax.triton_call(
        x,
        weight,
        width=width,
        eps=eps,
        BLOCK=triton.next_power_of_2(width),
        kernel=rms_norm_fwd_kernel,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=rows,
        # One launch for each element of a batch. Rows in leading dimensions of x are one launch.
        vmap_method="sequential",
    )
    return out, (x, weight, scale)


def _backward(eps: float, kept: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, scale = kept
    rows, width = x.shape
    shares = min(SHARES, rows)
    d_x, d_weight = triax.triton_call(
        x,
        weight,
        scale,
        d_out,
        rows=rows,
        width=width,
        BLOCK=triton.next_power_of_2(width),
        kernel=rms_norm_bwd_kernel,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((shares, width), jnp.float32),
        ),
        grid=shares,
        vmap_method="sequential",
    )
    return d_x, d_weight.sum(0).astype(weight.dtype)


_rms_norm.defvjp(_forward, _backward)
