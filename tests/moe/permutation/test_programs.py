"""Plan, permute and unpermute: what programs hold, and what JAX keeps for the backward pass."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import draws
from triax import moe
from triax.testing import assert_same_bits

PATHS = ["xla", "interpret", None]
TOKENS, TOP_K, EXPERTS, WIDTH = 9, 2, 3, 4


def route(x, ids, weights, implementation=None, align_size=4):
    """Plan, permute, something for the experts to do, unpermute."""
    plan = moe.make_plan(ids, EXPERTS, align_size=align_size, implementation=implementation)
    out = moe.permute(x, plan, weights=weights, implementation=implementation)
    rows = jnp.tanh(out.rows) * out.weights[:, None]
    return moe.unpermute(rows, plan, weights, implementation=implementation), plan


def batches(count):
    rng = np.random.default_rng(0)
    ids = np.stack([draws.ids(rng, TOKENS, TOP_K, EXPERTS) for _ in range(count)])
    return (
        rng.standard_normal((count, TOKENS, WIDTH)).astype(np.float32),
        ids,
        rng.random((count, TOKENS, TOP_K), np.float32),
    )


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("implementation", PATHS)
def test_a_batched_plan_goes_through_vmap(implementation):
    x, ids, _ = batches(2)
    make = functools.partial(moe.make_plan, num_experts=EXPERTS, implementation=implementation)
    make = jax.jit(make)
    plans = jax.jit(jax.vmap(make))(ids)
    assert plans.row_of.shape == ids.shape
    assert plans.num_dropped.shape == (2,)
    op = jax.jit(lambda x, plan: moe.permute(x, plan, implementation=implementation))
    loop = [op(x[i], make(ids[i])) for i in range(2)]
    assert_same_bits(jax.jit(jax.vmap(op))(x, plans), np.stack(loop))


@pytest.mark.parametrize("saved", ["triax_permuted_rows", "triax_unpermuted_tokens", None])
def test_names_for_checkpoint_policies(saved, capsys):
    """A policy that names what was routed keeps it, and nothing else is kept."""
    x, ids, weights = (a[0] for a in batches(1))
    policy = jax.checkpoint_policies.save_only_these_names(*([saved] if saved else []))
    layer = jax.checkpoint(lambda x: jnp.sin(route(x, ids, weights, "xla")[0]), policy=policy)
    jax.ad_checkpoint.print_saved_residuals(layer, x)
    lines = capsys.readouterr().out.splitlines()
    kept = [line for line in lines if "argument" not in line and "constant" not in line]
    num_rows = (TOKENS * TOP_K + EXPERTS * 3) // 4 * 4
    shapes = {"triax_permuted_rows": (num_rows, WIDTH), "triax_unpermuted_tokens": (TOKENS, WIDTH)}
    assert len(kept) == (saved is not None)
    if saved is not None:
        assert kept[0].startswith("f32[{},{}]".format(*shapes[saved]))


def lowered_text(platform, num_tokens=96, top_k=4, num_experts=40, width=48, num_rows=None):
    """The program of both ops and their gradients, from ids."""
    types = [
        jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, top_k), jnp.float32),
    ]

    def program(ids, x, weights):
        plan = moe.make_plan(ids, num_experts, num_rows=num_rows)
        out, pull = jax.vjp(lambda x, w: moe.permute(x, plan, weights=w), x, weights)
        y, pull_y = jax.vjp(lambda r, w: moe.unpermute(r, plan, w), out.rows, weights)
        return out, pull(out), y, pull_y(y), plan

    return jax.jit(program).trace(*types).lower(lowering_platforms=(platform,)).as_text()


def shapes_of(text):
    found = re.findall(r"tensor<((?:\d+x)*)[a-z]\w*>", text)
    shapes = {tuple(int(size) for size in shape.split("x")[:-1]) for shape in found}
    return {shape for shape in shapes if len(shape) != 1 or shape[0] > 2}  # those of attributes


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_plugin)])
def test_nothing_is_expert_wide_or_copied_for_every_slot(platform):
    shapes = shapes_of(lowered_text(platform, num_rows=400))
    assert (400, 48) in shapes
    for shape in shapes:
        assert math.prod(shape) <= 400 * 48, shape
        assert math.prod(shape) < 96 * 40 or 48 in shape, shape
        assert shape[:2] not in ((96, 40), (384, 40)), shape
        assert shape not in ((384, 48), (96, 4, 48)), shape
