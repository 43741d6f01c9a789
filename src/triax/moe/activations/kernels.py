"""The kernels of glu: the activation of a gated linear unit, times each row's weight."""

import triton
import triton.language as tl


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """The activation and its derivative, computed from one sigmoid."""
    if ACTIVATION == "swiglu":
        s = tl.sigmoid(x)
        slope = s * (1 - s)
    else:  # GELU's tanh form: tanh(z) = 2 * sigmoid(2 * z) - 1
        tl.static_assert(ACTIVATION == "geglu", "an unknown activation")
        s = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        slope = s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    return x * s, s + x * slope


@triton.jit(do_not_specialize=["num_rows"])
def _glu_kernel(
    gate_up_ptr,
    row_weights_ptr,
    num_rows,
    width,
    out_ptr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # One program for some rows and a block of their columns.
    column_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    rows = tl.program_id(0) // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = rows < num_rows
    mask = inside[:, None] & (columns < width)[None, :]
    offset = rows.to(tl.int64)[:, None] * width
    halves = gate_up_ptr + 2 * offset + columns[None, :]
    gate = tl.load(halves, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(halves + width, mask=mask, other=0.0).to(tl.float32)
    active, _ = _activate(gate, ACTIVATION)
    out = active * up
    if row_weights_ptr is not None:
        out *= tl.load(row_weights_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + offset + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _glu_grad_kernel(
    gate_up_ptr,
    row_weights_ptr,
    gradient_ptr,
    num_rows,
    width,
    d_gate_up_ptr,
    d_row_weights_ptr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # Whole rows, so that the gradient of a row's weight is summed up by one program.
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    offset = rows.to(tl.int64)[:, None] * width
    dtype: tl.constexpr = d_gate_up_ptr.dtype.element_ty
    if row_weights_ptr is not None:
        weight = tl.load(row_weights_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, width, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = inside[:, None] & (columns < width)
        halves = gate_up_ptr + 2 * offset + columns
        gate = tl.load(halves, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(halves + width, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + offset + columns, mask=mask, other=0.0).to(tl.float32)
        active, slope = _activate(gate, ACTIVATION)
        if row_weights_ptr is not None:
            total += active * up * gradient
            gradient *= weight
        d_halves = d_gate_up_ptr + 2 * offset + columns
        tl.store(d_halves, (gradient * up * slope).to(dtype), mask=mask)
        tl.store(d_halves + width, (gradient * active).to(dtype), mask=mask)
    if row_weights_ptr is not None:
        tl.store(d_row_weights_ptr + rows, tl.sum(total, 1), mask=inside)
