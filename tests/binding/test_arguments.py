"""The types of operands and outputs, and how operands are collected."""

from __future__ import annotations

import types

import numpy as np
import pytest

from triax.binding.arguments import array_type
from triax.binding.launch import ArrayType
from triax.errors import ArgumentTypeError


def like(*shape, dtype="float32"):
    return types.SimpleNamespace(shape=shape, dtype=np.dtype(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (np.int64(0), 3), (np.int32(2),)])
def test_sizes_are_ints(shape):
    found = array_type("x", like(*shape))
    assert found == ArrayType(shape, np.dtype("float32"))
    assert all(type(size) is int for size in found.shape)


@pytest.mark.parametrize("shape", [(-1,), (3, -2), (True,), (2.0,), (np.int64(-1), 3)])
def test_what_is_no_size(shape):
    with pytest.raises(ArgumentTypeError, match="`x` must have a shape of non-negative ints; got"):
        array_type("x", like(*shape))
