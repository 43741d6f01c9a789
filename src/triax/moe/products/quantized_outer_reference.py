"""quantized_outer in plain JAX: the path for every platform without Triton."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.moe.products.options import Groups, Options
from triax.moe.products.reference import group_of_rows, group_outer_reference
from triax.moe.quantization.reference import quantize_groups_reference
from triax.moe.shared.arrays import take_rows


def quantized_outer_reference(
    left: jax.Array,
    right: jax.Array,
    left_source: jax.Array | None,
    right_source: jax.Array | None,
    groups: Groups,
    *,
    options: Options,
    dtypes: tuple[np.dtype, np.dtype],
) -> jax.Array:
    """Sums left × right over the rows of each group, both in 8 bits."""
    left, right = rows_of(left, left_source), rows_of(right, right_source)
    num_groups = groups.sizes.shape[0]
    group = group_of_rows(groups, left.shape[0])
    (x, x_scales), (y, y_scales) = (
        quantize_groups_reference(side, group, num_groups=num_groups, dtype=dtype)
        for side, dtype in zip((left, right), dtypes, strict=True)
    )
    wide: Any = Options(jnp.dtype(jnp.float32), None)
    sums = group_outer_reference(x, y, groups, options=wide)
    return (sums * x_scales[:, :, None] * y_scales[:, None, :]).astype(options.dtype)


def num_rows(side: jax.Array, source: jax.Array | None) -> int:
    """Returns the number of rows of a side: its own rows, or the rows that `source` names."""
    return (side if source is None else source).shape[0]


def rows_of(side: jax.Array, source: jax.Array | None) -> jax.Array:
    """Returns a side's rows, or the rows that `source` names; a row out of range is zero."""
    if source is None:
        return side
    known = (source >= 0) & (source < side.shape[0])
    rows = take_rows(side, source, mode="clip")
    return jnp.where(known[:, None], rows, jnp.zeros((), side.dtype))
