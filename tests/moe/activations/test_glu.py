"""glu and its derivatives, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.oracle import assert_rounded_once
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.testing import assert_close, checked, poison

PATHS = ["interpret", "xla"]
ACTIVATIONS = ["swiglu", "geglu"]


def draw(num_rows, width, dtype, seed=0):
    """gate_up, row weights, and a gradient of the result."""
    rng = np.random.default_rng(seed)
    shapes = [(num_rows, 2 * width), (num_rows,), (num_rows, width)]
    dtypes = map(jnp.dtype, (dtype, "float32", dtype))
    return [(rng.standard_normal(s) * 2).astype(d) for s, d in zip(shapes, dtypes, strict=True)]


def expected(gate_up, weights, gradient, activation):
    """The result, and the gradients of `gate_up` and `weights`."""
    gate_up, weights, gradient = (np.asarray(a, np.float64) for a in (gate_up, weights, gradient))
    gate, up = np.split(gate_up, 2, axis=1)
    if activation == "swiglu":
        sigmoid = 1 / (1 + np.exp(-gate))
        active, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    else:
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        d_inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * gate**2)
        active = gate / 2 * (1 + np.tanh(inner))
        slope = (1 + np.tanh(inner)) / 2 + gate / 2 * d_inner / np.cosh(inner) ** 2
    weighted = weights[:, None] * gradient
    return (
        weights[:, None] * active * up,
        np.concatenate([weighted * up * slope, weighted * active], axis=1),
        np.sum(active * up * gradient, axis=1),
    )


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "width"), [("float32", 7, 40), ("bfloat16", 3, 1500), ("float16", 130, 1)]
)
def test_result_and_gradients(implementation, activation, dtype, num_rows, width):
    gate_up, weights, gradient = draw(num_rows, width, dtype)
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


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
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
    out, pull = jax.vjp(op, gate_up, weights)
    for rows in (out, *pull(jax.device_put(gradient))):
        assert not np.any(np.asarray(rows)[5:])


@pytest.mark.parametrize("implementation", [None, *PATHS])
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_nothing_to_do(implementation, shape):
    out, pull = jax.vjp(functools.partial(moe.glu, implementation=implementation), jnp.ones(shape))
    assert out.shape == (shape[0], shape[1] // 2)
    assert pull(out)[0].shape == shape


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
            r"`row_weights` must have one weight for each of the 3 rows .*; got shape \(4,\)",
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
