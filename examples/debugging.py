"""Three mistakes that a GPU would let pass, and what the interpreter says about them.

    python examples/debugging.py

It runs on the CPU, with or without a GPU in the machine.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

import triax
from triax import testing
from triax.errors import DataRace, OutOfBounds, UninitializedRead


@triton.jit
def difference_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[i] = x[i + 1] - x[i]; the mask should end one element earlier."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    here = tl.load(x_ptr + at, mask=mask)
    tl.store(out_ptr + at, tl.load(x_ptr + at + 1, mask=mask) - here, mask=mask)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr):
    """Counts values; two programs may meet at a count, so it should be `tl.atomic_add`."""
    count = counts_ptr + tl.load(x_ptr + tl.program_id(0))
    tl.store(count, tl.load(count) + 1)


@triton.jit
def running_sum_kernel(x_ptr, out_ptr, n):
    """Running sums; the first is never stored."""
    for i in range(1, n):
        tl.store(out_ptr + i, tl.load(out_ptr + i - 1) + tl.load(x_ptr + i))


def difference(x):
    kernel = {"kernel": difference_kernel, "implementation": "interpret"}
    return triax.triton_call(x, n=x.size, BLOCK=16, out_type=x, grid=1, **kernel)


def histogram(x):
    return triax.triton_call(
        x,
        kernel=histogram_kernel,
        out_type=jax.ShapeDtypeStruct((4,), x.dtype),
        zeroed_outputs=(0,),
        grid=x.size,
        implementation="interpret",
    )


def running_sum(x):
    kernel = {"kernel": running_sum_kernel, "implementation": "interpret"}
    return triax.triton_call(x, n=x.size, out_type=x, grid=1, **kernel)


def main() -> int:
    """How many of the mistakes were found."""
    mistakes = (
        (OutOfBounds, difference, jnp.arange(10.0)),
        (DataRace, histogram, jnp.array([0, 3, 1, 3])),
        (UninitializedRead, running_sum, jnp.arange(5.0)),
    )
    found = 0
    with jax.default_device(jax.devices("cpu")[0]):
        for expected, function, x in mistakes:
            try:
                with testing.checked():
                    function(jax.device_put(x, jax.devices("cpu")[0]))
            except expected as error:
                found += 1
                print(f"{expected.__name__} in {function.__name__}:\n  {error}")
    print(f"{found} of {len(mistakes)} mistakes found")
    return found


if __name__ == "__main__":
    main()
