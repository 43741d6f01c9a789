"""The arguments of quantize."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError

X = np.ones((4, 300), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"array": [1.0]}, ArgumentTypeError, "`array` must be an array; got"),
        ({"array": X.astype(int)}, ArgumentTypeError, "float32, bfloat16 or float16; got int64"),
        ({"array": X.astype(np.float64)}, ArgumentTypeError, "`array` .* got float64"),
        ({"array": X.astype(jnp.float8_e5m2)}, ArgumentTypeError, "`array` .* got float8_e5m2"),
        ({"dtype": "float8"}, ArgumentValueError, "`dtype` must be float8_e4m3fn, .* or int4; got"),
        ({"dtype": "float8_e4m3fnuz"}, ArgumentValueError, "`dtype` .* got 'float8_e4m3fnuz'"),
        ({"block": 128}, ArgumentTypeError, "`block` must be a tuple .* got 128 of type int"),
        (
            {"block": (128,)},
            ArgumentValueError,
            r"`block` must have .* shape \(4, 300\); got \(128",
        ),
        ({"block": (1, 0)}, ArgumentValueError, r"`block\[1\]` must be at least 1 .* got 0"),
        ({"block": (-1, 1)}, ArgumentValueError, r"`block\[0\]` must be at least 1 .* got -1"),
        ({"block": (True, 1)}, ArgumentTypeError, r"`block\[0\]` must be a Python int"),
        ({"block": (1, 8.0)}, ArgumentTypeError, r"`block\[1\]` must be a Python int"),
        ({"implementation": "cuda"}, ArgumentValueError, "`implementation` must be one of"),
        (
            {"array": X[0], "block": (300,), "transposed": True},
            ArgumentValueError,
            "`transposed` must be False for an array of fewer than two dimensions",
        ),
    ],
)
def test_errors(change, error, match):
    given = {"array": X, "block": (1, 128)} | change
    with pytest.raises(error, match=match):
        moe.quantize(given.pop("array"), **given)


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
@pytest.mark.parametrize(
    ("block", "transposed"),
    [((1, 100), False), ((1, 8), False), ((2, None), False), ((1, None), True), ((64, 64), False)],
)
def test_blocks_that_no_kernel_does(implementation, block, transposed):
    with pytest.raises(ArgumentValueError, match=r"`block` must suit the kernels: .* got \("):
        moe.quantize(X, block=block, transposed=transposed, implementation=implementation)
    assert moe.quantize(X, block=block, transposed=transposed).shape == X.shape


def test_dtypes_by_any_name():
    for dtype in (jnp.float8_e5m2, "float8_e5m2", np.dtype(jnp.float8_e5m2)):
        assert moe.quantize(X, dtype, block=[1, None]).dtype == jnp.float8_e5m2
    assert moe.quantize(X, block=(1, None)).dtype == jnp.float8_e4m3fn
