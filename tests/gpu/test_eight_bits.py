"""Products and layers in 8 bits on a GPU, against float64 of the quantized numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.references import on_cpu
from tests.gpu.test_ragged_dot import spans
from tests.moe import flat
from tests.moe.products.chosen import without
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.moe.products import any_gpu_gradients
from triax.moe.products.any_gpu_configs import TILE
from triax.moe.products.options import Groups
from triax.moe.products.quantized_outer_ops import outer_in_8_bits
from triax.moe.products.reference import group_of_rows
from triax.moe.quantization.reference import quantize_groups_reference
from triax.moe.quantization.scaled import ScaledArray
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu

FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
SIZES = {
    "uneven": [0, 1, 700, 63, 64, 65, 1500, 300],
    "few": [3, 0, 20, 17, 33, 1, 0, 9],
    "wrong": [-5, 900, 2**31 - 1, 40, -(2**31), 7, 0, 2**31 - 1],
}
BLOCKS = {"rows": ((1, None), (1, None, 1)), "blocks": ((1, 128), (1, 128, 128))}
DEPTH, COLUMNS = 1072, 656  # partial blocks and tiles


def draw(num_rows):
    keys = jax.random.split(jax.random.key(0))
    rows = (
        jax.random.normal(keys[0], (num_rows, DEPTH)) * jnp.exp(jnp.arange(num_rows) % 7)[:, None]
    )
    weights = jax.random.normal(keys[1], (8, DEPTH, COLUMNS)) * DEPTH**-0.5
    return rows.astype("bfloat16"), weights.astype("bfloat16")


def product(rows, weights, sizes):
    x = exactly(rows) if isinstance(rows, ScaledArray) else np.asarray(rows, np.float64)
    w = exactly(weights)
    out = np.zeros((len(x), w.shape[2]))
    for group, span in enumerate(spans(sizes, len(x))):
        out[span] = x[span] @ w[group]
    return out


def error(found, wanted):
    found = np.asarray(found, np.float64)
    assert np.all(np.isfinite(found))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", [(DEPTH, COLUMNS), (2880, 336), (128, 128), (16, 16), (128, 4112)]
)
@pytest.mark.parametrize("sizes", ["uneven", "wrong"])
@pytest.mark.parametrize("scaling", BLOCKS)
def test_the_kernel_of_float32_sums_and_its_twin(scaling, sizes, shape, result, dtype):
    """The one in Gluon, which is not interpreted, has the bits of the one that is.

    With the most columns a program has several tiles of one product each, so stores are close.
    """
    depth, columns = shape
    given = jnp.asarray(np.array(SIZES[sizes], np.int64).astype(np.int32))
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (3072, depth)).at[-40:].set(jnp.nan)
    w = jax.random.normal(keys[1], (8, depth, columns)).at[2].set(jnp.nan)
    rows = moe.quantize(x, dtype, block=BLOCKS[scaling][0])
    weights = moe.quantize(w, block=BLOCKS[scaling][1], transposed=True)

    def run(offset):
        how = {"preferred_element_type": result, "implementation": "triton"}
        part = ScaledArray(weights.values[1:7], weights.scales[1:7], weights.block, transposed=True)
        poison(3072 * columns * 8)
        whole = jax.jit(lambda rows: moe.ragged_dot(rows, weights, given, **how))(rows)
        some = lambda rows: moe.ragged_dot(rows, part, given, group_offset=offset, **how)
        return whole, jax.jit(some)(rows)

    found = run(1)
    with without("sm90_8_bits"):
        twin = run(1)
    for one, other in zip(found, twin, strict=True):
        assert_same_bits(one, other)
    assert np.any(np.asarray(found[0]))


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn")])
@pytest.mark.parametrize(
    ("scaling", "precision"), [("rows", FAST), ("rows", None), ("blocks", None)]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_products(sizes, scaling, precision, dtypes):
    sizes = SIZES[sizes]
    num_rows = 100 if sum(sizes) == 83 else 3072
    x, w = draw(num_rows)
    rows = moe.quantize(x, dtypes[0], block=BLOCKS[scaling][0])
    weights = moe.quantize(w, dtypes[1], block=BLOCKS[scaling][1], transposed=True)
    given = jnp.asarray(np.array(sizes, np.int64).astype(np.int32))
    past = sum(max(size, 0) for size in sizes)
    if past < num_rows:  # what no group has may be anything
        rows = ScaledArray(rows.values, rows.scales.at[past:].set(jnp.nan), rows.block)
    wanted = product(moe.quantize(x, dtypes[0], block=BLOCKS[scaling][0]), weights, sizes)
    poison(4 * wanted.nbytes)
    run = jax.jit(
        lambda rows: moe.ragged_dot(
            rows, weights, given, precision=precision, preferred_element_type="float32"
        )
    )
    first = run(rows)
    assert error(first, wanted) < (3e-3 if precision == FAST else 5e-4)
    assert not np.any(first[past:])
    for _ in range(20):
        assert_same_bits(run(rows), first)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    ("scaling", "transposed", "tiled"),
    [
        ("rows", True, False),
        ("rows", False, False),
        ("blocks", True, False),
        ("rows", True, True),
        ("blocks", True, True),
    ],
)
@pytest.mark.parametrize("sizes", SIZES)
def test_weights_alone(sizes, scaling, transposed, tiled, dtype):
    sizes = SIZES[sizes]
    x, w = draw(100 if sum(sizes) == 83 else 3072)
    if tiled:
        x, w = (of[..., : of.shape[-1] // 64 * 64] for of in (x, w[:, : x.shape[1] // 64 * 64]))
    weights = moe.quantize(w, dtype, block=BLOCKS[scaling][1], transposed=transposed)
    passed = jax.jit(moe.ScaledArray.tile)(weights) if tiled else weights
    given = jnp.asarray(np.array(sizes, np.int64).astype(np.int32))

    @jax.jit
    def run(x):
        out, pull = jax.vjp(lambda x: moe.ragged_dot(x, passed, given), x)
        return out, *pull(out)

    poison(4 * x.shape[0] * w.shape[2])
    out, d_x = run(x)
    wanted = product(x, weights, sizes)
    assert error(out, wanted) < 5e-3
    w = np.swapaxes(exactly(weights), 1, 2)
    back = np.zeros(x.shape)
    for group, span in enumerate(spans(sizes, len(x))):
        back[span] = np.asarray(out[span], np.float64) @ w[group]
    assert error(d_x, back) < 5e-3


@pytest.mark.parametrize(
    ("dtype", "tiled"),
    [
        ("float8_e4m3fn", False),
        ("float8_e5m2", False),
        ("int8", False),
        ("float8_e4m3fn", True),
        ("int8", True),
    ],
)
@pytest.mark.parametrize("num_rows", [16, 256, 512, 2048, 32768])
def test_all_weights_are_widened_exactly(num_rows, dtype, tiled):
    """Whatever tiles the rows of a group take; what is not finite is none of its row's numbers."""
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    codes = jnp.where(jnp.isfinite(codes.astype("float32")), codes.astype("float32"), 0)
    each = (jnp.arange(256)[:, None] + jnp.arange(256)) % 256
    values = jnp.broadcast_to(codes[each].astype(dtype), (8, 256, 256))
    scales = jnp.ones((8, 256, 1), "float32")
    rows = jnp.tile(jnp.eye(256, dtype="bfloat16"), (num_rows // 256 + 1, 1))[:num_rows]
    sizes = jnp.full(8, num_rows // 8, "int32")
    multiply = jax.jit(lambda values: moe.ragged_dot(rows, scaled(values), sizes))
    stored = lambda values: ScaledArray(values, scales, (1, None, 1), True)
    scaled = lambda values: stored(values).tile() if tiled else stored(values)
    wanted = jnp.tile(codes[each].T, (num_rows // 256 + 1, 1))[:num_rows]
    np.testing.assert_array_equal(np.asarray(multiply(values), np.float32), wanted)
    if dtype != "int8":
        out = np.asarray(multiply(values.at[3, 5, 7].set(jnp.nan)), np.float32)
        rows_of_it = slice(3 * num_rows // 8, 4 * num_rows // 8)
        assert np.isnan(out[rows_of_it, 5]).all()
        assert np.isnan(out).sum() == num_rows // 8


def quantized(rows, groups, **how):
    return quantize_groups_reference(rows, group_of_rows(groups, len(rows)), **how)


def as_int32(sizes):
    return jnp.asarray(np.array(sizes, np.int64).astype(np.int32))


def rows_and_gradient(num_rows, sizes, dtype="bfloat16"):
    """Rows past the groups are NaN."""
    keys = jax.random.split(jax.random.key(2))
    shapes = (num_rows, DEPTH), (num_rows, COLUMNS)
    past = sum(max(size, 0) for size in sizes)
    for key, shape in zip(keys, shapes, strict=True):
        columns = jnp.exp(jnp.arange(shape[1]) % 7)
        side = (jax.random.normal(key, shape) * columns).astype(dtype)
        yield side.at[past:].set(jnp.nan) if past < num_rows else side


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("sizes", SIZES)
def test_groups_in_8_bits(sizes, to, dtype):
    """The same bits as plain JAX, and zeros up to the end of a group's last tile."""
    sizes = SIZES[sizes]
    num_rows = 100 if sum(sizes) == 83 else 3072
    rows, _ = rows_and_gradient(num_rows, sizes, dtype)
    special = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0, -0.0, 1e-40, 3e38])
    rows = rows.at[:7, 5].set(special.astype(dtype))
    groups = Groups(as_int32(sizes))

    @jax.jit
    def run(rows):
        bounds = any_gpu_gradients.group_bounds(groups, num_rows, "triton")
        how = {"dtype": jnp.dtype(to), "implementation": "triton"}
        return any_gpu_gradients.quantize_groups(rows, bounds, **how)

    poison(4 * rows.nbytes)
    values, scales = run(rows)
    how = {"num_groups": len(sizes), "dtype": jnp.dtype(to)}
    wanted, wanted_scales = on_cpu(quantized, rows, groups, **how)
    assert_same_bits(scales, wanted_scales)
    values, wanted, start = np.asarray(values), np.asarray(wanted), 0
    for span in spans(sizes, num_rows):
        count = span.stop - span.start
        assert_same_bits(values[:, start : start + count].T, wanted[span])
        padded = -(-count // TILE) * TILE
        assert not values[:, start + count : start + padded].view(np.uint8).any()
        start += padded


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn",) * 2, ("float8_e4m3fn", "float8_e5m2")])
@pytest.mark.parametrize("fast_sums", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_weights_gradients(sizes, fast_sums, dtypes):
    sizes = SIZES[sizes]
    num_rows = 100 if sum(sizes) == 83 else 3072
    sides = list(rows_and_gradient(num_rows, sizes))
    groups = Groups(as_int32(sizes))
    group = on_cpu(functools.partial(group_of_rows, num_rows=num_rows), groups)
    exact = []
    for side, dtype in zip(sides, dtypes, strict=True):
        how = {"num_groups": len(sizes), "dtype": jnp.dtype(dtype)}
        values, scales = on_cpu(quantized, side, groups, **how)
        of_rows = scales.astype(np.float64)[np.minimum(group, len(sizes) - 1)]
        exact.append(values.astype(np.float64) * of_rows)
    wanted = np.stack([exact[0][span].T @ exact[1][span] for span in spans(sizes, num_rows)])
    poison(4 * wanted.nbytes)

    @jax.jit
    def run(left, right):
        return outer_in_8_bits(
            left,
            right,
            as_int32(sizes),
            dtypes=dtypes,
            result_dtype="float32",
            fast_sums=fast_sums,
            implementation="triton",
        )

    first = run(*sides)
    assert error(first, wanted) < (3e-3 if fast_sums else 5e-4)
    for matrix, span in zip(first, spans(sizes, num_rows), strict=True):
        assert span.stop > span.start or not np.any(matrix)
    for _ in range(20):
        assert_same_bits(run(*sides), first)


def test_rows_that_are_named():
    """The same bits as of the rows, and zeros for rows that there are not."""
    sizes = [700, 0, 1500, 300]
    tokens, rows = rows_and_gradient(3072, sizes)
    tokens = tokens[:500]
    source = jax.random.randint(jax.random.key(5), (3072,), -3, 520, "int32")
    known = (source >= 0) & (source < 500)
    moved = jnp.where(known[:, None], tokens[jnp.clip(source, 0, 499)], 0)
    how = {"dtypes": ("float8_e4m3fn",) * 2, "result_dtype": "float32", "fast_sums": True}
    how["implementation"] = "triton"
    for sources in ((source, None), (None, source)):
        named = source is sources[0]
        pair = (tokens, rows) if named else (rows, tokens)
        plain = (moved, rows) if named else (rows, moved)
        found = outer_in_8_bits(*pair, as_int32(sizes), sources=sources, **how)
        assert_same_bits(found, outer_in_8_bits(*plain, as_int32(sizes), **how))


RECIPES = {"rows": "rows", "blocks": "blocks", "all": moe.Recipe(weight_gradient="rows")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer(recipe):
    """The kernels against plain JAX: both quantize to the same bits."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = (500, 256), (500, 8), (8, 256, 384), (8, 192, 256)
    given = [
        jax.random.normal(k, s) / (1 if len(s) == 2 else 14)
        for k, s in zip(keys, shapes, strict=True)
    ]
    given = [a.astype("float32" if i == 1 else "bfloat16") for i, a in enumerate(given)]

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(*given, implementation):
        def tokens(*given):
            how = {"top_k": 2, "normalize": True, "implementation": implementation}
            return flat.layer(*given, recipe=RECIPES[recipe], **how).tokens

        out, pull = jax.vjp(tokens, *given)
        return out, *pull(given[0])

    plain = on_cpu(run, *given, implementation="xla")
    for found, wanted in zip(run(*given, implementation="triton"), plain, strict=True):
        assert error(found, np.asarray(wanted, np.float64)) < 1e-2
