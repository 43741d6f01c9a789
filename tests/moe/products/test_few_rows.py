"""Few 16-bit rows times 8-bit weights in tiles, against float64 of the numbers they stand for.

Sums are in float32 and rounded once, so bounds are those of one term.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.moe import launches
from tests.moe.products import oracle
from tests.moe.products.test_scaled import E4M3, exactly, scaled
from triax import moe
from triax.compat import jax_private
from triax.errors import ArgumentTypeError
from triax.moe.products import few_rows
from triax.moe.products.operands import parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.product import RaggedDot
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import launching, target
from triax.testing import assert_close, assert_same_bits, checked

# Rows of groups as the two kinds of tiles take them, and what is more than one tile.
SIZES = {
    "narrow": [3, 0, 17, 1, 0, 9, 2, 2],
    "wide": [20, 0, 65, 64, 1, 30],
    "wider": [200, 3],
    "wrong": [-5, 40, 2**31 - 1, 7],
}
ROWS = {"narrow": 40, "wide": 200, "wider": 210, "wrong": 70}
DEPTH, COLUMNS = 192, 128
# Tensor cores take their left operand from registers.
FROM_REGISTERS = r"wgmma.mma_async\S*bf16.bf16\s*\{[^}]*\},\s*\{"


@pytest.mark.sampled(3, 5)
@pytest.mark.parametrize("dtype", [E4M3, "int8"])
@pytest.mark.parametrize("scaled_by", [(None, None), (None, 1), (128, 128), (64, 1), (32, 1)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("card", [90, 120])
def test_equals_float64(monkeypatch, card, sizes, scaled_by, dtype):
    gpu = dataclasses.replace(target.INTERPRETER, compute_capability=card)
    monkeypatch.setattr(target, "INTERPRETER", gpu)
    num_rows, sizes = ROWS[sizes], np.array(SIZES[sizes], np.int64).astype(np.int32)
    block = 1, scaled_by[0] or DEPTH, scaled_by[1] or COLUMNS
    weights = scaled(1, (len(sizes), COLUMNS, DEPTH), block, dtype, transposed=True)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, DEPTH), np.float32).astype(jnp.bfloat16)
    past = int(np.minimum(np.maximum(sizes.astype(np.int64), 0).sum(), num_rows))
    rows[past:] = np.nan
    bias = rng.standard_normal((len(sizes), COLUMNS), np.float32).astype(jnp.bfloat16)
    each = rng.standard_normal(num_rows, np.float32)
    multiply = functools.partial(moe.ragged_dot, bias=bias, bias_weights=each)
    run = jax.jit(functools.partial(multiply, implementation="interpret"))
    given = weights.tile()
    if jax_private.supports_tensor_maps():  # else the kernel of many rows is taken
        assert 'loc("few_rows' in run.lower(rows, given, sizes).as_text(debug_info=True)
    with checked():
        out = run(rows, given, sizes)
    wanted = oracle.ragged_dot(rows, exactly(weights), sizes)
    for group, span in enumerate(oracle.spans(sizes, num_rows)):
        wanted[span] += np.float64(bias[group]) * each[span, None]
    assert_close(out, wanted, terms=1)
    assert not np.any(np.asarray(out)[past:])


@pytest.mark.parametrize("sizes", [[30, 10, 20, 5, 40], [2**31 - 1, 9, -3, 4, 5], [30, 0, 0, 0, 0]])
def test_of_some_groups(sizes):
    """Rows before the groups are zero, too."""
    weights = scaled(1, (3, COLUMNS, DEPTH), (1, DEPTH, 1), E4M3, transposed=True)
    sizes = np.array(sizes, np.int32)
    rows = np.random.default_rng(0).standard_normal((120, DEPTH), np.float32).astype(jnp.bfloat16)
    how = {"group_offset": 1, "implementation": "interpret"}
    with checked():
        out = jax.jit(functools.partial(moe.ragged_dot, **how))(rows, weights.tile(), sizes)
    all_of_them = np.zeros((5, DEPTH, COLUMNS))
    all_of_them[1:4] = exactly(weights)
    assert_close(out, oracle.ragged_dot(rows, all_of_them, sizes), terms=1)


@pytest.mark.sampled(5, None)
@pytest.mark.parametrize("sizes", [[0, 20, 3, 17, 0, 1], [-5, 2**31 - 1, 2**31 - 1, 7, 0, 0]])
@pytest.mark.parametrize("first", [None, 0, 7, -9, 2**31 - 1])
def test_programs_find_the_tiles_of_the_schedule(monkeypatch, first, sizes):
    """The same results from sizes as from a schedule that is launched before."""
    weights = scaled(1, (6, COLUMNS, DEPTH), (1, DEPTH, 1), "int8", transposed=True).tile()
    rows = np.random.default_rng(0).standard_normal((45, DEPTH), np.float32).astype(jnp.bfloat16)
    launched = []
    launch = few_rows.launch
    noted = lambda *of, **how: (launched.append(how["NUM_GROUPS"]), launch(*of, **how))[1]
    monkeypatch.setattr(few_rows, "launch", noted)
    groups = Groups(jnp.array(sizes, "int32"), None if first is None else jnp.int32(first))
    gpu = dataclasses.replace(target.INTERPRETER, compute_capability=90)
    options = Options(jnp.dtype("bfloat16"), None, share=0.6)  # 4 rows in a group

    def found():
        operands = {"left": parts(rows), "right": parts(weights), "weights": weights}
        how = {"transposed": True, "options": options, "implementation": "interpret"}
        return few_rows.few_rows_of_tiles(RaggedDot(target=gpu, groups=groups, **operands, **how))

    with checked():
        of_sizes = jax.jit(found)()
    monkeypatch.setattr(few_rows, "MOST_SCHEDULED", 0)
    assert_same_bits(of_sizes, jax.jit(lambda: found())())
    assert launched == [6, 0]


OF_ROWS = {
    "e4m3": functools.partial(launches.eight, block=(1, None, 1)),
    "int4": functools.partial(
        launches.packed, kind="float32", block=32, numbers="int4", columns=128
    ),
    "mxfp4": functools.partial(
        launches.packed, kind="float8_e8m0fnu", block=32, numbers="float4_e2m1fn", columns=128
    ),
}


@pytest.mark.parametrize(
    ("card", "tiled", "weights", "most", "at_most", "past"),
    [
        (90, False, "e4m3", 16, "ragged_dot_transposed 32", "ragged_dot_transposed 64"),
        (90, False, "mxfp4", 8, "widen", "widen"),
        (90, True, "e4m3", 8, "few_rows_of_tiles 16", "few_rows 32"),
        (90, True, "e4m3", 24, "few_rows 32", "few_rows 64"),
        (90, True, "e4m3", 256, "few_rows 64", "widen"),
        (90, True, "mxfp4", 8, "few_rows_of_tiles 16", "few_rows 32"),
        (90, True, "mxfp4", 24, "few_rows 32", "few_rows 64"),
        (90, True, "mxfp4", 256, "few_rows 64", "widen"),
        (90, True, "int4", 40, "few_rows_of_tiles 32", "few_rows 64"),
        (120, True, "mxfp4", 64, "few_rows_of_tiles 32", "few_rows 64"),
        (120, True, "int4", 256, "few_rows 64", "widen"),
        (80, True, "int4", 64, "few_rows_of_tiles 16", "widen"),
    ],
)
def test_which_kernel_takes_how_many_rows(monkeypatch, card, tiled, weights, most, at_most, past):
    """Of a group, on average and rounded down; with the rows of a tile."""
    gpu = target.Target(card, multiprocessors=3, tensor_maps=card >= 90)
    monkeypatch.setattr(target, "INTERPRETER", gpu)
    launched, launch = [], launching.triton_call

    def noted(*operands, name, **how):
        launched.append(f"{name} {how.get('BLOCK_ROWS', '')}".strip())
        return launch(*operands, name=name, **how)

    monkeypatch.setattr(launching, "triton_call", noted)
    for num_rows, kernel in ((5 * most + 4, at_most), (5 * most + 5, past)):
        case = OF_ROWS[weights](num_rows)
        function, arrays = launches.in_tiles(case) if tiled else case
        launched.clear()
        jax.eval_shape(functools.partial(function, implementation="interpret"), *arrays)
        assert next(each for each in launched if "schedule" not in each) == kernel


@pytest.mark.parametrize("rows", [40, 400])
@pytest.mark.parametrize("tiled", [False, True])
def test_nan_among_weights_is_its_column(tiled, rows):
    weights = scaled(1, (8, COLUMNS, DEPTH), (1, DEPTH, 1), E4M3, transposed=True)
    values = np.array(weights.values)
    values[2, 5, 7] = np.nan
    weights = ScaledArray(values, weights.scales, weights.block, True)
    weights = weights.tile() if tiled else weights
    sizes = np.full(8, rows // 8, np.int32)
    multiply = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    out = multiply(np.ones((rows, DEPTH), jnp.bfloat16), weights, sizes)
    is_nan = np.isnan(np.asarray(out, np.float32)).reshape(8, -1, COLUMNS)
    assert is_nan[2, :, 5].all()
    assert is_nan.sum() == rows // 8


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize("dtype", [E4M3, "int8"])
@pytest.mark.parametrize("num_rows", [3, 40, 600, 1200])
def test_all_numbers_in_tiles(num_rows, dtype):
    """Each number of 8 bits, exactly, whatever takes it; a row has one number that is not zero."""
    depth = columns = 256
    codes = np.add.outer(np.arange(columns), np.arange(depth))[None] % 256
    values = np.tile(codes, (4, 1, 1)).astype(np.uint8).view(getattr(ml_dtypes, dtype, dtype))
    values = np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(1))
    weights = ScaledArray(values, np.ones((4, columns, 1), np.float32), (1, None, 1), True)
    rows = np.zeros((num_rows, depth), np.float32)
    rows[np.arange(num_rows), np.arange(num_rows) * 37 % depth] = 1
    sizes = np.array([1, num_rows - 3, 0, 2], np.int32)
    run = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    out = run(rows.astype(jnp.bfloat16), weights.tile(), sizes)
    np.testing.assert_array_equal(
        np.asarray(out, np.float64), oracle.ragged_dot(rows, exactly(weights), sizes)
    )


@pytest.mark.parametrize("num_rows", [40, 600])
def test_scales_that_are_powers_of_two_in_tiles(num_rows):
    """The least and the largest power, in blocks of 8-bit numbers; NaN is its column's."""
    powers = np.resize(np.array([100, 127, 140, 0, 120], np.uint8), (2, COLUMNS, DEPTH // 32))
    powers[1, 9, 2] = 255
    values = np.resize(np.arange(-3, 4), (2, COLUMNS, DEPTH)).astype(np.int8)
    scales = powers.view(jnp.float8_e8m0fnu)
    weights = ScaledArray(values, scales, (1, 32, 1), transposed=True)
    rows = np.resize([1.0, -2.0, 0.5], (num_rows, DEPTH)).astype(jnp.bfloat16)
    sizes = np.full(2, num_rows // 2, np.int32)
    run = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    exact = values * np.repeat(np.exp2(powers.astype(np.float64) - 127), 32, axis=2)
    exact[1, 9] = np.nan
    out = np.asarray(run(rows, weights.tile(), sizes), np.float64)
    wanted = oracle.ragged_dot(rows, exact.swapaxes(1, 2), sizes)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    np.testing.assert_allclose(out, wanted, rtol=2**-7, atol=2**-7 * np.nanmax(abs(wanted)))


def test_float16_takes_products_before_scales():
    """Weights times their scales, of which tiles are made, would not fit: these are refused."""
    weights = scaled(1, (2, 64, 256), (1, 128, 64), E4M3, transposed=True)
    weights = dataclasses.replace(weights, scales=np.full((2, 1, 2), 2.0**14, np.float32))
    rows = np.full((600, 256), 2.0**-10, np.float16)
    given = weights.tile()
    for of in (rows, moe.quantize(rows, block=(1, None)), rows.astype(np.int32)):
        with pytest.raises(ArgumentTypeError, match=r"weights in tiles; .*`tiles=False`"):
            moe.ragged_dot(of, given, np.array([300, 300], np.int32))
    out = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))(
        rows, weights, np.array([300, 300], np.int32)
    )
    assert np.isfinite(out).all()
    assert_close(out, oracle.ragged_dot(rows, exactly(weights), [300, 300]), terms=1)


@pytest.mark.sampled(1, None)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("num_rows", [40, 600])
@pytest.mark.parametrize("block", [(1, None, 1), (1, 128, 128)])
def test_tiles_are_the_weights(block, num_rows, implementation):
    """In plain JAX and with many rows too; and in gradients."""
    of = 1, block[1] or DEPTH, block[2]
    weights = scaled(1, (2, COLUMNS, DEPTH), of, E4M3, transposed=True)
    check_tiles(weights, num_rows, implementation)


def check_tiles(weights, num_rows, implementation):
    """Compares products of two groups' weights, and the rows' gradient, with those of tiles."""
    depth = weights.shape[1]
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, depth), np.float32).astype(jnp.bfloat16)
    sizes = np.array([num_rows - 25, 20], np.int32)

    @jax.jit
    def run(rows, weights):
        multiply = functools.partial(moe.ragged_dot, implementation=implementation)
        out, pull = jax.vjp(lambda rows: multiply(rows, weights, sizes), rows)
        return out, *pull(out)

    for out, wanted in zip(run(rows, weights.tile()), run(rows, weights), strict=True):
        assert_close(out, np.asarray(wanted, np.float64), terms=1)


@pytest.mark.cuda_plugin
def test_weights_are_widened_in_registers(monkeypatch):
    from tests.moe.products.test_programs import kernels

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    _, arrays = launches.in_tiles(OF_ROWS["e4m3"](100))
    traced = jax.jit(moe.ragged_dot).trace(*arrays)
    if not jax_private.supports_tensor_maps():
        with pytest.warns(UserWarning, match="need JAX 0.11.1"):
            assert "_few_rows_kernel" not in kernels(traced.lower(lowering_platforms=("cuda",)))[1]
        return
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    assert "_few_rows_kernel" in ptx
    assert "mul.bf16x2" in ptx
    assert re.search(FROM_REGISTERS, ptx)
