"""The kernels of glu: an activation, gated or not, times each row's weight; also in 8 bits.

Gate and up are the halves of each row of one array, or alternate in its rows, or are two arrays.
"""

import triton
import triton.language as tl

from triax.moe.quantization.kernels import (
    _INFINITY,
    _finite,
    _float32,
    _inverse,
    _quantized,
    _scale,
    _sizes,
)


@triton.jit
def _curve(x, CURVE: tl.constexpr, ALPHA: tl.constexpr):
    """Returns the activation of `x` and its derivative."""
    if CURVE == "silu":
        s = tl.sigmoid(ALPHA * x)
        return x * s, s + x * (ALPHA * (s * (1 - s)))
    elif CURVE == "gelu":  # the tanh form: tanh(z) = 2 * sigmoid(2 * z) - 1
        s = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        slope = s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
        return x * s, s + x * slope
    elif CURVE == "gelu_exact":
        s = 0.5 + 0.5 * tl.math.erf(0.7071067811865476 * x)
        return x * s, s + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    else:
        tl.static_assert(CURVE == "relu2", "an unknown activation")
        x = tl.where(x < 0, 0.0, x)
        return x * x, 2 * x


@triton.jit
def _clipped(gate, up, LIMIT: tl.constexpr):
    """Clips gate and up; also returns which elements of each were not clipped. NaNs never are."""
    gate_kept = ~(gate > LIMIT)
    up_kept = ~(tl.abs(up) > LIMIT)
    gate = tl.where(gate_kept, gate, LIMIT)
    up = tl.where(up_kept, up, tl.where(up > 0, LIMIT, -LIMIT))
    return gate, up, gate_kept, up_kept


@triton.jit
def _load(
    operands,
    rows,
    first,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Loads float32 blocks of gate and up from column `first` on; if not GATED, up is gate."""
    gate_ptr, up_ptr, _, num_rows, width = operands
    inside = (rows < num_rows)[:, None]
    row = rows.to(tl.int64)[:, None]
    columns = first + tl.arange(0, COLUMNS)[None, :]
    mask = inside & (columns < width)
    if GATED and up_ptr is None:
        if INTERLEAVED:
            both = 2 * first + tl.arange(0, 2 * COLUMNS)[None, :]
            at = gate_ptr + 2 * row * width + both
            block = tl.load(at, mask=inside & (both < 2 * width), other=0.0)
            gate, up = block.reshape(rows.shape[0], COLUMNS, 2).split()
        else:
            at = gate_ptr + 2 * row * width + columns
            gate = tl.load(at, mask=mask, other=0.0)
            up = tl.load(at + width, mask=mask, other=0.0)
    else:
        gate = tl.load(gate_ptr + row * width + columns, mask=mask, other=0.0)
        up = gate
        if GATED:
            up = tl.load(up_ptr + row * width + columns, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _glu(operands, rows, first, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes a block of glu, from column `first` on, in the dtype of gate and up.

    `ACTIVATION` is CURVE, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET.
    """
    CURVE: tl.constexpr = ACTIVATION[0]
    GATED: tl.constexpr = ACTIVATION[1]
    INTERLEAVED: tl.constexpr = ACTIVATION[2]
    ALPHA: tl.constexpr = ACTIVATION[3]
    LIMIT: tl.constexpr = ACTIVATION[4]
    UP_OFFSET: tl.constexpr = ACTIVATION[5]
    gate_up_ptr, _, row_weights_ptr, num_rows, _ = operands
    gate, up = _load(operands, rows, first, GATED, INTERLEAVED, COLUMNS)
    if LIMIT is not None:
        gate, up, _, _ = _clipped(gate, up, LIMIT)
    out, _ = _curve(gate, CURVE, ALPHA)
    if GATED:
        out *= up + UP_OFFSET
    if row_weights_ptr is not None:
        weight = tl.load(row_weights_ptr + rows, mask=rows < num_rows, other=0.0)
        out *= weight.to(tl.float32)[:, None]
    return out.to(gate_up_ptr.dtype.element_ty)


@triton.jit
def _place(rows, num_rows, first, width, COLUMNS: tl.constexpr):
    """Returns the offsets of a block of the result, and where its elements exist."""
    columns = first + tl.arange(0, COLUMNS)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < width)
    return rows.to(tl.int64)[:, None] * width + columns, mask


@triton.jit(do_not_specialize=["num_rows"])
def _glu_kernel(
    gate_up_ptr,
    up_ptr,
    row_weights_ptr,
    num_rows,
    width,
    out_ptr,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # One program computes some rows of a block of columns.
    column_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    rows = tl.program_id(0) // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(0) % column_blocks * BLOCK_COLUMNS
    operands = gate_up_ptr, up_ptr, row_weights_ptr, num_rows, width
    out = _glu(
        operands, rows, first, (CURVE, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET), BLOCK_COLUMNS
    )
    at, mask = _place(rows, num_rows, first, width, BLOCK_COLUMNS)
    tl.store(out_ptr + at, out, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_glu_kernel(
    gate_up_ptr,
    up_ptr,
    row_weights_ptr,
    num_rows,
    width,
    values_ptr,
    scales_ptr,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # A program takes whole rows, each with a scale. It computes the result twice: first to find
    # each row's largest magnitude, then to round. The second time its operands come from the cache.
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    operands = gate_up_ptr, up_ptr, row_weights_ptr, num_rows, width
    largest = _largest_of_glu(
        operands, rows, False, (CURVE, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET), BLOCK_COLUMNS
    )
    special = tl.max(largest, 0) >= _INFINITY
    if special:
        largest = _largest_of_glu(
            operands,
            rows,
            True,
            (CURVE, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET),
            BLOCK_COLUMNS,
        )
    scale = _scale(largest, values_ptr.dtype.element_ty)
    tl.store(scales_ptr + rows, scale, mask=rows < num_rows)
    inverse = _inverse(scale)[:, None]
    for first in range(0, width, BLOCK_COLUMNS):
        out = _glu(
            operands,
            rows,
            first,
            (CURVE, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET),
            BLOCK_COLUMNS,
        )
        if special:
            values = _quantized(out, inverse, values_ptr, True)
        else:
            values = _quantized(out, inverse, values_ptr, False)
        at, mask = _place(rows, num_rows, first, width, BLOCK_COLUMNS)
        tl.store(values_ptr + at, values, mask=mask)


@triton.jit
def _largest_of_glu(
    operands, rows, FINITE: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns the largest magnitude in each row of the result; FINITE ignores all others."""
    dtype: tl.constexpr = operands[0].dtype.element_ty
    largest = tl.zeros(
        [rows.shape[0], COLUMNS], tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    )
    for first in range(0, operands[4], COLUMNS):
        out = _glu(operands, rows, first, ACTIVATION, COLUMNS)
        sizes = _sizes(out)
        largest = tl.maximum(largest, _finite(sizes, dtype) if FINITE else sizes)
    return _float32(tl.max(largest, 1), dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _glu_grad_kernel(
    gate_up_ptr,
    up_ptr,
    row_weights_ptr,
    gradient_ptr,
    num_rows,
    width,
    d_gate_up_ptr,
    d_up_ptr,
    d_row_weights_ptr,
    AGAIN: tl.constexpr,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # Programs take whole rows, so that one program sums the gradient of a row's weight. With AGAIN
    # the kernel also recomputes glu's result. It saves memory by overwriting what it has read: the
    # result takes the place of `gradient`, and the gradients that of gate and up.
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    row = rows.to(tl.int64)[:, None]
    operands = gate_up_ptr, up_ptr, row_weights_ptr, num_rows, width
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    if AGAIN:
        d_gate_up_ptr = gate_up_ptr
        d_up_ptr = up_ptr
    if row_weights_ptr is not None:
        weight = tl.load(row_weights_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, width, BLOCK_COLUMNS):
        columns = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = inside[:, None] & (columns < width)
        gate, up = _load(operands, rows, first, GATED, INTERLEAVED, BLOCK_COLUMNS)
        gradient = tl.load(gradient_ptr + row * width + columns, mask=mask, other=0.0)
        gradient = gradient.to(tl.float32)
        if LIMIT is not None:
            gate, up, gate_kept, up_kept = _clipped(gate, up, LIMIT)
        active, slope = _curve(gate, CURVE, ALPHA)
        out = active
        if GATED:
            up += UP_OFFSET
            out = active * up
        if row_weights_ptr is not None:
            total += out * gradient
            gradient *= weight
            out *= weight
        if AGAIN:
            tl.debug_barrier()  # all threads must have read the block before any overwrites it
            tl.store(gradient_ptr + row * width + columns, out.to(dtype), mask=mask)
        d_gate = gradient * slope
        if CURVE == "relu2":  # a constant below zero, whose derivative is 0 even of infinity or NaN
            d_gate = tl.where(gate < 0, 0.0, d_gate)
        if GATED:
            d_gate = gradient * up * slope
            d_up = gradient * active
            if LIMIT is not None:
                d_gate = tl.where(gate_kept, d_gate, 0.0)
                d_up = tl.where(up_kept, d_up, 0.0)
        if GATED and d_up_ptr is None:
            if INTERLEAVED:
                both = 2 * first + tl.arange(0, 2 * BLOCK_COLUMNS)[None, :]
                at = d_gate_up_ptr + 2 * row * width + both
                block = tl.join(d_gate, d_up).reshape(BLOCK_ROWS, 2 * BLOCK_COLUMNS)
                tl.store(at, block.to(dtype), mask=inside[:, None] & (both < 2 * width))
            else:
                at = d_gate_up_ptr + 2 * row * width + columns
                tl.store(at, d_gate.to(dtype), mask=mask)
                tl.store(at + width, d_up.to(dtype), mask=mask)
        else:
            tl.store(d_gate_up_ptr + row * width + columns, d_gate.to(dtype), mask=mask)
            if GATED:
                tl.store(d_up_ptr + row * width + columns, d_up.to(dtype), mask=mask)
    if row_weights_ptr is not None:
        tl.store(d_row_weights_ptr + rows, tl.sum(total, 1), mask=inside)
