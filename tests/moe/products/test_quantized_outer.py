"""Weights' gradients in 8 bits: numbers bit for bit, and products against float64 of them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe.products import oracle
from tests.moe.products.test_ragged_dot import PATHS, as_sizes
from tests.moe.quantization.oracle import draw, expected
from triax.errors import DifferentiationError
from triax.moe.products import any_gpu_gradients
from triax.moe.products.any_gpu_configs import TILE
from triax.moe.products.options import Groups
from triax.moe.products.quantized_outer_ops import outer_in_8_bits
from triax.moe.products.reference import group_of_rows
from triax.moe.quantization.reference import quantize_groups_reference
from triax.moe.shared import target
from triax.testing import assert_close, assert_same_bits, checked, poison

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ROWS, LEFT, RIGHT = 300, 70, 144
SIZES = {
    "uneven": [0, 1, 150, 100],
    "whole tiles": [128, 0, 0, 128],
    "one": [0, 0, 300, 0],
    "none": [0, 0, 0, 0],
    "too many": [100, 50, 2**31 - 1, 2**31 - 1],
    "negative": [-7, 160, -(2**31), 33],
}


def both_sides(seed=0, dtype="float32"):
    """Numbers of many sizes; none that is finite in the last rows."""
    rng = np.random.default_rng(seed)
    sides = []
    for columns in (LEFT, RIGHT):
        side = rng.standard_normal((ROWS, columns)) * np.exp(rng.uniform(-3, 3, columns))
        side[-9:] = np.nan
        sides.append(side.astype(jnp.dtype(dtype)))
    return sides


def rounded(rows, sizes, dtype):
    """What the groups' numbers in 8 bits stand for, in float64."""
    out = np.zeros(rows.shape)
    for span in oracle.spans(sizes, len(rows)):
        if span.stop > span.start:
            values, scales = expected(rows[span], dtype, (None, 1))
            out[span] = values.astype(np.float64) * scales.astype(np.float64)
    return out


def run(
    left,
    right,
    sizes,
    implementation,
    fast_sums=True,
    dtypes=(E4M3, E5M2),
    dtype="float32",
    sources=(None, None),
):
    product = functools.partial(
        outer_in_8_bits,
        dtypes=dtypes,
        result_dtype=dtype,
        fast_sums=fast_sums,
        implementation=implementation,
    )
    return jax.jit(product)(left, right, as_sizes(sizes), sources=sources)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("sizes", "dtype", "to"),
    [
        (sizes, dtype, to)
        for i, sizes in enumerate(SIZES)
        for dtype, to in [(("bfloat16", "float32", "float16")[i % 3], (E4M3, E5M2)[i % 2])]
    ],
)
def test_bits(sizes, dtype, to):
    """Of kernels and of plain JAX, with what is not finite; zeros fill the last tiles up."""
    rows, sizes = draw((ROWS, LEFT), jnp.dtype(dtype)), SIZES[sizes]
    groups = Groups(jnp.asarray(as_sizes(sizes)))
    poison(8 * rows.nbytes)
    with checked():
        bounds = any_gpu_gradients.group_bounds(groups, ROWS, "interpret")
        values, scales = any_gpu_gradients.quantize_groups(
            jnp.asarray(rows), bounds, dtype=jnp.dtype(to), implementation="interpret"
        )
    plain_values, plain_scales = quantize_groups_reference(
        jnp.asarray(rows), group_of_rows(groups, ROWS), num_groups=len(sizes), dtype=jnp.dtype(to)
    )
    assert_same_bits(scales, plain_scales)
    assert values.shape[1] % TILE == 0
    values, plain_values, start = np.asarray(values), np.asarray(plain_values), 0
    for group, span in enumerate(oracle.spans(sizes, ROWS)):
        found, plain = values[:, start:].T, plain_values[span]
        wanted, wanted_scales = expected(rows[span], to, (None, 1))
        count = span.stop - span.start
        assert_same_bits(found[:count], wanted)
        assert_same_bits(plain, wanted)
        assert_same_bits(scales[group], wanted_scales[0] if count else np.full(LEFT, 2**-126, "f"))
        padded = -(-count // TILE) * TILE
        assert not found[count:padded].view(np.uint8).any()
        start += padded
    assert start <= values.shape[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_float64(implementation, sizes):
    sizes = SIZES[sizes]
    left, right = both_sides()
    if sum(sizes) > ROWS:
        left[-9:] = right[-9:] = 1
    wanted = oracle.group_outer(rounded(left, sizes, E4M3), rounded(right, sizes, E5M2), sizes)
    for fast_sums in (True, False):
        with checked():
            out = run(left, right, sizes, implementation, fast_sums)
        assert_close(out, wanted, terms=ROWS)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (40, 9, 300, 257), (9, 260, 16, 24)])
def test_shapes(shape):
    """Tiles of every size, and more groups than the schedule reads at once."""
    num_rows, groups, num_left, num_right = shape
    rng = np.random.default_rng(1)
    left, right = (rng.standard_normal((num_rows, n), np.float32) for n in (num_left, num_right))
    sizes = rng.multinomial(num_rows, np.full(groups, 1 / groups))
    out = run(left, right, sizes, "interpret", dtypes=(E5M2, E4M3), dtype="bfloat16")
    assert out.dtype == jnp.bfloat16
    wanted = oracle.group_outer(rounded(left, sizes, E5M2), rounded(right, sizes, E4M3), sizes)
    assert_close(out, wanted, terms=num_rows)


@pytest.mark.slow("many programs for one rule")
def test_through_pointers(monkeypatch):
    """As on GPUs without TMA: the same products, zeros for the group without rows."""
    left, right = both_sides(dtype="bfloat16")
    by_descriptors = run(left, right, SIZES["uneven"], "interpret")
    other = dataclasses.replace(target.INTERPRETER, tensor_maps=False)
    monkeypatch.setattr(target, "INTERPRETER", other)
    with checked():
        out = run(left, right, SIZES["uneven"], "interpret")
    sides = (rounded(left, SIZES["uneven"], E4M3), rounded(right, SIZES["uneven"], E5M2))
    for found in (by_descriptors, out):
        assert_close(found, oracle.group_outer(*sides, SIZES["uneven"]), terms=ROWS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_group(implementation, value):
    """Also beside a group without rows."""
    left, right = both_sides()
    sizes = [10, 0, 150, 120, 5]
    clean = np.asarray(run(left, right, sizes, implementation))
    left[9, 3] = right[20, 5] = value
    out = np.asarray(run(left, right, sizes, implementation))
    assert not out[1].any()
    assert_same_bits(out[3:], clean[3:])
    assert not np.isfinite(out[0, 3]).any()
    assert not np.isfinite(out[2, :, 5]).any()
    for found, plain, axis, at in ((out[0], clean[0], 0, 3), (out[2], clean[2], 1, 5)):
        assert_same_bits(np.delete(found, at, axis), np.delete(plain, at, axis))


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("named", [(True, False), (False, True), (True, True)])
def test_rows_that_are_named(implementation, named):
    """The same bits as of those rows, and zeros for rows that there are not."""
    sources = [np.random.default_rng(2).integers(-2, 50, ROWS).astype(np.int32) for _ in named]
    given, rows = [], []
    for side, source, is_named in zip(both_sides(), sources, named, strict=True):
        tokens = side[:47]
        inside = (source >= 0) & (source < len(tokens))
        moved = np.where(inside[:, None], tokens[np.clip(source, 0, len(tokens) - 1)], 0)
        given.append(tokens if is_named else side)
        rows.append(moved.astype("float32") if is_named else side)
    sources = [jnp.asarray(s) if n else None for s, n in zip(sources, named, strict=True)]
    with checked():
        found = run(*given, SIZES["uneven"], implementation, sources=sources)
    assert_same_bits(found, run(*rows, SIZES["uneven"], implementation))


@pytest.mark.slow("many programs for one rule")
def test_named_rows_that_are_cut_over_devices():
    left, right = both_sides()
    source = jnp.asarray(np.random.default_rng(3).integers(0, 40, ROWS), jnp.int32)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    sizes, right[-9:] = [0, 150, 0, 150], 2  # a group for each device
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
        cut = jax.jit(lambda *sides, source: run(*sides, sizes, None, sources=(source, None)))
        out = cut(put(left), put(right), source=put(source))
    wanted = run(left, right, sizes, None, sources=(source, None))
    assert_close(out, np.asarray(wanted, np.float64), terms=ROWS)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_over_devices(kind, cut):
    """Columns are as if they were not cut; each part of the rows has scales of its own."""
    left, right = both_sides()
    sizes = [0, 100, 60, 140]
    left[-9:] = right[-9:] = 2
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    spec = PartitionSpec("a") if cut == "rows" else PartitionSpec(None, "a")
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, spec))
        out = jax.jit(lambda *sides: run(*sides, sizes, None))(put(left), put(right))
    wanted, count = 0, 150 if cut == "rows" else ROWS
    for first in range(0, ROWS, count):
        part = [np.clip(span.stop - first, 0, count) for span in oracle.spans(sizes, ROWS)]
        own = np.diff(part, prepend=0)
        sides = left[first : first + count], right[first : first + count]
        numbers = (rounded(side, own, to) for side, to in zip(sides, (E4M3, E5M2), strict=True))
        wanted = wanted + oracle.group_outer(*numbers, own)
    assert_close(np.asarray(out), wanted, terms=ROWS)


@pytest.mark.slow("many programs for one rule")
def test_a_batch():
    pairs = [both_sides(seed, "bfloat16") for seed in (0, 1)]
    left, right = (jnp.stack(side) for side in zip(*pairs, strict=True))
    found = jax.vmap(lambda left, right: run(left, right, SIZES["uneven"], None))(left, right)
    for one, pair in zip(found, pairs, strict=True):
        assert_same_bits(one, run(*pair, SIZES["uneven"], None))


def test_no_derivative():
    left, right = both_sides()
    with pytest.raises(DifferentiationError, match="has no derivative"):
        jax.grad(lambda x: jnp.sum(run(x, right, SIZES["one"], None)))(jnp.asarray(left))


@pytest.mark.parametrize("implementation", [None, *PATHS])
@pytest.mark.parametrize("shape", [(0, 2, 4, 3), (5, 0, 4, 3), (5, 2, 0, 3), (5, 2, 4, 0)])
def test_nothing_to_multiply(implementation, shape):
    num_rows, groups, num_left, num_right = shape
    left, right = jnp.ones((num_rows, num_left)), jnp.ones((num_rows, num_right))
    out = run(left, right, [1] * groups, implementation)
    assert_same_bits(out, np.zeros(shape[1:], np.float32))
