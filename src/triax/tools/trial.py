"""The kernel that `triax doctor` runs, in a module of its own because it imports Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from triax.call import triton_call

BLOCK = 128


@triton.jit
def _double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.store(out_ptr + offsets, 2 * x, mask=offsets < n)


def double(x: Any, **options: Any) -> Any:
    """Doubles the array `x` with a kernel."""
    grid = triton.cdiv(x.size, BLOCK)
    return triton_call(
        x, n=x.size, BLOCK=BLOCK, kernel=_double_kernel, out_type=x, grid=grid, **options
    )
