"""What `sort_chunks_by_index` refuses, in its words; and how it divides the work."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import triax
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.chunk_sort.configs import ChunkMoveConfig

X = jnp.zeros((4, 3))
IDS = jnp.zeros(2, jnp.int32)

REFUSED = {
    "a list": (
        {"x": [[1.0]]},
        ArgumentTypeError,
        "`x` must be an array of shape [tokens, hidden]",
    ),
    "rank of x": (
        {"x": X[0]},
        ArgumentValueError,
        "`x` must have shape [tokens, hidden]; got (3,)",
    ),
    "rank of sizes": (
        {"split_sizes": IDS[None]},
        ArgumentValueError,
        "`split_sizes` must have shape [chunks]; got (1, 2)",
    ),
    "float sizes": (
        {"split_sizes": IDS.astype(float)},
        ArgumentTypeError,
        "`split_sizes` must have an integer dtype; got float32. Cast it with "
        "`split_sizes.astype(jnp.int32)`",
    ),
    "bool indices": (
        {"sorted_indices": IDS.astype(bool)},
        ArgumentTypeError,
        "`sorted_indices` must have an integer dtype; got bool",
    ),
    "lengths": (
        {"sorted_indices": IDS[:1]},
        ArgumentValueError,
        "`sorted_indices` must have shape (2,) to go with `split_sizes`; got (1,)",
    ),
    "length of probs": (
        {"probs": jnp.zeros(3)},
        ArgumentValueError,
        "`probs` must have shape (4,) to go with `x`; got (3,)",
    ),
    "integer probs": (
        {"probs": jnp.zeros(4, int)},
        ArgumentTypeError,
        "`probs` must have a floating-point dtype; got int32",
    ),
    "implementation": (
        {"implementation": "cuda"},
        ArgumentValueError,
        "`implementation` must be one of None, 'triton', 'interpret', 'xla'; got 'cuda'",
    ),
    "a dtype kernels lack": (
        {"x": X.astype(complex), "implementation": "interpret"},
        ArgumentTypeError,
        "`x` has dtype complex64, which Triton kernels do not support",
    ),
}


@pytest.mark.parametrize(("change", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(change, error, text):
    arguments = {"x": X, "split_sizes": IDS, "sorted_indices": IDS} | change
    with pytest.raises(error, match=re.escape(text)) as caught:
        moe.sort_chunks_by_index(**arguments)
    assert isinstance(caught.value, triax.TriaxError)


def test_refuses_more_rows_than_it_counts():
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    x = jax.ShapeDtypeStruct((2**31, 1), jnp.bool_)
    with pytest.raises(ArgumentValueError, match=re.escape("`x` must have at most 2**31 - 1 rows")):
        jax.eval_shape(moe.sort_chunks_by_index, x, ids, ids)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [0, 1, 3, 64, 2880, 4096, 5120, 7168, 100_000])
def test_heuristic(width, itemsize):
    config = ChunkMoveConfig.heuristic(width, itemsize)
    for value in (config.block_rows, config.block_width, config.num_warps):
        assert value & (value - 1) == 0 < value
    assert config.block_rows * config.block_width * itemsize <= 2 * 1024
    assert config.num_warps <= 8
    covered = -(-width // config.block_width) * config.block_width
    assert covered >= width
    if width * itemsize >= 4096:  # a row of several accesses per thread wastes few of them
        assert covered <= 1.125 * width


def test_heuristic_for_the_shapes_that_matter():
    assert ChunkMoveConfig.heuristic(4096, 4) == ChunkMoveConfig(1, 512, 4)
    assert ChunkMoveConfig.heuristic(7168, 2) == ChunkMoveConfig(1, 1024, 4)


@pytest.mark.parametrize("block_rows", [1, 8, 16, 1024])
@pytest.mark.parametrize("num_chunks", [1, 2, 127, 128, 129, 16384, 16385, 2**31 - 1])
def test_a_search_finds_one_chunk(block_rows, num_chunks):
    config = ChunkMoveConfig(block_rows, 64, 4)
    steps, ways = config.search_steps(num_chunks), config.search_ways
    assert ways & (ways - 1) == 0
    assert ways * block_rows <= 2048
    assert ways ** (steps - 1) < max(2, num_chunks) <= max(2, ways**steps)
