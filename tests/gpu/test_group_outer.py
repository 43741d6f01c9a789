"""The gradient of weights in 16 bits on Hopper: its kernel in Gluon and Triton's, and float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.test_ragged_dot import SIZES, TOLERANCE, spans
from tests.moe.products.chosen import without
from tests.moe.products.test_programs import kernels
from triax.moe.products import ops
from triax.moe.products.options import Groups, Options
from triax.testing import assert_same_bits

pytestmark = pytest.mark.gpu
NUM_ROWS = 3072
WIDTHS = [(256, 512), (200, 328), (72, 136), (136, 264), (8, 248), (2048, 1536)]


def draw(left, right, dtype, held):
    """Both sides, NaN in the rows of no group."""
    keys = jax.random.split(jax.random.key(left + right))
    sides = [
        jax.random.normal(key, (NUM_ROWS, columns), jnp.dtype(dtype))
        for key, columns in zip(keys, (left, right), strict=True)
    ]
    return [jnp.where(held[:, None], side, jnp.nan) for side in sides]


def run(left, right, groups, dtype):
    options = {"options": Options(jnp.dtype(dtype), None), "implementation": "triton"}
    program = jax.jit(lambda *operands: ops.group_outer(*operands, **options))
    operands = left, right, groups
    ptx = kernels(program.lower(*operands))
    return program(*operands), any("_group_outer_overlapped_kernel" in text for text in ptx)


def both(*operands):
    """What the kernel in Gluon computes: Triton's bits, if both multiply in warp groups."""
    found, in_gluon = run(*operands)
    with without("sm90_16_bits"):
        wanted, not_there = run(*operands)
    if not in_gluon:
        pytest.skip("only for Hopper")
    assert not not_there
    if found.shape[1] > 32:
        assert_same_bits(found, wanted)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("first_row", [None, 0, 77, NUM_ROWS, -5])
@pytest.mark.parametrize("sizes", SIZES)
def test_groups(sizes, first_row, dtype):
    """Even, uneven, empty and wrong ones, anywhere among rows of others."""
    start = min(max(first_row or 0, 0), NUM_ROWS)
    rows = [slice(s.start + start, s.stop + start) for s in spans(SIZES[sizes], NUM_ROWS - start)]
    held = np.zeros(NUM_ROWS, bool)
    for span in rows:
        held[span] = True
    left, right = draw(200, 328, dtype, held)
    of = np.array(SIZES[sizes], np.int64).astype(np.int32)
    first_row = None if first_row is None else jnp.int32(first_row)
    found = both(left, right, Groups(jnp.array(of), first_row), dtype)
    check(found, left, right, rows, dtype)


@pytest.mark.parametrize(("left", "right"), WIDTHS)
def test_widths(left, right):
    sizes = [400, 0, 77, 1000, 1, 64, 65, 900]
    rows = list(spans(sizes, NUM_ROWS))
    operands = draw(left, right, "bfloat16", np.arange(NUM_ROWS) < sum(sizes))
    found = both(*operands, Groups(jnp.array(sizes, jnp.int32)), "bfloat16")
    check(found, *operands, rows, "bfloat16")


def test_many_runs_and_groups():
    """More groups than programs, most of them empty, and the same bits in every run."""
    sizes = np.zeros(40, np.int32)
    sizes[[3, 4, 17, 39]] = 700, 5, 300, 1500
    operands = draw(136, 1032, "bfloat16", np.arange(NUM_ROWS) < sizes.sum())
    groups = Groups(jnp.array(sizes))
    first = both(*operands, groups, "bfloat16")
    check(first, *operands, list(spans(sizes.tolist(), NUM_ROWS)), "bfloat16")
    for _ in range(100):
        assert_same_bits(run(*operands, groups, "bfloat16")[0], first)


@pytest.mark.parametrize("group", range(4))
def test_nothing_of_a_group_reaches_another(group):
    """NaN everywhere but in one group: it is as if alone."""
    sizes = [700, 77, 1000, 100]
    rows = list(spans(sizes, NUM_ROWS))
    held = np.zeros(NUM_ROWS, bool)
    held[rows[group]] = True
    operands = draw(200, 328, "bfloat16", held)
    found = both(*operands, Groups(jnp.array(sizes, jnp.int32)), "bfloat16")
    check(found[group][None], *operands, [rows[group]], "bfloat16")


def check(found, left, right, rows, dtype):
    left, right = (np.asarray(array, np.float64) for array in (left, right))
    wanted = np.stack([left[span].T @ right[span] for span in rows])
    found = np.asarray(found, np.float64)
    assert np.all(np.isfinite(found))
    assert np.linalg.norm(found - wanted) <= TOLERANCE[dtype] * np.linalg.norm(wanted)
    for a, span in zip(found, rows, strict=True):
        assert span.start < span.stop or not np.any(a)
