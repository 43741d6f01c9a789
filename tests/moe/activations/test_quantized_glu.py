"""glu in 8 bits: the bits that quantize makes of its result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe.activations.test_glu import CLAMPED, GATED, PATHS, draw
from triax import moe
from triax.errors import DifferentiationError
from triax.moe.activations.ops import activate_quantized
from triax.moe.activations.options import resolve
from triax.moe.shared import target
from triax.testing import assert_same_bits, checked, poison

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def quantized_glu(gate_up, weights, dtype, *, activation, interleaved, implementation):
    gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    kind = resolve(activation, interleaved)
    return activate_quantized(gate, up, weights, kind, dtype, implementation=implementation)


def both(gate_up, weights, to=E4M3, *, activation="swiglu", interleaved=False, implementation=None):
    """In one op, and in two."""
    kind = {"activation": activation, "interleaved": interleaved, "implementation": implementation}
    out = moe.glu(gate_up, weights, **kind)
    apart = moe.quantize(out, to, block=(1, None), implementation=implementation)
    return quantized_glu(gate_up, weights, to, **kind), apart


def run_both(gate_up, weights, to=E4M3, *, implementation=None, **kind):
    """As `both`, with glu as a program of its own: one might leave out a rounding between two."""
    kind["implementation"] = implementation
    out = jax.jit(functools.partial(moe.glu, **kind))(gate_up, weights)
    quantize = functools.partial(
        moe.quantize, dtype=to, block=(1, None), implementation=implementation
    )
    kind = {"activation": "swiglu", "interleaved": False} | kind
    fused = functools.partial(quantized_glu, dtype=to, **kind)
    return jax.jit(lambda *given: (fused(*given), quantize(out)))(gate_up, weights)


def assert_same(found, wanted):
    assert found.block == wanted.block
    jax.tree.map(assert_same_bits, found, wanted)


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    ("activation", "layout", "shape", "dtype", "to"),
    [
        ("swiglu", "side by side", (37, 96), "bfloat16", E4M3),
        ("swiglu", "two", (5, 2100), "bfloat16", E5M2),
        (CLAMPED, "interleaved", (33, 45), "float32", E4M3),
        ("geglu_exact", "two", (9, 33), "float16", E4M3),
        ("relu2", "", (70, 17), "bfloat16", E5M2),
        ("silu", "", (1, 1), "float32", E4M3),
    ],
    ids=str,
)
def test_bits(activation, layout, shape, dtype, to, implementation):
    gate_up, weights, _ = draw(*shape, dtype)
    weights[0] = 0  # a row of zeros
    if activation not in GATED:
        gate_up = gate_up[:, : shape[1]]
    elif layout == "two":
        gate_up = tuple(np.split(gate_up, 2, axis=1))
    poison(8 * shape[0] * shape[1])
    with checked():
        found, wanted = run_both(
            gate_up,
            weights,
            to,
            activation=activation,
            interleaved=layout == "interleaved",
            implementation=implementation,
        )
    assert_same(found, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("to", [E4M3, E5M2])
def test_what_is_no_number_stays_in_its_row(implementation, to):
    gate_up, *_ = draw(6, 40, "bfloat16")
    gate_up[1, 3] = np.nan
    gate_up[2, 41] = np.inf
    gate_up[4] *= 1e30
    found, wanted = run_both(gate_up, None, to, implementation=implementation)
    assert_same(found, wanted)
    numbers = np.asarray(found.values, np.float32) * np.asarray(found.scales)
    assert np.isnan(numbers[1, 3])
    assert np.isfinite(numbers[[0, 3, 5]]).all()
    assert np.isfinite(np.delete(numbers[2], 1)).all()


def test_functions_and_no_rows():
    gate_up, weights, _ = draw(6, 40, "float32")
    assert_same(*run_both(gate_up, weights, activation=lambda gate, up: gate * up))
    assert_same(*run_both(np.zeros((0, 40), np.float32), np.zeros(0, np.float32)))


def test_gpus_that_do_not_round_to_8_bits(monkeypatch):
    gate_up, weights, _ = draw(6, 40, "bfloat16")
    old = target.Target(80, 3, False)
    monkeypatch.setattr(target, "INTERPRETER", old)
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    run = jax.jit(lambda *given: both(*given)[0])
    text = run.trace(jnp.asarray(gate_up), weights).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in text


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_are_cut(kind):
    gate_up, weights, _ = draw(8, 40, "bfloat16")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
        found, wanted = jax.jit(both)(put(gate_up), put(weights))
    assert_same(*jax.tree.map(np.asarray, (found, wanted)))
    assert_same(jax.tree.map(np.asarray, found), run_both(gate_up, weights)[1])


def test_no_derivative():
    gate_up, *_ = draw(6, 40, "float32")
    kind = {"activation": "swiglu", "interleaved": False, "implementation": None}

    def loss(gate_up):
        return jnp.sum(quantized_glu(gate_up, None, E4M3, **kind).scales)

    with pytest.raises(DifferentiationError, match="8 bits has no derivative"):
        jax.grad(loss)(jnp.asarray(gate_up))
