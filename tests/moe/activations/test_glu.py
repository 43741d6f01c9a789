"""glu's functions of JAX, its sharded weights, and its messages; all else is in case.py."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe import bounds
from tests.moe.activations.case import Operands
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError


def draw(num_rows, width, dtype, seed=0):
    """gate_up, row weights, and a gradient of the result."""
    rng = np.random.default_rng(seed)
    shapes = [(num_rows, 2 * width), (num_rows,), (num_rows, width)]
    dtypes = map(jnp.dtype, (dtype, "float32", dtype))
    return [(rng.standard_normal(s) * 2).astype(d) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_gradients_of_small_weights_are_rounded_once(implementation):
    """A device sums over its part of the width in float32."""
    of = Operands(23, 40, dtype="bfloat16", weights="bfloat16", layout="two")
    arrays = of.draw(np.random.default_rng(1), "gradient")
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    cut, whole = (NamedSharding(mesh, spec) for spec in (P(None, "a"), P()))

    @functools.partial(jax.jit, in_shardings=(cut, cut, whole, cut))
    def run(gate, up, weights, gradient):
        op = functools.partial(moe.glu, implementation=implementation)
        return jax.vjp(op, (gate, up), weights)[1](gradient)

    (d_gate, _), d_weights = run(*arrays.values())
    assert d_gate.sharding.shard_shape(d_gate.shape) == (23, 10)
    assert d_weights.dtype == jnp.bfloat16
    wanted = of.expect(arrays, arrays["gradient"])["d_weights"]
    assert bounds.fault("d_weights", d_weights, wanted) is None


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
    out, pull = jax.vjp(jax.jit(op), gate_up, weights)
    out, d_gate_up, d_weights = map(np.asarray, (out, *pull(jnp.asarray(gradient))))
    assert not np.any(out[2:5])
    assert not np.any(d_gate_up[2:5])
    assert np.isfinite(d_weights[:5]).all()
    assert d_weights[2] != 0
    assert not np.isfinite(out[5].astype(np.float32)).all()  # its own, with a weight
    along = lambda w, by: jax.jvp(functools.partial(op, gate_up), (w,), (by,))[1]
    tangent = jax.jit(along)(weights, np.ones_like(weights))
    assert np.isfinite(np.asarray(tangent, np.float32)[:5]).all()


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
