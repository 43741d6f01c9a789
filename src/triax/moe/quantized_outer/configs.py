"""How the kernels of quantized_outer are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe.grouped_matmul.configs import Itemsizes, OuterConfig, fit
from triax.moe.grouped_matmul.tiles import ROWS
from triax.moe.shared.target import Target

TILE = ROWS
"""What a group's rows are padded to a multiple of, and the most that is summed at a time."""


@dataclasses.dataclass(frozen=True)
class GroupsConfig:
    """One program quantizes `block_columns` of a group, `block_rows` at a time."""

    block_rows: int = TILE
    block_columns: int = 64
    num_warps: int = 4


def outer_config(
    target: Target, left: int, right: int, result: int, *, tma: bool, float32_sums: bool
) -> OuterConfig:
    """The config of the product for so many columns on both sides.

    `result` are the bytes of an element of the result; `float32_sums` is whether sums of tensor
    cores are added up outside of them.
    """
    if not (tma and target.architecture.multiplies_from_shared):
        config = OuterConfig(fit(left, 128), fit(right, 128), TILE if tma else TILE // 2, 8, 3, tma)
    elif float32_sums:
        config = OuterConfig(fit(left, 256), fit(right, 128), TILE, 8, 3, True)
    else:
        config = OuterConfig(fit(left, 128), fit(right, 256), TILE, 8, 3, True, 4)
    return config.fitted(target.architecture, Itemsizes(1, 1, result), tma)
