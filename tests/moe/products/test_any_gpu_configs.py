"""How the kernels are cut into programs."""

from __future__ import annotations

import itertools

import pytest

from triax import architectures
from triax.moe.products.any_gpu_configs import DotConfig, Itemsizes, OuterConfig, fit, shared_bytes
from triax.moe.shared.target import Target

ARCHITECTURES = architectures.BY_CAPABILITY.values()
HALVES, FLOATS, EIGHT_BITS = Itemsizes(2, 2, 2), Itemsizes(4, 4, 4), Itemsizes(1, 1, 2)


def card(compute_capability, tma=None):
    known = architectures.of(compute_capability)
    return Target(compute_capability, known.multiprocessors, known.tma if tma is None else tma)


H200 = card(90)


@pytest.mark.parametrize("itemsizes", [HALVES, FLOATS])
@pytest.mark.parametrize("average", [0, 1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 500])
def test_few_groups_have_more_rows_than_a_tile(average, itemsizes):
    """A group of two tiles has its weights read twice, and few rows take no other time."""
    for columns in (16, 4096):
        how = {"exact": False, "tma": True}
        config = DotConfig.heuristic(H200, average, columns, 4096, itemsizes, **how)
        assert config.block_rows >= min(128, 2 * average)
        assert config.block_rows <= max(16, 4 * average)
        assert (config.row_tiles == 1) == (average <= 64)


TMA = {"exact": False, "tma": True}
NO_TMA = {**TMA, "tma": False}
EXACT = {**TMA, "exact": True}


@pytest.mark.parametrize(
    ("capability", "rows", "width", "itemsizes", "how", "expected"),
    [
        (90, 1000, 4096, FLOATS, EXACT, (64, 64, 32, 4, 3, False, 8)),
        (90, 1000, 4096, EIGHT_BITS, TMA, (128, 256, 128, 8, 3, True, 8)),
        (90, 1000, 4096, HALVES, TMA, (128, 256, 64, 8, 3, True, 8)),
        (90, 1000, 4096, FLOATS, TMA, (128, 128, 32, 8, 3, True, 8)),
        (90, 1000, 4096, EIGHT_BITS, {**TMA, "blocked": True}, (128, 128, 128, 8, 3, True, 8)),
        (
            90,
            1000,
            4096,
            EIGHT_BITS,
            {**TMA, "float32_sums": True},
            (64, 128, 128, 4, 3, False, 32),
        ),
        (90, 64, 4096, EIGHT_BITS, {**TMA, "blocked": True}, (64, 128, 128, 4, 4, True, 8)),
        (90, 64, 4096, EIGHT_BITS, {**TMA, "float32_sums": True}, (64, 128, 128, 4, 4, True, 8)),
        (90, 17, 4096, EIGHT_BITS, TMA, (64, 128, 128, 4, 4, True, 8)),
        (90, 16, 4096, EIGHT_BITS, TMA, (16, 128, 256, 8, 4, True, 1)),
        (90, 64, 4096, HALVES, TMA, (128, 256, 64, 8, 3, True, 1)),
        (90, 32, 4096, HALVES, TMA, (64, 256, 64, 4, 4, True, 1)),
        (90, 16, 4096, HALVES, TMA, (32, 128, 128, 8, 4, True, 1)),
        (90, 64, 4096, HALVES, {**TMA, "blocked": True}, (128, 128, 64, 8, 3, True, 1)),
        (90, 32, 4096, HALVES, {**TMA, "blocked": True}, (64, 128, 64, 4, 4, True, 1)),
        (90, 16, 4096, FLOATS, TMA, (32, 128, 32, 8, 4, True, 1)),
        (90, 1000, 4096, HALVES, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (90, 1000, 4096, EIGHT_BITS, {**NO_TMA, "blocked": True}, (128, 128, 128, 8, 4, False, 8)),
        (90, 64, 4096, EIGHT_BITS, NO_TMA, (64, 128, 128, 8, 4, False, 8)),
        # What tensor cores take at least of the depth.
        (90, 1000, 16, EIGHT_BITS, TMA, (128, 16, 32, 8, 3, True, 8)),
        (90, 1000, 16, HALVES, TMA, (128, 16, 16, 8, 3, True, 8)),
        # Cards whose tensor cores multiply what is in registers; not measured.
        (80, 4, 20, FLOATS, {**EXACT, "tma": False}, (16, 32, 32, 4, 3, False, 8)),
        (80, 1000, 4096, HALVES, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (86, 1000, 4096, HALVES, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (80, 1000, 4096, FLOATS, NO_TMA, (128, 64, 32, 8, 4, False, 8)),
        (89, 4, 4096, EIGHT_BITS, NO_TMA, (16, 128, 128, 4, 4, False, 1)),
        (120, 1000, 4096, HALVES, TMA, (128, 128, 64, 8, 3, True, 8)),
        (120, 40, 4096, HALVES, TMA, (128, 128, 64, 8, 3, True, 1)),
        (120, 4, 4096, HALVES, TMA, (16, 128, 64, 4, 4, True, 1)),
    ],
)
def test_configs_of_products(capability, rows, width, itemsizes, how, expected):
    config = DotConfig.heuristic(card(capability), rows, width, width, itemsizes, **how)
    assert tuple(vars(config).values()) == expected


@pytest.mark.parametrize(
    ("capability", "width", "itemsizes", "how", "expected"),
    [
        (90, 4096, FLOATS, EXACT, (64, 64, 32, 4, 3, False, 8)),
        (90, 20, FLOATS, EXACT, (32, 32, 32, 4, 3, False, 8)),
        (90, 4096, EIGHT_BITS, TMA, (128, 256, 128, 8, 3, True, 4)),
        (90, 4096, EIGHT_BITS, {**TMA, "float32_sums": True}, (256, 128, 128, 8, 3, True, 8)),
        (90, 4096, EIGHT_BITS, NO_TMA, (128, 128, 64, 8, 3, False, 8)),
        (120, 4096, EIGHT_BITS, TMA, (128, 128, 128, 8, 3, True, 8)),
        (90, 4096, HALVES, TMA, (128, 256, 64, 8, 3, True, 8)),
        (90, 4096, FLOATS, TMA, (128, 128, 32, 8, 3, True, 8)),
        (90, 20, HALVES, TMA, (32, 32, 64, 8, 3, True, 8)),
        (90, 4096, HALVES, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (80, 4096, HALVES, NO_TMA, (128, 128, 64, 8, 4, False, 8)),
        (120, 4096, HALVES, TMA, (128, 128, 64, 8, 3, True, 8)),
    ],
)
def test_configs_of_gradients(capability, width, itemsizes, how, expected):
    config = OuterConfig.heuristic(card(capability), width, width, itemsizes, **how)
    assert tuple(vars(config).values()) == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.compute_capability)
def test_every_block_fits_every_card(architecture):
    """By the bound on shared memory. That Triton takes no more, `tests.cards` shows."""
    sizes = (1, 16, 33, 128, 4096)
    averages = (0, 4, 12, 24, 40, 100, 1000)
    bytes_of = [Itemsizes(*each) for each in itertools.product((1, 2, 4), (1, 2, 4), (2, 4))]
    for tma in {architecture.tma, False}:
        target = card(architecture.compute_capability, tma)
        for itemsizes, width in itertools.product(bytes_of, sizes):
            configs = []
            for exact in {False, itemsizes.left == 4}:
                how = {"exact": exact, "tma": tma}
                configs.append(OuterConfig.heuristic(target, width, 4096, itemsizes, **how))
                for sums, blocked in itertools.product((False, True), repeat=2):
                    if itemsizes.left == 1:
                        how |= {"float32_sums": sums, "blocked": blocked}
                    elif sums or blocked:  # these are of 8 bits
                        continue
                    configs += [
                        DotConfig.heuristic(target, rows, width, depth, itemsizes, **how)
                        for rows, depth in itertools.product(averages, sizes)
                    ]
            if itemsizes.left == itemsizes.right == 1:
                for sums in (False, True):
                    how = {"exact": False, "tma": tma, "float32_sums": sums}
                    configs.append(OuterConfig.heuristic(target, width, 4096, itemsizes, **how))
            for config in configs:
                block = list(vars(config).values())[:3]
                args = block, config.num_stages, architecture, itemsizes, tma
                assert shared_bytes(*args) <= architecture.shared_bytes, config
                assert 2 <= config.num_stages <= 4
                assert min(block) >= 16


def test_sizes_fit():
    assert [fit(size, 128) for size in (0, 16, 17, 128, 129)] == [16, 16, 32, 128, 128]
