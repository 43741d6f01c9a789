"""Plan, permute and unpermute on a GPU: against NumPy and plain JAX on a CPU, at full size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.references import on_cpu
from tests.moe import draws
from triax import moe
from triax.testing import assert_close, assert_same_bits, poison

pytestmark = pytest.mark.gpu

FIELDS = ("row_of", "expert_of", "group_sizes", "group_counts", "group_filled", "num_dropped")
# Tokens, slots, experts, hidden: the models of today.
MODELS = {
    "Mixtral 8x7B": (8192, 2, 8, 4096),
    "DeepSeek-V3": (16384, 8, 256, 7168),
    "gpt-oss-120b": (4096, 4, 128, 2880),
    "Kimi K2": (4096, 8, 384, 7168),
    "Llama-4 Maverick": (8192, 1, 128, 5120),
    "decoding": (128, 8, 128, 4096),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw_on_device(seed, shape, dtype):
    """Numbers in [-2, 2) by a hash of their place, which compiles faster than jax.random."""
    mixed = jnp.full(shape, seed * 0x9E3779B9 % 2**32, jnp.uint32)
    for axis in range(len(shape)):
        mixed = (mixed ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(2654435761)
        mixed = mixed ^ (mixed >> 15)
    return ((mixed >> 8).astype(jnp.float32) * 2**-22 - 2).astype(dtype)


@functools.partial(jax.jit, static_argnames=("num_experts", "sizes", "implementation"))
def plan_of(ids, num_experts, sizes=(), implementation=None):
    return moe.make_plan(ids, num_experts, **dict(sizes), implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def everything(x, weights, scales, plan, rows, d_permuted, d_tokens, implementation=None):
    """Both ops and all their gradients."""
    permuted, pull = jax.vjp(
        lambda x, w, s: moe.permute(x, plan, weights=w, scales=s, implementation=implementation),
        x,
        weights,
        scales,
    )
    op = functools.partial(moe.unpermute, implementation=implementation)
    weighted, pull_weighted = jax.vjp(lambda rows, w: op(rows, plan, w), rows, weights)
    return {
        "permuted": permuted,
        "d_permute": pull(d_permuted),
        "weighted": weighted,
        "d_weighted": pull_weighted(d_tokens),
        "plain": op(rows, plan),
    }


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def draw_case(plan, width, dtype, num_scales=4):
    """Arguments of `everything` for a plan."""
    (num_tokens, top_k), num_rows = plan.row_of.shape, plan.num_rows
    draw = draw_on_device
    return (
        draw(1, (num_tokens, width), dtype),
        draw(2, (num_tokens, top_k), "float32"),
        draw(3, (num_tokens, num_scales), "float32"),
        plan,
        draw(4, (num_rows, width), dtype),
        moe.Permuted(
            draw(5, (num_rows, width), dtype),
            draw(6, (num_rows,), "float32"),
            draw(7, (num_rows, num_scales), "float32"),
        ),
        draw(8, (num_tokens, width), dtype),
    )


@jax.jit
def unequal_elements(actual, expected):
    """How many elements of each array differ in their bits."""

    def count(a, b):
        words = f"uint{8 * a.dtype.itemsize}"
        to_words = lambda c: jax.lax.bitcast_convert_type(c, words)
        return jnp.sum(to_words(a) != to_words(b), dtype=jnp.float32)

    return jax.tree.map(count, actual, expected)


@jax.jit
def errors(actual, expected):
    """The largest difference of each array, in terms of its largest element."""

    def error(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1)

    return jax.tree.map(error, actual, expected)


def check_against_plain_jax(case):
    """All rows, in some of their columns; products over all columns for some tokens."""
    poison(sum(leaf.nbytes for leaf in jax.tree.leaves(case)) * 2)
    actual = everything(*case)
    width, rng = case[0].shape[1], np.random.default_rng(9)
    columns = np.unique([0, width - 1, *rng.integers(0, width, 62)])
    some = lambda a: a[:, columns] if a.ndim == 2 and a.shape[1] == width else a
    narrow = jax.tree.map(some, case)
    expected = on_cpu(everything, *narrow, implementation="xla")
    d_rows, d_weights = actual.pop("d_weighted")
    expected["d_weighted"] = expected["d_weighted"][0]
    found = jax.tree.map(lambda a: np.asarray(some(a)), {**actual, "d_weighted": d_rows})
    d_x, d_w, d_s = found.pop("d_permute")
    e_x, e_w, e_s = expected.pop("d_permute")
    jax.tree.map(assert_same_bits, found.pop("permuted"), expected.pop("permuted"))
    assert_same_bits(d_w, e_w)
    worst = errors((found, d_x, d_s), (expected, e_x, e_s))
    assert all(float(error) <= 1e-2 for error in jax.tree.leaves(worst)), worst
    _, _, _, plan, rows, _, d_tokens = case
    tokens = rng.integers(0, len(d_tokens), 100)
    row_of = np.asarray(plan.row_of)[tokens]
    sums = np.einsum(
        "tkh,th->tk",
        np.asarray(rows[np.maximum(row_of, 0)], np.float64),
        np.asarray(d_tokens[tokens], np.float64),
    )
    found = np.asarray(d_weights)[tokens]
    assert_close(found, np.where(row_of < 0, 0, sums), terms=width)


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("routing", ["distinct", "alike"])
@pytest.mark.xdist_group("large")
def test_model_shapes(shape, routing):
    num_tokens, top_k, num_experts, width = shape
    rng = np.random.default_rng(2)
    ids = draws.ids(rng, num_tokens, top_k, num_experts, kind=routing)
    plan = plan_of(ids, num_experts, (("align_size", 8),))
    how = {"num_experts": num_experts, "sizes": (("align_size", 8),), "implementation": "xla"}
    expected = on_cpu(plan_of, ids, **how)
    for name in FIELDS:
        assert_same_bits(getattr(plan, name), getattr(expected, name), name)
    check_against_plain_jax(draw_case(plan, width, "bfloat16"))


@pytest.mark.parametrize("top_k", [8, 100])
def test_masks_under_deterministic_ops(top_k):
    """XLA then sorts what a scatter writes, by indices that it makes one number of."""
    mask = np.random.default_rng(7).random((3000, 100)) < 0.08
    make = functools.partial(moe.make_plan_from_mask, top_k=top_k, implementation="xla")
    actual = jax.jit(make, compiler_options={"xla_gpu_deterministic_ops": True})(mask)
    expected = on_cpu(functools.partial(moe.make_plan_from_mask, top_k=top_k), mask)
    for name in FIELDS:
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)


@pytest.mark.xdist_group("large")
def test_rows_times_width_past_32_bits():
    """300,000 rows of 7168: offsets pass 2**31, and in the gradients too."""
    num_rows, width = 300_000, 7168
    ids = np.arange(150_000 * 2).reshape(-1, 2) * 7919 % 64
    plan = plan_of(ids.astype(np.int32), 64)
    assert plan.num_rows == num_rows
    x = draw_on_device(1, (150_000, width), "bfloat16")
    weights = draw_on_device(2, (150_000, 2), "float32")
    poison(8 << 30)
    rows = jax.jit(moe.permute)(x, plan)

    @jax.jit
    def wrong_rows(rows, x, plan):
        """Rows that differ from their token, slot by slot."""
        differs = lambda row, x: jnp.any(rows[row] != x)
        count = lambda slot: jnp.sum(
            jax.lax.map(lambda pair: differs(*pair), (plan.row_of[:, slot], x), batch_size=4096)
        )
        return count(0) + count(1)

    assert int(wrong_rows(rows, x, plan)) == 0
    y, pull = jax.vjp(jax.jit(lambda rows, w: moe.unpermute(rows, plan, w)), rows, weights)
    expected = x * weights.sum(1, keepdims=True)
    assert float(errors(y, expected.astype(x.dtype))) < 1e-2
    del expected, y
    d_rows, d_weights = pull(x)
    for token in (0, 1, 75_001, 149_999):
        for slot in range(2):
            g = np.asarray(x[token]).astype(np.float64)
            row = int(plan.row_of[token, slot])
            assert_close(d_rows[row], g * float(weights[token, slot]))
            assert_close(d_weights[token, slot][None], np.array([g @ g]), terms=width)


def test_tokens_times_experts_past_32_bits():
    """An index into [tokens, experts] would pass 2**31, were there one."""
    num_tokens, num_experts = 12_000_000, 256
    ids = jax.random.randint(jax.random.key(0), (num_tokens, 1), 0, num_experts)
    plan = plan_of(ids, num_experts)
    row_of, ids = np.asarray(plan.row_of)[:, 0], np.asarray(ids)[:, 0]
    order = np.argsort(ids, kind="stable")
    np.testing.assert_array_equal(row_of[order], np.arange(num_tokens))
    assert int(plan.num_dropped) == 0


def test_a_thousand_runs_give_the_same_bits():
    """Forward and backward with donated buffers, in memory that was poisoned."""
    rng = np.random.default_rng(7)
    ids = draws.ids(rng, 2048, 4, 64, kind="alike")
    x = rng.standard_normal((2048, 1024)).astype(jnp.bfloat16)
    weights = rng.random((2048, 4)).astype(np.float32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(x, weights, ids):
        plan = moe.make_plan(ids, 64, align_size=8, capacity=300)

        def layer(x, weights):
            rows = moe.permute(x, plan)
            # Without it XLA may see through the two moves.
            rows = jax.lax.optimization_barrier(rows)
            return moe.unpermute(rows, plan, weights)

        y, pull = jax.vjp(layer, x, weights)
        return y, *pull(y)

    @jax.jit
    def all_equal(a, b):
        return jnp.all(jnp.array(jax.tree.leaves(unequal_elements(a, b))) == 0)

    first = step(jnp.array(x), jnp.array(weights), ids)
    verdicts = []
    for turn in range(1000):
        if turn % 50 == 0:
            poison(64 << 20)
        verdicts.append(all_equal(step(jnp.array(x), jnp.array(weights), ids), first))
    assert np.all(jnp.stack(verdicts))


def test_new_sizes_compile_nothing():
    from triax.compiling import compiler

    def run(num_tokens):
        ids = draws.ids(np.random.default_rng(8), num_tokens, 2, 8)
        plan = plan_of(ids, 8)
        jax.block_until_ready(everything(*draw_case(plan, 96, "float32")))

    run(1)
    run(4096)  # many pairs have kernels of their own
    before = compiler.compile_count()
    for num_tokens in (2, 17, 1024, 1025, 4097):
        run(num_tokens)
    assert compiler.compile_count() == before
