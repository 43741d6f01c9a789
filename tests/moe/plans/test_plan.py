"""The plan against its definition: every path, hard inputs, exactly equal."""

from __future__ import annotations

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moe import oracle
from triax import moe
from triax.moe.plans import launchers
from triax.moe.plans.configs import FewPairsConfig, ScanConfig, SortConfig

FIELDS = ("row_of", "expert_of", "group_sizes", "group_counts", "group_filled", "num_dropped")

# Few shapes and options, because plain JAX compiles a program for each pair of them. Tokens, slots,
# experts: no tokens, one, several parts and blocks of pairs, no slots, more experts than bins.
SHAPES = [
    (0, 2, 5),
    (1, 1, 1),
    (17, 4, 5),
    (33, 3, 8),
    (15, 6, 128),
    (9, 4, 1100),
    (100, 1, 5),
    (4, 0, 3),
]
# Alignment, capacity, and rows in multiples of the alignment (None for the default).
OPTIONS = [
    (1, None, None),
    (8, None, None),
    (1, 3, None),
    (16, 1, 2),
    (8, None, 1),
    (4, 8, 1000),
    (128, 10**9, 5),
    (1, 0, None),
    (2, None, 0),
]
cases = {"seed": st.integers(0, 2**32 - 1), "options": st.sampled_from(OPTIONS)}


def check(actual, expected, num_rows):
    """Equal in every field; groups as they are told to be."""
    for name in FIELDS:
        value = np.asarray(getattr(actual, name))
        assert value.dtype == np.int32, name
        np.testing.assert_array_equal(value, getattr(expected, name), err_msg=name)
    assert actual.num_rows == num_rows
    placed = np.sum(np.asarray(actual.row_of) >= 0)
    assert np.sum(np.asarray(actual.group_filled)) == placed
    assert np.sum(np.asarray(actual.group_counts)) == placed + int(actual.num_dropped)


def resolve(options, num_tokens, top_k, num_experts):
    """The keywords of `make_plan` and the number of rows they lead to."""
    align, capacity, blocks = options
    keywords = {"align_size": align, "capacity": capacity}
    if blocks is None:
        num_rows = (num_tokens * top_k + num_experts * (align - 1)) // align * align
    else:
        num_rows = keywords["num_rows"] = blocks * align
    return keywords, num_rows


@contextlib.contextmanager
def path(name):
    """One of the ways to a plan, as what `implementation` is.

    "few" and "many" are the kernels for so many pairs, for any number of them, with blocks so small
    that every loop is run more than once.
    """
    if name in ("xla", "interpret"):
        yield name
        return
    bins = lambda num_experts: 32 if num_experts < 512 else 512
    few = {
        "heuristic": lambda num_experts: FewPairsConfig(bins(num_experts), block_others=32),
        "max_pairs": 0 if name == "many" else 2048,
    }
    many = {
        "heuristic": lambda num_experts: SortConfig(bins(num_experts), part=16),
        "max_blocks": 3,
    }
    with (
        mock.patch.multiple(FewPairsConfig, **few),
        mock.patch.multiple(SortConfig, **many),
        mock.patch.object(launchers, "ScanConfig", return_value=ScanConfig(2, 256)),
    ):
        yield "interpret"


PATHS = ("xla", "interpret", "few", "many")


@pytest.fixture(params=PATHS)
def implementation(request):
    with path(request.param) as implementation:
        yield implementation


def test_example(implementation):
    plan = moe.make_plan(np.int32([[1, 0], [2, 1]]), 3, implementation=implementation)
    assert plan.row_of.tolist() == [[1, 0], [3, 2]]
    assert plan.group_sizes.tolist() == [1, 2, 1]
    of_mask = lambda mask: moe.make_plan_from_mask(mask, 2, implementation=implementation)
    plan = jax.jit(of_mask)(np.int32([[1, 1, 0], [0, 1, 1]]))
    assert plan.row_of.tolist() == [[0, 1], [2, 3]]
    assert plan.expert_of.tolist() == [[0, 1], [1, 2]]


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(routing=st.sampled_from(oracle.ROUTINGS), **cases)
def test_equals_definition(shape, seed, routing, options):
    ids = oracle.draw_ids(np.random.default_rng(seed), *shape, routing)
    keywords, num_rows = resolve(options, *shape)
    expected = oracle.plan(ids, shape[2], num_rows, keywords["capacity"], keywords["align_size"])
    ids = jax.device_put(ids)
    for name in PATHS:
        with path(name) as implementation:
            plan = moe.make_plan(ids, shape[2], **keywords, implementation=implementation)
        check(plan, expected, num_rows)


# Those of the second line keep every expert and have too many for their ids to be sorted.
MASKS = [(0, 2, 5), (33, 3, 8), (9, 4, 384)]
MASKS += [(0, 20, 20), (70, 64, 64), (130, 40, 33), (7, 300, 300)]


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("shape", MASKS, ids=str)
@given(fill=st.sampled_from([0.0, 0.01, 0.3, 1.0]), **cases)
def test_mask_equals_definition(shape, seed, fill, options):
    dtype = ("bool", "int8", "uint32")[OPTIONS.index(options) % 3]  # no more programs than options
    num_tokens, top_k, num_experts = shape
    rng = np.random.default_rng(seed)
    mask = oracle.random_bits(rng, (num_tokens, num_experts), dtype)
    mask[rng.random(mask.shape) >= fill] = 0
    keywords, num_rows = resolve(options, *shape)
    expected = oracle.plan_of_mask(
        mask, top_k, num_rows, keywords["capacity"], keywords["align_size"]
    )
    mask = jax.device_put(mask)
    for implementation in ("xla", "interpret"):
        plan = moe.make_plan_from_mask(mask, top_k, **keywords, implementation=implementation)
        check(plan, expected, num_rows)


def test_more_experts_than_bins(implementation):
    """A histogram has 512: ranks count each pair once, and groups follow one another."""
    experts = [0, 511, 512, 513, 1023, 1024, 1099]
    ids = np.tile(np.array([*experts, *experts[::-1]]).reshape(7, 2), (6, 1))
    plan = moe.make_plan(ids, 1100, align_size=2, capacity=9, implementation=implementation)
    check(plan, oracle.plan(ids, 1100, plan.num_rows, 9, 2), (84 + 1100) // 2 * 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64"])
def test_id_dtypes(dtype, implementation):
    """Ids that int32 does not hold are out of range, not other experts."""
    with jax.enable_x64(dtype.endswith("64")):
        ids = oracle.draw_ids(np.random.default_rng(0), 30, 2, 384, "any").astype(dtype)
        ids[0] = np.iinfo(dtype).max
        ids[1] = np.iinfo(dtype).min
        if dtype == "int64":
            ids[2] = 2**32, -(2**32) + 1
        plan = moe.make_plan(ids, 384, implementation=implementation)
        check(plan, oracle.plan(ids, 384, 60), 60)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("align_size", [2**20, 2**30, 2**31 - 1])
def test_sums_beyond_32_bits(align_size, implementation):
    """Groups that would end past 2**31 are cut off where the rows end."""
    ids = oracle.draw_ids(np.random.default_rng(1), 40, 2, 128, "any")
    ids[0] = 0  # the first size, of two rows, already passes 2**31 while it is rounded up
    plan = moe.make_plan(
        ids, 128, align_size=align_size, num_rows=align_size, implementation=implementation
    )
    check(plan, oracle.plan(ids, 128, align_size, None, align_size), align_size)


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(("num_tokens", "max_blocks"), [(456, 1), (684, 2), (6000, 20)])
def test_many_pairs(num_tokens, max_blocks, implementation, monkeypatch):
    """More than one program looks at together; blocks of many parts, and of no whole number."""
    monkeypatch.setattr(SortConfig, "max_blocks", max_blocks)
    ids = oracle.draw_ids(np.random.default_rng(2), num_tokens, 3, 3, "wild")
    ids[200:300] = 1  # whole parts of one expert
    plan = moe.make_plan(ids, 3, align_size=8, implementation=implementation)
    expected_rows = (3 * num_tokens + 21) // 8 * 8
    check(plan, oracle.plan(ids, 3, plan.num_rows, None, 8), expected_rows)


def test_group_sizes_fit_ragged_dot(implementation):
    """They never pass the rows, so that they go straight in."""
    ids = oracle.draw_ids(np.random.default_rng(3), 20, 2, 4, "any")
    plan = moe.make_plan(ids, 4, num_rows=16, align_size=8, implementation=implementation)
    assert np.sum(plan.group_sizes) == 16
    weights = np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1)
    multiply = jax.jit(lambda sizes: jax.lax.ragged_dot(np.ones((16, 1), "f4"), weights, sizes))
    out = np.asarray(multiply(plan.group_sizes))
    np.testing.assert_array_equal(out[:, 0], np.repeat([1.0, 2, 3, 4], plan.group_sizes))
