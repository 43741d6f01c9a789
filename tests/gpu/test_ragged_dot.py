"""ragged_dot on a GPU: at sizes where every path of the kernels runs, and next to NaNs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.references import on_cpu
from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 1e-3}
SIZES = {
    "even": [384] * 8,
    "uneven": [0, 1, 700, 63, 64, 65, 1500, 300],
    "one": [0, 0, 0, 3072, 0, 0, 0, 0],
    "wrong": [-5, 900, 2**31 - 1, 40, -(2**31), 7, 0, 2**31 - 1],
}


def spans(sizes, num_rows):
    start = 0
    for size in sizes:
        end = min(start + max(size, 0), num_rows)
        yield slice(start, end)
        start = end


def draw(num_rows, depth, columns, groups, dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(num_rows, depth), (groups, depth, columns), (num_rows, columns)]
    return [
        jax.random.normal(k, s, jnp.float32).astype(dtype)
        for k, s in zip(keys, shapes, strict=True)
    ]


def all_three(rows, weights, gradient, sizes, implementation="triton"):
    sizes = jnp.asarray(np.array(sizes, np.int64).astype(np.int32))

    @jax.jit
    def run(rows, weights, gradient):
        op = lambda x, w: moe.ragged_dot(x, w, sizes, implementation=implementation)
        out, pull = jax.vjp(op, rows, weights)
        return out, *pull(gradient)

    return run(rows, weights, gradient)


def expected(rows, weights, gradient, sizes):
    x, w, g = (np.asarray(a, np.float64) for a in (rows, weights, gradient))
    out, d_x, d_w = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, span in enumerate(spans(sizes, len(x))):
        out[span], d_x[span], d_w[e] = x[span] @ w[e], g[span] @ w[e].T, x[span].T @ g[span]
    return out, d_x, d_w


def check(actual, wanted, dtype):
    for a, b in zip(actual, wanted, strict=True):
        a = np.asarray(a, np.float64)
        assert np.all(np.isfinite(a))
        assert np.linalg.norm(a - b) <= TOLERANCE[dtype] * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("depth", "columns"), [(256, 512), (200, 328), (130, 67)])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_float64(dtype, depth, columns, sizes):
    arrays = draw(3072, depth, columns, 8, dtype)
    check(all_three(*arrays, SIZES[sizes]), expected(*arrays, SIZES[sizes]), dtype)


@pytest.mark.parametrize("num_rows", [1, 40, 100, 250, 500])
def test_few_rows(num_rows):
    sizes = [num_rows // 8] * 7 + [num_rows]
    arrays = draw(num_rows, 512, 384, 8, "bfloat16")
    check(all_three(*arrays, sizes), expected(*arrays, sizes), "bfloat16")


@pytest.mark.parametrize("depth", [256, 130])
def test_nothing_of_a_group_reaches_another(depth):
    """NaN everywhere but in one group, and past the groups: the group is as if alone."""
    sizes = [300, 77, 400, 100]
    arrays = draw(1024, depth, 256, 4, "bfloat16")
    wanted = expected(*arrays, sizes)
    for group, span in enumerate(spans(sizes, 1024)):
        keep = (jnp.arange(1024) >= span.start) & (jnp.arange(1024) < span.stop)
        mine = (jnp.arange(4) == group)[:, None, None]
        rows, weights, gradient = arrays
        poisoned = [jnp.where(keep[:, None], rows, jnp.nan), jnp.where(mine, weights, jnp.inf)]
        poisoned.append(jnp.where(keep[:, None], gradient, jnp.nan))
        out, d_x, d_w = all_three(*poisoned, sizes)
        mine = [out[span], d_x[span], d_w[group]]
        check(mine, [wanted[0][span], wanted[1][span], wanted[2][group]], "bfloat16")
        assert not np.any(np.asarray(out[877:], np.float32))
        assert not np.any(np.asarray(d_x[877:], np.float32))


def test_every_run_gives_the_same_bits():
    arrays = draw(4096, 512, 768, 8, "bfloat16")
    sizes = [100, 900, 0, 512, 1024, 60, 700, 300]
    first = all_three(*arrays, sizes)
    for _ in range(100):
        for a, b in zip(all_three(*arrays, sizes), first, strict=True):
            assert_same_bits(a, b)


def test_eight_bits_with_scales():
    rows, weights, _ = draw(1024, 512, 384, 4, "float32")
    rows, weights = (a.astype(jnp.float8_e4m3fn) for a in (rows, weights))
    of_rows, of_groups = jnp.linspace(0.5, 2, 1024), jnp.array([1.0, 2.0, 0.5, 3.0])
    sizes = [200, 300, 0, 400]
    out = moe.ragged_dot(
        moe.ScaledArray(rows, of_rows[:, None], (1, None)),
        moe.ScaledArray(weights, of_groups[:, None, None], (1, None, None)),
        jnp.array(sizes),
        implementation="triton",
    )
    wanted = np.zeros((1024, 384))
    for e, span in enumerate(spans(sizes, 1024)):
        wanted[span] = np.asarray(rows[span], np.float64) @ np.asarray(weights[e], np.float64)
        wanted[span] *= np.asarray(of_rows[span])[:, None] * float(of_groups[e])
    error = np.linalg.norm(np.asarray(out, np.float64) - wanted)
    assert error <= 5e-3 * np.linalg.norm(wanted)


def test_tf32_where_the_matmul_precision_says_so():
    arrays = draw(2048, 512, 256, 4, "float32")
    sizes = [512, 100, 900, 300]
    wanted = expected(*arrays, sizes)
    with jax.default_matmul_precision("tensorfloat32"):
        actual = all_three(*arrays, sizes)
    for a, b in zip(actual, wanted, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        assert 2e-6 < error < 1e-3


def test_equals_jax():
    rows, weights, _ = draw(8192, 1024, 512, 16, "bfloat16")
    sizes = jnp.asarray(np.random.default_rng(0).multinomial(8000, [1 / 16] * 16), jnp.int32)
    actual = moe.ragged_dot(rows, weights, sizes, implementation="triton")
    wanted = jax.lax.ragged_dot(rows, weights, sizes)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32)[:8000],
        np.asarray(wanted, np.float32)[:8000],
        rtol=1e-2,
        atol=1e-2 * 32,
    )


@pytest.mark.parametrize(("depth", "columns"), [(256, 512), (130, 67)])
@pytest.mark.parametrize("transposed", [False, True])
def test_some_groups_with_biases(depth, columns, transposed):
    """Rows of others are NaN, and the groups lie between them."""
    sizes, offset = [300, 500, 77, 0, 900, 400], 2
    num_rows, mine = 3072, slice(800, 1777)
    rows, weights, gradient = draw(num_rows, depth, columns, 3, "bfloat16")
    if transposed:
        weights = jnp.swapaxes(weights, 1, 2)
    is_mine = ((jnp.arange(num_rows) >= mine.start) & (jnp.arange(num_rows) < mine.stop))[:, None]
    poisoned = [jnp.where(is_mine, array, jnp.nan) for array in (rows, gradient)]
    bias = jax.random.normal(jax.random.key(7), (3, columns))
    bias_weights = jnp.linspace(-1, 2, num_rows)

    def run(rows, weights, bias, bias_weights, gradient, sizes, **how):
        def product(x, w, b, by):
            how_ = {"bias": b, "bias_weights": by, "transpose_weights": transposed} | how
            return moe.ragged_dot(x, w, jnp.array(sizes), **how_)

        out, pull = jax.vjp(product, rows, weights, bias, bias_weights)
        return out, *pull(gradient)

    some = jax.jit(
        lambda offset: run(
            poisoned[0], weights, bias, bias_weights, poisoned[1], sizes, group_offset=offset
        )
    )(jnp.int32(offset))
    wide = [a[mine].astype("float32") for a in (rows, gradient)]
    some_sizes = sizes[offset : offset + 3]
    wanted = on_cpu(
        functools.partial(run, sizes=some_sizes, implementation="xla"),
        *(wide[0], weights.astype("float32"), bias, bias_weights[mine], wide[1]),
    )
    for actual, expected in zip(some, wanted, strict=True):
        if len(actual) == num_rows:
            others = np.delete(np.asarray(actual, np.float32), np.r_[mine], axis=0)
            assert not np.any(others)
            actual = actual[mine]
        check([actual], [np.asarray(expected, np.float64)], "bfloat16")


def test_sums_of_biases_have_the_same_bits_in_every_run():
    rows, weights, gradient = draw(4096, 512, 768, 8, "bfloat16")
    sizes = jnp.array([100, 900, 0, 512, 1024, 60, 700, 300])

    @jax.jit
    def run(bias):
        op = lambda w, b: moe.ragged_dot(rows, w, sizes, bias=b)
        return jax.vjp(op, weights, bias)[1](gradient)

    first = run(jnp.ones((8, 768)))
    check(
        first[1:],
        [
            np.stack(
                [
                    np.asarray(gradient, np.float64)[span].sum(0)
                    for span in spans(sizes.tolist(), 4096)
                ]
            )
        ],
        "float32",
    )
    for _ in range(50):
        for a, b in zip(run(jnp.ones((8, 768))), first, strict=True):
            assert_same_bits(a, b)
