"""Causal attention that never writes its scores to memory: flash attention, forward and backward.

    python examples/flash_attention.py

A program holds a block of queries and goes over the keys before them. It keeps a running maximum
and sum for the softmax, and corrects what it has summed so far whenever the maximum grows. The
backward pass computes the scores again, from the logarithm of each query's sum: once for blocks of
queries, once for blocks of keys, so that every result is written by one program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax

CONFIGS = [
    triton.Config({"BLOCK_Q": q, "BLOCK_K": k}, num_warps=warps, num_stages=3)
    for q, k, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
]
BLOCK = 64  # of the backward pass


@triton.jit
def load_rows(ptr, rows, length, DIM: tl.constexpr):
    """Rows of an array [length, DIM], zeros past its end."""
    at = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(ptr + at, mask=rows[:, None] < length, other=0)


@triton.jit
def store_rows(ptr, rows, values, length, DIM: tl.constexpr):
    at = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=rows[:, None] < length)


@triton.autotune(CONFIGS, key=["length", "DIM"])
@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_sum_ptr,
    length,
    scale,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    base = head * length * DIM
    first = tl.program_id(0) * BLOCK_Q
    queries = first + tl.arange(0, BLOCK_Q)
    q = load_rows(q_ptr + base, queries, length, DIM)
    largest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for start in range(0, min(first + BLOCK_Q, length), BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        scores = tl.dot(q, tl.trans(load_rows(k_ptr + base, keys, length, DIM))) * scale
        scores = tl.where(queries[:, None] >= keys[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - now[:, None])
        correction = tl.exp(largest - now)
        total = total * correction + tl.sum(weights, axis=1)
        v = load_rows(v_ptr + base, keys, length, DIM)
        out = tl.dot(weights.to(v.dtype), v, out * correction[:, None])
        largest = now
    store_rows(out_ptr + base, queries, out / total[:, None], length, DIM)
    log_sum = largest + tl.log(total)
    tl.store(log_sum_ptr + head * length + queries, log_sum, mask=queries < length)


@triton.jit
def weights_and_their_gradient(q, k, v, d_out, log_sum, delta, queries, keys, scale):
    """The softmax's weights [queries, keys], and the gradient of the scores before scaling."""
    weights = tl.exp(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
    weights = tl.where(queries[:, None] >= keys[None, :], weights, 0)
    d_weights = tl.dot(d_out, tl.trans(v))
    return weights, weights * (d_weights - delta[:, None]) * scale


@triton.jit
def queries_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    log_sum_ptr,
    delta_ptr,
    d_q_ptr,
    length,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    base = head * length * DIM
    first = tl.program_id(0) * BLOCK
    queries = first + tl.arange(0, BLOCK)
    q = load_rows(q_ptr + base, queries, length, DIM)
    d_out = load_rows(d_out_ptr + base, queries, length, DIM)
    log_sum = tl.load(log_sum_ptr + head * length + queries, mask=queries < length, other=0)
    delta = tl.load(delta_ptr + head * length + queries, mask=queries < length, other=0)
    d_q = tl.zeros((BLOCK, DIM), tl.float32)
    for start in range(0, min(first + BLOCK, length), BLOCK):
        keys = start + tl.arange(0, BLOCK)
        k = load_rows(k_ptr + base, keys, length, DIM)
        v = load_rows(v_ptr + base, keys, length, DIM)
        _, d_scores = weights_and_their_gradient(
            q, k, v, d_out, log_sum, delta, queries, keys, scale
        )
        d_q = tl.dot(d_scores.to(k.dtype), k, d_q)
    store_rows(d_q_ptr + base, queries, d_q, length, DIM)


@triton.jit
def keys_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    log_sum_ptr,
    delta_ptr,
    d_k_ptr,
    d_v_ptr,
    length,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    base = head * length * DIM
    first = tl.program_id(0) * BLOCK
    keys = first + tl.arange(0, BLOCK)
    k = load_rows(k_ptr + base, keys, length, DIM)
    v = load_rows(v_ptr + base, keys, length, DIM)
    d_k = tl.zeros((BLOCK, DIM), tl.float32)
    d_v = tl.zeros((BLOCK, DIM), tl.float32)
    for start in range(first, length, BLOCK):
        queries = start + tl.arange(0, BLOCK)
        mask = queries < length
        q = load_rows(q_ptr + base, queries, length, DIM)
        d_out = load_rows(d_out_ptr + base, queries, length, DIM)
        log_sum = tl.load(log_sum_ptr + head * length + queries, mask=mask, other=0)
        delta = tl.load(delta_ptr + head * length + queries, mask=mask, other=0)
        weights, d_scores = weights_and_their_gradient(
            q, k, v, d_out, log_sum, delta, queries, keys, scale
        )
        d_v = tl.dot(tl.trans(weights.to(v.dtype)), d_out, d_v)
        d_k = tl.dot(tl.trans(d_scores.to(q.dtype)), q, d_k)
    store_rows(d_k_ptr + base, keys, d_k, length, DIM)
    store_rows(d_v_ptr + base, keys, d_v, length, DIM)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [heads, length, dim] arrays; dim is a power of two, 16 or more."""
    return _forward(q, k, v)[0]


def _forward(q, k, v):
    heads, length, dim = q.shape
    out, log_sum = triax.triton_call(
        q,
        k,
        v,
        length=length,
        scale=dim**-0.5,
        DIM=dim,
        kernel=forward_kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, length), jnp.float32),
        ),
        grid=lambda meta: (triton.cdiv(length, meta["BLOCK_Q"]), heads),
    )
    return out, (q, k, v, out, log_sum)


def _backward(kept, d_out):
    q, k, v, out, log_sum = kept
    heads, length, dim = q.shape
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=2)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)

    def call(kernel, out_type):
        return triax.triton_call(
            q,
            k,
            v,
            d_out,
            log_sum,
            delta,
            length=length,
            scale=dim**-0.5,
            DIM=dim,
            BLOCK=BLOCK,
            kernel=kernel,
            out_type=out_type,
            grid=(triton.cdiv(length, BLOCK), heads),
        )

    return call(queries_grad_kernel, like), *call(keys_grad_kernel, (like, like))


attention.defvjp(_forward, _backward)


def plain(q, k, v):
    length = q.shape[1]
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tri(length, dtype=bool), scores * q.shape[2] ** -0.5, -jnp.inf)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores).astype(v.dtype), v)


def main() -> float:
    shape, dtype = ((16, 4096, 64), jnp.bfloat16) if on_gpu() else ((2, 100, 16), jnp.float32)
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, *shape), dtype)
    gradient = lambda f: lambda *args: jax.vjp(f, *args)[1](d_out)
    return max(
        compare("attention", attention, plain, q, k, v),
        compare("its gradients", gradient(attention), gradient(plain), q, k, v),
    )


if __name__ == "__main__":
    main()
