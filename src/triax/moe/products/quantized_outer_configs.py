"""Chooses how the kernels of quantized_outer are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe.products.any_gpu_configs import Itemsizes, OuterConfig, fit
from triax.moe.products.row_tiles import ROWS
from triax.moe.shared.target import Target

TILE = ROWS
"""A group's rows are padded to a multiple of this, which is also the most that a step sums."""


@dataclasses.dataclass(frozen=True)
class GroupsConfig:
    """A program quantizes `block_columns` columns of a group, `block_rows` rows at a time."""

    block_rows: int = TILE
    block_columns: int = 64
    num_warps: int = 4


def outer_config(
    target: Target, left: int, right: int, result: int, *, tma: bool, float32_sums: bool
) -> OuterConfig:
    """Returns the product's config for `left` × `right` columns.

    `result` is the result's itemsize; with `float32_sums` sums are promoted to float32.
    """
    if not (tma and target.architecture.multiplies_from_shared):
        config = OuterConfig(fit(left, 128), fit(right, 128), TILE if tma else TILE // 2, 8, 3, tma)
    elif float32_sums:
        config = OuterConfig(fit(left, 256), fit(right, 128), TILE, 8, 3, True)
    else:
        config = OuterConfig(fit(left, 128), fit(right, 256), TILE, 8, 3, True, 4)
    return config.fitted(target.architecture, Itemsizes(1, 1, result), tma)
