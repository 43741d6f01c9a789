"""A product of rows in groups, as the functions that choose and launch kernels take it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.binding.launch import KernelImplementation
from triax.compat import versions
from triax.moe.activations.reference import GluSpec
from triax.moe.products.operands import Parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.row_tiles import suit_tma
from triax.moe.shared.target import Target

_HOPPER = 90
ALIGNED = "rows, weights and results that begin at multiples of 16 bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A product of two operands, for the GPU that a program is lowered for."""

    target: Target
    left: Parts
    right: Parts
    groups: Groups
    options: Options
    implementation: KernelImplementation | None

    @property
    def num_rows(self) -> int:
        return len(self.left.values)

    @property
    def num_groups(self) -> int:
        return self.groups.sizes.shape[0]

    @property
    def rows_per_group(self) -> int:
        """The mean number of rows of a group, rounded down."""
        return int(self.num_rows * self.options.share) // self.num_groups

    @property
    def is_exact(self) -> bool:
        """Whether float32 is multiplied without tensor cores."""
        return self.left.values.dtype.itemsize == 4 and self.options.input_precision == "ieee"

    def needs_hopper(self) -> str | None:
        """Returns what a kernel in Gluon for Hopper needs and the target does not have, or None."""
        if self.implementation == "interpret":
            return "a GPU: Gluon is not interpreted"
        if self.target.compute_capability != _HOPPER:
            return "Hopper (compute capability 9.0)"
        if not versions.GLUON.passes(versions.installed(versions.GLUON.package) or "0"):
            return f"Triton {versions.GLUON.stable} or later"
        if not self.target.tensor_maps:
            return f"JAX {versions.TENSOR_MAPS.stable} or later"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDot(Product):
    """Rows times the weights of their groups, plus a bias, and perhaps an activation.

    `right` are the parts of `weights`. With `glu` the result is the product, or None without
    `keep_product`, and what `glu` makes of it, times `row_weights`.
    """

    weights: Any
    transposed: bool
    bias: jax.Array | None = None
    bias_weights: jax.Array | None = None
    row_weights: jax.Array | None = None
    glu: GluSpec | None = None
    keep_product: bool = True

    @property
    def depth(self) -> int:
        return self.left.values.shape[1]

    @property
    def columns(self) -> int:
        return self.right.columns if self.transposed else self.right.values.shape[2]

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_rows, self.columns), self.options.dtype)

    @property
    def suits_tma(self) -> bool:
        """Whether blocks are loaded and stored by descriptors."""
        arrays = self.left.values, self.right.values, self.out_type
        return self.target.tensor_maps and suit_tma(*arrays)

    def __str__(self) -> str:
        return f"ragged_dot of {_shown(self.left)} × {_shown(self.right)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOuter(Product):
    """The sums of left × right over the rows of each group.

    With `rounded_to` both sides are first rounded to 8 bits, with a scale for each group and
    column. Then a side may have `sources`: for each of the groups' rows, its index in the side.
    """

    rounded_to: tuple[np.dtype, np.dtype] | None = None
    sources: tuple[jax.Array | None, jax.Array | None] = None, None

    @property
    def num_rows(self) -> int:
        return len(self.left.values if self.sources[0] is None else self.sources[0])

    @property
    def columns(self) -> int:
        return self.right.values.shape[1]

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        shape = self.num_groups, self.left.values.shape[1], self.columns
        return jax.ShapeDtypeStruct(shape, self.options.dtype)

    def __str__(self) -> str:
        return f"group_outer of {_shown(self.left)} × {_shown(self.right)}"


def _shown(parts: Parts) -> str:
    dtype = parts.packed or jnp.dtype(parts.values.dtype).name
    return f"{dtype}{[*parts.values.shape]}{' in tiles' * parts.tiled}"
