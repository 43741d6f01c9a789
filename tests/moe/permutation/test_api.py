"""What `permute` and `unpermute` refuse, in their words; and how they divide the work."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from tests.moe.plans.case import ready_plan
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.permutation.configs import MoveConfig

PLAN = ready_plan(np.zeros((4, 2), np.int32), 3)
X = np.zeros((4, 5), np.float32)
ROWS = np.zeros((8, 5), np.float32)

REFUSED = {
    "a list": (
        moe.permute,
        {"x": [[1.0]]},
        ArgumentTypeError,
        "`x` must be an array of shape [tokens, hidden]",
    ),
    "rank": (
        moe.permute,
        {"x": X[None]},
        ArgumentValueError,
        "`x` must have shape [tokens, hidden]; got (1, 4, 5). Reshape leading",
    ),
    "tokens": (
        moe.permute,
        {"x": X[:3]},
        ArgumentValueError,
        "`x` must have shape (4, hidden) to go with the plan; got (3, 5)",
    ),
    "no plan": (
        moe.permute,
        {"plan": None},
        ArgumentTypeError,
        "`plan` must be a Plan, from `make_plan`; got None of type NoneType",
    ),
    "a batched plan": (
        moe.permute,
        {"plan": jax.tree.map(lambda leaf: leaf[None], PLAN)},
        ArgumentValueError,
        "`group_filled` of shape [3]; got (1, 4, 2), (1, 3) and (1, 3). Make one plan",
    ),
    "integer weights": (
        moe.permute,
        {"weights": jnp.ones((4, 2), int)},
        ArgumentTypeError,
        "`weights` must have a floating-point dtype; got int32",
    ),
    "shape of weights": (
        moe.permute,
        {"weights": X},
        ArgumentValueError,
        "`weights` must have shape (4, 2) to go with the plan; got (4, 5)",
    ),
    "scales": (
        moe.permute,
        {"scales": X[:2]},
        ArgumentValueError,
        "`scales` must have shape (4, scales) to go with the plan; got (2, 5)",
    ),
    "a dtype kernels lack": (
        moe.permute,
        {"x": X.astype("complex64"), "implementation": "interpret"},
        ArgumentTypeError,
        "`x` has dtype complex64, which Triton kernels do not support",
    ),
    "rows": (
        moe.unpermute,
        {"rows": ROWS[:7]},
        ArgumentValueError,
        "`rows` must have shape (8, hidden) to go with the plan; got (7, 5)",
    ),
    "integer rows": (
        moe.unpermute,
        {"rows": ROWS.astype("int32")},
        ArgumentTypeError,
        "`rows` must have a floating-point dtype; got int32. Cast it with",
    ),
    "weights of unpermute": (
        moe.unpermute,
        {"weights": ROWS},
        ArgumentValueError,
        "`weights` must have shape (4, 2) to go with the plan; got (8, 5)",
    ),
    "implementation": (
        moe.unpermute,
        {"implementation": "cuda"},
        ArgumentValueError,
        "`implementation` must be one of None, 'triton', 'interpret', 'xla'; got 'cuda'",
    ),
}


@pytest.mark.parametrize(("op", "change", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(op, change, error, text):
    arguments = {"x": X, "plan": PLAN} if op is moe.permute else {"rows": ROWS, "plan": PLAN}
    with pytest.raises(error, match=re.escape(text)) as caught:
        op(**(arguments | change))
    assert isinstance(caught.value, triax.TriaxError)


def test_what_comes_back():
    """An array, or all three where weights or scales were given."""
    assert moe.permute(X, PLAN).shape == (8, 5)
    out = moe.permute(X, PLAN, weights=jnp.ones((4, 2)))
    assert isinstance(out, moe.Permuted)
    assert out.scales is None
    assert moe.permute(X, PLAN, scales=X).weights is None


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [0, 1, 3, 64, 2880, 4096, 5120, 7168, 100_000])
def test_heuristics(width, itemsize):
    parts, rows = MoveConfig.for_parts(width, itemsize, 8), MoveConfig.for_rows(width, itemsize)
    copies = [MoveConfig.for_copies(width, itemsize, top_k) for top_k in (1, 2, 4, 8)]
    sums = MoveConfig.for_plain_sums(width, itemsize, 8)
    for config in (parts, sums, rows, *copies):
        for value in dataclasses.astuple(config):
            assert value & (value - 1) == 0 < value
        assert config.num_warps <= 8 * config.block_slots
    for config in copies:
        assert (config.block_tokens, config.block_width) == (parts.block_tokens, parts.block_width)
    assert parts.block_tokens * parts.block_width * itemsize <= 2048
    covered = -(-width // parts.block_width) * parts.block_width
    assert covered >= width
    if width * itemsize >= 4096:  # a row of several accesses per thread wastes few of them
        assert covered <= 1.125 * width
    if width * itemsize <= 16 * 1024 and width <= 8192:
        assert rows.block_width >= width


def test_heuristics_for_the_shapes_that_matter():
    assert MoveConfig.for_parts(7168, 2, 8) == MoveConfig(1, 1024, 4)
    assert MoveConfig.for_parts(4096, 2, 2) == MoveConfig(1, 1024, 4)
    assert MoveConfig.for_parts(5120, 2, 1) == MoveConfig(1, 1024, 2)
    assert MoveConfig.for_parts(1, 1, 1) == MoveConfig(256, 1, 1)
    assert MoveConfig.for_plain_sums(4096, 2, 8) == MoveConfig(2, 1024, 8)
    assert MoveConfig.for_rows(7168, 2) == MoveConfig(1, 8192, 8)
    assert MoveConfig.for_rows(2048, 2) == MoveConfig(1, 2048, 2)
    assert MoveConfig.for_rows(2048, 1) == MoveConfig(1, 2048, 2)
    assert MoveConfig.for_rows(512, 2) == MoveConfig(2, 512, 1)


@pytest.mark.parametrize(
    ("width", "itemsize", "top_k", "slots"),
    [
        (2880, 2, 4, 2),
        (2880, 2, 8, 2),
        (2880, 2, 2, 1),  # few copies
        (2880, 4, 4, 1),  # 11,520 bytes, whole pieces of 256
        (7168, 2, 8, 1),
        (96, 2, 4, 1),  # several rows to a program
    ],
)
def test_rows_at_once(width, itemsize, top_k, slots):
    config = MoveConfig.for_copies(width, itemsize, top_k)
    parts = MoveConfig.for_parts(width, itemsize, top_k)
    assert config.block_slots == slots
    assert config.num_warps == slots * parts.num_warps
