"""Launches the kernels of permute and unpermute: result types, grids and configs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.launch import KernelImplementation
from triax.moe.permutation import configs
from triax.moe.permutation.configs import MoveConfig, step_slots
from triax.moe.permutation.reference import Gathered, Permuted, Routes, sum_dtype
from triax.moe.shared.arrays import absent, as_words, from_words, stored
from triax.moe.shared.launching import launch

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

# permute writes each row once, so it uses streaming stores: on an H200 they are 1.4% faster for
# four or eight rows of a token, and 0.8% slower for two.
_STORES = ".cs"


def permute(
    x: jax.Array,
    weights: jax.Array | None,
    scales: jax.Array | None,
    routes: Routes,
    *,
    implementation: KernelImplementation | None,
) -> Permuted:
    """Returns each row's token, weight and scales; zeros in the rows without a token."""
    from triax.moe.permutation.kernels import _permute_kernel

    num_tokens, width = x.shape
    top_k = routes.row_of.shape[1]
    num_rows = routes.num_rows
    num_scales = 0 if scales is None else scales.shape[1]
    config = MoveConfig.for_copies(width, x.dtype.itemsize, top_k)
    width_blocks = max(1, -(-width // config.block_width))
    num_zeroing = _num_zeroing(routes, config)
    words = [as_words(array) for array in (x, weights, scales)]
    rows, row_weights, row_scales = launch(
        _permute_kernel,
        *words,
        *_plan_operands(routes, num_zeroing),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, width), words[0].dtype),
            None if weights is None else jax.ShapeDtypeStruct((num_rows,), words[1].dtype),
            None
            if scales is None
            else jax.ShapeDtypeStruct((num_rows, num_scales), words[2].dtype),
        ),
        # The first programs move the tokens. The last programs zero the rows without a token, whose
        # number only the device knows.
        grid=-(-num_tokens // config.block_tokens) * width_blocks + num_zeroing,
        config=config,
        implementation=implementation,
        TOP_K=top_k,
        STEP_SLOTS=step_slots(top_k),
        WIDTH=width,
        SCALES=num_scales,
        STORES=_STORES,
        BLOCK_EXPERTS=configs.ZEROING_BLOCK_EXPERTS,
        **absent(row_weights_ptr=weights, row_scales_ptr=scales),
    )
    return Permuted(
        from_words(rows, x), from_words(row_weights, weights), from_words(row_scales, scales)
    )


def unpermute(
    rows: jax.Array,
    weights: jax.Array | None,
    row_weights: jax.Array | None,
    routes: Routes,
    *,
    implementation: KernelImplementation | None,
) -> Gathered:
    """Returns each token's sum over its rows, multiplied by `weights` [tokens, top_k] if given."""
    from triax.moe.permutation.kernels import _unpermute_kernel

    num_tokens, top_k = routes.row_of.shape
    width = rows.shape[1]
    formula = MoveConfig.for_plain_sums if weights is None else MoveConfig.for_parts
    config = formula(width, rows.dtype.itemsize, top_k)
    width_blocks = max(1, -(-width // config.block_width))
    x, token_weights = launch(
        _unpermute_kernel,
        rows,
        weights,
        row_weights,
        routes.row_of,
        routes.num_slots,
        num_tokens,
        routes.num_rows,
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, width), stored(rows.dtype)),
            None
            if row_weights is None
            else jax.ShapeDtypeStruct((num_tokens, top_k), row_weights.dtype),
        ),
        # One program per block of elements. Along the width there is at least one, because weights
        # are returned even if the width is 0.
        grid=-(-num_tokens // config.block_tokens) * width_blocks,
        config=config,
        implementation=implementation,
        TOP_K=top_k,
        STEP_SLOTS=step_slots(top_k),
        WIDTH=width,
        DOUBLE=sum_dtype(rows, weights) == jnp.float64,
        **absent(token_weights_ptr=row_weights),
    )
    return Gathered(x.astype(rows.dtype), token_weights)


def unpermute_grad(
    rows: jax.Array,
    weights: jax.Array,
    gradient: jax.Array,
    routes: Routes,
    *,
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum's gradients with respect to rows and weights, in their dtypes."""
    from triax.moe.permutation.kernels import _unpermute_grad_kernel

    num_tokens, top_k = routes.row_of.shape
    width = rows.shape[1]
    config = MoveConfig.for_rows(width, rows.dtype.itemsize)
    num_zeroing = _num_zeroing(routes, config)
    d_rows, d_weights = launch(
        _unpermute_grad_kernel,
        rows,
        weights,
        gradient,
        *_plan_operands(routes, num_zeroing),
        out_type=(
            jax.ShapeDtypeStruct(rows.shape, stored(rows.dtype)),
            jax.ShapeDtypeStruct((num_tokens, top_k), stored(weights.dtype)),
        ),
        # The first programs take whole tokens, to sum over the width in a fixed order. The last
        # programs zero the rows without a token.
        grid=-(-num_tokens // config.block_tokens) + num_zeroing,
        config=config,
        implementation=implementation,
        TOP_K=top_k,
        STEP_SLOTS=step_slots(top_k),
        WIDTH=width,
        DOUBLE=sum_dtype(rows, weights) == jnp.float64,
        BLOCK_EXPERTS=configs.ZEROING_BLOCK_EXPERTS,
    )
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype)


def _plan_operands(routes: Routes, num_zeroing: int) -> tuple[Any, ...]:
    """Returns the plan's arrays and sizes, as operands of the kernels that write rows."""
    num_experts = routes.group_sizes.shape[0]
    return (
        routes.row_of,
        routes.num_slots,
        routes.group_sizes,
        routes.group_filled,
        routes.row_of.shape[0],
        routes.num_rows,
        num_experts,
        num_experts if routes.padded else 0,
        num_zeroing,
    )


def _num_zeroing(routes: Routes, config: MoveConfig) -> int:
    """Returns the number of programs that zero the rows without a token."""
    blocks = -(-routes.num_rows // config.block_tokens)
    return min(blocks, configs.MAX_ZEROING_PROGRAMS)
