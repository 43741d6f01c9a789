"""The row groups and the options of a grouped product."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import settings

# JAX's names for the matmul precisions that allow tensor cores to multiply float32.
_TF32 = {"default", "tensorfloat32", "TF32_TF32_F32"}
_TF32X3 = {"high", "TF32_TF32_F32_X3"}

# JAX's name for accumulating products of 8-bit floats entirely in tensor cores.
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
    """The options of a product: the result's dtype, and the matmul precision, also of gradients.

    `share` is the fraction of all groups that have weights, to estimate the rows per group.
    `one_order` is whether the order of a sum must not depend on the number of rows.
    """

    dtype: Any
    precision: str | None
    share: float = 1.0
    one_order: bool = dataclasses.field(default_factory=settings.one_order_of_sums)

    @property
    def fast_sums(self) -> bool:
        """Whether products of 8-bit floats accumulate entirely in tensor cores."""
        return self.precision == FAST_SUMS

    @property
    def input_precision(self) -> str:
        """Triton's name of the precision of float32 products."""
        if self.precision in _TF32:
            return "tf32"
        return "tf32x3" if self.precision in _TF32X3 else "ieee"

    def for_partial_sums(self) -> Options:
        """Returns options for results that are summed up: floats are at least float32."""
        small = jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4
        return dataclasses.replace(self, dtype=jnp.dtype(jnp.float32)) if small else self
