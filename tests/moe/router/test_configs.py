"""How the router's kernels are cut into programs."""

from __future__ import annotations

import pytest

from triax.moe.router.configs import RouteConfig, place_bits


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "exact", "by_score", "expected"),
    [
        (1, 1, 1, False, False, (32, 1, 1, 1, 1)),
        (8, 2, 1, False, False, (32, 1, 8, 2, 1)),
        (128, 8, 1, True, True, (8, 1, 128, 8, 1)),
        (160, 6, 8, True, False, (4, 8, 32, 8, 1)),
        (256, 8, 8, True, True, (4, 8, 32, 8, 1)),
        (256, 8, 8, False, True, (1, 8, 32, 8, 1)),
        (256, 8, 8, False, False, (2, 8, 32, 8, 1)),
        (512, 10, 1, True, False, (2, 1, 512, 16, 1)),
        (1024, 8, 1, False, False, (1, 1, 1024, 8, 1)),
        (16, 16, 1, False, False, (8, 1, 16, 16, 1)),
    ],
)
def test_configs_that_were_measured(num_experts, top_k, num_groups, exact, by_score, expected):
    config = RouteConfig.for_choice(num_experts, top_k, num_groups, exact, by_score)
    assert tuple(vars(config).values()) == expected


@pytest.mark.parametrize(
    ("num_experts", "top_k", "reads_rows", "expected"),
    [
        (128, 8, True, (4, 1, 128, 8, 1)),
        (128, 8, False, (8, 1, 128, 8, 1)),
        (8, 2, True, (32, 1, 8, 2, 1)),
        (1024, 8, True, (1, 1, 1024, 8, 1)),
        (16, 16, True, (16, 1, 16, 16, 1)),
    ],
)
def test_configs_of_gradients_that_were_measured(num_experts, top_k, reads_rows, expected):
    config = RouteConfig.for_gradient(num_experts, top_k, reads_rows)
    assert tuple(vars(config).values()) == expected


def test_places_of_experts():
    """Groups begin at multiples of a power of two."""
    sizes = [(1, 1), (12, 4), (128, 1), (160, 8), (256, 8)]
    assert [place_bits(*of) for of in sizes] == [0, 4, 7, 8, 8]
