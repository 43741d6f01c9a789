"""The sizes that CUDA allows."""

from __future__ import annotations

import numpy as np

from triax.binding.grid import normalize

LARGEST = (2**31 - 1, 65535, 65535)


def test_the_largest_grid():
    assert normalize(LARGEST) == LARGEST


def test_numbers_of_numpy():
    found = normalize([np.int64(4), np.int32(2), 1], {})
    assert found == (4, 2, 1)
    assert [type(size) for size in found] == [int] * 3
