"""The gradients of permute and unpermute: against differences, and against those of plain JAX."""

from __future__ import annotations

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.moe import oracle
from triax import moe
from triax.testing import assert_close, assert_same_bits

TOKENS, TOP_K, EXPERTS, WIDTH = 6, 2, 3, 5
# tests/conftest.py turns them off, for versions that know the flag.
FLAG = "xla_cpu_use_fusion_emitters"
EMITTERS = {FLAG: True} if FLAG in os.environ.get("XLA_FLAGS", "") else None


@pytest.fixture(params=["xla", "interpret"])
def implementation(request):
    return request.param


@pytest.fixture
def plan():
    """Some pairs are not routed, some dropped, some rows are pad rows, some past the groups."""
    ids = oracle.draw_ids(np.random.default_rng(3), TOKENS, TOP_K, EXPERTS, "any")
    ids[1, 0] = -1
    plan = oracle.make_plan(ids, EXPERTS, capacity=3, align_size=4, num_rows=16)
    assert int(plan.num_dropped) > 0
    assert 16 > plan.group_sizes.sum() > plan.group_filled.sum()
    return plan


def draw(*shapes, dtype=np.float64):
    rng = np.random.default_rng(4)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.sampled(0, 1)
def test_finite_differences(plan, implementation):
    """By x, weights, scales and rows; forward, backward, and one of the other."""
    with jax.enable_x64(True):
        x, weights, scales, rows = draw((TOKENS, WIDTH), (TOKENS, TOP_K), (TOKENS, 2), (16, WIDTH))

        def function(x, weights, scales, rows):
            out = moe.permute(
                x, plan, weights=weights, scales=scales, implementation=implementation
            )
            back = lambda *args: moe.unpermute(*args, implementation=implementation)
            layer = back(jnp.sin(out.rows), plan, weights)
            results = *out, back(rows, plan, weights), back(rows, plan), layer
            return jax.tree.map(jnp.sin, results)

        order = 2 if implementation == "interpret" else 1  # test_hessians_agree has the other
        check_grads(jax.jit(function), (x, weights, scales, rows), order, atol=1e-6, rtol=1e-6)


@pytest.mark.sampled(1)
def test_forward_mode_of_one_argument_alone(plan, implementation):
    """What is not differentiated has no tangent, and integers none at all."""
    x, weights, rows = draw((TOKENS, WIDTH), (TOKENS, TOP_K), (16, WIDTH), dtype=np.float32)
    scales = np.ones((TOKENS, 1), int)

    def tangent(op, primal):
        return jax.jvp(jax.jit(op), (primal,), (2 * primal,))[1]

    permute = functools.partial(moe.permute, plan=plan, implementation=implementation)
    by_x = tangent(lambda x: permute(x, weights=weights, scales=scales), x)
    plain = jax.jit(moe.permute)
    assert_same_bits(by_x.rows, plain(2 * x, plan))
    assert not np.any(by_x.weights)
    assert by_x.scales.dtype == jax.dtypes.float0
    by_weights = tangent(lambda w: permute(x.astype(int), weights=w), weights)
    assert by_weights.rows.dtype == jax.dtypes.float0
    assert_same_bits(by_weights.weights, plain(x, plan, weights=2 * weights).weights)

    unpermute = functools.partial(moe.unpermute, implementation=implementation)
    by_rows = tangent(lambda rows: unpermute(rows, plan, weights), rows)
    by_weights = tangent(lambda weights: unpermute(rows, plan, weights), weights)
    wanted = 2 * np.asarray(jax.jit(unpermute)(rows, plan, weights))
    for actual in (by_rows, by_weights):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)


@pytest.mark.slow("many programs for one rule")
def test_hessians_agree(plan, implementation):
    """Forward over reverse, as in `jax.hessian`; in plain JAX, which takes less time, also the
    other three orders and a batch of products."""
    x, weights = draw((TOKENS, 2), (TOKENS, TOP_K), dtype=np.float32)

    def loss(x):
        def step(x, _):
            rows = jnp.tanh(moe.permute(x, plan, implementation=implementation))
            return x + moe.unpermute(rows, plan, weights, implementation=implementation), None

        step = jax.checkpoint(step)
        return jnp.sum(jax.lax.scan(step, x, length=2)[0] ** 2)

    def plain(x):
        exists = jnp.where(plan.row_of >= 0, weights, 0).sum(1, keepdims=True)
        for _ in range(2):
            x = x + exists * jnp.tanh(x)
        return jnp.sum(x**2)

    expected = jax.jit(jax.hessian(plain))(x)
    if implementation == "interpret":
        actual = jax.jit(jax.hessian(loss))(x)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
        return
    for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
        actual = jax.jit(outer(inner(loss)))(x)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    vectors = np.stack([x, -x])
    product = lambda v: jax.jvp(jax.grad(loss), (x,), (v,))[1]
    products = jax.jit(jax.vmap(product))(vectors)
    wanted = np.einsum("abcd,ncd->nab", expected, vectors)
    np.testing.assert_allclose(products, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(1, 1)
def test_gradient_of_vmap_is_that_of_the_loop(plan, implementation):
    """Also of what the batches share, whose gradients are summed."""
    x, weights = draw((3, TOKENS, WIDTH), (TOKENS, TOP_K), dtype=np.float32)

    def layer(x, weights):
        rows = jnp.tanh(moe.permute(x, plan, implementation=implementation))
        return jnp.sum(moe.unpermute(rows, plan, weights, implementation=implementation) ** 2)

    batched = lambda x, weights: jnp.sum(jax.vmap(layer, (0, None))(x, weights))
    loop = lambda x, weights: sum(layer(each, weights) for each in x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        jax.jit(jax.grad(batched, (0, 1)))(x, weights),
        jax.jit(jax.grad(loop, (0, 1)))(x, weights),
    )


def take_permute(x, plan):
    """Permute as a user of JAX would write it, for JAX to differentiate."""
    target = jnp.where(plan.row_of < 0, plan.num_rows, plan.row_of)
    copies = jnp.broadcast_to(x[:, None], (*target.shape, x.shape[1]))
    rows = jnp.zeros((plan.num_rows, x.shape[1]), x.dtype)
    return rows.at[target].set(copies, mode="drop")


def take_unpermute(rows, plan, weights):
    """Unpermute likewise."""
    routed = plan.row_of >= 0
    taken = jnp.where(routed[..., None], rows[plan.row_of], 0)
    return jnp.sum(taken * jnp.where(routed, weights, 0)[..., None], axis=1)


@pytest.mark.sampled(1)
def test_equal_to_those_of_plain_jax(plan, implementation):
    x, weights, up, down = draw(
        (TOKENS, WIDTH), (TOKENS, TOP_K), (EXPERTS, WIDTH, 7), (EXPERTS, 7, WIDTH), dtype=np.float32
    )

    def layer(permute, unpermute):
        def loss(x, weights, up, down):
            hidden = jax.lax.ragged_dot(permute(x, plan), up, plan.group_sizes)
            rows = jax.lax.ragged_dot(jnp.tanh(hidden), down, plan.group_sizes)
            return jnp.sum(unpermute(rows, plan, weights) ** 2)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, weights, up, down)

    actual = layer(
        lambda *args: moe.permute(*args, implementation=implementation),
        lambda *args: moe.unpermute(*args, implementation=implementation),
    )
    expected = layer(take_permute, take_unpermute)
    jax.tree.map(lambda a, e: assert_close(a, e, terms=64), actual, expected)


@pytest.mark.sampled(1)
def test_gradient_of_everything_at_once_is_the_sum(plan, implementation):
    """Ids that come from a differentiated router do not stand in the way."""
    x, router = draw((TOKENS, WIDTH), (WIDTH, EXPERTS), dtype=np.float32)

    def loss(x, router):
        weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
        plan = moe.make_plan(ids, EXPERTS, align_size=4, implementation=implementation)
        rows = moe.permute(x, plan, implementation=implementation)
        y = moe.unpermute(jnp.tanh(rows), plan, weights, implementation=implementation)
        return jnp.sum(y**2)

    def expected(x, router):
        weights, _ = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
        return jnp.sum((jnp.tanh(x) * weights.sum(1, keepdims=True)) ** 2)

    actual = jax.jit(jax.grad(loss, (0, 1)))(x, router)
    jax.tree.map(
        lambda a, e: assert_close(a, e, terms=64),
        actual,
        jax.jit(jax.grad(expected, (0, 1)))(x, router),
    )


@pytest.mark.slow("many programs for one rule")
def test_a_batch_of_constants_under_jit():
    """Of which XLA computes the results while it compiles, some of them wrongly."""
    ids = jnp.asarray([[1, 0], [0, 1], [2, -1], [2, 0], [1, 2], [0, 2]])
    plan = moe.make_plan(ids, EXPERTS, align_size=4)
    x = jnp.asarray(*draw((2, TOKENS, 3), dtype=np.float32))
    rows = jnp.zeros((2, plan.num_rows, 3))
    permute = jax.vmap(lambda x: moe.permute(x, plan, implementation="xla"))
    unpermute = jax.vmap(lambda rows: moe.unpermute(rows, plan, implementation="xla"))
    for function in (lambda: permute(x), lambda: jax.vjp(unpermute, rows)[1](x)[0]):
        program = jax.jit(function).lower().compile(compiler_options=EMITTERS)
        assert_same_bits(program(), function())
