"""How the kernels are cut into programs."""

from __future__ import annotations

import pytest

from triax.moe.grouped_matmul.configs import DotConfig

_SHARED_BYTES = 227 * 1024  # of a program on Hopper


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("average", [0, 1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 500])
def test_few_groups_have_more_rows_than_a_tile(average, itemsize):
    """A group of two tiles has its weights read twice, and few rows take no other time."""
    for columns in (16, 4096):
        config = DotConfig.heuristic(
            average, columns, 4096, itemsize, exact=False, hopper=True, tma=True
        )
        assert config.block_rows >= min(128, 2 * average)
        assert config.block_rows <= max(16, 4 * average)
        assert (config.row_tiles == 1) == (average <= 64)
        loaded = (config.block_rows + config.block_columns) * config.block_depth * itemsize
        stored = config.block_rows * config.block_columns // 2 * itemsize
        assert loaded * config.num_stages + stored <= _SHARED_BYTES
