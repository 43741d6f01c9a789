"""TransformerEngine's helpers of the all-to-all: rows go to their experts' shard and come back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import transformer_engine as te
from triax.testing import assert_same_bits

SHARDS, LOCAL, ROWS = 4, 3, 64


@pytest.fixture
def counts():
    counts = np.random.default_rng(0).integers(0, 5, (SHARDS, SHARDS * LOCAL))
    counts[1] = 0
    counts[:, 4] = 0
    return counts.astype(np.int32)


def test_parameters(counts):
    """What one shard sends and where it lands there, by hand."""
    sizes = counts.reshape(SHARDS, SHARDS, LOCAL).sum(2)
    forth = jax.jit(te.compute_ragged_all_to_all_params, static_argnums=2)
    home = jax.jit(
        lambda: [
            te.compute_reverse_ragged_all_to_all_params(counts, shard, SHARDS)
            for shard in range(SHARDS)
        ]
    )()
    for shard, back in enumerate(home):
        there = forth(counts, np.int32(shard), SHARDS)
        for (offsets, sent, targets, received), sizes_ in ((there, sizes), (back, sizes.T)):
            assert offsets.tolist() == [sizes_[shard, :to].sum() for to in range(SHARDS)]
            assert sent.tolist() == sizes_[shard].tolist()
            assert targets.tolist() == [sizes_[:shard, to].sum() for to in range(SHARDS)]
            assert received.tolist() == sizes_[:, shard].tolist()


def test_there_and_back(counts):
    """The rows say where they come from: [shard, expert, number]."""
    rows = np.zeros((SHARDS, ROWS, 3), np.float32)
    for shard in range(SHARDS):
        named = [(shard, e, n) for e, count in enumerate(counts[shard]) for n in range(count)]
        rows[shard, : len(named)] = np.array(named).reshape(-1, 3)
    received = np.zeros_like(rows)
    send = jax.jit(te.compute_ragged_all_to_all_params, static_argnums=2)
    for shard in range(SHARDS):
        offsets, sent, targets, _ = send(counts, shard, SHARDS)
        for to in range(SHARDS):
            source = rows[shard, offsets[to] : offsets[to] + sent[to]]
            received[to, targets[to] : targets[to] + sent[to]] = source

    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:SHARDS]), ("x",)),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    def sort(x):
        shard = jax.lax.axis_index("x")
        y, sizes, state = te.local_permute_after_a2a(x[0], counts, shard, SHARDS)
        return y[None], sizes[None], te.local_unpermute_before_a2a(y, state)[None]

    by_expert, sizes, back = jax.jit(sort)(received)
    assert_same_bits(back, received)
    for shard in range(SHARDS):
        local = range(shard * LOCAL, (shard + 1) * LOCAL)
        assert sizes[shard].tolist() == [counts[:, e].sum() for e in local]
        named = [(s, e, n) for e in local for s in range(SHARDS) for n in range(counts[s, e])]
        assert_same_bits(by_expert[shard, : len(named)], np.array(named, np.float32).reshape(-1, 3))


def test_mistakes(counts):
    with pytest.raises(ArgumentValueError, match="a row for each of the 3 shards"):
        te.compute_ragged_all_to_all_params(counts, 0, 3)
    with pytest.raises(ArgumentValueError, match="experts that the shards divide evenly"):
        te.compute_reverse_ragged_all_to_all_params(counts[:, :5], 0, SHARDS)
    with pytest.raises(ArgumentTypeError, match="`all_shards_tokens_per_expert`"):
        te.local_permute_after_a2a(jnp.ones((8, 2)), counts + 0.5, 0, SHARDS)
