"""Few bfloat16 rows times 4-bit weights in tiles, against float64 of the numbers they stand for.

Sums are in float32 and rounded once, so bounds are those of one term.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.products import oracle
from tests.moe.products.test_few_rows import FROM_REGISTERS, ROWS, SIZES, check_tiles
from tests.moe.products.test_scaled import scaled
from tests.moe.quantization.oracle import E4M3, E8M0, exactly
from triax import moe
from triax.compat import jax_private
from triax.moe.quantization.packing import pack
from triax.moe.shared import target
from triax.testing import assert_close, assert_same_bits, checked

DEPTH, COLUMNS = 320, 192  # no multiples of 128
E2M1 = "float4_e2m1fn"
# dtype, depth and columns of a scale, the scales' dtype, the zeros'
WAYS = {
    "mxfp4": (E2M1, (32, 1), E8M0, None),
    "nvfp4": (E2M1, (16, 1), E4M3, None),
    "nvfp4, 48": (E2M1, (48, 1), E4M3, None),
    "e2m1, tiles": (E2M1, (64, 32), "float32", None),
    "e2m1, powers of columns": (E2M1, (None, 1), E8M0, None),
    "e2m1, 32": (E2M1, (32, 1), "float32", None),
    "int4, columns": ("int4", (None, 1), "float32", np.int8),
    "int4, 32": ("int4", (32, 1), "float32", np.int8),
    "int4, 32, no zeros": ("int4", (32, 1), "float32", None),
    "int4, tiles of 32": ("int4", (32, 48), "float32", np.int8),
    "int4, 96": ("int4", (96, 1), "float32", np.int8),
    "int4, 64": ("int4", (64, 1), "float32", np.int8),
    "int4, 128": ("int4", (128, 1), "float32", None),
    "int4, 32, bfloat16": ("int4", (32, 1), "bfloat16", np.int8),
    "int4, 64, float16": ("int4", (64, 1), "float16", np.int8),
    "int4, columns, bfloat16": ("int4", (None, 1), "bfloat16", None),
    "int4, powers": ("int4", (32, 1), E8M0, np.int8),
}


def weights_of(groups, dtype, block, scale_dtype, zeros, columns=COLUMNS, depth=DEPTH):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (groups, columns, depth))
    deep, wide = block
    shape = groups, -(-columns // wide), -(-depth // (deep or depth))
    scales = np.exp2(rng.integers(-9, 9, shape))
    if scale_dtype != E8M0:
        scales *= rng.uniform(0.5, 2, shape)
    of_all = None
    if scale_dtype == E4M3:
        scales = np.minimum(scales, 448)
        of_all = np.exp(rng.standard_normal((groups, columns, 1))).astype(np.float32)
    scales = scales.astype(scale_dtype)
    if zeros is not None:  # and the outermost
        zeros = rng.choice([-128, -5, 0, 3, 127], shape).astype(zeros)
    return moe.ScaledArray(pack(codes), scales, (1, *block), True, dtype, zeros, of_all)


def is_taken(run, *args):
    """Whether a kernel for few rows is called: in the interpreter, or on a GPU."""
    text = run.lower(*args).as_text(debug_info=True)
    return re.search(r'"few_rows(_of_tiles)?[("]', text) is not None


@pytest.mark.sampled(2, 10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("card", [90, 120])
def test_equals_float64(monkeypatch, card, sizes, way):
    gpu = dataclasses.replace(target.INTERPRETER, compute_capability=card)
    monkeypatch.setattr(target, "INTERPRETER", gpu)
    num_rows, sizes = ROWS[sizes], np.array(SIZES[sizes], np.int64).astype(np.int32)
    weights = weights_of(len(sizes), *WAYS[way])
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, DEPTH), np.float32).astype(jnp.bfloat16)
    past = int(np.minimum(np.maximum(sizes.astype(np.int64), 0).sum(), num_rows))
    rows[past:] = np.nan
    bias = rng.standard_normal((len(sizes), COLUMNS), np.float32).astype(jnp.bfloat16)
    each = rng.standard_normal(num_rows, np.float32)
    multiply = functools.partial(moe.ragged_dot, bias=bias, bias_weights=each)
    run = jax.jit(functools.partial(multiply, implementation="interpret"))
    given = weights.tile()
    assert is_taken(run, rows, given, sizes)
    with checked():
        out = run(rows, given, sizes)
    wanted = oracle.ragged_dot(rows, exactly(weights), sizes)
    for group, span in enumerate(oracle.spans(sizes, num_rows)):
        wanted[span] += np.float64(bias[group]) * each[span, None]
    assert_close(out, wanted, terms=1)
    assert not np.any(np.asarray(out)[past:])


@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, powers", "int4, 32", "e2m1, tiles"])
@pytest.mark.parametrize("num_rows", [1, 11])
def test_tiles_of_very_few_rows(num_rows, way):
    """Warps share a tile's depth, which has an odd number of steps."""
    depth, columns = 832, 64  # so many steps that powers have two parts
    weights = weights_of(4, *WAYS[way], columns, depth)
    rng = np.random.default_rng(num_rows)
    rows = rng.standard_normal((num_rows + 2, depth), np.float32).astype(jnp.bfloat16)
    rows[-2:] = np.nan
    sizes = np.array([0, num_rows - num_rows // 2, 0, num_rows // 2], np.int32)
    run = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    assert is_taken(run, rows, weights.tile(), sizes)
    with checked():
        out = run(rows, weights.tile(), sizes)
    wanted = oracle.ragged_dot(rows, exactly(weights), sizes)
    assert_close(out, wanted, terms=1)
    assert not np.any(np.asarray(out)[num_rows:])


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
    assert is_taken(run, *args)
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


@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, 32"])
def test_tiles_are_widened_for_many_rows(way):
    weights = weights_of(1, *WAYS[way], 64, 64)
    rows = np.random.default_rng(0).standard_normal((260, 64)).astype(jnp.bfloat16)
    out = moe.ragged_dot(rows, weights.tile(), np.array([260]), implementation="interpret")
    exact = exactly(weights).astype(np.float32).astype(jnp.bfloat16)
    assert_close(out, oracle.ragged_dot(rows, exact, [260]), terms=1)


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize(
    ("card", "per_group", "dtype"),
    [(90, 8, "int4"), (90, 70, "int4"), (120, 8, "int4"), (120, 70, "int4"), (90, 70, "int8")],
)
def test_each_32_of_the_depth_have_their_scale_and_zero(monkeypatch, card, per_group, dtype):
    """Of each row one element is not zero, so that results are exact products in float32."""
    gpu = dataclasses.replace(target.INTERPRETER, compute_capability=card)
    monkeypatch.setattr(target, "INTERPRETER", gpu)
    groups, num_rows = 2, 2 * per_group
    weights = weights_of(groups, *WAYS["int4, 32"])
    if dtype == "int8":
        weights = scaled(1, (groups, COLUMNS, DEPTH), (1, 32, 1), dtype, transposed=True)
    which = np.random.default_rng(3).permutation(np.arange(num_rows) % DEPTH)
    rows = jnp.zeros((num_rows, DEPTH), jnp.bfloat16).at[np.arange(num_rows), which].set(1)
    how = {"preferred_element_type": "float32", "implementation": "interpret"}
    run = jax.jit(lambda *args: moe.ragged_dot(*args, transpose_weights=True, **how))
    args = rows, weights.tile().mT, np.full(groups, per_group, np.int32)
    assert is_taken(run, *args)
    with checked():
        out = run(*args)
    group = np.arange(num_rows) // per_group
    np.testing.assert_array_equal(out, exactly(weights).astype(np.float32)[group, which])


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
    assert is_taken(run, rows, weights, sizes)
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
        exact = exactly(weights).astype(np.float32)  # overflows as bfloat16 does
        wanted = oracle.ragged_dot(rows, exact, sizes).astype(np.float32)
    return rows.astype(jnp.bfloat16), weights, sizes, wanted


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, 32"])
def test_a_scale_that_is_not_a_number_is_its_columns(way, tiled):
    weights = weights_of(8, *WAYS[way])
    weights.scales[2, 5, 6] = np.nan
    weights = weights.tile() if tiled else weights
    rows, sizes = np.zeros((40, DEPTH), jnp.bfloat16), np.full(8, 5, np.int32)
    multiply = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    out = multiply(rows, weights, sizes)
    is_nan = np.isnan(np.asarray(out, np.float32)).reshape(8, 5, COLUMNS)
    assert is_nan[2, :, 5].all()
    assert is_nan.sum() == 5


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("num_rows", [40, 600])
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, 32"])
def test_tiles_are_the_weights(way, num_rows, implementation):
    """In plain JAX and with many rows too, where they are reordered back; and in gradients."""
    check_tiles(weights_of(2, *WAYS[way]), num_rows, implementation)


OTHERS = {
    "zeros are floats": ("int4", (64, 1), "float32", np.float32),
    "blocks of 16": ("int4", (16, 1), "float32", None),
    "blocks of 48": (E2M1, (48, 1), E8M0, None),
    "blocks of 8": (E2M1, (8, 1), E4M3, None),
    "scales of e4m3 for two columns": (E2M1, (16, 2), E4M3, None),
    "scales of e4m3 for whole columns": (E2M1, (None, 1), E4M3, None),
}


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("way", [*OTHERS, "rows", "columns innermost", "many rows", "not in tiles"])
def test_what_takes_a_temporary(way):
    num_rows = 600 if way == "many rows" else 40
    weights = weights_of(2, *OTHERS.get(way, WAYS["mxfp4"]))
    if way == "columns innermost":
        weights = moe.quantize(weights.dequantize(), "int4", block=(1, None, 1))
    given = weights if way == "not in tiles" else weights.tile()
    rows = np.random.default_rng(0).standard_normal((num_rows, DEPTH), np.float32)
    rows = rows.astype("float32" if way == "rows" else jnp.bfloat16)
    sizes = np.full(2, num_rows // 2, np.int32)
    run = jax.jit(functools.partial(moe.ragged_dot, implementation="interpret"))
    assert not is_taken(run, rows, given, sizes)
    exact = np.asarray(weights.dequantize(rows.dtype))
    assert_close(run(rows, given, sizes), oracle.ragged_dot(rows, exact, sizes), terms=1)


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, 64", "int4, 32"])
@pytest.mark.parametrize("rows", [64, 1024, 4096])
def test_weights_are_unpacked_in_registers(monkeypatch, rows, way):
    from tests.moe.products.test_programs import kernels

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    shape = jax.ShapeDtypeStruct
    weights = weights_of(32, *WAYS[way], columns=256, depth=512)
    weights = jax.eval_shape(weights.tile)
    traced = jax.jit(moe.ragged_dot).trace(
        shape((rows, 512), "bfloat16"), weights, shape((32,), "int32")
    )
    if rows <= (1024 if way == "int4, 32" else 64):
        ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[-1]
        assert "_few_rows_of_tiles_kernel" in ptx
        assert re.search(r"(mul|sub|fma\.rn)\.bf16x2", ptx)
        # Between products weights stay in registers; sums of parts of the depth do not, after them.
        # The second loop, for scales that are seen not to be small or positive, is taken rarely.
        products = [found.start() for found in re.finditer(r"mma\.sync", ptx)]
        last = products[len(products) // (2 if "fp4" in way else 1) - 1]
        assert not re.search(r"st\.shared|stmatrix", ptx[products[0] : last])
        return
    if not jax_private.supports_tensor_maps():
        with pytest.warns(UserWarning, match="need JAX 0.11.1"):
            assert "_few_rows_kernel" not in kernels(traced.lower(lowering_platforms=("cuda",)))[1]
        return
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    assert "_few_rows_kernel" in ptx
    assert re.search(r"(mul|sub|fma\.rn)\.bf16x2", ptx)
    assert re.search(FROM_REGISTERS, ptx)


@pytest.mark.parametrize("block", [(1, 64, 192), (1, None, 1)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_tiles_with_columns_innermost_are_as_exact_as_what_is_not_in_tiles(dtype, block):
    """Scales of the whole depth multiply sums, not weights that are then rounded to bfloat16."""
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((3, 64, 192)) * 9).astype(jnp.dtype(dtype))
    scales = rng.uniform(0.2, 5, (3, 1, 1 if block[2] > 1 else 192)).astype(np.float32)
    weights = moe.ScaledArray(jnp.asarray(values), jnp.asarray(scales), block)
    rows = jnp.asarray(rng.standard_normal((43, 64)), jnp.bfloat16)
    sizes = np.array([10, 20, 5], np.int32)
    product = functools.partial(moe.ragged_dot, implementation="interpret")
    found, wanted = product(rows, weights.tile(), sizes), product(rows, weights, sizes)
    assert_same_bits(found, wanted)
