"""The plan against its definition: every path, hard inputs, exactly equal."""

from __future__ import annotations

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moe import oracle
from triax import moe
from triax.moe.plans import launchers
from triax.moe.plans.configs import FewPairsConfig, ScanConfig, SortConfig

FIELDS = ("row_of", "expert_of", "group_sizes", "group_counts", "group_filled", "num_dropped")

# Few shapes, so that plain JAX compiles few programs: tokens, slots, experts. No tokens, one,
# more pairs than one part, no slots, more experts than one histogram has bins.
SHAPES = [
    (0, 2, 5),
    (1, 1, 1),
    (2, 1, 8),
    (17, 2, 1),
    (17, 4, 5),
    (33, 3, 8),
    (5, 8, 128),
    (40, 6, 128),
    (3, 4, 1100),
    (150, 1, 5),
    (4, 0, 3),
]

sizes = st.fixed_dictionaries(
    {
        "align_size": st.sampled_from([1, 1, 8, 16, 128]),
        "capacity": st.sampled_from([None, None, 0, 1, 3, 8, 10**9]),
        "blocks": st.sampled_from([None, None, 0, 1, 2, 5, 1000]),
    }
)


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
    align = options["align_size"]
    keywords = {"align_size": align, "capacity": options["capacity"]}
    if options["blocks"] is None:
        num_rows = (num_tokens * top_k + num_experts * (align - 1)) // align * align
    else:
        num_rows = keywords["num_rows"] = options["blocks"] * align
    return keywords, num_rows


@contextlib.contextmanager
def path(name):
    """One of the ways to a plan, as what `implementation` is: the kernels for many pairs place few
    just as well."""
    if name == "interpret many":
        with mock.patch.object(FewPairsConfig, "max_pairs", 0):
            yield "interpret"
    else:
        yield name


PATHS = ("xla", "interpret", "interpret many")


@pytest.fixture(params=PATHS)
def implementation(request):
    with path(request.param) as implementation:
        yield implementation


def test_example(implementation):
    plan = moe.make_plan(jnp.array([[1, 0], [2, 1]]), 3, implementation=implementation)
    assert plan.row_of.tolist() == [[1, 0], [3, 2]]
    assert plan.group_sizes.tolist() == [1, 2, 1]
    plan = moe.make_plan_from_mask(
        jnp.array([[1, 1, 0], [0, 1, 1]]), 2, implementation=implementation
    )
    assert plan.row_of.tolist() == [[0, 1], [2, 3]]
    assert plan.expert_of.tolist() == [[0, 1], [1, 2]]


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), routing=st.sampled_from(oracle.ROUTINGS), options=sizes)
def test_equals_definition(shape, seed, routing, options):
    ids = oracle.draw_ids(np.random.default_rng(seed), *shape, routing)
    keywords, num_rows = resolve(options, *shape)
    expected = oracle.plan(ids, shape[2], num_rows, keywords["capacity"], keywords["align_size"])
    ids = jax.device_put(ids)
    for name in PATHS:
        with path(name) as implementation:
            plan = moe.make_plan(ids, shape[2], **keywords, implementation=implementation)
        check(plan, expected, num_rows)


# The last four keep every expert and have too many for their ids to be sorted.
MASKS = [(0, 2, 5), (17, 2, 1), (33, 3, 8), (9, 4, 384)]
MASKS += [(0, 20, 20), (70, 64, 64), (130, 40, 33), (7, 300, 300)]


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("shape", MASKS, ids=str)
@given(seed=st.integers(0, 2**32 - 1), fill=st.sampled_from([0.0, 0.01, 0.3, 1.0]), options=sizes)
def test_mask_equals_definition(shape, seed, fill, options):
    num_tokens, top_k, num_experts = shape
    rng = np.random.default_rng(seed)
    mask = rng.random((num_tokens, num_experts)) < fill
    if seed % 2:
        mask = mask.astype(np.int32)
    keywords, num_rows = resolve(options, *shape)
    expected = oracle.plan_of_mask(
        mask, top_k, num_rows, keywords["capacity"], keywords["align_size"]
    )
    mask = jax.device_put(mask)
    for implementation in ("xla", "interpret"):
        plan = moe.make_plan_from_mask(mask, top_k, **keywords, implementation=implementation)
        check(plan, expected, num_rows)


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
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


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("align_size", [2**20, 2**30])
def test_sums_beyond_32_bits(align_size, implementation):
    """Groups that would end past 2**31 are cut off where the rows end."""
    ids = oracle.draw_ids(np.random.default_rng(1), 40, 2, 128, "distinct")
    plan = moe.make_plan(
        ids, 128, align_size=align_size, num_rows=align_size, implementation=implementation
    )
    check(plan, oracle.plan(ids, 128, align_size, None, align_size), align_size)


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(("num_tokens", "max_blocks"), [(684, 2), (1500, 256), (6000, 20)])
def test_many_pairs(num_tokens, max_blocks, implementation, monkeypatch):
    """Blocks of many parts, of one, and of no whole number of them."""
    monkeypatch.setattr(SortConfig, "max_blocks", max_blocks)
    ids = oracle.draw_ids(np.random.default_rng(2), num_tokens, 3, 3, "wild")
    plan = moe.make_plan(ids, 3, align_size=8, implementation=implementation)
    expected_rows = (3 * num_tokens + 21) // 8 * 8
    check(plan, oracle.plan(ids, 3, plan.num_rows, None, 8), expected_rows)


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_more_blocks_than_the_scan_takes_at_once(implementation, monkeypatch):
    monkeypatch.setattr(launchers, "ScanConfig", lambda: ScanConfig(8, 4, 4))
    ids = oracle.draw_ids(np.random.default_rng(4), 1500, 2, 5, "any")
    plan = moe.make_plan(ids, 5, implementation=implementation)
    check(plan, oracle.plan(ids, 5, 3000), 3000)


def test_group_sizes_fit_ragged_dot(implementation):
    """They never pass the rows, so that they go straight in."""
    ids = oracle.draw_ids(np.random.default_rng(3), 20, 2, 4, "any")
    plan = moe.make_plan(ids, 4, num_rows=16, align_size=8, implementation=implementation)
    assert int(plan.group_sizes.sum()) == 16
    rows = jnp.ones((16, 4))
    out = jax.lax.ragged_dot(rows, jnp.ones((4, 4, 2)), plan.group_sizes)
    np.testing.assert_array_equal(out, np.full((16, 2), 4.0))
