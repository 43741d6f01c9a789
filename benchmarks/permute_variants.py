"""Another way to permute, which `experiments.py` measures."""

from __future__ import annotations

from typing import Any

import jax
import triton
import triton.language as tl

from triax import triton_call
from triax.moe.permute.configs import MoveConfig, ZeroConfig
from triax.moe.permute.kernels import _zero_empty_rows
from triax.moe.permute.launchers import _as_dtype, _num_zeroing, _plan_operands, _words
from triax.moe.permute.reference import Permuted


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_experts", "num_padded", "num_zeroing"]
)
def _permute_at_once_kernel(
    x_ptr,
    row_of_ptr,
    group_sizes_ptr,
    group_filled_ptr,
    num_tokens,
    num_rows,
    num_experts,
    num_padded,
    num_zeroing,
    rows_ptr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # All of a token's rows are looked up before the first is written: the compiler may not move
    # a load over a store, for it does not know that these are different arrays.
    width_blocks: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    num_moving = num_tokens * width_blocks
    if tl.program_id(0) < num_moving:
        token = (tl.program_id(0) // width_blocks).to(tl.int64)
        width_block = tl.program_id(0) % width_blocks
        slot = tl.arange(0, SLOTS)
        row = tl.load(row_of_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
        exists = (row >= 0) & (row < num_rows)
        column = width_block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        wide = column < WIDTH
        x = tl.load(x_ptr + token * WIDTH + column, mask=wide)
        write = rows_ptr + row[:, None] * WIDTH + column[None, :]
        x = tl.broadcast_to(x[None, :], [SLOTS, BLOCK_WIDTH])
        tl.store(write, x, mask=exists[:, None] & wide[None, :])
    else:
        _zero_empty_rows(
            rows_ptr,
            None,
            None,
            group_sizes_ptr,
            group_filled_ptr,
            num_rows,
            num_experts,
            num_padded,
            tl.program_id(0) - num_moving,
            num_zeroing,
            WIDTH,
            0,
            1,
            BLOCK_WIDTH,
            BLOCK_EXPERTS,
        )


def permute_at_once(
    x: jax.Array, weights: None, scales: None, routes: Any, *, implementation: str | None
) -> Permuted:
    """All K rows of a token in one store, so that their indices are loaded at once."""
    num_tokens, width = x.shape
    top_k = routes.row_of.shape[1]
    config = MoveConfig.for_parts(width, x.dtype.itemsize)
    num_zeroing = _num_zeroing(routes, config)
    words = _words(x)
    rows = triton_call(
        words,
        *_plan_operands(routes, num_zeroing),
        kernel=_permute_at_once_kernel,
        out_type=jax.ShapeDtypeStruct((routes.num_rows, width), words.dtype),
        grid=num_tokens * -(-width // config.block_width) + num_zeroing,
        num_warps=config.num_warps,
        name="permute",
        vmap_method="sequential",
        implementation=implementation,
        TOP_K=top_k,
        SLOTS=1 << (top_k - 1).bit_length(),
        WIDTH=width,
        BLOCK_WIDTH=config.block_width,
        BLOCK_EXPERTS=ZeroConfig().block_experts,
    )
    return Permuted(_as_dtype(rows, x), weights, scales)
