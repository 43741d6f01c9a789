"""Products of weights in 4 bits: what is kept for gradients, layers, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.moe.quantization.oracle import nvfp4
from triax import moe
from triax.errors import DifferentiationError
from triax.testing import assert_same_bits

SIZES = np.array([20, 0, 37, -3, 30], np.int32)
ROWS, DEPTH, COLUMNS = 96, 304, 24
# The dtype, the depth that shares a scale, the dtype of scales, and whether there are zeros.
WAYS = {
    "mxfp4": ("float4_e2m1fn", 32, "float8_e8m0fnu", False),
    "int4, groups of 32": ("int4", 32, "float32", True),
}


def weights_in(way):
    if way == "nvfp4":
        return nvfp4((len(SIZES), DEPTH, COLUMNS))
    dtype, deep, scale_dtype, has_zeros = WAYS[way]
    array = np.random.default_rng(1).standard_normal((len(SIZES), DEPTH, COLUMNS), np.float32)
    how = {"block": (1, deep, 1), "transposed": True, "scale_dtype": scale_dtype}
    found = moe.quantize(array, dtype, **how)
    zeros = np.ones(found.scales.shape, np.float32) if has_zeros else None
    return moe.ScaledArray(**vars(found) | {"zeros": zeros})


def rows():
    drawn = np.random.default_rng(7).standard_normal((ROWS, DEPTH), np.float32)
    return drawn.astype("bfloat16")


def test_the_packed_weights_are_what_is_kept_for_the_gradient():
    weights = weights_in("mxfp4")
    _, pull = jax.vjp(lambda rows: moe.ragged_dot(rows, weights, SIZES), rows())
    kept = sum(a.nbytes for a in jax.tree.leaves(pull))
    assert weights.values.nbytes < kept < 1.1 * weights.values.nbytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*WAYS, "nvfp4"])
def test_no_derivative_by_weights(way):
    weights = weights_in(way)
    for part in ("scales", "zeros", "global_scales"):
        if getattr(weights, part) is None:
            continue

        def loss(array, part=part):
            given = moe.ScaledArray(**vars(weights) | {part: array})
            return jnp.sum(moe.ragged_dot(rows(), given, SIZES).astype("float32"))

        with pytest.raises(DifferentiationError, match=f"by numbers of {weights.packed}"):
            jax.grad(loss)(getattr(weights, part))


@pytest.mark.slow("its parts have tests of their own")
def test_a_layer():
    """And the tokens' gradient: as of the arrays that the weights stand for."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    x, logits = normal(12, 64), normal(12, 4)
    gate_up = moe.from_mxfp4(
        rng.integers(0, 256, (4, 48, 2, 16), np.uint8), rng.integers(120, 126, (4, 48, 2), np.uint8)
    )
    down = moe.quantize(normal(4, 24, 64), "int4", block=(1, 16, 1), transposed=True)

    def run(gate_up, down):
        experts = moe.Experts(gate_up, down, interleaved=True)
        layer = lambda x: moe.feed_forward(x, logits, experts, moe.Router(2)).tokens
        out, pull = jax.vjp(layer, x)
        return out, *pull(out)

    plain = run(gate_up.dequantize("bfloat16"), down.dequantize("bfloat16"))
    jax.tree.map(assert_same_bits, run(gate_up, down), plain)


MISTAKES = {
    "rows of 4 bits": (
        lambda: (moe.quantize(ones(), "int4", block=(1, None)), weights_in("mxfp4")),
        "`rows` must be in 8 bits or more; got a ScaledArray of int4",
    ),
    "rows of 8 bits": (
        lambda: (moe.quantize(ones(), block=(1, None)), weights_in("mxfp4")),
        "`rows` must be floats of 16 bits or more to go .* of float4_e2m1fn weights; got float8",
    ),
    "rows of integers": (
        lambda: (ones(dtype="int32"), weights_in("mxfp4")),
        "`rows` must be floats of 16 bits or more",
    ),
    "another depth": (
        lambda: (ones(DEPTH // 2), weights_in("mxfp4")),
        rf"`weights` must have the depth of `rows`, 152, .* got shape \(5, {DEPTH}, 24\)",
    ),
    "groups share scales": (
        lambda: (ones(), moe.quantize(np.ones((5, DEPTH, 8), "f"), "int4", block=(2, 32, 1))),
        r"`weights` must have scales of blocks \(1, any, any\)",
    ),
    "a checkpoint's blocks": (
        lambda: (ones(96), np.zeros((5, 24, 3, 16), np.uint8)),
        r"`weights` must be weights, or .* uint8 .* `moe.from_mxfp4\(blocks, scales\)`",
    ),
}


def ones(depth=DEPTH, dtype="float32"):
    return np.ones((ROWS, depth), dtype)


@pytest.mark.parametrize(("operands", "match"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(operands, match):
    rows, weights = operands()
    with pytest.raises((TypeError, ValueError), match=match):
        moe.ragged_dot(rows, weights, SIZES)


def test_a_checkpoints_blocks_in_a_layer():
    down = jnp.ones((4, 12, 96))
    with pytest.raises(TypeError, match=r"`w_gate_up` .*moe.from_mxfp4"):
        moe.Experts(np.zeros((4, 24, 3, 16), np.uint8), down)
    with pytest.raises(TypeError, match=r"`w_down` .*moe.from_mxfp4"):
        moe.Experts(down, np.zeros((4, 96, 1, 16), np.uint8))
    with pytest.raises(TypeError, match=r"`w_down` .* `moe.ScaledArray\(…, packed=…\)`"):
        moe.Experts(down, np.zeros((4, 96, 6), np.uint8))


@pytest.mark.slow("the ops' sharding has tests of its own")
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_layer_with_its_experts_on_several_devices():
    rng = np.random.default_rng(0)
    x, logits, *weights = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((16, 64), (16, 8), (8, 64, 48), (8, 24, 64))
    )
    how = {"block": (1, 24, 1), "transposed": True}
    weights = [moe.quantize(w, "int4", **how) for w in weights]
    args = x, logits, moe.Experts(*weights)
    layer = lambda *args, **how: moe.feed_forward(*args, moe.Router(2), **how).tokens
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spread = jax.shard_map(
        lambda *args: layer(*args, axis_name="e"), mesh=mesh, in_specs=P("e"), out_specs=P("e")
    )
    np.testing.assert_allclose(jax.jit(spread)(*args), layer(*args), rtol=1e-4, atol=1e-4)
