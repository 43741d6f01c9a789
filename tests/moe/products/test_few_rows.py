"""Few 16-bit rows times weights in tiles: which kernel takes them, and powers of two.

Their values are in scaled_case.py.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import launches
from tests.moe.bounds import exact
from tests.moe.plans.case import spans
from tests.moe.products.case import dot
from tests.moe.products.test_programs import kernels
from tests.moe.quantization.oracle import E4M3, E8M0, exactly
from triax import moe
from triax.compat import jax_private
from triax.errors import ArgumentTypeError
from triax.moe.quantization.packing import pack
from triax.moe.shared import launching, target

E2M1 = "float4_e2m1fn"
# Tensor cores take their left operand from registers.
FROM_REGISTERS = r"wgmma.mma_async\S*bf16.bf16\s*\{[^}]*\},\s*\{"

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
        (90, True, "e4m3", 8, "very_few_rows 16", "few_rows 32"),
        (90, True, "e4m3", 24, "few_rows 32", "few_rows 64"),
        (90, True, "e4m3", 256, "few_rows 64", "widen"),
        (90, True, "mxfp4", 8, "very_few_rows 16", "few_rows 32"),
        (90, True, "mxfp4", 24, "few_rows 32", "few_rows 64"),
        (90, True, "mxfp4", 256, "few_rows 64", "widen"),
        (90, True, "int4", 40, "very_few_rows 32", "few_rows 64"),
        (120, True, "mxfp4", 64, "very_few_rows 32", "few_rows 64"),
        (120, True, "int4", 256, "few_rows 64", "widen"),
        (80, True, "int4", 64, "very_few_rows 16", "widen"),
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


def test_float16_takes_products_before_scales():
    """Weights times their scales, of which tiles are made, would not fit: these are refused."""
    values = np.full((2, 64, 256), 8, jnp.float8_e4m3fn)
    scales = np.full((2, 1, 2), 2.0**14, np.float32)
    weights = moe.ScaledArray(values, scales, (1, 128, 64), transposed=True)
    rows, sizes = np.full((600, 256), 2.0**-10, np.float16), np.array([300, 300], np.int32)
    given = weights.tile()
    for of in (rows, moe.quantize(rows, block=(1, None)), rows.astype(np.int32)):
        with pytest.raises(ArgumentTypeError, match=r"weights in tiles; .*`tiles=False`"):
            moe.ragged_dot(of, given, sizes)
    out = moe.ragged_dot(rows, weights, sizes, implementation="interpret")
    np.testing.assert_array_equal(out, np.full((600, 64), 2.0**15))


@pytest.mark.parametrize("part", [0, 3, 9])
@pytest.mark.parametrize("num_rows", [4, 40])  # by both kernels for few rows
def test_a_large_power_is_seen_in_any_step(num_rows, part):
    codes = np.full((1, 64, 10), 120, np.uint8)
    codes[0, 7, part] = 135
    weights = moe.ScaledArray(
        pack(np.full((1, 64, 320), 2)), codes.view(E8M0), (1, 32, 1), True, E2M1
    )
    rows = np.ones((num_rows, 320), jnp.bfloat16)
    run = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    out = run(rows, weights.tile(), np.array([num_rows]))
    wanted = np.float32(32 * np.exp2(codes[0].astype(np.float64) - 127).sum(1))
    np.testing.assert_array_equal(out, np.tile(wanted.astype(jnp.bfloat16), (num_rows, 1)))


@pytest.mark.parametrize("code", [0x7F, 0xB8])  # NaN and -1
@pytest.mark.parametrize("part", [0, 7, 18])
@pytest.mark.parametrize("num_rows", [4, 40])
def test_a_scale_of_e4m3_that_is_not_positive_is_seen_in_any_step(num_rows, part, code):
    codes = np.full((1, 64, 20), 0x38, np.uint8)
    codes[0, 7, part] = code
    of_all = np.full((1, 64, 1), 0.5, np.float32)
    how = {"packed": E2M1, "global_scales": of_all}
    weights = moe.ScaledArray(
        pack(np.full((1, 64, 320), 2)), codes.view(E4M3), (1, 16, 1), True, **how
    )
    rows = np.ones((num_rows, 320), jnp.bfloat16)
    run = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    out = run(rows, weights.tile(), np.array([num_rows]))
    wanted = np.full((num_rows, 64), 160, jnp.bfloat16)
    wanted[:, 7] = np.nan if code == 0x7F else 144
    np.testing.assert_array_equal(np.asarray(out, np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("num_rows", [256, 2048])
def test_all_numbers_times_all_scales_of_e4m3(num_rows):
    *args, wanted = all_numbers_of_nvfp4(num_rows)
    how = {"implementation": "interpret", "preferred_element_type": "float32"}
    run = jax.jit(lambda *args: moe.ragged_dot(*args, **how))
    np.testing.assert_array_equal(run(*args), wanted)


def all_numbers_of_nvfp4(num_rows):
    """A column for each code. Those of the first two tiles are from 0 to 126, of the others not."""
    columns, depth, groups = 320, 64, 32
    codes = (np.arange(columns)[:, None] + np.arange(depth) + np.arange(groups)[:, None, None]) % 16
    scales = np.concatenate([np.arange(127), [0], np.arange(127, 256), np.zeros(63)])
    scales = np.tile(scales.astype(np.uint8)[:, None], (groups, 1, 4)).view(E4M3)
    of_all = np.random.default_rng(0).uniform(0.5, 2, (groups, columns, 1)).astype(np.float32)
    weights = moe.ScaledArray(pack(codes), scales, (1, 16, 1), True, E2M1, global_scales=of_all)
    rows = np.zeros((num_rows, depth), np.float32)
    rows[np.arange(num_rows), np.arange(num_rows) % depth] = 1
    sizes = np.full(groups, num_rows // groups, np.int32)
    group, place = np.arange(num_rows) // sizes[0], np.arange(num_rows) % depth
    wanted = exactly(weights).astype(np.float32)[group, place]
    return rows.astype(jnp.bfloat16), weights.tile(), sizes, wanted


@pytest.mark.parametrize("num_rows", [4, 20, 520])
def test_the_least_the_largest_and_no_power_in_tiles(num_rows):
    """Of weights and rows that are all 1, as infinity times zero is not a number by itself."""
    codes = np.repeat(np.arange(64, dtype=np.uint8)[:, None], 6, axis=1)
    codes[:2] = [[0], [254]]
    nan = np.arange(6)  # in a column for each half of each step
    codes[2 + nan, nan] = 255
    scales = codes[None].view(E8M0)
    weights = moe.ScaledArray(pack(np.full((1, 64, 192), 2)), scales, (1, 32, 1), True, E2M1)
    rows = np.ones((num_rows, 192), jnp.bfloat16)
    run = jax.jit(
        lambda *args: moe.ragged_dot(
            *args, implementation="interpret", preferred_element_type="float32"
        )
    )
    out = np.asarray(run(rows, weights.tile(), np.array([num_rows])))
    with np.errstate(all="ignore"):
        wanted = 192 * np.exp2(codes[:, 0].astype(np.float64) - 127).astype(np.float32)
    wanted[2 + nan] = np.nan
    np.testing.assert_array_equal(out, np.tile(wanted, (num_rows, 1)))


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("dtype", [E2M1, "int4"])
@pytest.mark.parametrize("num_rows", [256, 2048])
def test_all_numbers_times_all_powers_of_two(num_rows, dtype):
    """A column for each power: also subnormals, and those that overflow or are not a number."""
    rows, weights, sizes, wanted = all_numbers(num_rows, dtype)
    weights = weights.tile()
    run = jax.jit(
        lambda *args: moe.ragged_dot(
            *args, implementation="interpret", preferred_element_type="float32"
        )
    )
    np.testing.assert_array_equal(run(rows, weights, sizes), wanted)


def all_numbers(num_rows, dtype):
    """Of 32 groups, whose rows are large, so that no product is subnormal in float32."""
    depth = columns = 256
    codes = (np.arange(columns)[:, None] + np.arange(depth) + np.arange(32)[:, None, None]) % 16
    powers = np.tile(np.arange(columns, dtype=np.uint8)[:, None], (32, 1, 8)).view(E8M0)
    weights = moe.ScaledArray(pack(codes), powers, (1, 32, 1), True, dtype)
    rows = np.zeros((num_rows, depth), np.float32)
    rows[np.arange(num_rows), np.arange(num_rows) % depth] = 8
    sizes = np.full(32, num_rows // 32, np.int32)
    with np.errstate(all="ignore"):
        numbers = exact(exactly(weights).astype(np.float32))  # overflows as bfloat16 does
        wanted = dot(exact(rows), numbers, spans(sizes, num_rows), 0).value.astype(np.float32)
    return rows.astype(jnp.bfloat16), weights, sizes, wanted


@pytest.mark.cuda_plugin
def test_weights_are_widened_in_registers(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    _, arrays = launches.in_tiles(OF_ROWS["e4m3"](100))
    traced = jax.jit(moe.ragged_dot).trace(*arrays)
    if not jax_private.supports_tensor_maps():
        with pytest.warns(UserWarning, match="need JAX 0.11.1"):
            assert (
                ".entry _few_rows_kernel"
                not in kernels(traced.lower(lowering_platforms=("cuda",)))[1]
            )
        return
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    assert ".entry _few_rows_kernel" in ptx
    assert "mul.bf16x2" in ptx
    assert re.search(FROM_REGISTERS, ptx)


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4"])
@pytest.mark.parametrize("rows", [2, 32, 128])
def test_weights_are_unpacked_in_registers(monkeypatch, rows, way):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    _, arrays = (
        launches.nvfp4(5 * rows) if way == "nvfp4" else launches.in_tiles(OF_ROWS[way](5 * rows))
    )
    traced = jax.jit(moe.ragged_dot).trace(*arrays)
    if rows <= (32 if way == "int4" else 2):
        ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[-1]
        assert "_very_few_rows_kernel" in ptx
        assert re.search(r"(mul|add|sub|fma\.rn)\.bf16x2", ptx)
        # Between products weights stay in registers; sums of parts of the depth do not, after them.
        # The second loop, for scales that are seen not to be small or positive, is taken rarely.
        products = [found.start() for found in re.finditer(r"mma\.sync", ptx)]
        last = products[len(products) // (2 if "fp4" in way else 1) - 1]
        assert not re.search(r"st\.shared|stmatrix", ptx[products[0] : last])
        return
    if not jax_private.supports_tensor_maps():
        with pytest.warns(UserWarning, match="need JAX 0.11.1"):
            assert (
                ".entry _few_rows_kernel"
                not in kernels(traced.lower(lowering_platforms=("cuda",)))[1]
            )
        return
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    assert ".entry _few_rows_kernel" in ptx
    assert re.search(r"(mul|add|sub|fma\.rn)\.bf16x2", ptx)
    assert re.search(FROM_REGISTERS, ptx)
