"""glu on a GPU, at models' widths and others, and the same in every run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.moe.activations.test_glu import ACTIVATIONS, CLAMPED, GATED, draw, expected, in_layout
from tests.moe.activations.test_quantized_glu import both
from triax import moe
from triax.testing import assert_close, assert_same_bits, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_rows", "width"), [(1000, 2048), (333, 1536), (65, 14336), (9, 77)])
def test_result_and_gradients(activation, dtype, num_rows, width):
    gate_up, weights, gradient = draw(num_rows, width, dtype)
    if activation not in GATED:
        gate_up = gate_up[:, :width]
    op = functools.partial(moe.glu, activation=activation, implementation="triton")

    @jax.jit
    def run(gate_up, weights, gradient):
        out, pull = jax.vjp(op, gate_up, weights)
        return out, *pull(gradient)

    poison(8 * gate_up.nbytes)
    results = run(gate_up, weights, gradient)
    wanted = expected(gate_up, weights, gradient, activation)
    for actual, want, terms in zip(results, wanted, (1, 1, width), strict=True):
        assert_close(actual, want, terms=terms)
    for _ in range(5):
        jax.tree.map(assert_same_bits, run(gate_up, weights, gradient), results)


@pytest.mark.parametrize("layout", ["interleaved", "two"])
def test_layouts(layout):
    gate_up, weights, gradient = draw(1000, 2880, "bfloat16")
    how = {"activation": CLAMPED, "implementation": "triton"}

    def run(op):
        out, pull = jax.jit(functools.partial(jax.vjp, op))(gate_up, weights)
        return out, *jax.jit(pull)(jnp.asarray(gradient))

    *moved, d_weights = run(in_layout(layout, **how))
    *wanted, expected_d_weights = run(functools.partial(moe.glu, **how))
    jax.tree.map(assert_same_bits, moved, wanted)
    assert_close(d_weights, expected_d_weights, terms=2880)  # other blocks, another order


@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), [(1000, 2048), (65, 14336), (333, 77), (9, 4096)])
def test_in_8_bits(num_rows, width, special, to):
    """The bits that quantize makes of its result."""
    gate_up, weights, _ = draw(num_rows, width, "bfloat16")
    if special:
        gate_up[3, 5], gate_up[5, width] = jnp.nan, jnp.inf
    poison(8 * gate_up.nbytes)
    found, wanted = jax.jit(functools.partial(both, to=to, implementation="triton"))(
        jnp.asarray(gate_up), jnp.asarray(weights)
    )
    jax.tree.map(assert_same_bits, found, wanted)
