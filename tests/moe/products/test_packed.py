"""ragged_dot of weights in 4 bits, and of MX formats, against float64 of the quantized numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.products import oracle
from tests.moe.products.test_ragged_dot import PATHS
from tests.moe.quantization.oracle import E8M0, exactly, nvfp4
from triax import moe
from triax.errors import DifferentiationError
from triax.testing import assert_close, assert_same_bits, checked

SIZES = np.array([20, 0, 37, -3, 30], np.int32)
ROWS, DEPTH, COLUMNS = 96, 304, 24  # blocks of 32, 64 and 128 are partial


def weights_of(dtype, block, transposed=True, scale_dtype="float32", zeros=None):
    rng = np.random.default_rng(1)
    array = rng.standard_normal((len(SIZES), DEPTH, COLUMNS), np.float32)
    array *= np.exp(rng.standard_normal((len(SIZES), DEPTH, COLUMNS), np.float32))
    found = moe.quantize(array, dtype, block=block, transposed=transposed, scale_dtype=scale_dtype)
    if zeros is None:
        return found
    zeros = rng.integers(-8, 9, found.scales.shape).astype(zeros)
    return moe.ScaledArray(**vars(found) | {"zeros": zeros})


WAYS = {
    "mxfp4": lambda: weights_of("float4_e2m1fn", (1, 32, 1), scale_dtype=E8M0),
    "nvfp4": lambda: nvfp4((len(SIZES), DEPTH, COLUMNS)),
    "e2m1": lambda: weights_of("float4_e2m1fn", (1, 64, 1)),
    "int4, groups of 128": lambda: weights_of("int4", (1, 128, 1), zeros=np.int8),
    "int4, groups of 32": lambda: weights_of("int4", (1, 32, 1), zeros=np.float32),
    "int4, columns": lambda: weights_of("int4", (1, None, 1)),
    "int4, experts": lambda: weights_of("int4", (1, None, None), False),
    "int4, columns innermost": lambda: weights_of("int4", (1, 100, 7), False, zeros=np.int8),
    "mxfp8": lambda: weights_of("float8_e4m3fn", (1, 32, 1), scale_dtype=E8M0),
}


@functools.cache
def weights_in(way):
    return WAYS[way]()


def drawn(dtype="bfloat16"):
    rng = np.random.default_rng(7)
    rows, gradient = (
        rng.standard_normal((ROWS, n), np.float32).astype(dtype) for n in (DEPTH, COLUMNS)
    )
    rows[-5:] = gradient[-5:] = np.nan
    return rows, gradient


@pytest.mark.sampled(2, 6)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_equals_float64(implementation, dtype, way):
    """With the rows' gradient, a bias and its gradient."""
    weights = weights_in(way)
    rows, gradient = drawn(dtype)
    bias = np.ones((len(SIZES), COLUMNS), np.float32)

    @jax.jit
    def run(rows, weights, bias, gradient):
        how = {"implementation": implementation}
        op = lambda rows, bias: moe.ragged_dot(rows, weights, SIZES, bias=bias, **how)
        out, pull = jax.vjp(op, rows, bias)
        return out, *pull(gradient)

    with checked():
        out, d_rows, d_bias = run(rows, weights, bias, gradient)
    assert out.dtype == d_rows.dtype == dtype
    # Values times scales are rounded to the rows' dtype.
    exact = exactly(weights).astype(np.float32).astype(dtype)
    wanted = oracle.ragged_dot(rows, exact, SIZES)
    wanted[:87] += 1
    assert_close(out, wanted, terms=DEPTH)
    assert not np.any(out[87:])
    back = oracle.ragged_dot(gradient, np.swapaxes(exact, 1, 2), SIZES)
    assert_close(d_rows, back, terms=COLUMNS)
    sums = [gradient[span].astype(np.float64).sum(0) for span in oracle.spans(SIZES, ROWS)]
    assert_close(d_bias, np.stack(sums), terms=ROWS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
def test_rows_and_weights_of_mxfp8(implementation):
    weights = weights_in("mxfp8")
    rows = moe.quantize(jnp.asarray(drawn("float32")[0][:87]), block=(1, 32), scale_dtype=E8M0)
    rows = jax.tree.map(lambda a: jnp.pad(a, ((0, 9), (0, 0))), rows)
    how = {"implementation": implementation, "preferred_element_type": "float32"}
    out = moe.ragged_dot(rows, weights, SIZES, **how)
    assert_close(out, oracle.ragged_dot(exactly(rows), exactly(weights), SIZES), terms=DEPTH)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, columns innermost"])
@pytest.mark.parametrize("transposed", [False, True])
def test_as_an_array_of_the_rows_dtype(way, transposed):
    """Bit for bit: of some of the groups, in another dtype, in forward mode, under vmap."""
    weights, (rows, gradient) = weights_in(way), drawn()
    if transposed:
        rows, gradient = gradient, rows
    how = {"group_offset": 2, "preferred_element_type": "float32", "transpose_weights": transposed}
    sizes = jnp.array([4, 3, *SIZES, 8])

    def both(weights):
        op = lambda rows: moe.ragged_dot(rows, weights, sizes, **how)
        many = jax.vmap(op)(jnp.stack([rows, rows + 1]))
        return jax.jvp(op, (rows,), (rows,)), many

    jax.tree.map(assert_same_bits, both(weights), both(weights.dequantize("bfloat16")))


@functools.cache
def tiles():
    array = np.random.default_rng(1).standard_normal((len(SIZES), 256, 256), np.float32)
    return moe.quantize(array, "int4", block=(1, 64, 1), transposed=True).tile()


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, None, "a"), "apart", None])
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, groups of 128", "tiles"])
def test_over_devices(way, kind, spec):
    """Weights that are cut over devices in any way, or the rows; with the rows' gradient."""
    weights, (rows, _) = tiles() if way == "tiles" else weights_in(way), drawn()
    weights, sizes = jax.tree.map(lambda a: a[:4], weights), jnp.array(SIZES[:4])
    rows = rows[:, : weights.shape[1]]

    @jax.jit
    def run(rows, weights):
        out, pull = jax.vjp(lambda rows: moe.ragged_dot(rows, weights, sizes), rows)
        return out, *pull(out)

    plain = run(rows, weights)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,), devices=jax.devices()[:4])

    def put(array, spec=spec):
        if spec == "apart":  # values one way, and what goes with them another
            spec = P("a") if array.dtype in ("uint8", "int32") else P(None, "a")
        fits = all(name is None or array.shape[i] % 4 == 0 for i, name in enumerate(spec))
        return jax.device_put(array, NamedSharding(mesh, spec if fits else P()))

    with jax.set_mesh(mesh):
        if spec is None:
            rows = jax.device_put(rows, NamedSharding(mesh, P("a")))
        else:
            weights = jax.tree.map(put, weights)
        found = run(rows, weights)
    for one, wanted in zip(found, plain, strict=True):
        assert_close(np.asarray(one), np.asarray(wanted, np.float64), terms=DEPTH)


def test_the_packed_weights_are_what_is_kept_for_the_gradient():
    weights, (rows, _) = weights_in("mxfp4"), drawn()
    _, pull = jax.vjp(lambda rows: moe.ragged_dot(rows, weights, SIZES), rows)
    kept = sum(a.nbytes for a in jax.tree.leaves(pull))
    assert weights.values.nbytes < kept < 1.1 * weights.values.nbytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["mxfp4", "nvfp4", "int4, groups of 32"])
def test_no_derivative_by_weights(way):
    weights, (rows, _) = weights_in(way), drawn()
    for part in ("scales", "zeros", "global_scales"):
        if getattr(weights, part) is None:
            continue

        def loss(array, part=part):
            given = moe.ScaledArray(**vars(weights) | {part: array})
            return jnp.sum(moe.ragged_dot(rows, given, SIZES).astype("float32"))

        with pytest.raises(DifferentiationError, match=f"by numbers of {weights.packed}"):
            jax.grad(loss)(getattr(weights, part))


@pytest.mark.parametrize("sizes", [(5, 0, 4, 8), (0, 4, 4, 8), (5, 4, 4, 0), (5, 4, 0, 8)])
def test_nothing_to_multiply(sizes):
    num_rows, depth, groups, columns = sizes
    values, scales = (groups, columns, depth // 2), (groups, columns, -(-depth // 32))
    weights = moe.ScaledArray(
        jnp.zeros(values, jnp.uint8), jnp.ones(scales), (1, 32, 1), True, "int4"
    )
    out = moe.ragged_dot(jnp.ones((num_rows, depth)), weights, np.ones(groups, np.int32))
    np.testing.assert_array_equal(out, np.zeros((num_rows, columns)))


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
