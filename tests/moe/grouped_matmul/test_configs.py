"""How the kernels are cut into programs."""

from __future__ import annotations

import pytest

from triax.moe.grouped_matmul.configs import DotConfig, OuterConfig, fit, is_hopper

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


HOPPER = {"exact": False, "hopper": True, "tma": True}
NO_TMA = {**HOPPER, "tma": False}
EXACT = {**HOPPER, "exact": True}
OLD = {**NO_TMA, "hopper": False}


@pytest.mark.parametrize(
    ("rows", "width", "itemsize", "how", "expected"),
    [
        (1000, 4096, 4, EXACT, (64, 64, 32, 4, 3, False, 8)),
        (4, 20, 4, {**OLD, "exact": True}, (16, 32, 32, 4, 3, False, 8)),
        (1000, 4096, 1, HOPPER, (128, 256, 128, 8, 3, True, 8)),
        (1000, 4096, 2, HOPPER, (128, 256, 64, 8, 3, True, 8)),
        (1000, 4096, 4, HOPPER, (128, 128, 32, 8, 3, True, 8)),
        (1000, 4096, 1, {**HOPPER, "blocked": True}, (128, 128, 128, 8, 3, True, 8)),
        (1000, 4096, 1, {**HOPPER, "float32_sums": True}, (64, 128, 128, 4, 3, False, 32)),
        (64, 4096, 1, {**HOPPER, "blocked": True}, (64, 128, 128, 4, 4, True, 8)),
        (64, 4096, 1, {**HOPPER, "float32_sums": True}, (64, 128, 128, 4, 4, True, 8)),
        (17, 4096, 1, HOPPER, (64, 128, 128, 4, 4, True, 8)),
        (16, 4096, 1, HOPPER, (16, 128, 256, 8, 4, True, 1)),
        (64, 4096, 2, HOPPER, (128, 256, 64, 8, 3, True, 1)),
        (32, 4096, 2, HOPPER, (64, 256, 64, 4, 4, True, 1)),
        (16, 4096, 2, HOPPER, (32, 128, 128, 8, 4, True, 1)),
        (16, 4096, 4, HOPPER, (32, 128, 32, 8, 4, True, 1)),
        (1000, 4096, 2, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (1000, 4096, 2, OLD, (128, 128, 32, 8, 4, False, 8)),
        (1000, 4096, 1, {**NO_TMA, "blocked": True}, (128, 128, 128, 8, 4, False, 8)),
        (1000, 4096, 1, {**NO_TMA, "float32_sums": True}, (128, 128, 128, 8, 4, False, 8)),
        (64, 4096, 1, NO_TMA, (64, 128, 128, 8, 4, False, 8)),
        # What tensor cores take at least of the depth.
        (1000, 16, 1, HOPPER, (128, 16, 32, 8, 3, True, 8)),
        (1000, 16, 2, HOPPER, (128, 16, 16, 8, 3, True, 8)),
    ],
)
def test_configs_that_were_measured(rows, width, itemsize, how, expected):
    config = DotConfig.heuristic(rows, width, width, itemsize, **how)
    assert tuple(vars(config).values()) == expected


@pytest.mark.parametrize(
    ("width", "itemsize", "how", "expected"),
    [
        (4096, 4, EXACT, (64, 64, 32, 4, 3, False, 8)),
        (20, 4, EXACT, (32, 32, 32, 4, 3, False, 8)),
        (4096, 1, HOPPER, (128, 256, 128, 8, 3, True, 8)),
        (4096, 2, HOPPER, (128, 256, 64, 8, 3, True, 8)),
        (4096, 4, HOPPER, (128, 128, 32, 8, 3, True, 8)),
        (20, 2, HOPPER, (32, 32, 64, 8, 3, True, 8)),
        (4096, 2, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (4096, 2, OLD, (128, 128, 32, 8, 4, False, 8)),
    ],
)
def test_configs_of_gradients_that_were_measured(width, itemsize, how, expected):
    config = OuterConfig.heuristic(width, width, itemsize, **how)
    assert tuple(vars(config).values()) == expected


def test_sizes_fit():
    assert [fit(size, 128) for size in (0, 16, 17, 128, 129)] == [16, 16, 32, 128, 128]
    assert [is_hopper(capability) for capability in (80, 89, 90, 100)] == [False, False, True, True]
