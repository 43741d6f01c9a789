"""What `make_plan` and `make_plan_from_mask` refuse, in their words; and how they divide work."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.plans import launchers
from triax.moe.plans.configs import FewPairsConfig, MaskConfig, SortConfig

IDS = jnp.zeros((4, 2), jnp.int32)
MASK = jnp.zeros((4, 3), bool)

REFUSED = {
    "a list": (
        {"selected_experts": [[1]] * 1000},
        ArgumentTypeError,
        "`selected_experts` must be an array of shape [tokens, top_k]; got [[1], [1], [1], [1], "
        "...] of type list. Use jnp.asarray.",
    ),
    "rank": (
        {"selected_experts": IDS[None]},
        ArgumentValueError,
        "`selected_experts` must have shape [tokens, top_k]; got (1, 4, 2). Reshape "
        "leading batch dimensions to [tokens, top_k], and the results back.",
    ),
    "float ids": (
        {"selected_experts": IDS.astype(float)},
        ArgumentTypeError,
        "`selected_experts` must have an integer dtype; got float32. Pass the second result of",
    ),
    "no experts": (
        {"num_experts": 0},
        ArgumentValueError,
        "`num_experts` must be at least 1 and at most 2**31 - 1; got 0",
    ),
    "traced experts": (
        {"num_experts": jnp.int32(3)},
        ArgumentTypeError,
        "`num_experts` must be a Python int, because array shapes depend on it; got",
    ),
    "bool capacity": ({"capacity": True}, ArgumentTypeError, "`capacity` must be a Python int"),
    "no capacity": (
        {"capacity": 0},
        ArgumentValueError,
        "`capacity` must be at least 1 and at most 2**31 - 1; got 0",
    ),
    "alignment": ({"align_size": 0}, ArgumentValueError, "`align_size` must be at least 1"),
    "unaligned rows": (
        {"align_size": 8, "num_rows": 20},
        ArgumentValueError,
        "`num_rows` must be a multiple of `align_size`, 8; got 20. Use 24.",
    ),
    "too many rows": (
        {"num_rows": 2**31},
        ArgumentValueError,
        "`num_rows` must be at least 0 and at most 2**31 - 1; got 2147483648",
    ),
    "implementation": (
        {"implementation": "cuda"},
        ArgumentValueError,
        "`implementation` must be one of None, 'triton', 'interpret', 'xla'; got 'cuda'",
    ),
}
REFUSED_MASKS = {
    "float": (
        {"routing_map": MASK.astype(float)},
        ArgumentTypeError,
        "`routing_map` must have a boolean or integer dtype; got float32. Use `routing_map != 0`",
    ),
    "rank": (
        {"routing_map": MASK[0]},
        ArgumentValueError,
        "`routing_map` must have shape [tokens, experts]; got (3,)",
    ),
    "no experts": (
        {"routing_map": MASK[:, :0]},
        ArgumentValueError,
        "`routing_map` must have at least one expert; got shape (4, 0)",
    ),
    "slots": ({"top_k": -1}, ArgumentValueError, "`top_k` must be at least 0"),
}


@pytest.mark.parametrize(("change", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(change, error, text):
    with pytest.raises(error, match=re.escape(text)) as caught:
        moe.make_plan(**({"selected_experts": IDS, "num_experts": 3} | change))
    assert isinstance(caught.value, triax.TriaxError)


@pytest.mark.parametrize(
    ("change", "error", "text"), REFUSED_MASKS.values(), ids=REFUSED_MASKS.keys()
)
def test_refuses_masks(change, error, text):
    with pytest.raises(error, match=re.escape(text)):
        moe.make_plan_from_mask(**({"routing_map": MASK, "top_k": 2} | change))


def test_refuses_more_pairs_than_it_counts():
    ids = jax.ShapeDtypeStruct((2**28, 8), jnp.int32)
    with pytest.raises(ArgumentValueError, match=re.escape("at most 2**31 - 1 pairs")):
        jax.eval_shape(lambda ids: moe.make_plan(ids, 3, num_rows=8), ids)


@pytest.mark.slow("many programs for one rule")
def test_default_rows_hold_the_worst_case():
    """Every expert ends with all but one of a block's rows empty."""
    plan = moe.make_plan(jnp.arange(5)[:, None], 5, align_size=8)
    assert plan.num_rows == (5 + 5 * 7) // 8 * 8 == 40
    assert int(plan.num_dropped) == 0
    assert moe.make_plan(IDS, 3).num_rows == 8


def test_a_plan_shows_its_shapes():
    plan = jax.eval_shape(lambda: moe.make_plan(IDS, num_experts=256))
    traced = []
    jax.eval_shape(lambda plan: traced.append(repr(plan)), plan)
    assert traced == [repr(plan)]
    assert repr(plan) == (
        "Plan(row_of=int32[4,2], expert_of=int32[4,2], group_sizes=int32[256], "
        "group_counts=int32[256], group_filled=int32[256], num_dropped=int32[], num_rows=8, "
        "num_experts=256, align_size=1)"
    )
    spec = jax.sharding.PartitionSpec("a")
    assert f"row_of={spec}, " in repr(jax.tree.map(lambda _: spec, plan))
    sent = moe.DispatchPlan(plan, None, "ep", 8)
    assert repr(sent) == "DispatchPlan(ways=Plan(...), received=None, axis_name='ep', num_rows=8)"


def test_a_plan_is_a_pytree():
    plan = jax.jit(lambda ids: moe.make_plan(ids, 3, align_size=8))(IDS)
    assert isinstance(plan, moe.Plan)
    assert (plan.num_rows, plan.num_experts, plan.align_size) == (24, 3, 8)
    leaves, tree = jax.tree.flatten(plan)
    assert len(leaves) == 6
    assert all(leaf.dtype == np.int32 for leaf in leaves)
    assert jax.tree.unflatten(tree, leaves) is not None


@pytest.mark.parametrize("num_experts", [1, 5, 8, 128, 384, 100_000])
def test_heuristics(num_experts):
    few, many = FewPairsConfig.heuristic(num_experts), SortConfig.heuristic(num_experts)
    select = MaskConfig.to_select(num_experts)
    for config in (few, many, select):
        assert config.block_experts & (config.block_experts - 1) == 0
    assert 32 <= few.block_experts == many.block_experts <= 512
    assert select.block_tokens * select.block_experts == 2048


@pytest.mark.parametrize("num_pairs", [1, 127, 128, 2049, 32768, 32769, 131072, 2**31 - 1])
def test_blocks_are_few_and_whole(num_pairs):
    config = SortConfig.heuristic(8)
    parts = -(-num_pairs // config.part)
    per_block = config.parts_per_block(num_pairs)
    assert per_block * config.max_blocks >= parts
    assert per_block == 1 or (per_block - 1) * config.max_blocks < parts


@pytest.mark.parametrize(
    ("num_experts", "bins", "select", "place"),
    [
        (1, 32, (2048, 1, 4), (8192, 1, 8)),
        (33, 64, (32, 64, 4), (128, 64, 8)),
        (256, 256, (8, 256, 4), (32, 256, 8)),
        (600, 512, (8, 256, 4), (32, 256, 8)),
    ],
)
def test_configs_that_were_measured(num_experts, bins, select, place):
    def of(config):
        return tuple(vars(config).values())

    assert of(FewPairsConfig.heuristic(num_experts)) == (bins, 16, 1024, 8)
    assert of(SortConfig.heuristic(num_experts)) == (bins, 128, 4, 2)
    assert of(MaskConfig.to_select(num_experts)) == select
    assert of(MaskConfig.to_place(num_experts)) == place
    assert tuple(launchers._SCAN.values()) == (256, 4, 4)
    assert (FewPairsConfig.max_pairs, SortConfig.max_blocks) == (2048, 256)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_example(implementation):
    plan = moe.make_plan(np.int32([[1, 0], [2, 1]]), 3, implementation=implementation)
    assert plan.row_of.tolist() == [[1, 0], [3, 2]]
    assert plan.group_sizes.tolist() == [1, 2, 1]
    of_mask = lambda mask: moe.make_plan_from_mask(mask, 2, implementation=implementation)
    plan = jax.jit(of_mask)(np.int32([[1, 1, 0], [0, 1, 1]]))
    assert plan.row_of.tolist() == [[0, 1], [2, 3]]
    assert plan.expert_of.tolist() == [[0, 1], [1, 2]]
