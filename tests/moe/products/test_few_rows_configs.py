"""How the kernel for few rows is cut into programs where tensor cores read registers."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from triax import architectures
from triax.moe.products.few_rows_configs import FewRowsConfig, VeryFewRowsConfig
from triax.moe.shared.target import Target

CARDS = [each for each in architectures.BY_CAPABILITY.values() if not each.multiplies_from_shared]


def block_bytes(config, packed):
    """What a stage loads, and what all stages share: 4-bit weights once more, after widening."""
    rows, weights = (
        size * config.block_depth for size in (config.block_rows, config.block_columns)
    )
    return (2 * rows + weights // 2, 2 * weights) if packed else (2 * rows + weights, 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("card", CARDS, ids=lambda each: each.compute_capability)
def test_as_many_stages_as_fit(card, packed):
    """Up to 4, of which one needs no memory. The smallest card has fewer for packed weights."""
    free = card.shared_bytes - 4096  # without barriers and scales
    for rows, columns, depth, scaled in itertools.product(
        (1, 8, 20, 40, 100, 250), (64, 4096), (64, 2880, 7168), (None, 32, 64, 128)
    ):
        shape = card, rows, columns, depth, scaled
        config = FewRowsConfig.heuristic(*shape, eight=not packed)
        assert not config.weights_left
        assert 16 <= config.block_rows <= max(16, min(64, 4 * rows))
        same = FewRowsConfig.heuristic(*shape, eight=True)
        assert config.block_rows == same.block_rows
        each, once = block_bytes(config, packed)
        assert 2 <= config.num_stages <= 4
        assert (config.num_stages - 1) * each + once <= free, config
        assert config.num_stages == 4 or config.num_stages * each + once > free, config


@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("rows", [1, 40, 250])
def test_blocks_with_two_scales_are_those_with_one(capability, rows):
    """With more warps where products from registers would leave too few of these."""
    shape = architectures.of(capability), rows, 4096, 2880
    config_of = functools.partial(FewRowsConfig.heuristic, *shape)
    assert config_of(32, eight=True) == config_of(64, eight=True)
    if capability == 120:
        one, two = (config_of(scaled, eight=False) for scaled in (64, 32))
        assert two == dataclasses.replace(one, num_warps=8 if rows >= 32 else 4)


@pytest.mark.parametrize(
    ("card", "rows", "tiles", "depth", "powers", "in_sum", "config"),
    [
        (90, 4, 11520, 2880, True, False, VeryFewRowsConfig(8, 1, 4)),
        (90, 0, 720, 2880, True, False, VeryFewRowsConfig(8, 2, 4)),
        (90, 0, 1440, 2880, True, False, VeryFewRowsConfig(8, 1, 4)),
        (90, 0, 1440, 7168, True, False, VeryFewRowsConfig(8, 2, 4)),
        (90, 0, 256, 768, True, False, VeryFewRowsConfig(8, 2, 4)),
        (90, 0, 512, 768, True, False, VeryFewRowsConfig(8, 1, 4)),
        (90, 0, 512, 7168, False, True, VeryFewRowsConfig(8, 2, 6)),
        (90, 0, 896, 2048, False, True, VeryFewRowsConfig(8, 2, 4)),
        (90, 4, 2880, 2880, False, True, VeryFewRowsConfig(8, 1, 3)),
        (90, 8, 2048, 7168, True, False, VeryFewRowsConfig(16, 1, 4)),
        (90, 40, 2048, 7168, False, True, VeryFewRowsConfig(32, 1, 3)),
        (80, 60, 2048, 7168, False, False, VeryFewRowsConfig(32, 1, 3)),
        (80, 60, 2048, 7168, False, True, VeryFewRowsConfig(16, 1, 4)),
    ],
)
def test_very_few_rows(card, rows, tiles, depth, powers, in_sum, config):
    gpu = Target(compute_capability=card, multiprocessors=132, tensor_maps=card >= 90)
    how = {"powers": powers, "in_sum": in_sum, "eight": False}
    assert VeryFewRowsConfig.heuristic(gpu, rows, tiles, depth, **how) == config
    assert config.num_warps == config.split


@pytest.mark.parametrize(
    ("rows", "tiles", "depth", "in_sum", "config"),
    [
        (0, 360, 2880, False, VeryFewRowsConfig(8, 4, 3)),
        (0, 360, 2048, False, VeryFewRowsConfig(8, 2, 4)),
        (0, 360, 2048, True, VeryFewRowsConfig(8, 2, 3)),
        (0, 512, 7168, False, VeryFewRowsConfig(8, 2, 3)),
        (0, 896, 2048, False, VeryFewRowsConfig(8, 1, 4)),
        (0, 11520, 7168, False, VeryFewRowsConfig(8, 2, 3)),
        (4, 11520, 7168, False, VeryFewRowsConfig(8, 2, 3)),
        (8, 2048, 7168, False, VeryFewRowsConfig(16, 2, 3)),
        (8, 11520, 7168, False, VeryFewRowsConfig(16, 1, 3)),
        (24, 2048, 7168, False, VeryFewRowsConfig(32, 1, 3)),
    ],
)
def test_very_few_rows_in_8_bits(rows, tiles, depth, in_sum, config):
    gpu = Target(compute_capability=90, multiprocessors=132, tensor_maps=True)
    how = {"powers": False, "in_sum": in_sum, "eight": True}
    assert VeryFewRowsConfig.heuristic(gpu, rows, tiles, depth, **how) == config


def test_programs_find_few_tiles_of_few_rows():
    gpu = Target(compute_capability=90, multiprocessors=132, tensor_maps=True)
    assert VeryFewRowsConfig(8, 1, 3).finds_tiles(gpu, 24 * 132)
    assert not VeryFewRowsConfig(8, 1, 3).finds_tiles(gpu, 24 * 132 + 1)
    assert not VeryFewRowsConfig(16, 1, 3).finds_tiles(gpu, 1)


@pytest.mark.parametrize(
    ("eight", "rows", "scaled", "config"),
    [
        (False, 9, None, (32, 128, 128, 3, 128)),
        (False, 25, None, (64, 128, 128, 3, 168)),
        (False, 256, None, (64, 128, 128, 3, 168)),
        (False, 24, 128, (32, 128, 128, 3, 168)),
        (False, 25, 128, (64, 128, 128, 3, None)),
        (False, 24, 64, (32, 128, 128, 3, 168)),
        (False, 41, 64, (64, 128, 128, 3, None)),
        (False, 41, 32, (64, 128, 64, 4, None)),
        (True, 24, None, (32, 128, 128, 3, 168)),
        (True, 25, None, (64, 128, 64, 3, 128)),
        (True, 24, 128, (32, 128, 128, 3, 168)),
        (True, 25, 256, (64, 128, 128, 3, None)),
        (True, 41, 64, (64, 128, 64, 3, None)),
    ],
)
def test_rows_past_those_of_tiles(eight, rows, scaled, config):
    """As many programs share a multiprocessor as registers and shared memory allow."""
    of = functools.partial(FewRowsConfig.heuristic, eight=eight)
    found = of(architectures.of(90), rows, 4096, 7168, scaled)
    block_rows, columns, depth, stages, registers = config
    assert found == FewRowsConfig(
        block_rows, columns, depth, stages, True, programs=None, registers=registers
    )
    on_blackwell = of(architectures.of(100), rows, 4096, 7168, scaled)
    assert on_blackwell == dataclasses.replace(found, registers=None)
    weights = columns * depth // (1 if eight else 2)
    shared = stages * (2 * block_rows * depth + weights)
    resident = 65536 // (128 * (registers or 255))
    assert resident * shared <= 228 * 1024 - resident * 1024


def test_a_block_has_one_scale_for_its_depth_or_two():
    of = functools.partial(FewRowsConfig.heuristic, architectures.of(90), eight=True)
    assert [of(32, 4096, 7168, deep).block_depth for deep in (32, 64, 96, 128, 192, 256)] == [
        *(64, 64, 64, 128, 64, 128)
    ]


def test_rows_of_tiles_where_products_are_from_registers():
    assert FewRowsConfig.heuristic(
        architectures.of(120), 100, 4096, 7168, None, eight=True
    ) == FewRowsConfig(64, 128, 64, 4, False)


@pytest.mark.parametrize("capability", architectures.BY_CAPABILITY)
def test_as_many_rows_of_tiles_as_are_fastest(capability):
    most = [
        VeryFewRowsConfig.most_rows(architectures.of(capability), scaled)
        for scaled in (None, 32, 64, 96)
    ]
    if capability == 75:  # no products of bfloat16
        assert most == [0] * 4
    else:
        assert most == ([8, 40, 8, 40] if capability in (90, 100, 103, 110) else [64] * 4)
