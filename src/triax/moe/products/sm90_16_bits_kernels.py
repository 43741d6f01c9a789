"""ragged_dot in 16 bits for Hopper, in Gluon: tiles are stored while the next are multiplied.

In Triton's own language the warps that multiply also store, and tensor cores idle meanwhile. Here
each of two warp groups multiplies half of a tile's rows, adds the bias, and leaves the sums in
shared memory, rounded. Two other warps store them from there, and apply an activation; one more
loads. Results have the bits of `_ragged_dot_kernel` and `_glu_kernel`.

A tile has two blocks of columns, `apart` columns from each other: gate and up, or neighbours.
`_group_outer_overlapped_kernel` has the same parts, but its own functions `locate` and `load`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triax.moe.activations.kernels import _clipped as _clipped_of_triton
from triax.moe.activations.kernels import _curve as _curve_of_triton
from triax.moe.products.sm90_8_bits_kernels import _async_load, _num_outside, _outside, _tile

# Triton 3.9 renamed both.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_views = gl.shared_memory_descriptor
_view = getattr(_views, "reinterpret", None) or _views._reinterpret

_clipped, _curve = gluon.jit(_clipped_of_triton.fn), gluon.jit(_curve_of_triton.fn)


@gluon.jit
def _locate(tiles, tile, ROWS: gl.constexpr):
    """Returns a tile's group, first row, end of rows, column tile, and depth."""
    _, num_column_tiles, tiles_ptr, depth = tiles
    group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, ROWS)
    return group, row, end, column_tile, depth


@gluon.jit
def _load(descriptors, buffers, barriers, tiles, sizes, TRANSPOSED: gl.constexpr):
    """Loads blocks of rows, and two of columns, into buffers as they become empty.

    The bias comes with a tile's last blocks.
    """
    STAGES: gl.constexpr = buffers[0].type.shape[0]
    ROWS: gl.constexpr = buffers[0].type.shape[1]
    DEPTH: gl.constexpr = buffers[0].type.shape[2]
    rows, weights, bias = descriptors
    full, empty = barriers
    _, wide, _, apart, _ = sizes
    BLOCKS: gl.constexpr = rows.block_type.nbytes + 2 * weights.block_type.nbytes
    count = 0
    for tile in range(gl.program_id(0), tiles[0], gl.num_programs(0)):
        group, row, _, column_tile, depth = _locate(tiles, tile, ROWS)
        for start in range(0, depth, DEPTH):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            ready = full.index(stage)
            if bias is None:
                mbarrier.expect(ready, BLOCKS)
            else:
                is_last = start + DEPTH >= depth
                mbarrier.expect(ready, BLOCKS, pred=start + DEPTH < depth)
                mbarrier.expect(ready, BLOCKS + 2 * bias.block_type.nbytes, pred=is_last)
            _async_load(rows, [row, start], ready, buffers[0].index(stage))
            for half in gl.static_range(2):
                block = buffers[1].index(2 * stage + half)
                column = column_tile * wide + half * apart
                if TRANSPOSED:
                    _async_load(weights, [group, column, start], ready, block)
                else:
                    _async_load(weights, [group, start, column], ready, block)
                if bias is not None:
                    block = buffers[2].index(2 * stage + half)
                    _async_load(bias, [group, column], ready, block, pred=is_last)
            count += 1


@gluon.jit
def _multiply(buffers, barriers, tiles, locate, TRANSPOSED: gl.constexpr, PART: gl.constexpr):
    """Multiplies one half, PART, of each tile's rows; TRANSPOSED says which operands are."""
    halves, pairs, made, biases, bias_weights_ptr = buffers
    STAGES: gl.constexpr = pairs.type.shape[0]
    DEPTH: gl.constexpr = pairs.type.shape[2 if TRANSPOSED[1] else 1]
    OWN: gl.constexpr = made.type.shape[1]
    COLUMNS: gl.constexpr = made.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    full, empty = barriers
    made = made.index(PART)
    total = gl.zeros([OWN, COLUMNS], gl.float32, layout)
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles[0], gl.num_programs(0)):
        _, row, end, _, depth = locate(tiles, tile, 2 * OWN)
        if bias_weights_ptr is not None:
            which = row + PART * OWN + gl.arange(0, OWN, gl.SliceLayout(1, layout))
            weight = gl.load(bias_weights_ptr + which, mask=which < end, other=0.0)
        for start in range(0, depth, DEPTH):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            x = halves.index(2 * stage + PART)
            w = pairs.index(stage)
            if TRANSPOSED[0]:
                x = x.permute((1, 0))
            if TRANSPOSED[1]:
                w = w.permute((1, 0))
            total = warpgroup_mma(x, w, total, use_acc=start > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=start > 0)
            count += 1
        mbarrier.wait(empty.index(STAGES + PART), turn & 1 ^ 1)
        total = warpgroup_mma_wait(0, deps=(total,))
        last = (count + STAGES - 1) % STAGES
        if biases is not None:
            bias = biases.index(last).load(gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
            if bias_weights_ptr is not None:
                bias *= weight.to(gl.float32)[:, None]
            total += bias
        mbarrier.arrive(empty.index(last), count=1)
        made.store(total.to(made.dtype))
        _barrier()
        mbarrier.arrive(full.index(STAGES + PART), count=1)
        turn += 1


@gluon.jit
def _finish(
    blocks, barriers, tiles, pointers, sizes, locate, ACTIVATION: gl.constexpr, WARPS: gl.constexpr
):
    """Stores each tile, and then zeros for rows before and past the groups, if there can be any."""
    STAGES: gl.constexpr = barriers[0].type.shape[0] - 2
    OWN: gl.constexpr = blocks.type.shape[1]
    HALF: gl.constexpr = blocks.type.shape[2] // 2
    ROWS: gl.constexpr = 4 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])
    full, empty = barriers
    num_rows, wide, _, _, _ = sizes
    turn = 0
    for tile in range(gl.program_id(0), tiles[0], gl.num_programs(0)):
        _, row, end, column_tile, _ = locate(tiles, tile, 2 * OWN)
        for part in range(2):
            shape: gl.constexpr = [OWN // ROWS, ROWS, 2 * HALF]
            made = _view(blocks.index(part), blocks.dtype, shape, blocks.layout)
            mbarrier.wait(full.index(STAGES + part), turn & 1)
            for i in range(OWN // ROWS):
                near = made.index(i).slice(0, HALF, dim=1).load(layout)
                far = made.index(i).slice(HALF, HALF, dim=1).load(layout)
                first = row + part * OWN + i * ROWS
                _store(pointers, near, far, first, end, column_tile * wide, sizes, ACTIVATION)
            _barrier()
            mbarrier.arrive(empty.index(STAGES + part), count=1)
        turn += 1

    if num_rows is not None:
        _, num_column_tiles, tiles_ptr, _ = tiles
        last_row = gl.load(tiles_ptr + 1)
        first_row = gl.load(tiles_ptr + 2)
        zeros = gl.zeros([ROWS, HALF], blocks.dtype, layout)
        num_empty = _num_outside(first_row, last_row, num_rows, ROWS) * num_column_tiles
        for tile in range(gl.program_id(0), num_empty, gl.num_programs(0)):
            row_tile = tile // num_column_tiles
            row, end = _outside(row_tile, first_row, last_row, num_rows, ROWS)
            column = tile % num_column_tiles * wide
            _store(pointers, zeros, zeros, row, end, column, sizes, ACTIVATION)


@gluon.jit
def _store(pointers, near, far, row, end, column, sizes, ACTIVATION: gl.constexpr):
    """Stores two blocks of columns, up to row `end`, and with ACTIVATION `glu` of both."""
    _, out_ptr, _ = pointers
    _, _, width, apart, num_columns = sizes
    rows = row + gl.arange(0, near.shape[0], gl.SliceLayout(1, near.type.layout))
    columns = column + gl.arange(0, near.shape[1], gl.SliceLayout(0, near.type.layout))[None, :]
    inside = (rows < end)[:, None]
    mask = inside & (columns < width)
    if out_ptr is not None:
        at = rows.to(gl.int64)[:, None] * num_columns + columns
        gl.store(out_ptr + at, near, mask=mask)
        gl.store(out_ptr + at + apart, far, mask=inside & (columns + apart < num_columns))
    if ACTIVATION is not None:
        GATED: gl.constexpr = ACTIVATION[1]
        INTERLEAVED: gl.constexpr = ACTIVATION[2]
        if not GATED:
            _store_inner(pointers, near, near, row, end, column, num_columns, ACTIVATION)
            _store_inner(pointers, far, far, row, end, column + apart, num_columns, ACTIVATION)
        elif INTERLEAVED:
            pairs: gl.constexpr = [near.shape[0], near.shape[1] // 2, 2]
            first = column // 2
            gate, up = near.reshape(pairs).split()
            _store_inner(pointers, gate, up, row, end, first, num_columns // 2, ACTIVATION)
            gate, up = far.reshape(pairs).split()
            first += apart // 2
            _store_inner(pointers, gate, up, row, end, first, num_columns // 2, ACTIVATION)
        else:
            _store_inner(pointers, near, far, row, end, column, width, ACTIVATION)


@gluon.jit
def _store_inner(pointers, gate, up, row, end, column, width, ACTIVATION: gl.constexpr):
    """Stores `glu` of a block of gate and up, up to row `end`; without a gate both are one."""
    row_weights_ptr, _, inner_ptr = pointers
    CURVE: gl.constexpr = ACTIVATION[0]
    ALPHA: gl.constexpr = ACTIVATION[3]
    LIMIT: gl.constexpr = ACTIVATION[4]
    DTYPE: gl.constexpr = gate.dtype
    rows = row + gl.arange(0, gate.shape[0], gl.SliceLayout(1, gate.type.layout))
    columns = column + gl.arange(0, gate.shape[1], gl.SliceLayout(0, gate.type.layout))[None, :]
    gate = gate.to(gl.float32)
    up = up.to(gl.float32)
    if LIMIT is not None:
        gate, up, _, _ = _clipped(gate, up, LIMIT)
    inner, _ = _curve(gate, CURVE, ALPHA)
    if ACTIVATION[1]:
        inner *= up + ACTIVATION[5]
    if row_weights_ptr is not None:
        weight = gl.load(row_weights_ptr + rows, mask=rows < end, other=0.0)
        inner *= weight.to(gl.float32)[:, None]
    at = rows.to(gl.int64)[:, None] * width + columns
    gl.store(inner_ptr + at, inner.to(DTYPE), mask=(rows < end)[:, None] & (columns < width))


@gluon.jit
def _allocate(left, right, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr):
    """Returns the buffers of loads; their views for products, and buffers for results; barriers.

    In the views the two blocks of columns of a stage are one operand of a product.
    """
    x = gl.allocate_shared_memory(left.dtype, [STAGES] + left.block_shape, left.layout)
    w = gl.allocate_shared_memory(left.dtype, [2 * STAGES] + right.block_shape, right.layout)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    stored: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    half: gl.constexpr = [2 * STAGES, 64, 64]
    pair: gl.constexpr = [STAGES, 256, 64] if TRANSPOSED[1] else [STAGES, 64, 256]
    made = gl.allocate_shared_memory(left.dtype, [2, 64, 256], stored)
    views = (_view(x, left.dtype, half, layout), _view(w, left.dtype, pair, layout), made)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 2):  # the last two are for halves of a tile
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if i < STAGES else 1)
    fence_async_shared()
    return (x, w), views, (full, empty)


@gluon.jit(do_not_specialize=["num_rows"])
def _ragged_dot_overlapped_kernel(
    rows,
    weights,
    bias,
    tiles_ptr,
    bias_weights_ptr,
    row_weights_ptr,
    num_rows,
    depth,
    width,
    apart,
    num_columns,
    out_ptr,
    inner_ptr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    # There are as many programs as the GPU runs at once.
    HALF: gl.constexpr = weights.block_shape[1 if TRANSPOSED else 2]
    # Gate and up side by side are HALF columns of each.
    IS_APART: gl.constexpr = ACTIVATION is not None and ACTIVATION[1] and not ACTIVATION[2]
    wide: gl.constexpr = HALF if IS_APART else 2 * HALF
    which: gl.constexpr = (False, TRANSPOSED)
    locate: gl.constexpr = _locate
    descriptors = (rows, weights, bias)
    buffers, views, barriers = _allocate(rows, weights, which, STAGES)
    x, w = buffers
    halves, pairs, made = views
    if bias is None:
        buffers = (x, w, None)
        operands = (halves, pairs, made, None, None)
    else:
        b = gl.allocate_shared_memory(bias.dtype, [2 * STAGES, 1, HALF], bias.layout)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        biases = _view(b, bias.dtype, [STAGES, 2 * HALF], flat)
        buffers = (x, w, b)
        operands = (halves, pairs, made, biases, bias_weights_ptr)
    num_column_tiles = gl.cdiv(width, wide)
    tiles = (gl.load(tiles_ptr) * num_column_tiles, num_column_tiles, tiles_ptr, depth)
    pointers = (row_weights_ptr, out_ptr, inner_ptr)
    sizes = (num_rows, wide, width, apart, num_columns)
    gl.warp_specialize(
        [
            (_multiply, (operands, barriers, tiles, locate, which, 0)),
            (_multiply, (operands, barriers, tiles, locate, which, 1)),
            (_finish, (views[2], barriers, tiles, pointers, sizes, locate, ACTIVATION, WARPS)),
            (_load, (descriptors, buffers, barriers, tiles, sizes, TRANSPOSED)),
        ],
        [4, WARPS, 1],
        [REGISTERS, REGISTERS // 2, REGISTERS // 2],
    )
