"""Primitives of a user's own that lower through `triton_call_lowering`."""

import functools

import jax
import triton
from jax.extend.core import Primitive
from jax.interpreters import mlir

import triax
from tests import kernels


def own(rule, results=lambda *avals: [*avals]):
    """A function of arrays that binds a primitive with this lowering rule, on the CPU and for CUDA.

    `results` gives the types of its results from those of its operands.
    """
    primitive = Primitive(rule.__name__)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **how: jax.jit(functools.partial(primitive.bind, **how))(*xs))
    primitive.def_abstract_eval(lambda *avals, **_: results(*avals))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive.bind


def _sum_and_accumulate(ctx, x, y, *, scale, grid_kind, tuning):
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


_bind_sum_and_accumulate = own(_sum_and_accumulate)


def sum_and_accumulate(x, y, *, scale=2.0, grid_kind="callable", tuning="off"):
    """(x + y, y + scale * x)"""
    return _bind_sum_and_accumulate(x, y, scale=scale, grid_kind=grid_kind, tuning=tuning)


def _add_in_blocks(ctx, x, y, **options):
    return triax.triton_call_lowering(
        ctx,
        kernels.autotuned_add_kernel,
        x,
        y,
        grid=lambda meta: (meta["BLOCK"],),
        constexprs={"n": ctx.avals_in[0].size, "BLOCK": 512},
        **options,
    )


add_in_blocks = own(_add_in_blocks, lambda x, y: [x])
"""x + y, given a block of 512 beside the configs of 64, 256 and 1024; the grid is the block."""


def _accumulate(ctx, x, y):
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


_bind_accumulate = own(_accumulate, lambda x, y: [y])


def accumulate(x, y):
    """y + x, in place in a kernel that has one pointer for y."""
    (total,) = _bind_accumulate(x, y)
    return total
