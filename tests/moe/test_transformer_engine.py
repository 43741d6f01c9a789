"""What `tests/moe/test_cases.py` does not see of the TransformerEngine-shaped functions."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import transformer_engine
from triax.testing import assert_same_bits

te = transformer_engine
PATHS = ["xla", "interpret"]
BATCH, SEQUENCE, WIDTH, EXPERTS = 3, 4, 5, 6
TOKENS = BATCH * SEQUENCE

token_dispatch = jax.jit(
    transformer_engine.token_dispatch,
    static_argnames=("num_out_tokens", "align_size", "top_k", "implementation"),
)
token_combine = jax.jit(transformer_engine.token_combine, static_argnames="implementation")
sort_chunks_by_index = jax.jit(
    transformer_engine.sort_chunks_by_index, static_argnames="implementation"
)


@pytest.fixture(params=PATHS)
def implementation(request):
    return request.param


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
def test_256_experts_compile_like_8(monkeypatch, tmp_path):
    """Without `top_k`, as much code as with it: nothing is unrolled over the experts."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")

    def layer(x, probs, mask, top_k):
        def route(x, probs):
            out = te.token_dispatch(x, mask, 512, probs, 16, top_k=top_k)
            return te.token_combine(out.output, out.row_id_map, probs, out.pad_offsets)

        y, pull = jax.vjp(route, x, probs)
        return pull(y)

    def program(top_k):
        shape = jax.ShapeDtypeStruct
        types = shape((64, 48), "float32"), shape((64, 256), "float32"), shape((64, 256), "bool")
        traced = jax.jit(layer, static_argnums=3).trace(*types, top_k)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert len(program(None)) < 1.5 * len(program(8))


def test_order_of_arguments_and_results():
    mask = np.array([[1, 0, 1], [0, 0, 1]])
    result = token_dispatch(np.array([[1.0], [2.0]]), mask, 3, mask * 0.5, 2)
    assert isinstance(result, tuple)
    assert result._fields == (
        "output",
        "permuted_probs",
        "row_id_map",
        "pad_offsets",
        "tokens_per_expert",
    )
    output, permuted_probs, row_id_map, pad_offsets, tokens_per_expert = result
    assert output[:, 0].tolist() == [1, 0, 1, 2, 0, 0]
    assert permuted_probs.tolist() == [0.5, 0, 0.5, 0.5, 0, 0]
    assert row_id_map.tolist() == [[0, 1, -1, 0, 2, -1, 2], [2, -1, -1, 2, -1, -1, 1]]
    assert pad_offsets.tolist() == [0, 1, 1]
    assert tokens_per_expert.tolist() == [2, 0, 2]
    combined = token_combine(output, row_id_map, mask * 0.5, pad_offsets)
    assert combined[:, 0].tolist() == [1, 1]


# --- the chunk sort --------------------------------------------------------------------------


@pytest.mark.parametrize("three_d", [False, True])
def test_sort_chunks(implementation, three_d):
    x = np.random.default_rng(0).standard_normal((TOKENS, WIDTH)).astype(np.float32)
    sizes, indices = np.array([3, 0, 4, 5], np.int32), np.array([2, 3, 0, 1], np.int32)
    ends = np.cumsum(sizes)
    order = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in indices])
    shaped = x.reshape(BATCH, SEQUENCE, WIDTH) if three_d else x

    sort = lambda x: sort_chunks_by_index(x, sizes, indices, implementation=implementation)
    output, row_id_map = sort(shaped)
    assert_same_bits(output, x[order])
    assert_same_bits(row_id_map, np.argsort(order).astype(np.int32))

    weights = np.random.default_rng(0).random((TOKENS, WIDTH), np.float32)
    d_x = jax.jit(lambda x: jax.vjp(lambda x: sort(x)[0], x)[1](weights)[0])(shaped)
    assert_same_bits(d_x, weights[row_id_map].reshape(shaped.shape))


def test_an_unused_map_costs_nothing():
    args = np.zeros((TOKENS, WIDTH), np.float32), np.array([4, 8]), np.array([1, 0])
    flops = lambda op: jax.jit(op).lower(*args).compile().cost_analysis()["bytes accessed"]
    plain = flops(lambda *args: moe.sort_chunks_by_index(*args).rows)
    assert flops(lambda *args: sort_chunks_by_index(*args)[0]) == plain


# --- errors ----------------------------------------------------------------------------------

X, MASK = np.zeros((4, 3), np.float32), np.ones((4, 2), np.int32)
MAP = np.zeros((4, 5), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: te.token_dispatch(X[0], MASK, 8), ArgumentValueError, "`inp`.*sequence.*got"),
        (lambda: te.token_dispatch([1.0], MASK, 8), ArgumentTypeError, "`inp`.*array"),
        (
            lambda: te.token_dispatch(X, MASK[:3], 8),
            ArgumentValueError,
            r"`inp`.*\(3, hidden\)",
        ),
        (lambda: te.token_dispatch(X, MASK * 1j, 8), ArgumentTypeError, "`routing_map`.*!= 0"),
        (lambda: te.token_dispatch(X, MASK, -1), ArgumentValueError, "`num_out_tokens`.*got -1"),
        (lambda: te.token_dispatch(X, MASK, 8.0), ArgumentTypeError, "`num_out_tokens`.*int"),
        (lambda: te.token_dispatch(X, MASK, 8, MASK), ArgumentTypeError, "`probs`.*astype"),
        (lambda: te.token_dispatch(X, MASK, 8, X), ArgumentValueError, "`probs`.*permute"),
        (lambda: te.token_dispatch(X, MASK, 8, align_size=0), ArgumentValueError, "`align_size`"),
        (lambda: te.token_dispatch(X, MASK, 8, top_k=0), ArgumentValueError, "`top_k`.*got 0"),
        (lambda: te.token_combine(X, MAP[:, :4]), ArgumentValueError, "`row_id_map`.*third result"),
        (lambda: te.token_combine(X, MAP * 1.0), ArgumentTypeError, "`row_id_map`.*integer"),
        (lambda: te.token_combine(MASK, MAP), ArgumentTypeError, "`inp`.*floating"),
        (lambda: te.token_combine(X, MAP, X[:3]), ArgumentValueError, r"`merging_probs`.*\(4, exp"),
        (lambda: te.token_combine(X, MAP, None, MAP), ArgumentValueError, "`pad_offsets`"),
        (lambda: te.sort_chunks_by_index(X[0], MAP[0], MAP[0]), ArgumentValueError, "`inp`"),
    ],
)
def test_errors_name_the_argument(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_maps_wider_than_what_is_unrolled_inside_shard_map(implementation):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(11)
    x = rng.standard_normal((16, 8)).astype(np.float32)
    probs = rng.random((16, 32), np.float32)
    mask = rng.random((16, 32)) < 0.1

    def layer(x, mask, probs):
        out = token_dispatch(x, mask, 64, probs, 4, implementation=implementation)
        return token_combine(
            out.output, out.row_id_map, probs, out.pad_offsets, implementation=implementation
        )

    def both(x, probs):
        spec = jax.sharding.PartitionSpec("d")
        local = jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec)
        y, pull = jax.vjp(lambda x, probs: local(x, mask, probs), x, probs)
        return y, *pull(y)

    actual = jax.jit(both)(x, probs)
    alone = jax.jit(functools.partial(forward_and_backward, layer))
    expected = [alone(x[half], mask[half], probs[half]) for half in HALVES]
    for a, parts in zip(actual, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(a, np.concatenate(parts), rtol=1e-5, atol=1e-6)


HALVES = (slice(0, 8), slice(8, 16))


def forward_and_backward(layer, x, mask, probs):
    y, pull = jax.vjp(lambda x, probs: layer(x, mask, probs), x, probs)
    return y, *pull(y)
