"""A primitive of a user's own that lowers through `triton_call_lowering`."""

import functools

import jax
import jax.numpy as jnp
import triton
from jax.extend.core import Primitive
from jax.interpreters import mlir

import triax
from tests import kernels

sum_and_accumulate_p = Primitive("sum_and_accumulate")
sum_and_accumulate_p.multiple_results = True


@sum_and_accumulate_p.def_impl
def _impl(x, y, **params):
    return jax.jit(functools.partial(sum_and_accumulate_p.bind, **params))(x, y)


@sum_and_accumulate_p.def_abstract_eval
def _abstract_eval(x, y, **_):
    return [jax.core.ShapedArray(x.shape, x.dtype), jax.core.ShapedArray(y.shape, y.dtype)]


def _lowering(ctx, x, y, *, scale, grid_kind, tuning):
    n = ctx.avals_in[0].size
    # The smallest block of the kernel's configs is 64: too many programs do nothing, too few
    # would leave elements out. The callable gets each config's own block.
    grids = {
        "int": triton.cdiv(n, 64),
        "tuple": (triton.cdiv(n, 64), 1),
        "callable": lambda meta: (triton.cdiv(n, meta["BLOCK"]),),
    }
    return triax.triton_call_lowering(
        ctx,
        kernels.sum_and_accumulate_kernel,
        x,
        y,
        grid=grids[grid_kind],
        input_output_aliases={1: 1},
        constexprs={"n": n, "SCALE": scale},
        tuning=tuning,
    )


for _platform in ("cuda", "cpu"):
    mlir.register_lowering(sum_and_accumulate_p, _lowering, platform=_platform)


def sum_and_accumulate(x, y, *, scale=2.0, grid_kind="callable", tuning="off"):
    """(x + y, y + scale * x)"""
    return sum_and_accumulate_p.bind(
        jnp.asarray(x), jnp.asarray(y), scale=scale, grid_kind=grid_kind, tuning=tuning
    )


add_in_blocks_p = Primitive("add_in_blocks")
add_in_blocks_p.multiple_results = True
add_in_blocks_p.def_abstract_eval(lambda x, y, **_: [x])


def _add_in_blocks_lowering(ctx, x, y, **options):
    return triax.triton_call_lowering(
        ctx,
        kernels.autotuned_add_kernel,
        x,
        y,
        grid=lambda meta: (meta["BLOCK"],),
        constexprs={"n": ctx.avals_in[0].size, "BLOCK": 512},
        **options,
    )


mlir.register_lowering(add_in_blocks_p, _add_in_blocks_lowering, platform="cuda")


def add_in_blocks(x, y, **options):
    """x + y, given a block of 512 beside the configs of 64, 256 and 1024; the grid is the block."""
    return add_in_blocks_p.bind(jnp.asarray(x), jnp.asarray(y), **options)


accumulate_p = Primitive("accumulate")
accumulate_p.multiple_results = True
accumulate_p.def_abstract_eval(lambda x, y, **_: [y])
accumulate_p.def_impl(lambda x, y: jax.jit(accumulate_p.bind)(x, y))


def _accumulate_lowering(ctx, x, y):
    n = ctx.avals_in[0].size
    return triax.triton_call_lowering(
        ctx,
        kernels.accumulate_kernel,
        x,
        y,
        grid=triton.cdiv(n, 64),
        input_output_aliases={1: 0},
        constexprs={"n": n, "BLOCK": 64},
    )


for _platform in ("cuda", "cpu"):
    mlir.register_lowering(accumulate_p, _accumulate_lowering, platform=_platform)


def accumulate(x, y):
    """y + x, in place in a kernel that has one pointer for y."""
    (total,) = accumulate_p.bind(jnp.asarray(x), jnp.asarray(y))
    return total
