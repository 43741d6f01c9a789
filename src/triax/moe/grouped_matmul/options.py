"""What a grouped product is asked for beside its operands: where groups lie, and its options."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# JAX's names for the matmul precisions that allow tensor cores to multiply float32.
_TF32 = {"default", "tensorfloat32", "TF32_TF32_F32"}
_TF32X3 = {"high", "TF32_TF32_F32_X3"}

# JAX's name for sums of products of 8-bit floats by the tensor cores alone.
FAST_SUMS = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


class Groups(NamedTuple):
    """Groups of consecutive rows.

    Attributes:
      sizes: int32 [groups].
      first_row: int32 [], the first row of the first group; None for row 0.
    """

    sizes: jax.Array
    first_row: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a product: the result's dtype, and JAX's default for matmuls where it is called.

    Gradients have that precision too, wherever they are traced. `share` is the part of all groups
    that there are weights for: by it the rows of a group are estimated.
    """

    dtype: Any
    precision: str | None
    share: float = 1.0

    @property
    def plain_precision(self) -> str | None:
        """For plain JAX, which multiplies 8-bit floats in bfloat16 or float32."""
        return None if self.fast_sums else self.precision

    @property
    def fast_sums(self) -> bool:
        """Whether tensor cores add up all products of 8-bit floats."""
        return self.precision == FAST_SUMS

    @property
    def input_precision(self) -> str:
        """Triton's name for how to multiply float32."""
        if self.precision in _TF32:
            return "tf32"
        return "tf32x3" if self.precision in _TF32X3 else "ieee"

    def for_partial_sums(self) -> Options:
        """The same with results that can be summed up: at least float32, if floats."""
        small = jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4
        return dataclasses.replace(self, dtype=jnp.dtype(jnp.float32)) if small else self
