"""The kernels: a program normalizes one row, or gives back the gradients of every n-th."""

import triton
import triton.language as tl

# What is best depends on how long a row is. Outputs' shapes may not depend on the config.
tuned = triton.autotune(
    configs=[triton.Config({}, num_warps=warps) for warps in (1, 2, 4, 8, 16)], key=["width"]
)


@tuned
@triton.jit
def rms_norm_fwd_kernel(x_ptr, weight_ptr, out_ptr, scale_ptr, width, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(out_ptr + row * width + columns, x * scale * weight, mask=mask)
    tl.store(scale_ptr + row, scale)


@tuned
@triton.jit
def rms_norm_bwd_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    d_out_ptr,
    d_x_ptr,
    d_weight_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
):
    share, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(share, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        scale = tl.load(scale_ptr + row)
        normal = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32) * scale
        d_out = tl.load(d_out_ptr + at, mask=mask, other=0).to(tl.float32)
        d_normal = d_out * weight
        inner = tl.sum(d_normal * normal) / width
        tl.store(d_x_ptr + at, (d_normal - normal * inner) * scale, mask=mask)
        d_weight += d_out * normal
    tl.store(d_weight_ptr + share * width + columns, d_weight, mask=mask)
