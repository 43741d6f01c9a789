"""ragged_dot of 8-bit floats with float32 accumulators, for Hopper, in Gluon.

Tensor cores multiply 128 of the depth at a time. Each such product is added to a float32 sum, and
is first multiplied by its block's scales, if there are any. In Triton's own language all warps wait
for a product before they add it, and meanwhile the tensor cores idle. Here a tile's rows are shared
by two warp groups, each of which waits only for its own products: one multiplies while the other
adds. A separate warp does all loads, also of the scales, because a warp group that loaded them
itself would wait for them between products. A tile is stored from shared memory while the next one
is multiplied. `_ragged_dot_kernel` computes the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triax.moe.products.any_gpu_kernels import _GROUP_END
from triax.moe.products.any_gpu_kernels import _num_outside as _num_outside_of_triton
from triax.moe.products.any_gpu_kernels import _outside as _outside_of_triton
from triax.moe.products.any_gpu_kernels import _tile as _tile_of_triton

# Triton 3.9 renamed all three.
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_tile = gluon.jit(_tile_of_triton.fn)
_outside, _num_outside = gluon.jit(_outside_of_triton.fn), gluon.jit(_num_outside_of_triton.fn)


@gluon.jit
def _load(descriptors, buffers, barriers, pointers, sizes, BLOCKED: gl.constexpr):
    """Loads blocks of rows and of columns, and their scales, into buffers as they become empty."""
    STAGES: gl.constexpr = buffers[0].type.shape[0]
    ROWS: gl.constexpr = buffers[0].type.shape[1]
    COLUMNS: gl.constexpr = buffers[1].type.shape[1]
    DEPTH: gl.constexpr = buffers[1].type.shape[2]
    rows, weights = descriptors
    full, empty = barriers
    tiles_ptr, row_scales_ptr, _ = pointers
    depth, num_columns = sizes[1], sizes[2]
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    deep = gl.cdiv(depth, DEPTH)
    num_column_tiles = gl.cdiv(num_columns, COLUMNS)
    num_tiles = gl.load(tiles_ptr) * num_column_tiles
    count = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, ROWS)
        column = group * num_columns + column_tile * COLUMNS
        if BLOCKED:
            # Rows past the group's end take the scale of its last row; they are not stored.
            row_at = gl.minimum(row + gl.arange(0, ROWS, lanes), end - 1) * deep
        for start in range(0, depth, DEPTH):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (ROWS + COLUMNS) * DEPTH)
            _async_load(rows, [row, start], ready, buffers[0].index(stage))
            _async_load(weights, [column, start], ready, buffers[1].index(stage))
            if BLOCKED:
                _copy(buffers[3].index(stage), row_scales_ptr + row_at)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                row_at += 1
            count += 1


@gluon.jit
def _multiply(out, buffers, barriers, pointers, sizes, BLOCKED: gl.constexpr, PART: gl.constexpr):
    """Multiplies and stores one half, PART, of each tile's rows."""
    STAGES: gl.constexpr = buffers[0].type.shape[0]
    ROWS: gl.constexpr = buffers[0].type.shape[1]
    COLUMNS: gl.constexpr = buffers[1].type.shape[1]
    DEPTH: gl.constexpr = buffers[1].type.shape[2]  # the depth of a block
    full, empty = barriers
    tiles_ptr, row_scales_ptr, group_scales_ptr = pointers
    num_rows, depth, num_columns = sizes
    OWN: gl.constexpr = ROWS // 2
    HALF: gl.constexpr = COLUMNS // 2  # columns that share a scale
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    MADE: gl.constexpr = buffers[2].type.shape[0] // 2  # this half's buffers for results: 2 or 1
    near_made = buffers[2].index(PART * MADE)
    far_made = buffers[2].index(PART * MADE + MADE - 1)
    num_column_tiles = gl.cdiv(num_columns, COLUMNS)
    num_tiles = gl.load(tiles_ptr) * num_column_tiles
    last_row = gl.load(tiles_ptr + 1)
    first_row = gl.load(tiles_ptr + 2)
    blocks = gl.cdiv(num_columns, HALF)
    deep = gl.cdiv(depth, DEPTH)
    zeros = gl.zeros([OWN, HALF], gl.float32, layout)
    count = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, ROWS)
        row += PART * OWN
        left = zeros
        right = zeros
        if BLOCKED:
            group_at = (group * blocks + column_tile * 2) * deep
            next_block = gl.where(column_tile * 2 + 1 < blocks, deep, 0)
        for block in range(deep):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            x = buffers[0].index(stage).slice(PART * OWN, OWN)
            w = buffers[1].index(stage)
            columns = w.slice(0, HALF).permute((1, 0))
            product = warpgroup_mma(x, columns, zeros, use_acc=False, is_async=True)
            if BLOCKED:
                near = gl.load(group_scales_ptr + (group_at + block))
                far = gl.load(group_scales_ptr + (group_at + next_block + block))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=block > 0)
            if BLOCKED:
                # After the arrival: Triton 3.6 has the group's threads meet before these reads,
                # else between the two products.
                scale = buffers[3].index(stage).slice(PART * OWN, OWN).load(of_rows)
            product = warpgroup_mma_wait(0, deps=(product,))
            if BLOCKED:
                product *= (scale * near)[:, None]
            left += product
            columns = w.slice(HALF, HALF).permute((1, 0))
            product = warpgroup_mma(x, columns, zeros, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=(product,))
            if BLOCKED:
                product *= (scale * far)[:, None]
            right += product
            count += 1
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        if not BLOCKED:
            # Rows past the group's end take the scale of its last row; they are not stored.
            which = gl.minimum(row + gl.arange(0, OWN, of_rows), end - 1)
            scale = gl.load(row_scales_ptr + which)[:, None]
            which = column_tile * COLUMNS + gl.arange(0, HALF, gl.SliceLayout(0, layout))
            at = group_scales_ptr + (group * num_columns + which)
            left *= scale
            left *= gl.load(at, mask=which < num_columns, other=0.0)[None, :]
            right *= scale
            right *= gl.load(at + HALF, mask=which + HALF < num_columns, other=0.0)[None, :]
        _store(out, left, near_made, row, end, column_tile * COLUMNS, MADE)
        _store(out, right, far_made, row, end, column_tile * COLUMNS + HALF, MADE)

    # Zeros for rows before and past the groups.
    num_empty = _num_outside(first_row, last_row, num_rows, ROWS) * blocks
    for tile in range(gl.program_id(0), num_empty, gl.num_programs(0)):
        row, end = _outside(tile // blocks, first_row, last_row, num_rows, ROWS)
        _store(out, zeros, near_made, row + PART * OWN, end, tile % blocks * HALF, 1)
    tma.store_wait(0)


@gluon.jit
def _store(out, block, made, row, end, column, MADE: gl.constexpr):
    """Begins to store a block of rows, up to row `end` and the last column.

    It leaves from `made`, one of MADE buffers in turn, once the block before it there has left.
    """
    tma.store_wait(MADE - 1)
    made.store(block.to(made.dtype))
    fence_async_shared()
    at = [_GROUP_END, end, _GROUP_END - (end - row), column]
    _async_store(out, at, made.reshape(out.block_shape))


@gluon.jit(do_not_specialize=["num_rows"])
def _ragged_dot_float32_sums_kernel(
    rows,
    weights,
    tiles_ptr,
    row_scales_ptr,
    group_scales_ptr,
    num_rows,
    depth,
    num_columns,
    out,
    BLOCKED: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr,
    BLOCK_DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    # There are as many programs as the GPU runs at once. `weights` has all groups' columns in one
    # dimension: past a group's last column the next group's follow, whose results are not stored.
    x = gl.allocate_shared_memory(rows.dtype, [STAGES, BLOCK_ROWS, BLOCK_DEPTH], rows.layout)
    w = gl.allocate_shared_memory(
        weights.dtype, [STAGES, BLOCK_COLUMNS, BLOCK_DEPTH], weights.layout
    )
    # Each half has a buffer for both halves of its columns; one, if results have 32 bits.
    bits: gl.constexpr = out.dtype.primitive_bitwidth
    shape: gl.constexpr = [64 // bits, BLOCK_ROWS // 2, BLOCK_COLUMNS // 2]
    made = gl.allocate_shared_memory(out.dtype, shape, gl.NVMMASharedLayout(128, bits, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # With scales, each of the loading warp's threads arrives too, once its own are there.
        mbarrier.init(full.index(stage), count=1 + 32 if BLOCKED else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    descriptors = (rows, weights)
    buffers = (x, w, made)
    if BLOCKED:
        stored: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        row_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_ROWS], stored)
        buffers = (x, w, made, row_scales)
    barriers = (full, empty)
    pointers = (tiles_ptr, row_scales_ptr, group_scales_ptr)
    sizes = (num_rows, depth, num_columns)
    gl.warp_specialize(
        [
            (_multiply, (out, buffers, barriers, pointers, sizes, BLOCKED, 0)),
            (_multiply, (out, buffers, barriers, pointers, sizes, BLOCKED, 1)),
            (_load, (descriptors, buffers, barriers, pointers, sizes, BLOCKED)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
