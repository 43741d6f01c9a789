"""The chunk sort by its definition, row by row, and inputs that are hard on it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.moe.oracle import random_bits

from triax.testing import assert_same_bits


def _bounds(sizes, num_rows):
    bounds = [0]
    for size in sizes:
        bounds.append(min(bounds[-1] + max(int(size), 0), num_rows))
    return bounds


def sources(sizes, indices, num_rows):
    """The row of x that each row of the output is."""
    bounds = _bounds(sizes, num_rows)
    order: list[int] = []
    for index in indices:
        if 0 <= index < len(sizes):
            order.extend(range(bounds[index], bounds[index + 1]))
    order = order[:num_rows]
    return np.array([*order, *range(len(order), num_rows)], np.int64)


def destinations(sizes, indices, num_rows):
    """The row of the output whose gradient each row of x takes."""
    bounds = _bounds(sizes, num_rows)
    back = list(range(num_rows))
    named: set[int] = set()
    position = 0
    for index in map(int, indices):
        if not 0 <= index < len(sizes):
            continue
        for offset, row in enumerate(range(bounds[index], bounds[index + 1])):
            if index not in named:
                back[row] = min(position + offset, num_rows - 1)
        position += bounds[index + 1] - bounds[index]
        named.add(index)
    return np.array(back, np.int64)


def make_case(seed, num_rows, width, num_chunks, dtype="float32", fill=1.0):
    """A valid sort: x, sizes that sum to `fill` of the rows, a permutation, probs."""
    rng = np.random.default_rng(seed)
    chunks = max(num_chunks, 1)
    sizes = np.bincount(rng.integers(0, chunks, int(num_rows * fill)), minlength=chunks)
    return SimpleNamespace(
        x=random_bits(rng, (num_rows, width), dtype),
        sizes=sizes[:num_chunks].astype(np.int32),
        indices=rng.permutation(num_chunks).astype(np.int32),
        probs=rng.random(num_rows, np.float32),
        g=random_bits(rng, (num_rows, width), dtype),
        g_probs=rng.random(num_rows, np.float32),
    )


@pytest.fixture(scope="session")
def oracle():
    return SimpleNamespace(
        sources=sources,
        destinations=destinations,
        random_bits=random_bits,
        assert_same_bits=assert_same_bits,
        make_case=make_case,
    )


@pytest.fixture(params=["xla", "interpret"])
def implementation(request):
    return request.param
