"""An op of one's own, complete: a kernel, `vmap`, its gradient, and tests.

    python examples/own_op.py

The op is rotary position embedding: pairs of features are turned by an angle that grows with the
position. Turning is linear, and its transpose turns back, so one kernel is the gradient as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax
from triax import testing

BASE = 10_000.0


# 1. The kernel: a program turns all heads of one token, which have their angles in common; in each
# the first half of features against the second.
@triton.jit
def rotate_kernel(
    x_ptr,
    angle_ptr,
    out_ptr,
    heads,
    half,
    SIGN: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)[None, :]
    angle = tl.load(angle_ptr + token * half + columns, mask=columns < half) * SIGN
    cos, sin = tl.cos(angle), tl.sin(angle)
    rows = tl.arange(0, HEADS)[:, None]
    mask = (rows < heads) & (columns < half)
    left = (token * heads + rows) * 2 * half + columns
    right = left + half
    x, y = tl.load(x_ptr + left, mask=mask), tl.load(x_ptr + right, mask=mask)
    tl.store(out_ptr + left, x * cos - y * sin, mask=mask)
    tl.store(out_ptr + right, x * sin + y * cos, mask=mask)


# 2. The call. In front of heads and features there may be any number of dimensions.
def call(x: jax.Array, angles: jax.Array, sign: int) -> jax.Array:
    heads, dim = x.shape[-2:]
    return triax.triton_call(
        x,
        angles,
        heads=heads,
        half=dim // 2,
        SIGN=sign,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(dim // 2),
        num_warps=4,
        kernel=rotate_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=x.size // (heads * dim),
    )


# 3. vmap: a batch is one more dimension in front, and still one launch.
def with_vmap(sign: int):
    @jax.custom_batching.custom_vmap
    def turn(x, angles):
        return call(x, angles, sign)

    @turn.def_vmap
    def _(size, batched, x, angles):
        x, angles = (
            array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            for array, is_batched in zip((x, angles), batched, strict=True)
        )
        return turn(x, angles), True

    return turn


turn, turn_back = with_vmap(1), with_vmap(-1)


# 4. The gradient: back by the same angles, which have none themselves.
@jax.custom_vjp
def rotate(x, angles):
    return turn(x, angles)


rotate.defvjp(
    lambda x, angles: (turn(x, angles), angles),
    lambda angles, d_out: (turn_back(d_out, angles), jnp.zeros_like(angles)),
)


# 5. What users call: checks, and the documentation.
def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of x, float32 [tokens, heads, dim], at int positions [tokens]."""
    if x.ndim != 3 or x.shape[2] % 2 or positions.shape != x.shape[:1]:
        raise ValueError(
            f"`x` must be [tokens, heads, an even number], `positions` [tokens]; got {x.shape} "
            f"and {positions.shape}."
        )
    return rotate(x, angles_at(positions, x.shape[2]))


def angles_at(positions: jax.Array, dim: int) -> jax.Array:
    half = dim // 2
    return positions[..., None] * BASE ** (-jnp.arange(half) / half)


def plain(x: jax.Array, positions: jax.Array) -> jax.Array:
    angle = angles_at(positions, x.shape[-1])[..., None, :]
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


# 6. Tests, which on a CPU also look for races and for what nobody wrote.
def main() -> float:
    tokens, heads, dim = (8192, 32, 128) if on_gpu() else (7, 3, 10)
    x, d_out = jax.random.normal(jax.random.key(0), (2, 2, tokens, heads, dim))
    positions = jnp.arange(tokens)
    with testing.checked():
        there = jax.jit(rope)(x[0], positions)
    back = jax.jit(turn_back)(there, angles_at(positions, dim))
    testing.assert_close(back, x[0], terms=4)

    batched = jax.vmap(rope, in_axes=(0, None))
    gradient = lambda f: lambda x: jax.vjp(lambda x: f(x, positions), x)[1](d_out)[0]
    return max(
        compare("rope over a batch", batched, plain, x, positions),
        compare("its gradient", gradient(batched), gradient(plain), x),
    )


if __name__ == "__main__":
    main()
