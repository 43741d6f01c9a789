"""ragged_dot of scaled arrays against float64 of the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe.products import oracle
from tests.moe.products.test_ragged_dot import PATHS
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import DifferentiationError
from triax.moe.quantization.scaled import ScaledArray
from triax.testing import assert_close, checked

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIZES = np.array([20, 0, 37, -3, 30], np.int32)
ROWS, DEPTH, COLUMNS = 96, 304, 144  # blocks of 128 and 64 are partial
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


def scaled(seed, shape, block, dtype, transposed=False):
    """Random values of a shape, and scales of many sizes; `block` is that of the array."""
    rng = np.random.default_rng(seed)
    stored = (block[0], *block[:0:-1]) if transposed else block
    count = tuple(-(-size // of) for size, of in zip(shape, stored, strict=True))
    values = rng.standard_normal(shape, np.float32) * (20 if dtype == "int8" else 1)
    scales = 2 ** rng.uniform(-3, 3, count)
    values = jnp.asarray(values.astype(jnp.dtype(dtype)))
    return ScaledArray(values, jnp.asarray(scales.astype(np.float32)), block, transposed)


def rows_of(block, dtype=E4M3, seed=0):
    return scaled(seed, (ROWS, DEPTH), (1, block), dtype)


def weights_of(depth, columns, transposed, dtype=E4M3):
    shape = (DEPTH, COLUMNS)[:: -1 if transposed else 1]
    return scaled(1, (len(SIZES), *shape), (1, depth, columns), dtype, transposed)


WAYS = {
    "rows and columns": (rows_of(DEPTH), weights_of(DEPTH, 1, True)),
    "more than the depth": (rows_of(512), weights_of(512, 1, True, E5M2)),
    "rows and groups": (rows_of(DEPTH, E5M2), weights_of(DEPTH, COLUMNS, False)),
    "blocks": (rows_of(128), weights_of(128, 128, True)),
    "blocks, depth not innermost": (rows_of(128), weights_of(128, 128, False)),
    "small blocks": (rows_of(64), weights_of(32, 16, True)),
    "blocks and columns": (rows_of(64), weights_of(DEPTH, 1, True)),
    "rows and blocks": (rows_of(DEPTH), weights_of(64, 200, False)),
    "integers": (rows_of(64, "int8"), weights_of(DEPTH, 1, True, "int8")),
}


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize(
    ("way", "implementation", "precision"),
    [
        (way, path, precision)
        for way in WAYS
        for path in PATHS  # which are all that there are on a CPU
        for precision in ((None, FAST) if way == "rows and columns" else (None,))
        if (way, path) != ("integers", "interpret")  # kernels multiply floats
    ],
)
def test_equals_float64(implementation, precision, way):
    rows, weights = WAYS[way]
    poisoned = rows.scales.at[-5:].set(jnp.nan)
    given = ScaledArray(rows.values, poisoned, rows.block)
    how = {"precision": precision, "preferred_element_type": "float32"}
    with checked():
        out = moe.ragged_dot(given, weights, SIZES, implementation=implementation, **how)
    wanted = oracle.ragged_dot(exactly(rows), exactly(weights), SIZES)
    assert_close(out, wanted, terms=DEPTH)
    assert not np.any(out[87:])


def test_the_result_is_bfloat16_and_takes_a_bias():
    rows, weights = WAYS["blocks"]
    bias = jnp.full((len(SIZES), COLUMNS), 100.0)
    out = moe.ragged_dot(rows, weights, SIZES, bias=bias)
    assert out.dtype == jnp.bfloat16
    wanted = oracle.ragged_dot(exactly(rows), exactly(weights), SIZES)
    wanted[:87] += 100
    assert_close(out, wanted, terms=DEPTH)


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("way", ["rows and columns", "blocks"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_over_devices(way, kind, cut):
    rows, weights = WAYS[way]
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,), devices=jax.devices()[:4])
    whole = moe.ragged_dot(rows, weights, SIZES)
    with jax.set_mesh(mesh):
        put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        if cut == "rows":
            rows = ScaledArray(put(rows.values, "a"), put(rows.scales, "a"), rows.block)
        else:
            values = put(weights.values, None, "a")
            weights = ScaledArray(values, weights.scales, weights.block, True)
        out = jax.jit(moe.ragged_dot)(rows, weights, SIZES)
    assert_close(np.asarray(out), np.asarray(whole, np.float64), terms=DEPTH)


def test_a_batch():
    rows, weights = WAYS["blocks"]
    batch = jax.tree.map(lambda a, b: jnp.stack([a, b]), rows, rows_of(128, seed=5))
    found = jax.vmap(lambda rows: moe.ragged_dot(rows, weights, SIZES))(batch)
    for i, one in enumerate((rows, rows_of(128, seed=5))):
        np.testing.assert_array_equal(found[i], moe.ragged_dot(one, weights, SIZES))


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("depth", "columns", "transposed", "weights_dtype"),
    [
        (DEPTH, 1, True, E4M3),
        (DEPTH, COLUMNS, False, E5M2),
        (DEPTH, 1, False, "int8"),
        (128, 128, True, E4M3),
        (32, 1, False, "int8"),
        (64, 1, True, "int8"),
    ],
)
def test_weights_alone(implementation, dtype, depth, columns, transposed, weights_dtype):
    """With the rows' gradient."""
    weights = weights_of(depth, columns, transposed, weights_dtype)
    rng = np.random.default_rng(7)
    rows, gradient = (
        rng.standard_normal((ROWS, n), np.float32).astype(dtype) for n in (DEPTH, COLUMNS)
    )
    rows[-5:] = gradient[-5:] = np.nan
    bias = np.ones((len(SIZES), COLUMNS), np.float32)

    @jax.jit
    def run(rows, bias, gradient):
        how = {"bias": bias, "implementation": implementation}
        op = lambda rows, bias: moe.ragged_dot(rows, weights, SIZES, **(how | {"bias": bias}))
        out, pull = jax.vjp(op, rows, bias)
        return out, *pull(gradient)

    with checked():
        out, d_rows, d_bias = run(rows, bias, gradient)
    assert out.dtype == d_rows.dtype == dtype
    exact = exactly(weights)
    wanted = oracle.ragged_dot(rows, exact, SIZES)
    wanted[:87] += 1
    assert_close(out, wanted, terms=DEPTH)
    back = oracle.ragged_dot(gradient, np.swapaxes(exact, 1, 2), SIZES)
    assert_close(d_rows, back, terms=COLUMNS)
    sums = [gradient[span].astype(np.float64).sum(0) for span in oracle.spans(SIZES, ROWS)]
    assert_close(d_bias, np.stack(sums), terms=ROWS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["rows and columns", "blocks"])
def test_no_derivative(way):
    rows, weights = WAYS[way]

    def loss(scales):
        given = ScaledArray(rows.values, scales, rows.block)
        return jnp.sum(moe.ragged_dot(given, weights, SIZES).astype("float32"))

    with pytest.raises(DifferentiationError, match="by numbers of float8_e4m3fn"):
        jax.grad(loss)(rows.scales)

    def of_weights(scales):
        given = ScaledArray(weights.values, scales, weights.block, True)
        return jnp.sum(moe.ragged_dot(jnp.ones((ROWS, DEPTH)), given, SIZES))

    with pytest.raises(DifferentiationError, match="by numbers of float8_e4m3fn"):
        jax.grad(of_weights)(weights.scales)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    "block", [(1, 1, None), (1, None, None), (1, 32, 64), (1, 64, 32), (1, 16, 128)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_as_in_torch(implementation, block, transposed):
    """Of `transpose_weights`, stored either way; blocks are named as the weights are."""
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.standard_normal((ROWS, 128), np.float32))
    spread = np.exp(rng.standard_normal((5, 128, 1)) + rng.standard_normal((5, 1, 128)))
    weights = moe.quantize(jnp.asarray(spread, jnp.float32), block=block, transposed=transposed)
    how = {"transpose_weights": True, "implementation": implementation}
    out, pull = jax.vjp(lambda rows: moe.ragged_dot(rows, weights, SIZES, **how), rows)
    exact = exactly(weights)
    assert_close(out, oracle.ragged_dot(rows, np.swapaxes(exact, 1, 2), SIZES), terms=128)
    assert_close(pull(rows)[0], oracle.ragged_dot(rows, exact, SIZES), terms=128)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [(1, 1, None), (1, None, 1)])
def test_scales_of_columns_are_not_those_of_the_depth(block):
    """Square weights, where both have the same shape."""
    weights = moe.quantize(jnp.ones((5, 64, 64)), block=block)
    with pytest.raises(ValueError, match="`weights` must have scales of blocks"):
        moe.ragged_dot(jnp.ones((8, 64)), weights, SIZES, transpose_weights=block[1] is None)


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("sizes", [(5, 0, 4, 8), (0, 0, 4, 8), (5, 3, 4, 0), (5, 0, 0, 8)])
def test_nothing_to_multiply(sizes):
    num_rows, depth, groups, columns = sizes
    rows = jnp.ones((num_rows, depth))
    for block in ((1, None, 1), (1, None, None), (1, 128, 128)):
        weights = moe.quantize(jnp.ones((groups, depth, columns)), block=block, transposed=True)
        for left in (rows, moe.quantize(rows, block=(1, None))):
            out = moe.ragged_dot(left, weights, np.ones(groups, np.int32))
            np.testing.assert_array_equal(out, np.zeros((num_rows, columns)))


@pytest.mark.slow("many programs for one rule")
@pytest.mark.parametrize("block", [(1, None, 1), (1, 32, 32), (1, None, None)])
def test_float64_rows(block):
    with jax.enable_x64():
        rng = np.random.default_rng(3)
        weights = moe.quantize(
            jnp.asarray(rng.standard_normal((5, 64, 64)), jnp.float32), block=block
        )
        rows = jnp.asarray(rng.standard_normal((ROWS, 64)))
        out, pull = jax.vjp(lambda rows: moe.ragged_dot(rows, weights, SIZES), rows)
        assert_close(out, oracle.ragged_dot(rows, exactly(weights), SIZES), terms=64)
        back = oracle.ragged_dot(rows, np.swapaxes(exactly(weights), 1, 2), SIZES)
        assert_close(pull(rows)[0], back, terms=64)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("block", [(1, None, 1), (1, 32, 32), (1, None, None)])
def test_weights_cut_by_group_on_explicit_axes(block):
    """The rows' gradient, and the array itself."""
    rng = np.random.default_rng(4)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    weights, rows, sizes = (
        moe.quantize(normal(4, 64, 64), block=block),
        normal(24, 64),
        [9, 0, 7, 5],
    )

    @jax.jit
    def run(weights):
        multiply = lambda rows: moe.ragged_dot(rows, weights, jnp.array(sizes))
        return *jax.vjp(multiply, rows)[1](rows), weights.dequantize()

    plain = run(weights)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        cut = jax.device_put(weights, NamedSharding(mesh, PartitionSpec("a")))
        for found, wanted in zip(run(cut), plain, strict=True):
            assert_close(np.asarray(found), np.asarray(wanted, np.float64), terms=64)


MISTAKES = {
    "odd blocks of rows": (rows_of(48), WAYS["blocks"][1], {}, "`rows` must have scales of blocks"),
    "rows share scales": (
        scaled(0, (ROWS, DEPTH), (2, DEPTH), E4M3),
        WAYS["blocks"][1],
        {},
        "`rows` must have scales of blocks",
    ),
    "odd blocks of weights": (
        WAYS["blocks"][0],
        weights_of(48, 48, True),
        {},
        "`weights` must have scales of blocks",
    ),
    "rows alone": (WAYS["blocks"][0], jnp.ones((5, DEPTH, 8)), {}, "must both be floats"),
    "integers as rows": (
        jnp.ones((ROWS, DEPTH), jnp.int32),
        WAYS["blocks"][1],
        {},
        "`rows` must be floats of 16 bits or more",
    ),
    "another depth": (
        rows_of(128),
        scaled(0, (5, COLUMNS, DEPTH + 1), (1, DEPTH + 1, 1), E4M3, True),
        {},
        "must have the depth of `rows`",
    ),
}


@pytest.mark.parametrize(("rows", "weights", "how", "match"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(rows, weights, how, match):
    with pytest.raises((TypeError, ValueError), match=match):
        moe.ragged_dot(rows, weights, SIZES, **how)


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("way", ["rows and columns", "blocks"])
@pytest.mark.parametrize("precision", [None, FAST])
def test_tensor_cores_of_8_bits(monkeypatch, way, precision):
    """Without a transpose, and with sums as they are asked for."""
    from tests.moe.products.test_programs import kernels

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    depth = {"rows and columns": 512, "blocks": 128}[way]
    columns = {"rows and columns": 1, "blocks": 128}[way]
    shape = jax.ShapeDtypeStruct
    rows = ScaledArray(shape((4096, 512), E4M3), shape((4096, 512 // depth), "float32"), (1, depth))
    blocks = 512 // depth, 256 // columns
    weights = ScaledArray(
        shape((4, 256, 512), E4M3), shape((4, *blocks[::-1]), "float32"), (1, depth, columns), True
    )
    multiply = functools.partial(moe.ragged_dot, precision=precision)
    traced = jax.jit(multiply).trace(rows, weights, shape((4,), "int32"))
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    assert re.search(r"wgmma.mma_async\S*e4m3.e4m3", ptx)
    assert ("add.f32" in ptx or "fma.rn.f32" in ptx) == (precision is None or way == "blocks")


def test_products_of_blocks_are_exact_in_plain_jax():
    """Where the platform would multiply float32 in fewer bits by default, as GPUs and TPUs do."""
    product = functools.partial(moe.ragged_dot, implementation="xla")
    program = jax.jit(product).lower(rows_of(128), weights_of(128, 128, False), SIZES)
    assert "precision = [HIGHEST, HIGHEST]" in program.as_text()


def test_weights_that_are_transposed_twice():
    rows = rows_of(128)
    square = scaled(1, (len(SIZES), DEPTH, DEPTH), (1, 128, 128), E4M3, True)
    twice = moe.ragged_dot(rows, square, SIZES, transpose_weights=True)
    plain = dataclasses.replace(square, transposed=False)
    np.testing.assert_array_equal(twice, moe.ragged_dot(rows, plain, SIZES))
    assert (twice != moe.ragged_dot(rows, square, SIZES)).any()


@pytest.mark.slow("many programs for one rule")
def test_plain_jax_has_no_fast_sums():
    """Their name is one of tensor cores, which other platforms refuse."""
    rows, weights = (array.values for array in (rows_of(DEPTH), weights_of(DEPTH, COLUMNS, False)))
    multiply = functools.partial(moe.ragged_dot, preferred_element_type="float32")
    fast = multiply(rows, weights, SIZES, precision=FAST, implementation="xla")
    np.testing.assert_array_equal(fast, multiply(rows, weights, SIZES, implementation="xla"))
