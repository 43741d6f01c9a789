"""What `tests/moe/test_cases.py` does not see of the TransformerEngine-shaped functions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import transformer_engine as te


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
    dispatch = jax.jit(lambda *args: te.token_dispatch(*args, 3, mask * 0.5, 2))
    result = dispatch(np.array([[1.0], [2.0]]), mask)
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
    combined = jax.jit(te.token_combine)(output, row_id_map, mask * 0.5, pad_offsets)
    assert combined[:, 0].tolist() == [1, 1]


def test_an_unused_map_costs_nothing():
    args = np.zeros((12, 5), np.float32), np.array([4, 8]), np.array([1, 0])
    flops = lambda op: jax.jit(op).lower(*args).compile().cost_analysis()["bytes accessed"]
    plain = flops(lambda *args: moe.sort_chunks_by_index(*args).rows)
    assert flops(lambda *args: te.sort_chunks_by_index(*args)[0]) == plain


# --- errors ----------------------------------------------------------------------------------

X, MASK = np.zeros((4, 3), np.float32), np.ones((4, 2), np.int32)
MAP = np.zeros((4, 5), np.int32)
IDS, WEIGHTS, ROWS = MASK, MASK * np.float32(1), np.zeros((8, 3))
state = functools.cache(jax.jit(lambda: te.pure_jax_token_dispatch(X, IDS, 3, 2)[1]))


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


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"score_function": "relu"},
            ArgumentValueError,
            "'sqrtsoftplus', or a ScoreFunction",
        ),
        ({"routing_map_format": 7}, ArgumentValueError, "or a RoutingMapFormat; got 7"),
        (
            {"expert_bias": np.zeros(16, np.float32)},
            ArgumentValueError,
            "needs score_function='sigmoid'",
        ),
        ({"scaling_factor": jnp.ones(())}, ArgumentTypeError, "`scaling_factor` must be a Python"),
        ({"topk": 17}, ArgumentValueError, "`topk` must be at most the 16 experts"),
        (
            {"topk": 17, "compute_aux_scores": True},
            ArgumentValueError,
            "`topk` must be at most the 16 experts of `logits`",
        ),
        ({"num_groups": 5, "group_topk": 2}, ArgumentValueError, "`num_groups` must divide"),
        ({"num_groups": 4, "group_topk": 5}, ArgumentValueError, "`group_topk` must be at most"),
        (
            {"num_groups": 4, "group_topk": 3, "topk": 2},
            ArgumentValueError,
            "least `group_topk`",
        ),
    ],
)
def test_what_a_router_gets_wrong_is_named(change, error, text):
    arguments = {"logits": np.zeros((20, 16), np.float32), "topk": 4, **change}
    with pytest.raises(error) as caught:
        te.fused_topk_with_score_function(**arguments)
    assert text in str(caught.value)
