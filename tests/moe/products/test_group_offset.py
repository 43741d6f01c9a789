"""The first group of weights that has some groups alone: its dtypes, and mistakes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.moe.products import arguments
from triax.testing import assert_same_bits


@pytest.mark.slow("many programs for one rule")
@pytest.mark.parametrize(
    ("offset", "promotion"), [(-1, "strict"), (-(2**40), "standard"), (2**40, "standard")]
)
def test_an_offset_of_64_bits(offset, promotion):
    """The same as of 32 bits, before the first group too."""
    rows, weights = jnp.ones((8, 16)), jnp.stack([jnp.full((16, 16), i + 1.0) for i in range(3)])
    near = max(-9, min(9, offset))
    how = {"implementation": "xla"}
    wanted = moe.ragged_dot(rows, weights, np.array([5, 2]), group_offset=jnp.int32(near), **how)
    with jax.enable_x64(), jax.numpy_dtype_promotion(promotion):
        out = moe.ragged_dot(
            rows, weights, jnp.array([5, 2], "int32"), group_offset=jnp.int64(offset), **how
        )
        assert_same_bits(out, wanted)


@pytest.mark.parametrize(
    ("offset", "match"),
    [
        (5, "`group_offset` must be from 0 to 4"),
        (-1, "`group_offset` must be from 0 to 4"),
        (True, "group_offset"),
        (jnp.zeros(2, jnp.int32), "group_offset"),
        (jnp.float32(1), "group_offset"),
    ],
)
def test_mistakes(offset, match):
    with pytest.raises((TypeError, ValueError), match=match):
        moe.ragged_dot(
            jnp.ones((9, 4)), jnp.ones((2, 4, 3)), np.array([3] * 6), group_offset=offset
        )


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int32"])
def test_an_offset_of_any_integer_dtype(kind):
    assert arguments._check_offset(jnp.array(2, kind), 5, 3) == 2
