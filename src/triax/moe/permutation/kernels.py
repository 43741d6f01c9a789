"""The kernels of permute and unpermute.

`_permute_kernel` reads each token once, and writes it to all its rows. `_unpermute_kernel` sums
the rows of each token. `_unpermute_grad_kernel` is the gradient of the weighted sum.
Every index from a plan is checked against the bounds of its array before it is used: a slot whose
row does not exist was dropped. Offsets are 64-bit, because rows times width exceeds 2**31 in
ordinary programs.

Slots are visited in steps of STEP_SLOTS, each unrolled, so that its loads overlap. A narrow map is
a single step. A wide map, where most slots have no row, comes with `num_slots_ptr`: the number of
slots that each token must visit.
"""

import triton
import triton.language as tl

# Triton does not specialise on these arguments, so that a new size compiles nothing.
_SIZES = ["num_tokens", "num_rows", "num_experts", "num_padded", "num_zeroing"]


@triton.jit
def _load_rows(row_of_ptr, token, slot, inside, num_rows, TOP_K: tl.constexpr):
    """Loads the rows of several tokens' slots, in 64 bits, and whether each row exists."""
    row = tl.load(row_of_ptr + token * TOP_K + slot, mask=inside, other=-1)
    return row.to(tl.int64), (row >= 0) & (row < num_rows)


@triton.jit
def _load_num_slots(num_slots_ptr, token, inside, TOP_K: tl.constexpr):
    """Loads the number of slots that each token visits; also returns the largest number."""
    if num_slots_ptr is None:
        num_slots = tl.full(token.shape, TOP_K, tl.int32)
        most = TOP_K
    else:
        num_slots = tl.load(num_slots_ptr + token, mask=inside, other=0)
        most = tl.max(num_slots, 0)
    return num_slots, most


@triton.jit
def _zero_other_slots(weights_ptr, token, num_slots, inside, TOP_K: tl.constexpr):
    """Writes zeros to the slots that tokens do not visit."""
    BLOCK_TOKENS: tl.constexpr = token.shape[0]
    # Not by `max`, which Triton 3.5 computes at run time: its result cannot be a block's size.
    block: tl.constexpr = 256 // BLOCK_TOKENS if BLOCK_TOKENS < 32 else 8
    zeros = tl.zeros([BLOCK_TOKENS, block], weights_ptr.dtype.element_ty)
    for first in range(0, TOP_K, block):
        slot = first + tl.arange(0, block)[None, :]
        mask = inside[:, None] & (slot >= num_slots[:, None]) & (slot < TOP_K)
        tl.store(weights_ptr + token[:, None] * TOP_K + slot, zeros, mask=mask)


@triton.jit
def _group_end(group_sizes_ptr, num_groups, num_rows, BLOCK_EXPERTS: tl.constexpr):
    """Returns the row at which the first `num_groups` groups end: always in [0, num_rows]."""
    end = tl.zeros([1], tl.int64)
    for first in range(0, num_groups, BLOCK_EXPERTS):
        expert = first + tl.arange(0, BLOCK_EXPERTS)
        size = tl.load(group_sizes_ptr + expert, mask=expert < num_groups, other=0)
        end += tl.sum(tl.maximum(size, 0).to(tl.int64), 0)
    return tl.sum(tl.minimum(end, num_rows), 0).to(tl.int32)


@triton.jit
def _zero_rows(rows, first, end, first_block, step, BLOCK: tl.constexpr):
    """Writes zeros to every `step`-th block of the rows from `first` to `end`.

    `rows` has the pointers to rows, row weights and row scales; the latter two may be None. `BLOCK`
    has the rows of a block and its width, the width of rows, and their scales.
    """
    BLOCK_ROWS: tl.constexpr = BLOCK[0]
    BLOCK_WIDTH: tl.constexpr = BLOCK[1]
    WIDTH: tl.constexpr = BLOCK[2]
    rows_ptr, row_weights_ptr, row_scales_ptr = rows
    zeros = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], rows_ptr.dtype.element_ty)
    for block in range(first_block, tl.cdiv(end - first, BLOCK_ROWS), step):
        row = first.to(tl.int64) + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = row < end
        for start in range(0, WIDTH, BLOCK_WIDTH):
            column = start + tl.arange(0, BLOCK_WIDTH)
            mask = inside[:, None] & (column < WIDTH)[None, :]
            tl.store(rows_ptr + row[:, None] * WIDTH + column[None, :], zeros, mask=mask)
        if row_weights_ptr is not None:
            none = tl.zeros([BLOCK_ROWS], row_weights_ptr.dtype.element_ty)
            tl.store(row_weights_ptr + row, none, mask=inside)
        if row_scales_ptr is not None:
            nothing = tl.zeros([BLOCK_ROWS], row_scales_ptr.dtype.element_ty)
            for scale in range(BLOCK[3]):
                tl.store(row_scales_ptr + row * BLOCK[3] + scale, nothing, mask=inside)


@triton.jit
def _zero_empty_rows(rows, groups, share, BLOCK: tl.constexpr, BLOCK_EXPERTS: tl.constexpr):
    """Writes zeros to one program's share of the rows without a token: pad rows and the tail."""
    group_sizes_ptr, group_filled_ptr, num_rows, num_experts, num_padded = groups
    program, num_programs = share
    for expert in range(program, num_padded, num_programs):
        start = _group_end(group_sizes_ptr, expert, num_rows, BLOCK_EXPERTS)
        size = tl.minimum(tl.load(group_sizes_ptr + expert), num_rows - start)
        filled = tl.maximum(tl.load(group_filled_ptr + expert), 0)
        first = start + tl.minimum(filled, num_rows - start)
        _zero_rows(rows, first, start + size, 0, 1, BLOCK)
    end = _group_end(group_sizes_ptr, num_experts, num_rows, BLOCK_EXPERTS)
    _zero_rows(rows, end, num_rows, program, num_programs, BLOCK)


@triton.jit(do_not_specialize=_SIZES)
def _permute_kernel(
    x_ptr,
    weights_ptr,
    scales_ptr,
    row_of_ptr,
    num_slots_ptr,
    group_sizes_ptr,
    group_filled_ptr,
    num_tokens,
    num_rows,
    num_experts,
    num_padded,
    num_zeroing,
    rows_ptr,
    row_weights_ptr,
    row_scales_ptr,
    TOP_K: tl.constexpr,
    STEP_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # Programs that share tokens are neighbours, so that a row is read and written in one go.
    width_blocks: tl.constexpr = max(1, (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH)
    num_moving = tl.cdiv(num_tokens, BLOCK_TOKENS) * width_blocks
    if tl.program_id(0) < num_moving:
        token_block = tl.program_id(0) // width_blocks
        width_block = tl.program_id(0) % width_blocks
        token = token_block.to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = token < num_tokens
        column = width_block.to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        num_slots, most_slots = _load_num_slots(num_slots_ptr, token, inside, TOP_K)
        wide = column < WIDTH
        read = x_ptr + token[:, None] * WIDTH + column[None, :]
        x = tl.load(read, mask=inside[:, None] & wide[None, :])
        x = tl.broadcast_to(x[:, None, :], [BLOCK_TOKENS, BLOCK_SLOTS, BLOCK_WIDTH])
        for first in range(0, most_slots, STEP_SLOTS):
            for ahead in tl.static_range(0, STEP_SLOTS, BLOCK_SLOTS):
                slot = (first + ahead + tl.arange(0, BLOCK_SLOTS))[None, :]
                visits = inside[:, None] & (slot < num_slots[:, None])
                row, exists = _load_rows(row_of_ptr, token[:, None], slot, visits, num_rows, TOP_K)
                write = rows_ptr + row[:, :, None] * WIDTH + column[None, None, :]
                mask = exists[:, :, None] & wide[None, None, :]
                tl.store(write, x, mask=mask, cache_modifier=STORES)
        if weights_ptr is not None:
            if width_block == 0:
                for first in range(0, most_slots, STEP_SLOTS):
                    for ahead in tl.static_range(STEP_SLOTS):
                        slot = first + ahead
                        visits = inside & (slot < num_slots)
                        row, exists = _load_rows(row_of_ptr, token, slot, visits, num_rows, TOP_K)
                        weight = tl.load(weights_ptr + token * TOP_K + slot, mask=exists)
                        tl.store(row_weights_ptr + row, weight, mask=exists)
        if scales_ptr is not None:
            if width_block == 0:
                for first in range(0, most_slots, STEP_SLOTS):
                    for ahead in tl.static_range(STEP_SLOTS):
                        slot = first + ahead
                        visits = inside & (slot < num_slots)
                        row, exists = _load_rows(row_of_ptr, token, slot, visits, num_rows, TOP_K)
                        for scale in range(SCALES):
                            value = tl.load(scales_ptr + token * SCALES + scale, mask=exists)
                            tl.store(row_scales_ptr + row * SCALES + scale, value, mask=exists)
    else:
        rows = rows_ptr, row_weights_ptr, row_scales_ptr
        groups = group_sizes_ptr, group_filled_ptr, num_rows, num_experts, num_padded
        share = tl.program_id(0) - num_moving, num_zeroing
        _zero_empty_rows(
            rows, groups, share, (BLOCK_TOKENS, BLOCK_WIDTH, WIDTH, SCALES), BLOCK_EXPERTS
        )


@triton.jit(do_not_specialize=_SIZES)
def _unpermute_kernel(
    rows_ptr,
    weights_ptr,
    row_weights_ptr,
    row_of_ptr,
    num_slots_ptr,
    num_tokens,
    num_rows,
    x_ptr,
    token_weights_ptr,
    TOP_K: tl.constexpr,
    STEP_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    wider: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    width_blocks: tl.constexpr = max(1, (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH)
    token_block = tl.program_id(0) // width_blocks
    width_block = tl.program_id(0) % width_blocks
    token = token_block.to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    column = width_block.to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    wide = (column < WIDTH)[None, :]
    num_slots, most_slots = _load_num_slots(num_slots_ptr, token, inside, TOP_K)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], wider)
    for first in range(0, most_slots, STEP_SLOTS):
        for ahead in tl.static_range(STEP_SLOTS):
            slot = first + ahead
            visits = inside & (slot < num_slots)
            row, exists = _load_rows(row_of_ptr, token, slot, visits, num_rows, TOP_K)
            read = rows_ptr + row[:, None] * WIDTH + column[None, :]
            term = tl.load(read, mask=exists[:, None] & wide, other=0.0).to(wider)
            if weights_ptr is not None:
                # The weight of a slot without a row may be NaN, and 0 times NaN is NaN: load 0.
                weight = tl.load(weights_ptr + token * TOP_K + slot, mask=exists, other=0.0)
                term *= weight.to(wider)[:, None]
            total += term
    write = x_ptr + token[:, None] * WIDTH + column[None, :]
    tl.store(write, total.to(x_ptr.dtype.element_ty), mask=inside[:, None] & wide)
    if row_weights_ptr is not None:
        if width_block == 0:
            for first in range(0, most_slots, STEP_SLOTS):
                for ahead in tl.static_range(STEP_SLOTS):
                    slot = first + ahead
                    visits = inside & (slot < num_slots)
                    row, exists = _load_rows(row_of_ptr, token, slot, visits, num_rows, TOP_K)
                    weight = tl.load(row_weights_ptr + row, mask=exists, other=0.0)
                    tl.store(token_weights_ptr + token * TOP_K + slot, weight, mask=visits)
            if num_slots_ptr is not None:
                _zero_other_slots(token_weights_ptr, token, num_slots, inside, TOP_K)


@triton.jit(do_not_specialize=_SIZES)
def _unpermute_grad_kernel(
    rows_ptr,
    weights_ptr,
    gradient_ptr,
    row_of_ptr,
    num_slots_ptr,
    group_sizes_ptr,
    group_filled_ptr,
    num_tokens,
    num_rows,
    num_experts,
    num_padded,
    num_zeroing,
    d_rows_ptr,
    d_weights_ptr,
    TOP_K: tl.constexpr,
    STEP_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    wider: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    width_blocks: tl.constexpr = max(1, (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH)
    token_blocks = tl.cdiv(num_tokens, BLOCK_TOKENS)
    token_block = tl.program_id(0)
    if token_block < token_blocks:
        token = token_block.to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = token < num_tokens
        read = gradient_ptr + token[:, None] * WIDTH
        # If a row is one block, the gradient stays in registers for all slots.
        whole = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
        kept_mask = inside[:, None] & (whole < WIDTH)[None, :]
        kept = tl.load(read + whole[None, :], mask=kept_mask, other=0.0).to(wider)
        num_slots, most_slots = _load_num_slots(num_slots_ptr, token, inside, TOP_K)
        for first in range(0, most_slots, STEP_SLOTS):
            for ahead in tl.static_range(STEP_SLOTS):
                slot = first + ahead
                visits = inside & (slot < num_slots)
                row, exists = _load_rows(row_of_ptr, token, slot, visits, num_rows, TOP_K)
                d_weight = tl.zeros([BLOCK_TOKENS], d_weights_ptr.dtype.element_ty)
                # Skipped if no token has a row: the sum over the width costs as much without rows.
                if tl.max(exists.to(tl.int32), 0) > 0:
                    weight = tl.load(weights_ptr + token * TOP_K + slot, mask=exists, other=0.0)
                    products = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], wider)
                    for width_block in range(width_blocks):
                        column = width_block * BLOCK_WIDTH + whole
                        mask = exists[:, None] & (column < WIDTH)[None, :]
                        if WIDTH <= BLOCK_WIDTH:
                            gradient = kept
                        else:
                            gradient = tl.load(read + column[None, :], mask=mask, other=0.0)
                            gradient = gradient.to(wider)
                        at = row[:, None] * WIDTH + column[None, :]
                        values = tl.load(rows_ptr + at, mask=mask, other=0.0).to(wider)
                        # Where the mask is False, gradients may be NaN, and 0 times NaN is NaN.
                        products += tl.where(mask, values * gradient, 0.0)
                        d_row = weight.to(wider)[:, None] * gradient
                        tl.store(d_rows_ptr + at, d_row.to(d_rows_ptr.dtype.element_ty), mask=mask)
                    d_weight = tl.sum(products, 1).to(d_weights_ptr.dtype.element_ty)
                tl.store(d_weights_ptr + token * TOP_K + slot, d_weight, mask=visits)
        if num_slots_ptr is not None:
            _zero_other_slots(d_weights_ptr, token, num_slots, inside, TOP_K)
    else:
        rows = d_rows_ptr, None, None
        groups = group_sizes_ptr, group_filled_ptr, num_rows, num_experts, num_padded
        share = token_block - token_blocks, num_zeroing
        _zero_empty_rows(rows, groups, share, (BLOCK_TOKENS, BLOCK_WIDTH, WIDTH, 0), BLOCK_EXPERTS)
