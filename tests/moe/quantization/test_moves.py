"""Scaled arrays on their way to experts: values and scales move together."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.moe.plans.case import ready_plan
from triax import moe
from triax.testing import assert_same_bits

TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 80, 8, 2


def draw():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(jnp.bfloat16)
    experts = rng.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32)
    weights = rng.random((TOKENS, TOP_K), np.float32)
    return x, experts, weights


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("block", [(1, None), (1, 32)])
def test_rows_are_quantized_as_if_after_the_move(block, implementation):

    @jax.jit
    def pairs(x, experts, weights):
        plan = moe.make_plan(experts, EXPERTS, align_size=4)
        x8 = moe.quantize(x, block=block)
        how = {"implementation": implementation}
        rows = moe.permute(x8, plan, **how)
        after = moe.quantize(moe.permute(x, plan), block=block)
        moved = moe.permute(x8, plan, weights=weights, **how)
        assert moved.scales is None
        w8 = moe.quantize(jnp.ones((EXPERTS, HIDDEN, 16)), block=(1, None, 1), transposed=True)
        return (
            (rows.dequantize(), after.dequantize()),
            (moved.rows.values, rows.values),
            (moved.weights, moe.permute(x, plan, weights=weights).weights),
            tuple(moe.ragged_dot(each, w8, plan.group_sizes) for each in (rows, after)),
        )

    for found, wanted in pairs(*draw()):
        assert_same_bits(found, wanted)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("scale_dtype", "implementation"),
    [
        ("float32", None),
        ("float8_e8m0fnu", "interpret"),  # which kernels do not know
    ],
)
def test_between_devices(scale_dtype, implementation):
    """The same rows as of tokens that are not quantized before, to the last bit."""
    x, experts, weights = draw()
    mesh = Mesh(np.array(jax.devices()[:4]), ("e",))

    def move(x, experts, weights):
        how = {"implementation": implementation}
        quantize = functools.partial(moe.quantize, block=(1, 32), scale_dtype=scale_dtype)
        sent = moe.dispatch(quantize(x), weights, experts, EXPERTS, "e", **how)
        plain = moe.dispatch(x, weights, experts, EXPERTS, "e", **how)
        assert sent.scales is None
        back = moe.combine(sent.rows.dequantize(), sent.plan, weights=sent.weights)
        return sent.rows.dequantize(), quantize(plain.rows).dequantize(), back

    split = jax.shard_map(
        move, mesh=mesh, in_specs=PartitionSpec("e"), out_specs=PartitionSpec("e"), check_vma=False
    )
    rows, wanted, back = jax.jit(split)(x, experts, weights)
    assert_same_bits(rows, wanted)
    quantize = functools.partial(moe.quantize, block=(1, 32), scale_dtype=scale_dtype)
    whole = jax.jit(lambda x: quantize(x).dequantize())(x) * weights.sum(1)[:, None]
    np.testing.assert_allclose(back, whole, rtol=1e-5, atol=1e-6)


def test_types_between_devices():
    """Scales that kernels do not know arrive as what they were, within the rows."""

    def move(x, weights, experts):
        x8 = moe.quantize(x, block=(1, 32), scale_dtype="float8_e8m0fnu")
        sent = moe.dispatch(x8, weights, experts, EXPERTS, "e")
        return sent.rows, sent.scales

    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("e",)), PartitionSpec("e")
    split = jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x, experts, weights = draw()
    rows, scales = jax.eval_shape(split, x, weights, experts)
    assert (rows.scales.dtype, scales) == ("float8_e8m0fnu", None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block": (2, None)}, "`x` must be \\[tokens, hidden\\] with separate scales for each"),
        ({"block": (1, None), "transposed": True}, "with separate scales for each token"),
    ],
)
def test_tokens_that_share_scales(change, match):
    x, experts, _ = draw()
    plan = ready_plan(experts, EXPERTS)
    with pytest.raises(ValueError, match=match):
        moe.permute(moe.quantize(x, **change), plan)
    with pytest.raises(TypeError, match="`scales` is given, and `x` is a ScaledArray"):
        moe.permute(moe.quantize(x, block=(1, None)), plan, scales=np.ones((TOKENS, 1), np.float32))


def test_the_block_of_rows_of_one_token():
    one = moe.quantize(draw()[0][:1], block=(32, 32))
    assert moe.permute(one, ready_plan(np.array([[1, 0]]), 2)).block == (1, 32)


@pytest.mark.parametrize(
    ("part", "scales"), [("zeros", "float32"), ("global_scales", "float8_e4m3fn")]
)
def test_parts_that_do_not_move(part, scales):
    """As many rows as tokens: their shapes would not tell."""
    of = {"packed": "int4" if part == "zeros" else "float4_e2m1fn", part: jnp.ones((2, 1))}
    x = moe.ScaledArray(jnp.ones((2, 8), "uint8"), jnp.ones((2, 1), scales), (1, 16), **of)
    with pytest.raises(ValueError, match=f"`x` has `{part}`, which do not move"):
        moe.permute(x, ready_plan(np.array([[1], [0]]), 2))


@pytest.mark.slow("many programs for one rule")
def test_one_token_with_blocks_of_more():
    """Its rows have scales of their own, also where it is a device's only one."""
    x, experts, weights = (array[:2] for array in draw())

    def move(x, experts, weights):
        one = moe.quantize(x, block=(32, 32))
        sent = moe.dispatch(one, weights, experts, EXPERTS, "e")
        rows = moe.permute(one, moe.make_plan(experts, EXPERTS))
        summed = moe.combine(sent.rows.dequantize(), sent.plan, weights=None)
        return rows.dequantize(), summed, one.dequantize()

    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("e",)), PartitionSpec("e")
    split = jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    rows, summed, exact = jax.jit(split)(x, experts, weights)
    assert_same_bits(rows, np.repeat(exact, TOP_K, axis=0))
    assert_same_bits(summed, exact * TOP_K)
