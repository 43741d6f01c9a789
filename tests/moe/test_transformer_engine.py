"""The TransformerEngine-shaped functions against what TransformerEngine documents, in NumPy.

The oracle goes through the map expert by expert, as in its documentation: rows grouped by expert in
the order of tokens, each group padded to the alignment, and the row map's three parts. Where Triax
differs on purpose there is a test of its own.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import transformer_engine
from triax.testing import assert_close, assert_same_bits

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


def dispatch_by_numpy(x, mask, probs, num_out_tokens, align_size=None):
    """Every result of a dispatch that drops nothing, and `row_of` [tokens, experts], -1 for none.

    Rows of `row_of` count pad rows; those of the row map do not.
    """
    num_experts = mask.shape[1]
    align = align_size or 1
    num_rows = num_out_tokens
    if align_size is not None:
        num_rows = (num_out_tokens + num_experts * (align - 1)) // align * align
    output = np.zeros((num_rows, x.shape[1]), x.dtype)
    permuted_probs = np.zeros(num_rows, np.float32)
    row_of = np.full(mask.shape, -1)
    row_without_pads = np.full(mask.shape, -1)
    sizes, offsets = [], []
    start = pads = 0
    for expert in range(num_experts):
        tokens = np.flatnonzero(mask[:, expert])
        offsets.append(pads)
        for rank, token in enumerate(tokens):
            row = start + rank
            output[row] = x[token]
            if probs is not None:
                permuted_probs[row] = probs[token, expert]
            row_of[token, expert] = row
            row_without_pads[token, expert] = row - pads
        size = -(-len(tokens) // align) * align
        sizes.append(size)
        start += size
        pads += size - len(tokens)
    return SimpleNamespace(
        output=output,
        permuted_probs=None if probs is None else permuted_probs,
        row_of=row_of,
        row_without_pads=row_without_pads,
        pad_offsets=None if align_size is None else np.array(offsets, np.int32),
        tokens_per_expert=np.array(sizes, np.int32),
    )


def combine_by_numpy(rows, row_of, merging_probs=None):
    """Each token's sum, float64."""
    out = np.zeros((row_of.shape[0], rows.shape[1]))
    for token, expert in np.argwhere(row_of >= 0):
        weight = 1.0 if merging_probs is None else np.float64(merging_probs[token, expert])
        out[token] += weight * rows[row_of[token, expert]]
    return out


def gradients(op, args, cotangents):
    """Those of all arguments, in NumPy."""
    run = jax.jit(lambda args, cotangents: jax.vjp(op, *args)[1](cotangents))
    return jax.tree.map(np.asarray, run(args, cotangents))


@pytest.fixture(params=PATHS)
def implementation(request):
    return request.param


def make_case(seed=0, top_k=2, dtype=np.float32):
    """Tokens, a map of `top_k` experts for each (one expert has none), probs."""
    rng = np.random.default_rng(seed)
    scores = rng.random((TOKENS, EXPERTS))
    scores[:, seed % EXPERTS] = -1
    mask = scores >= np.sort(scores, axis=1)[:, -top_k, None]
    x = rng.standard_normal((TOKENS, WIDTH)).astype(dtype)
    return x, mask, rng.random((TOKENS, EXPERTS)).astype(np.float32)


def check_map(row_id_map, expected, width):
    """Three parts: the rows, the experts, the count; whatever order a token's slots have."""
    row_id_map = np.asarray(row_id_map)
    assert row_id_map.dtype == np.int32
    assert row_id_map.shape == (TOKENS, 2 * width + 1)
    counts = row_id_map[:, -1]
    np.testing.assert_array_equal(counts, (expected.row_of >= 0).sum(1))
    for token, count in enumerate(counts):
        rows, experts = row_id_map[token, :count], row_id_map[token, width : width + count]
        assert sorted(experts) == list(np.flatnonzero(expected.row_of[token] >= 0))
        np.testing.assert_array_equal(rows, expected.row_without_pads[token, experts])
        assert (row_id_map[token, count:width] == -1).all()


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize(
    ("align_size", "top_k", "with_probs", "three_d", "map_dtype"),
    [
        (None, None, True, False, "int32"),
        (None, 2, False, True, "float32"),
        (4, 2, True, True, "int32"),
        (1, 4, True, True, "bool"),
        (4, None, False, False, "bfloat16"),
    ],
)
def test_dispatch_and_combine(implementation, align_size, top_k, with_probs, three_d, map_dtype):
    x, mask, probs = make_case()
    probs = probs if with_probs else None
    num_out_tokens = int(mask.sum()) + 3
    expected = dispatch_by_numpy(x, mask, probs, num_out_tokens, align_size)
    shape = lambda a: a.reshape(BATCH, SEQUENCE, -1) if three_d and a is not None else a

    dispatch = functools.partial(
        token_dispatch,
        num_out_tokens=num_out_tokens,
        align_size=align_size,
        top_k=top_k,
        implementation=implementation,
    )
    output, permuted_probs, row_id_map, pad_offsets, tokens_per_expert = dispatch(
        shape(x), shape(mask.astype(map_dtype)), probs=shape(probs)
    )
    assert_same_bits(output, expected.output)
    assert_same_bits(tokens_per_expert, expected.tokens_per_expert)
    check_map(row_id_map, expected, EXPERTS if top_k is None else top_k)
    for actual, wanted in (
        (permuted_probs, expected.permuted_probs),
        (pad_offsets, expected.pad_offsets),
    ):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(actual, wanted)

    combined = token_combine(
        output, row_id_map, shape(probs), pad_offsets, implementation=implementation
    )
    assert combined.shape == (TOKENS, WIDTH)
    assert_close(combined, combine_by_numpy(expected.output, expected.row_of, probs), terms=2)


@pytest.mark.nightly("its parts have tests of their own")
@given(seed=st.integers(0, 2**32 - 1), top_k=st.integers(1, 5), align_size=st.sampled_from([1, 8]))
def test_top_k_changes_the_width_of_the_map_alone(seed, top_k, align_size):
    """Where tokens have few of many experts, results and gradients are those without it."""
    rng = np.random.default_rng(seed)
    num_tokens, num_experts, hidden = 7, 24, 3
    chosen = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1) < top_k
    mask = chosen & (rng.random(chosen.shape) < 0.8)
    x = rng.standard_normal((num_tokens, hidden)).astype(np.float32)
    probs = rng.standard_normal(mask.shape).astype(np.float32)
    scale = rng.standard_normal((num_tokens * 5 + num_experts * 7, 1)).astype(np.float32)
    for implementation in PATHS:
        (*narrow, more), (*wide, wide_more) = (
            there_and_back(x, probs, mask, scale, align_size, top_k, implementation)
            for top_k in (5, None)
        )
        jax.tree.map(assert_same_bits, wide_more, more)
        for actual, expected in zip(wide, narrow, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        d_probs = np.asarray(wide[-1])
        assert (d_probs[~mask] == 0).all()


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def there_and_back(x, probs, mask, scale, align_size, top_k, implementation):
    """The tokens, all that a dispatch returns, and gradients."""
    how = {"implementation": implementation}

    def layer(x, probs):
        out = token_dispatch(x, mask, len(x) * 5, probs, align_size, top_k=top_k, **how)
        rows = out.output * scale[: len(out.output)]
        more = out.permuted_probs, out.tokens_per_expert, out.pad_offsets, out.output
        return token_combine(rows, out.row_id_map, probs, out.pad_offsets, **how), more

    y, pull, more = jax.vjp(layer, x, probs, has_aux=True)
    return y, *pull(jnp.ones_like(y)), more


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
    x, mask, probs = make_case()
    count = int(mask.sum())
    result = token_dispatch(x, mask, count, probs, 4)
    combined = token_combine(result[0], result[2], probs, result[3])
    assert isinstance(result, tuple)
    assert result._fields == (
        "output",
        "permuted_probs",
        "row_id_map",
        "pad_offsets",
        "tokens_per_expert",
    )
    expected = dispatch_by_numpy(x, mask, probs, count, 4)
    assert_same_bits(result[0], expected.output)
    assert_same_bits(result[3], expected.pad_offsets)
    assert_close(combined, combine_by_numpy(expected.output, expected.row_of, probs), terms=2)
    output, row_id_map = sort_chunks_by_index(x, np.array([4, 8]), np.array([1, 0]))
    assert_same_bits(output, np.roll(x, 8, axis=0))
    assert_same_bits(row_id_map, ((np.arange(TOKENS) + 8) % TOKENS).astype(np.int32))


def test_a_descending_map_is_read_too():
    """As TransformerEngine's kernels write it: experts descending, leftovers past the count."""
    x, mask, probs = make_case()
    expected = dispatch_by_numpy(x, mask, probs, int(mask.sum()))
    row_id_map = np.full((TOKENS, 2 * EXPERTS + 1), 7, np.int32)
    for token in range(TOKENS):
        experts = np.flatnonzero(mask[token])[::-1]
        row_id_map[token, : len(experts)] = expected.row_of[token, experts]
        row_id_map[token, EXPERTS : EXPERTS + len(experts)] = experts
        row_id_map[token, -1] = len(experts)
    combined = token_combine(expected.output, row_id_map, probs)
    assert_close(combined, combine_by_numpy(expected.output, expected.row_of, probs), terms=2)


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize(("align_size", "top_k"), [(None, None), (4, 2)])
def test_gradients(implementation, align_size, top_k):
    """Of inp and probs, through dispatch and through combine, against their definitions."""
    x, mask, probs = make_case(1)
    count = int(mask.sum()) + 3
    expected = dispatch_by_numpy(x, mask, probs, count, align_size)
    row_of, num_rows = expected.row_of, len(expected.output)
    rng = np.random.default_rng(2)
    d_output = rng.standard_normal((num_rows, WIDTH)).astype(np.float32)
    d_permuted = rng.standard_normal(num_rows).astype(np.float32)

    def dispatch(x, probs):
        return token_dispatch(
            x, mask, count, probs, align_size, top_k=top_k, implementation=implementation
        )[:2]

    d_x, d_probs = gradients(dispatch, (x, probs), (d_output, d_permuted))
    assert_close(d_x, combine_by_numpy(d_output, row_of), terms=2)
    assert_same_bits(d_probs, np.where(row_of >= 0, d_permuted[row_of], np.float32(0)))

    dispatched = token_dispatch(
        x, mask, count, probs, align_size, top_k=top_k, implementation=implementation
    )
    rows = rng.standard_normal((num_rows, WIDTH)).astype(np.float32)
    gradient = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)

    def combine(rows, probs):
        return token_combine(
            rows,
            dispatched.row_id_map,
            probs,
            dispatched.pad_offsets,
            implementation=implementation,
        )

    # What stands in rows without a token is nobody's, and gets nothing.
    nobody = np.setdiff1d(np.arange(num_rows), row_of)
    rows[nobody] = np.nan
    d_rows, d_merging = gradients(combine, (rows, probs), gradient)
    expected_rows, expected_probs = np.zeros(rows.shape), np.zeros(probs.shape)
    for token, expert in np.argwhere(row_of >= 0):
        row = row_of[token, expert]
        expected_rows[row] = probs[token, expert] * gradient[token]
        expected_probs[token, expert] = rows[row] @ gradient[token]
    assert_close(d_rows, expected_rows)
    assert_same_bits(d_rows[nobody], np.zeros((len(nobody), WIDTH), np.float32))
    assert_close(d_merging, expected_probs, terms=WIDTH)
    assert (np.asarray(d_merging)[row_of < 0] == 0).all()

    (d_rows,) = gradients(lambda rows: combine(rows, None), (rows,), gradient)
    token_of = {row_of[t, e]: t for t, e in np.argwhere(row_of >= 0)}
    for row in range(num_rows):
        wanted = gradient[token_of[row]] if row in token_of else np.zeros(WIDTH, np.float32)
        assert_same_bits(d_rows[row], wanted)


@pytest.mark.slow("its parts have tests of their own")
def test_a_layer_is_differentiated_as_its_dense_form():
    """Dispatch, something that depends on the expert, combine: float64, against autodiff."""
    x, mask, probs = make_case(3)
    scale = jnp.arange(1.0, EXPERTS + 1)

    def routed(x, probs):
        out, _, row_id_map, pad_offsets, sizes = token_dispatch(
            x, mask, int(mask.sum()), align_size=4, top_k=2
        )
        expert = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=out.shape[0])
        return token_combine(jnp.sin(out * scale[expert][:, None]), row_id_map, probs, pad_offsets)

    def dense(x, probs):
        each = jnp.sin(x[:, None] * scale[:, None])
        return jnp.sum(each * (probs * mask)[..., None], axis=1)

    with jax.enable_x64(True):
        args = jnp.array(x, jnp.float64), jnp.array(probs, jnp.float64)
        loss = lambda layer: lambda x, probs: jnp.sum(layer(x, probs) ** 2)
        for actual, expected in zip(
            jax.jit(jax.grad(loss(routed), (0, 1)))(*args),
            jax.jit(jax.grad(loss(dense), (0, 1)))(*args),
            strict=True,
        ):
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


# --- where TransformerEngine is not followed -------------------------------------------------


def test_a_zero_prob_keeps_the_row(implementation):
    x, mask, probs = make_case()
    probs = np.zeros_like(probs)
    out = token_dispatch(x, mask, int(mask.sum()), probs, implementation=implementation)
    assert_same_bits(
        out.output, dispatch_by_numpy(x, mask, None, int(mask.sum())).output, "the rows"
    )


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("align_size", [None, 4])
def test_nans_stay_with_their_tokens(implementation, align_size):
    x, mask, probs = make_case()
    dispatched = token_dispatch(
        x, mask, int(mask.sum()), align_size=align_size, implementation=implementation
    )
    # The probs of experts that a token is not routed to are nobody's business.
    probs = np.where(mask, probs, np.nan).astype(np.float32)
    gradient = np.ones((TOKENS, WIDTH), np.float32)
    gradient[5] = np.nan
    for merging in (None, probs):
        combine = lambda rows, merging=merging: token_combine(
            rows,
            dispatched.row_id_map,
            merging,
            dispatched.pad_offsets,
            implementation=implementation,
        )
        assert np.isfinite(np.asarray(combine(dispatched.output))).all()
        (d_rows,) = gradients(combine, (dispatched.output,), gradient)
        expected = dispatch_by_numpy(x, mask, None, int(mask.sum()), align_size).row_of
        rows_of_token = expected[5][expected[5] >= 0]
        wanted = np.isin(np.arange(len(d_rows)), rows_of_token)
        np.testing.assert_array_equal(np.isnan(d_rows).all(1), wanted)
        np.testing.assert_array_equal(np.isnan(d_rows).any(1), wanted)


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(("num_out_tokens", "align_size"), [(0, None), (20, None), (0, 4), (7, 4)])
def test_what_does_not_fit_is_dropped(implementation, num_out_tokens, align_size):
    """The interpreter checks every access; all sizes are of rows that there are."""
    x, mask, probs = make_case()
    mask[:] = True  # 72 pairs
    out = token_dispatch(x, mask, num_out_tokens, probs, align_size, implementation=implementation)
    num_rows = num_out_tokens
    if align_size is not None:
        num_rows = (num_out_tokens + EXPERTS * (align_size - 1)) // align_size * align_size
    assert out.output.shape == (num_rows, WIDTH)
    assert np.asarray(out.tokens_per_expert).sum() == num_rows
    kept = np.repeat(np.arange(EXPERTS), TOKENS), np.tile(np.arange(TOKENS), EXPERTS)
    kept = [part[:num_rows] for part in kept]  # 12 of each expert are a multiple of 4
    assert_same_bits(out.output, x[kept[1]])
    assert_same_bits(out.permuted_probs, probs[kept[1], kept[0]])
    expected = np.zeros((TOKENS, WIDTH))
    np.add.at(expected, kept[1], probs[kept[1], kept[0], None] * np.float64(x[kept[1]]))
    combined = token_combine(
        out.output, out.row_id_map, probs, out.pad_offsets, implementation=implementation
    )
    assert_close(combined, expected, terms=EXPERTS)


def test_more_experts_than_top_k_are_dropped(implementation):
    x, mask, _ = make_case(top_k=3)
    out = token_dispatch(x, mask, int(mask.sum()), top_k=2, implementation=implementation)
    first_two = mask & (mask.cumsum(1) <= 2)
    expected = dispatch_by_numpy(x, first_two, None, int(mask.sum()))
    assert_same_bits(out.output, expected.output)
    assert_same_bits(out.tokens_per_expert, expected.tokens_per_expert)
    check_map(out.row_id_map, expected, 2)


# --- the chunk sort --------------------------------------------------------------------------


@pytest.mark.parametrize("three_d", [False, True])
def test_sort_chunks(implementation, three_d):
    x, _, _ = make_case()
    sizes, indices = np.array([3, 0, 4, 5], np.int32), np.array([2, 3, 0, 1], np.int32)
    ends = np.cumsum(sizes)
    order = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in indices])
    shaped = x.reshape(BATCH, SEQUENCE, WIDTH) if three_d else x

    sort = lambda x: sort_chunks_by_index(x, sizes, indices, implementation=implementation)
    output, row_id_map = sort(shaped)
    assert_same_bits(output, x[order])
    assert_same_bits(row_id_map, np.argsort(order).astype(np.int32))

    weights = np.random.default_rng(0).random((TOKENS, WIDTH), np.float32)
    (d_x,) = gradients(lambda x: sort(x)[0], (shaped,), weights)
    assert_same_bits(d_x, weights[row_id_map].reshape(shaped.shape))


def test_an_unused_map_costs_nothing():
    x, _, _ = make_case()
    args = x, np.array([4, 8]), np.array([1, 0])
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
