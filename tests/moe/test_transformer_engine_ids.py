"""TransformerEngine's functions that route by expert ids, against their definitions in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import draws
from tests.moe.bounds import exact
from tests.moe.permutation.case import move, summed
from tests.moe.plans.case import Sizes
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import transformer_engine as te
from triax.testing import assert_close, assert_same_bits

BATCH, SEQUENCE, WIDTH, EXPERTS, TOP_K = 2, 6, 5, 4, 2
TOKENS = BATCH * SEQUENCE


@pytest.fixture(params=["xla", "interpret"])
def implementation(request):
    return request.param


def make_case(seed=0, routing="distinct"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    return x, draws.ids(rng, TOKENS, TOP_K, EXPERTS, kind=routing), weights


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("three_d", "align_size", "roll", "routing"),
    [
        (False, 0, None, "distinct"),
        (True, 0, 3, "wild"),
        (False, 1, 6, "wild"),
        (True, 1, 0, "distinct"),
        (False, 8, 0, "wild"),
        (True, 8, None, "wild"),
        (False, 8, 3, "distinct"),
        (True, 8, 6, "distinct"),
    ],
)
def test_there_and_back(implementation, three_d, align_size, roll, routing):
    x, ids, weights = make_case(routing=routing)
    shape = lambda a: a.reshape(BATCH, SEQUENCE, -1) if three_d else a
    known = (ids >= 0) & (ids < EXPERTS)
    rolled = np.where(known, (ids.astype(np.int64) - (roll or 0)) % EXPERTS, -1)
    sizes = Sizes(TOKENS, TOP_K, EXPERTS, align=max(align_size, 1))
    expected = sizes.plan(rolled)

    @jax.jit
    def run(x, ids, weights):
        rows, state, group_sizes = te.pure_jax_token_dispatch(
            x, ids, EXPERTS, TOP_K, align_size, roll, implementation=implementation
        )
        combined = te.pure_jax_token_combine(
            rows, state, weights, TOP_K, BATCH, SEQUENCE, implementation=implementation
        )
        return rows, group_sizes, combined

    rows, group_sizes, combined = run(shape(x), shape(ids), shape(weights))
    assert_same_bits(rows, move(x, expected.row_of, sizes.rows))
    assert_same_bits(group_sizes, expected.group_sizes)
    assert combined.shape == (BATCH, SEQUENCE, WIDTH)
    sums = summed(exact(rows), expected.row_of, exact(weights)).value
    assert_close(combined, sums.reshape(combined.shape), terms=TOP_K)


@pytest.mark.sampled(1)
def test_gradients(implementation):
    x, ids, weights = make_case(1)

    def layer(x, weights):
        rows, state, _ = te.pure_jax_token_dispatch(
            x, ids, EXPERTS, TOP_K, 4, implementation=implementation
        )
        return te.pure_jax_token_combine(
            jnp.tanh(rows), state, weights, TOP_K, BATCH, SEQUENCE, implementation=implementation
        )

    def dense(x, weights):
        return (jnp.tanh(x) * weights.sum(1, keepdims=True)).reshape(BATCH, SEQUENCE, WIDTH)

    for actual, expected in zip(
        jax.jit(jax.grad(lambda *args: jnp.sum(layer(*args) ** 2), (0, 1)))(x, weights),
        jax.jit(jax.grad(lambda *args: jnp.sum(dense(*args) ** 2), (0, 1)))(x, weights),
        strict=True,
    ):
        assert_close(actual, expected, terms=WIDTH)


@pytest.mark.parametrize("map_dtype", ["bool", "int32", "float32"])
@pytest.mark.parametrize("three_d", [False, True])
def test_selected_experts(implementation, map_dtype, three_d):
    """A token's experts in ascending order, its first two; unrouted slots weigh nothing."""
    rng = np.random.default_rng(2)
    mask = rng.random((TOKENS, EXPERTS)) < 0.5
    probs = rng.random(mask.shape).astype(np.float32)
    shape = lambda a: a.reshape(BATCH, SEQUENCE, -1) if three_d else a
    select = functools.partial(te.routing_map_to_selected_experts, topk=TOP_K)
    selected, weights = map(
        np.asarray,
        jax.jit(functools.partial(select, implementation=implementation))(
            shape(probs), shape(mask.astype(map_dtype))
        ),
    )
    assert selected.shape == weights.shape == (*shape(mask).shape[:-1], TOP_K)
    for token in range(TOKENS):
        experts = np.flatnonzero(mask[token])[:TOP_K]
        unrouted = [-1] * (TOP_K - len(experts))
        assert selected.reshape(TOKENS, -1)[token].tolist() == [*experts, *unrouted]
        expected = [*probs[token, experts], *(0.0 for _ in unrouted)]
        assert weights.reshape(TOKENS, -1)[token].tolist() == expected


X, IDS, WEIGHTS = np.zeros((4, 3)), np.zeros((4, 2), int), np.zeros((4, 2))
ROWS = np.zeros((8, 3))
state = functools.cache(jax.jit(lambda: te.pure_jax_token_dispatch(X, IDS, 3, 2)[1]))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: te.pure_jax_token_dispatch(X, IDS, 3, 4),
            ArgumentValueError,
            "`num_experts_per_tok`.*`selected_experts`, 2; got 4",
        ),
        (
            lambda: te.pure_jax_token_dispatch(X, IDS[:3], 3, 2),
            ArgumentValueError,
            r"`inputs`.*\(3, hidden\) to go with `selected_experts`",
        ),
        (
            lambda: te.pure_jax_token_dispatch(X, IDS, 3, 2, -1),
            ArgumentValueError,
            "`align_size`.*got -1",
        ),
        (
            lambda: te.pure_jax_token_dispatch(X, X, 3, 3),
            ArgumentTypeError,
            "`selected_experts`.*integer",
        ),
        (
            lambda: te.pure_jax_token_combine(ROWS, IDS, WEIGHTS, 2, 2, 2),
            ArgumentTypeError,
            "`perm_state`.*second result",
        ),
        (
            lambda: te.pure_jax_token_combine(ROWS, state(), WEIGHTS, 2, 3, 2),
            ArgumentValueError,
            "`batch_size`.*4 tokens of `routing_weights`; got 3 and 2",
        ),
        (
            lambda: te.pure_jax_token_combine(ROWS, state(), WEIGHTS, 1, 2, 2),
            ArgumentValueError,
            "`num_experts_per_tok`.*`routing_weights`, 2; got 1",
        ),
        (
            lambda: te.routing_map_to_selected_experts(X, IDS, 1),
            ArgumentValueError,
            r"`sparse_probs`.*\(4, 2\); got \(4, 3\)",
        ),
        (
            lambda: te.routing_map_to_selected_experts(X, X, 0),
            ArgumentValueError,
            "`topk`.*got 0",
        ),
    ],
)
def test_errors_name_the_argument(call, error, match):
    with pytest.raises(error, match=match):
        call()
