"""glu and its derivatives, against float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.bounds import assert_rounded_once
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.activations.ops import activate_gradients
from triax.moe.activations.options import resolve
from triax.testing import assert_close, assert_same_bits, checked, poison

PATHS = ["interpret", "xla"]
CLAMPED = moe.Swiglu(alpha=1.702, limit=1.5, up_offset=1.0)
GATED = ["swiglu", "geglu", "geglu_exact", CLAMPED, moe.Swiglu(limit=0.5)]
ACTIVATIONS = [*GATED, "silu", "gelu", "gelu_exact", "relu2"]


def curve(x, name, alpha=1.0):
    """An activation and its derivative."""
    if name in ("swiglu", "silu"):
        sigmoid = 1 / (1 + np.exp(-alpha * x))
        return x * sigmoid, sigmoid + alpha * x * sigmoid * (1 - sigmoid)
    if name == "relu2":
        return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)
    if name in ("geglu_exact", "gelu_exact"):
        below = 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5))
        return x * below, below + x * np.exp(-x * x / 2) / (2 * np.pi) ** 0.5
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    d_inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    slope = (1 + np.tanh(inner)) / 2 + x / 2 * d_inner / np.cosh(inner) ** 2
    return x / 2 * (1 + np.tanh(inner)), slope


def draw(num_rows, width, dtype, seed=0):
    """gate_up, row weights, and a gradient of the result."""
    rng = np.random.default_rng(seed)
    shapes = [(num_rows, 2 * width), (num_rows,), (num_rows, width)]
    dtypes = map(jnp.dtype, (dtype, "float32", dtype))
    return [(rng.standard_normal(s) * 2).astype(d) for s, d in zip(shapes, dtypes, strict=True)]


def with_gradients(op, gradient, *args):
    """The result, and the gradients of `args`, as one program."""

    @jax.jit
    def run(gradient, *args):
        out, pull = jax.vjp(op, *args)
        return out, *pull(gradient)

    return run(gradient, *args)


def in_layout(layout, **options):
    """glu of gate and up side by side, which it gets in another layout."""

    def op(gate_up, weights):
        gate, up = jnp.split(gate_up, 2, axis=1)
        if layout == "two":
            return moe.glu((gate, up), weights, **options)
        both = jnp.stack([gate, up], axis=2).reshape(gate_up.shape)
        return moe.glu(both, weights, interleaved=True, **options)

    return op


def expected(gate_up, weights, gradient, activation):
    """The result, and the gradients of `gate_up` and `weights`."""
    gate_up, weights, gradient = (np.asarray(a, np.float64) for a in (gate_up, weights, gradient))
    weighted = weights[:, None] * gradient
    if activation not in GATED:
        active, slope = curve(gate_up, activation)
        return weights[:, None] * active, weighted * slope, np.sum(active * gradient, axis=1)
    gate, up = np.split(gate_up, 2, axis=1)
    gate_moves = up_moves = np.ones_like(gate)
    alpha, offset = 1.0, 0.0
    if isinstance(activation, moe.Swiglu):
        alpha, limit, offset = activation.alpha, activation.limit, activation.up_offset
        gate_moves, up_moves = gate <= limit, np.abs(up) <= limit
        gate, up, activation = np.minimum(gate, limit), np.clip(up, -limit, limit), "swiglu"
    active, slope = curve(gate, activation, alpha)
    up = up + offset
    return (
        weights[:, None] * active * up,
        np.concatenate([weighted * up * slope * gate_moves, weighted * active * up_moves], axis=1),
        np.sum(active * up * gradient, axis=1),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "width"), [("float32", 7, 40), ("bfloat16", 3, 1500), ("float16", 130, 1)]
)
def test_result_and_gradients(implementation, activation, dtype, num_rows, width):
    gate_up, weights, gradient = draw(num_rows, width, dtype)
    if activation not in GATED:
        gate_up = gate_up[:, :width]
    op = functools.partial(moe.glu, activation=activation, implementation=implementation)
    poison(8 * gate_up.nbytes)

    @jax.jit
    def run(gradient, *args):
        out, pull = jax.vjp(op, *args)
        return out, *pull(gradient)

    with checked():
        out, d_gate_up, d_weights = run(gradient, gate_up, weights)
    assert out.dtype == d_gate_up.dtype == dtype
    assert d_weights.dtype == jnp.float32
    wanted = expected(gate_up, weights, gradient, activation)
    assert_rounded_once(out, wanted[0])
    assert_rounded_once(d_gate_up, wanted[1])
    assert_close(d_weights, wanted[2], terms=width)
    without, d_gate_up = run(gradient, gate_up)
    wanted = expected(gate_up, np.ones(num_rows), gradient, activation)
    assert_rounded_once(without, wanted[0])
    assert_rounded_once(d_gate_up, wanted[1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("activation", ["geglu", CLAMPED], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "two"])
def test_layouts_are_the_same_bit_by_bit(implementation, activation, layout):
    gate_up, weights, gradient = draw(23, 40, "bfloat16")
    how = {"activation": activation, "implementation": implementation}

    def run(op):
        with checked():
            return with_gradients(op, gradient, gate_up, weights)

    # XLA may compile each layout another way, and zeros then have other signs.
    same = assert_same_bits if implementation == "interpret" else assert_close
    jax.tree.map(same, run(in_layout(layout, **how)), run(functools.partial(moe.glu, **how)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("activation", ["swiglu", CLAMPED, "relu2"], ids=str)
@pytest.mark.parametrize("layout", ["one", "interleaved", "two"])
def test_the_gradients_make_the_result_again(implementation, activation, layout):
    """In the memory of the operands, which are still the caller's."""
    gate_up, weights, gradient = draw(35, 40, "bfloat16")
    if activation == "relu2":
        gate_up = gate_up[:, :40]
    elif layout == "two":
        gate_up = tuple(np.split(gate_up, 2, axis=1))
    interleaved = layout == "interleaved" and activation != "relu2"
    how = {"activation": activation, "interleaved": interleaved, "implementation": implementation}
    op = functools.partial(moe.glu, **how)

    @jax.jit
    def run(gate_up, weights, gradient):
        gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
        found, again = activate_gradients(
            *(gate, up, weights, resolve(activation, interleaved), gradient),
            again=True,
            implementation=implementation,
        )
        out, pull = jax.vjp(op, gate_up, weights)
        return (again, found, (gate_up, gradient)), (out, *pull(gradient))

    with checked():
        (again, found, kept), (out, d_gate_up, d_weights) = run(gate_up, weights, gradient)
    same = assert_same_bits if implementation == "interpret" else assert_close
    same(again, out)
    jax.tree.map(assert_same_bits, kept, (gate_up, gradient))
    same(found["row_weights"], d_weights)
    both = found["gate_up"] if found["up"] is None else (found["gate_up"], found["up"])
    jax.tree.map(same, both, d_gate_up)


@pytest.mark.parametrize("implementation", PATHS)
def test_gradients_of_small_weights_are_rounded_once(implementation):
    """A device sums over its part of the width in float32."""
    gate_up, weights, gradient = draw(23, 40, "bfloat16")
    weights = weights.astype(jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    cut, whole = (NamedSharding(mesh, spec) for spec in (P(None, "a"), P()))
    args = *np.split(gate_up, 2, axis=1), weights, gradient

    @functools.partial(jax.jit, in_shardings=(cut, cut, whole, cut))
    def run(gate, up, weights, gradient):
        op = functools.partial(moe.glu, implementation=implementation)
        return jax.vjp(op, (gate, up), weights)[1](gradient)

    (d_gate, _), d_weights = run(*args)
    assert d_gate.sharding.shard_shape(d_gate.shape) == (23, 10)
    assert d_weights.dtype == jnp.bfloat16
    assert_rounded_once(d_weights, expected(gate_up, weights, gradient, "swiglu")[2], terms=40)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"alpha": jnp.float32(1)}, ArgumentTypeError, "`alpha` of Swiglu must be a Python number"),
        ({"limit": "7"}, ArgumentTypeError, "`limit` of Swiglu must be a Python number; got"),
        ({"limit": -1.0}, ArgumentValueError, "`limit` of Swiglu must be positive and finite"),
        ({"up_offset": math.inf}, ArgumentValueError, "`up_offset` of Swiglu must be finite"),
    ],
)
def test_numbers_of_swiglu(options, error, match):
    with pytest.raises(error, match=match):
        moe.Swiglu(**options)


@pytest.mark.parametrize("implementation", PATHS)
def test_limits(implementation):
    """What is at the limit moves, what is beyond does not, and a NaN stays one."""
    gate = np.float32([[2.0, 2.5, np.nan, -9.0, np.inf, 1.0, 1.0, 1.0]])
    up = np.float32([[1.0, 1.0, 1.0, 1.0, 1.0, 2.0, -3.0, np.nan]])
    how = {"activation": moe.Swiglu(alpha=1.5, limit=2.0), "implementation": implementation}
    op = lambda *both: moe.glu(both, **how)
    out, *gradients = with_gradients(op, np.ones_like(gate), gate, up)
    active, slope = curve(np.minimum(gate, 2).astype(np.float64), "silu", 1.5)
    np.testing.assert_allclose(out, active * np.clip(up, -2, 2), rtol=1e-6)
    d_gate, d_up = (np.asarray(d)[0] for d in gradients)
    assert (d_gate[:2] != 0).tolist() == [True, False]
    np.testing.assert_allclose(d_gate[[0, 5]], (slope * up)[0, [0, 5]], rtol=1e-5)
    assert d_gate[4] == 0
    assert d_up[6] == 0
    assert d_up[5] != 0
    assert np.isnan(d_gate[[2, 7]]).all()
    assert np.isnan(d_up[2])


def test_functions_of_jax_and_what_they_close_over():
    gate_up, weights, gradient = draw(9, 20, "float32")
    steep = np.linspace(0.5, 2, 20, dtype=np.float32)

    def loss(gate_up, weights, steep):
        function = lambda gate, up: jnp.tanh(steep * gate) * up
        return jnp.sum(moe.glu(gate_up, weights, activation=function) * gradient)

    def plain(gate_up, weights, steep):
        gate, up = jnp.split(gate_up, 2, axis=1)
        return jnp.sum(jnp.tanh(steep * gate) * up * weights[:, None] * gradient)

    found, wanted = (
        jax.jit(jax.grad(f, (0, 1, 2)))(gate_up, weights, steep) for f in (loss, plain)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)
    one = gate_up[:, :20].astype(jnp.bfloat16)
    out = jax.jit(functools.partial(moe.glu, activation=jnp.cos))(one)
    assert_rounded_once(out, np.cos(one.astype(np.float64)))


@pytest.mark.slow("many programs for one rule")
def test_functions_of_interleaved_columns_have_all_derivatives():
    """Pairs of 16 bits are stored by their bits, of which JAX takes the derivative for zero."""
    gate_up, weights, gradient = map(jnp.asarray, draw(6, 10, "bfloat16"))
    apart = lambda both: jnp.concatenate([both[:, ::2], both[:, 1::2]], axis=1)

    def run(gate_up, weights, **how):
        loss = lambda x, w: jnp.sum((op(x, w) * gradient).astype("float32") ** 3)
        op = functools.partial(moe.glu, activation=lambda gate, up: jnp.sin(gate) * up, **how)
        slope = jax.grad(loss, (0, 1))
        steep = jax.grad(lambda x: jnp.sum(slope(x, weights)[0].astype("float32") ** 2))
        each = jax.vmap(slope, (0, None))(jnp.stack([gate_up, -gate_up]), weights)
        return loss(gate_up, weights), *slope(gate_up, weights), steep(gate_up), each

    found = run(gate_up, weights, interleaved=True)
    wanted = run(apart(gate_up), weights)
    found_leaves, wanted_leaves = jax.tree.leaves(found), jax.tree.leaves(wanted)
    for a, b in zip(found_leaves, wanted_leaves, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.any(b)
        if a.shape[-1:] == (20,):
            a = np.concatenate([a[..., ::2], a[..., 1::2]], axis=-1)
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * np.abs(b).max())


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("spec", [P("a"), P("b", "a"), P(None, "a"), P()], ids=str)
def test_functions_of_rows_and_weights_that_explicit_axes_cut_otherwise(spec):
    gate_up, weights, _ = draw(8, 16, "float32")
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    function = lambda gate, up: jax.nn.softmax(gate, axis=1) * up

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(both, weights):
        return jnp.sum(moe.glu(both, weights, activation=function))

    wanted = jax.jit(gradients)((gate_up, gate_up), weights)
    with jax.set_mesh(mesh):
        half = jax.device_put(gate_up, NamedSharding(mesh, spec))
        cut = jax.device_put(weights, NamedSharding(mesh, P("b")))
        found = jax.jit(gradients)((half, half), cut)
    assert [jax.typeof(x).sharding.spec for x in jax.tree.leaves(found)[:2]] == [
        P(*spec, *[None] * (2 - len(spec)))
    ] * 2
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_functions_of_rows_without_a_weight(interleaved):
    """A weight of zero has a gradient; pad rows, which are zeros too, have none that is not."""
    gate_up, weights, gradient = draw(6, 10, "bfloat16")
    gate_up[3:5] = weights[2:5] = 0
    gate_up[2, 4:8] = gate_up[5, [1, 10]] = 0
    how = {"activation": lambda gate, up: jnp.sqrt(jnp.abs(gate)) + up + 1 / up}
    op = functools.partial(moe.glu, interleaved=interleaved, **how)
    out, d_gate_up, d_weights = map(np.asarray, with_gradients(op, gradient, gate_up, weights))
    assert not np.any(out[2:5])
    assert not np.any(d_gate_up[2:5])
    assert np.isfinite(d_weights[:5]).all()
    assert d_weights[2] != 0
    assert not np.isfinite(out[5].astype(np.float32)).all()  # its own, with a weight
    along = lambda w, by: jax.jvp(functools.partial(op, gate_up), (w,), (by,))[1]
    tangent = jax.jit(along)(weights, np.ones_like(weights))
    assert np.isfinite(np.asarray(tangent, np.float32)[:5]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_second_derivatives_forward_mode_and_vmap(implementation, activation):
    gate_up, weights, _ = draw(6, 10, "float32")
    op = functools.partial(moe.glu, activation=activation, implementation=implementation)
    act = jax.nn.silu if activation == "swiglu" else jax.nn.gelu

    def plain(x, w):
        return act(x[:, :10]) * x[:, 10:] * w[:, None]

    def run(op):
        loss = lambda x, w: jnp.sum(op(x, w) ** 3)
        sharpness = lambda x, w: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))
        return jax.jit(
            lambda gate_up, weights, stacked: (
                jax.grad(sharpness, (0, 1))(gate_up, weights),
                jax.jvp(op, (gate_up, weights), (gate_up + 1, weights - 1)),
                jax.vmap(jax.grad(loss), (0, None))(stacked, weights),
            )
        )(gate_up, weights, np.stack([gate_up, -gate_up]))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(op), run(plain)
    )


@pytest.mark.parametrize("implementation", PATHS)
def test_rows_of_zeros_stay_zero(implementation):
    """As those past the groups are: neither they nor their gradients are anything else."""
    gate_up, weights, gradient = draw(9, 20, "bfloat16")
    gate_up[5:] = weights[5:] = 0
    op = functools.partial(moe.glu, implementation=implementation)
    for rows in with_gradients(op, gradient, gate_up, weights):
        assert not np.any(np.asarray(rows)[5:])


@pytest.mark.parametrize("implementation", [None, *PATHS])
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_nothing_to_do(implementation, shape):
    half = shape[0], shape[1] // 2
    ones = (np.ones(of, np.float32) for of in (half, shape))
    out, pulled = with_gradients(functools.partial(moe.glu, implementation=implementation), *ones)
    assert (out.shape, pulled.shape) == (half, shape)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_nothing_for_a_function_of_interleaved_columns(shape):
    op = functools.partial(moe.glu, activation=lambda gate, up: gate * up, interleaved=True)
    half = shape[0], shape[1] // 2
    out, pulled = with_gradients(op, *(np.ones(of, jnp.bfloat16) for of in (half, shape)))
    assert (out.shape, pulled.shape) == (half, shape)


def test_float64_takes_plain_jax():
    with jax.enable_x64(True):
        gate_up = jnp.ones((2, 4), jnp.float64)
        assert moe.glu(gate_up).dtype == jnp.float64
        with pytest.raises(ArgumentTypeError, match="`gate_up` must be a float of at most 32 bits"):
            moe.glu(gate_up, implementation="interpret")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gate_up": [1.0]}, ArgumentTypeError, r"`gate_up` must be an array of shape \[rows, 2"),
        ({"gate_up": jnp.ones((3, 4), int)}, ArgumentTypeError, "`gate_up` must have a floating"),
        (
            {"gate_up": jnp.ones((3, 5))},
            ArgumentValueError,
            r"even number of columns.*got .*\(3, 5",
        ),
        (
            {"gate_up": jnp.ones((3, 4), jnp.float8_e5m2)},
            ArgumentTypeError,
            "`gate_up` must be a float of 16 bits or more; got float8_e5m2",
        ),
        (
            {"row_weights": jnp.ones(4)},
            ArgumentValueError,
            r"`row_weights` must have shape \(3,\) to go with `gate_up`; got \(4,\)",
        ),
        (
            {"row_weights": jnp.ones(3, jnp.float8_e5m2)},
            ArgumentTypeError,
            "`row_weights` must be a float of 16 bits or more; got float8_e5m2",
        ),
        ({"activation": "relu"}, ArgumentValueError, "`activation` must be one of 'swiglu', 'geg"),
        ({"implementation": "cuda"}, ArgumentValueError, "`implementation` must be one of"),
    ],
)
def test_what_is_wrong_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        moe.glu(**{"gate_up": jnp.ones((3, 4))} | changes)
