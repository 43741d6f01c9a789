"""Ids and sizes that no int32 holds are out of range; none becomes the number of its low half."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from triax import moe
from triax.errors import ArgumentValueError
from triax.moe import transformer_engine as te
from triax.testing import assert_same_bits

TOKENS, EXPERTS, HIDDEN = 6, 4, 32
RNG = np.random.default_rng(0)
X = RNG.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
WEIGHTS = RNG.random((TOKENS, 2)).astype(np.float32)
MATRICES = RNG.standard_normal((EXPERTS, HIDDEN, HIDDEN)).astype(np.float32)
IDS = np.array([[0, 1], [2, 3], [1, 0], [3, 1], [0, 2], [2, 1]])
SIZES, BACKWARDS = np.array([2, 1, 1, 1]), np.array([3, 2, 1, 0])
BEYOND = (2**32 + 1, 2 - 2**40, 2**31, -(2**63))  # the low halves of three are experts
FIRST_OF_SIGN = (0, 1)


def dispatch(ids):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))

    # The ids are no argument: of those JAX drops the upper halves itself, without 64-bit types.
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def send(x, weights):
        sent = moe.dispatch(x, weights, ids, EXPERTS, "x", scheme="token")
        return sent.rows, sent.weights, sent.group_sizes

    return send(X, WEIGHTS)


def token_combine(row_id_map, offsets=None):
    return te.token_combine(X, row_id_map, pad_offsets=offsets)


def feed_forward(ids):
    lead, gate_up = ids.shape[:-1], np.concatenate([MATRICES] * 2, axis=2)
    x, weights = X.reshape(*lead, HIDDEN), WEIGHTS.reshape(*lead, 2)
    return moe.feed_forward(x, moe.Routing(weights, ids), moe.Experts(gate_up, MATRICES)).tokens


def maps(place):
    """One token's rows, experts and number of slots."""
    row_id_map = np.array([[0, 1, 0, 1, 2]] * 2)
    row_id_map[1, place] = 0
    return row_id_map, (1, place)


# Each function with a right argument, and the place in it where the wrong number goes.
ids, sizes = (IDS, (1, 1)), (SIZES, 1)
CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, Any]]] = {
    "make_plan": (lambda a: moe.make_plan(a, EXPERTS), ids),
    "make_plan, kernels": (lambda a: moe.make_plan(a, EXPERTS, implementation="interpret"), ids),
    "make_plan_from_mask": (lambda a: moe.make_plan_from_mask(a, 2), (IDS, (0, 0))),
    "route": (lambda a: moe.route(X[:, :EXPERTS], moe.Router(2), experts=a).weights, ids),
    "feed_forward": (feed_forward, ids),
    "feed_forward, batched": (feed_forward, (IDS[None], (0, 1, 1))),
    "dispatch": (dispatch, ids),
    "sort_chunks_by_index, sizes": (lambda a: moe.sort_chunks_by_index(X, a, BACKWARDS), sizes),
    "sort_chunks_by_index, indices": (
        lambda a: moe.sort_chunks_by_index(X, SIZES, a),
        (BACKWARDS, 2),
    ),
    "ragged_dot, sizes": (lambda a: moe.ragged_dot(X, MATRICES, a), sizes),
    "ragged_dot, kernels": (
        lambda a: moe.ragged_dot(X, MATRICES, a, implementation="interpret"),
        sizes,
    ),
    "ragged_dot, offset": (
        lambda a: moe.ragged_dot(X, MATRICES[:2], SIZES, group_offset=a),
        (np.array(1), ()),
    ),
    "pure_jax_token_dispatch": (
        lambda a: te.pure_jax_token_dispatch(X, a, EXPERTS, 2)[::2],
        ids,
    ),
    "pure_jax_token_dispatch, rolled": (
        lambda a: te.pure_jax_token_dispatch(X, a, EXPERTS, 2, roll_to_expert_id=2)[::2],
        ids,
    ),
    "TransformerEngine's chunks, sizes": (
        lambda a: te.sort_chunks_by_index(X, a, BACKWARDS),
        sizes,
    ),
    "TransformerEngine's chunks, indices": (
        lambda a: te.sort_chunks_by_index(X, SIZES, a)[0],
        (BACKWARDS, 2),
    ),
    "token_combine, row": (token_combine, maps(0)),
    "token_combine, expert": (lambda a: token_combine(a, np.array([0, 1, 2, 2])), maps(2)),
    "token_combine, count": (token_combine, maps(4)),
    "token_combine, offset": (lambda a: token_combine(maps(0)[0], a), (np.zeros(4, int), 1)),
    "token_combine, weights": (
        lambda a: te.token_combine(X, a, np.ones((2, EXPERTS), np.float32)),
        maps(2),
    ),
}


@pytest.mark.sampled(2, 8)
@pytest.mark.parametrize("arrays", ["NumPy", "JAX, 64 bits"])
@pytest.mark.parametrize("name", CASES)
def test_as_the_nearest_that_int32_holds(name, arrays):
    function, (right, place) = CASES[name]
    limits = np.iinfo(np.int32)
    wrong = [right.astype(np.int64) for _ in BEYOND]
    for given, number in zip(wrong, BEYOND, strict=True):
        given[place] = number
    nearest = [np.asarray(np.clip(given, limits.min, limits.max), np.int32) for given in wrong]
    with jax.enable_x64(arrays != "NumPy"):
        if arrays != "NumPy":
            wrong = list(map(jnp.asarray, wrong))
        # One program, of which the numbers are constants: as arguments JAX would cut them itself.
        found, expected = jax.jit(
            lambda: (list(map(function, wrong)), [function(nearest[i]) for i in FIRST_OF_SIGN])
        )()
    for index, number in enumerate(BEYOND):
        of_sign = expected[number < 0]
        for a, b in zip(*map(jax.tree.leaves, (found[index], of_sign)), strict=True):
            assert_same_bits(np.asarray(a), np.asarray(b))


REFUSED = {
    "num_experts": lambda n: moe.make_plan(IDS, n),
    "capacity": lambda n: moe.make_plan(IDS, EXPERTS, capacity=n),
    "num_rows": lambda n: moe.make_plan(IDS, EXPERTS, num_rows=n),
    "align_size": lambda n: moe.make_plan(IDS, EXPERTS, align_size=n),
    "top_k": lambda n: moe.Router(n),
    "group_offset": lambda n: moe.ragged_dot(X, MATRICES[:2], SIZES, group_offset=n),
    "roll_to_expert_id": lambda n: te.pure_jax_token_dispatch(
        X, IDS, EXPERTS, 2, roll_to_expert_id=n
    ),
    "shard_id": lambda n: te.compute_ragged_all_to_all_params(np.ones((2, 4), int), n, 2),
}


@pytest.mark.parametrize("number", [2**32 + 1, np.int64(2**32 + 1), np.int64(1 - 2**32)])
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_are_no_arrays_are_refused(name, number):
    with pytest.raises(ArgumentValueError, match=f"`{name}` must be .*; got {number}"):
        REFUSED[name](number)
