"""The kernels that the bridge is tested with, one of each kind."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * n_cols + cols, e / tl.sum(e, axis=0), mask=cols < n_cols)


@triton.jit
def tile_pointers(base, rows, cols, stride):
    return base + rows[:, None] * stride + cols[None, :]


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        inner = start + tl.arange(0, BK)
        a_mask = (rows[:, None] < m) & (inner[None, :] < k)
        b_mask = (inner[:, None] < k) & (cols[None, :] < n)
        a = tl.load(tile_pointers(a_ptr, rows, inner, k), mask=a_mask, other=0.0)
        b = tl.load(tile_pointers(b_ptr, inner, cols, n), mask=b_mask, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(tile_pointers(out_ptr, rows, cols, n), acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, out_ptr, mean_ptr, n_cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(mask, x - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n_cols + eps)
    w = tl.load(w_ptr + cols, mask=mask)
    b = tl.load(b_ptr + cols, mask=mask)
    tl.store(out_ptr + row * n_cols + cols, centred * scale * w + b, mask=mask)
    tl.store(mean_ptr + row, mean)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, bins, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=-1)
    tl.atomic_add(counts_ptr + x, 1, mask=(x >= 0) & (x < bins))


@triton.jit
def accumulate_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y += x, in place."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    y = tl.load(y_ptr + offsets, mask=mask) + tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def outputs_first_kernel(sum_ptr, x_ptr, difference_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(sum_ptr + offsets, x + y, mask=mask)
    tl.store(difference_ptr + offsets, x - y, mask=mask)


@triton.jit
def variadic_kernel(out_ptr, n, *xs, BLOCK: tl.constexpr = 64):
    """The sum of arrays, which a number among them multiplies."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(xs)):
        if xs[i].dtype.is_ptr():
            total += tl.load(xs[i] + offsets, mask=offsets < n)
        else:
            total *= xs[i]
    tl.store(out_ptr + offsets, total, mask=offsets < n)


@triton.jit
def tuple_kernel(xs, scales, out_ptr, n, BLOCK: tl.constexpr):
    """out = xs[0] * scales[0] + xs[1] * scales[1]"""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(xs[0] + offsets, mask=mask) * scales[0]
    total += tl.load(xs[1] + offsets, mask=mask) * scales[1]
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def scalar_array_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) * 2)


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    """out[i] = x[index[i]]: addresses that come from data."""
    row = tl.program_id(0)
    source = tl.load(index_ptr + row).to(tl.int64)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        values = tl.load(x_ptr + source * n_cols + cols, mask=cols < n_cols)
        tl.store(out_ptr + row.to(tl.int64) * n_cols + cols, values, mask=cols < n_cols)


@triton.jit
def scalars_kernel(x_ptr, out_ptr, n, negate, factor, shift, BLOCK: tl.constexpr):
    """out = ±(int64(x) * factor + shift): a bool, a float and an int64."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = (tl.load(x_ptr + offsets, mask=mask) * factor).to(tl.int64) + shift
    if negate:
        value = -value
    tl.store(out_ptr + offsets, value, mask=mask)


@triton.jit
def fused_multiply_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = x * y + x, in the operands' dtype."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, (x * y + x).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


_BLOCKS = [
    triton.Config({"BLOCK": 64}, num_warps=1),
    triton.Config({"BLOCK": 256}, num_warps=2),
    triton.Config({"BLOCK": 1024}, num_warps=4),
]

autotuned_accumulate_kernel = triton.autotune(configs=_BLOCKS, key=["n"], restore_value=["y_ptr"])(
    accumulate_kernel
)
autotuned_gather_kernel = triton.autotune(configs=_BLOCKS, key=["n_cols"])(gather_kernel)
autotuned_add_kernel = triton.autotune(configs=_BLOCKS, key=["n"])(add_kernel)


@triton.autotune(configs=_BLOCKS, key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def heuristic_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offsets < n) | EVEN
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.autotune(configs=_BLOCKS, key=[])
@triton.jit
def sum_and_accumulate_kernel(
    x_ptr, y_ptr, sum_ptr, y_out_ptr, n, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """sum = x + y; y += SCALE * x, where y and y_out share memory: for triton_call_lowering."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(sum_ptr + offsets, x + y, mask=mask)
    tl.store(y_out_ptr + offsets, y + SCALE * x, mask=mask)
