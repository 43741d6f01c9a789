"""The gradient of ragged_dot's weights in 16 bits for Hopper, in Gluon, with parts of ragged_dot's.

A tile has rows of one group's left × right, and the group's rows are its depth. Results have the
bits of `_group_outer_kernel`, whose descriptors it takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from triax.moe.products.any_gpu_kernels import _GROUP_END
from triax.moe.products.any_gpu_kernels import _ordered as _ordered_of_triton
from triax.moe.products.sm90_8_bits_kernels import _async_load
from triax.moe.products.sm90_16_bits_kernels import _allocate, _finish, _multiply

_ordered = gluon.jit(_ordered_of_triton.fn)


@gluon.jit
def _locate_outer(tiles, tile, ROWS: gl.constexpr):
    """Returns a tile's group, first row of all groups' results, end of rows, column tile, depth."""
    _, right_tiles, bounds_ptr, left_tiles, num_left, ROW_TILES = tiles
    per_group = left_tiles * right_tiles
    group = tile // per_group
    left_tile, right_tile = _ordered(tile % per_group, left_tiles, right_tiles, ROW_TILES)
    depth = gl.load(bounds_ptr + group + 1) - gl.load(bounds_ptr + group)
    row = group * num_left + left_tile * ROWS
    # A group without rows gets zeros, which loads past its end give.
    return group, row, (group + 1) * num_left, right_tile, gl.maximum(depth, 1)


@gluon.jit
def _load_outer(descriptors, buffers, barriers, tiles):
    """Loads blocks of left, and two of right columns, into buffers as they become empty."""
    STAGES: gl.constexpr = buffers[0].type.shape[0]
    DEPTH: gl.constexpr = buffers[0].type.shape[3]
    WIDE: gl.constexpr = buffers[0].type.shape[4]
    left, right = descriptors
    full, empty = barriers
    _, _, bounds_ptr, _, num_left, _ = tiles
    count = 0
    for tile in range(gl.program_id(0), tiles[0], gl.num_programs(0)):
        group, row, _, right_tile, depth = _locate_outer(tiles, tile, WIDE)
        end = gl.load(bounds_ptr + group + 1)
        bounded = _GROUP_END - (end - gl.load(bounds_ptr + group))
        for start in range(0, depth, DEPTH):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, left.block_type.nbytes + 2 * right.block_type.nbytes)
            at = [_GROUP_END, end, bounded + start, row - group * num_left]
            _async_load(left, at, ready, buffers[0].index(stage))
            for half in gl.static_range(2):
                at = [_GROUP_END, end, bounded + start, (2 * right_tile + half) * WIDE]
                _async_load(right, at, ready, buffers[1].index(2 * stage + half))
            count += 1


@gluon.jit
def _group_outer_overlapped_kernel(
    left,
    right,
    bounds_ptr,
    num_groups,
    num_left,
    num_right,
    out_ptr,
    ROW_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    # There are as many programs as the GPU runs at once. A tile's rows are summed in order.
    WIDE: gl.constexpr = left.block_shape[3]
    which: gl.constexpr = (True, False)
    locate: gl.constexpr = _locate_outer
    buffers, views, barriers = _allocate(left, right, which, STAGES)
    operands = (views[0], views[1], views[2], None, None)
    left_tiles = gl.cdiv(num_left, WIDE)
    right_tiles = gl.cdiv(num_right, 2 * WIDE)
    num_tiles = num_groups * left_tiles * right_tiles
    tiles = (num_tiles, right_tiles, bounds_ptr, left_tiles, num_left, ROW_TILES)
    pointers = (None, out_ptr, None)
    sizes = (None, 2 * WIDE, num_right, WIDE, num_right)
    gl.warp_specialize(
        [
            (_multiply, (operands, barriers, tiles, locate, which, 0)),
            (_multiply, (operands, barriers, tiles, locate, which, 1)),
            (_finish, (views[2], barriers, tiles, pointers, sizes, locate, None, WARPS)),
            (_load_outer, ((left, right), buffers, barriers, tiles)),
        ],
        [4, WARPS, 1],
        [REGISTERS, REGISTERS // 2, REGISTERS // 2],
    )
