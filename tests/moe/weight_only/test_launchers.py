"""Few 16-bit rows times 8-bit weights, against float64 of the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.grouped_matmul import oracle
from tests.moe.grouped_matmul.test_scaled import E4M3, exactly, scaled
from triax import moe
from triax.compat import jax_private
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import target
from triax.testing import assert_close, checked

# Rows of groups as the two kinds of tiles take them, and what is more than one tile.
SIZES = {
    "narrow": [3, 0, 17, 1, 0, 9, 2, 2],
    "wide": [20, 0, 65, 64, 1, 30],
    "wider": [200, 3],
    "wrong": [-5, 40, 2**31 - 1, 7],
}
ROWS = {"narrow": 40, "wide": 200, "wider": 210, "wrong": 70}
DEPTH, COLUMNS = 208, 176  # no multiples of 64
# Tensor cores take their left operand from registers.
FROM_REGISTERS = r"wgmma.mma_async\S*bf16.bf16\s*\{[^}]*\},\s*\{"


@pytest.mark.sampled(2, 5)
@pytest.mark.parametrize("dtype", [E4M3, "int8"])
@pytest.mark.parametrize("scaled_by", [(DEPTH, COLUMNS), (DEPTH, 1), (128, 128), (64, 1), (32, 1)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("card", [90, 120])
def test_equals_float64(monkeypatch, card, sizes, scaled_by, dtype):
    gpu = dataclasses.replace(target.INTERPRETER, compute_capability=card)
    monkeypatch.setattr(target, "INTERPRETER", gpu)
    num_rows, sizes = ROWS[sizes], np.array(SIZES[sizes], np.int64).astype(np.int32)
    weights = scaled(1, (len(sizes), COLUMNS, DEPTH), (1, *scaled_by), dtype, transposed=True)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, DEPTH), np.float32).astype(jnp.bfloat16)
    past = int(np.minimum(np.maximum(sizes.astype(np.int64), 0).sum(), num_rows))
    rows[past:] = np.nan
    bias = rng.standard_normal((len(sizes), COLUMNS), np.float32).astype(jnp.bfloat16)
    each = rng.standard_normal(num_rows, np.float32)
    multiply = functools.partial(moe.ragged_dot, bias=bias, bias_weights=each)
    run = jax.jit(functools.partial(multiply, implementation="interpret"))
    if jax_private.supports_tensor_maps():  # else the kernel of many rows is taken
        assert "few_rows" in run.lower(rows, weights, sizes).as_text(debug_info=True)
    with checked():
        out = run(rows, weights, sizes)
    wanted = oracle.ragged_dot(rows, exactly(weights), sizes)
    for group, span in enumerate(oracle.spans(sizes, num_rows)):
        wanted[span] += np.float64(bias[group]) * each[span, None]
    assert_close(out, wanted, terms=DEPTH)
    assert not np.any(np.asarray(out)[past:])


def test_of_some_groups():
    """Rows before the groups are zero, too."""
    weights = scaled(1, (3, COLUMNS, DEPTH), (1, DEPTH, 1), E4M3, transposed=True)
    sizes = np.array([30, 10, 20, 5, 40], np.int32)
    rows = np.random.default_rng(0).standard_normal((120, DEPTH), np.float32).astype(jnp.bfloat16)
    how = {"group_offset": 1, "implementation": "interpret"}
    with checked():
        out = jax.jit(functools.partial(moe.ragged_dot, **how))(rows, weights, sizes)
    all_of_them = np.zeros((5, DEPTH, COLUMNS))
    all_of_them[1:4] = exactly(weights)
    assert_close(out, oracle.ragged_dot(rows, all_of_them, sizes), terms=DEPTH)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [40, 400])
def test_nan_among_weights_is_its_column(rows):
    weights = scaled(1, (8, COLUMNS, DEPTH), (1, DEPTH, 1), E4M3, transposed=True)
    values = np.array(weights.values)
    values[2, 5, 7] = np.nan
    weights = ScaledArray(values, weights.scales, weights.block, True)
    sizes = np.full(8, rows // 8, np.int32)
    multiply = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    out = multiply(np.ones((rows, DEPTH), jnp.bfloat16), weights, sizes)
    is_nan = np.isnan(np.asarray(out, np.float32)).reshape(8, -1, COLUMNS)
    assert is_nan[2, :, 5].all()
    assert is_nan.sum() == rows // 8


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("rows", [64, 1024])
def test_weights_are_widened_in_registers(monkeypatch, rows):
    from tests.moe.grouped_matmul.test_programs import kernels

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    shape = jax.ShapeDtypeStruct
    weights = ScaledArray(
        shape((32, 256, 512), E4M3), shape((32, 256, 1), "float32"), (1, None, 1), True
    )
    traced = jax.jit(moe.ragged_dot).trace(
        shape((rows, 512), "bfloat16"), weights, shape((32,), "int32")
    )
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    if not jax_private.supports_tensor_maps():
        assert "_few_rows_kernel" not in ptx
        return
    assert "_few_rows_kernel" in ptx
    assert "mul.bf16x2" in ptx
    assert bool(re.search(FROM_REGISTERS, ptx)) == (rows == 1024)
