"""`for_target`: code that is written once the GPU is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import devices, moe
from triax.compat import jax_private
from triax.errors import ArgumentValueError, DifferentiationError
from triax.moe.shared.target import INTERPRETER, for_target


def scale(target, x, pair, *, implementation):
    """Multiplies by the compute capability, and says what it was written for."""
    TARGETS.append(target)
    return {"scaled": x * target.compute_capability, "sum": pair[0] + pair[1]}


TARGETS = []


def call(x):
    out_type = {"scaled": x, "sum": x}
    return for_target(scale, x, (x, x + 1), out_type=out_type, implementation=None)


@pytest.mark.parametrize("jit", [False, True])
def test_operands_and_results_are_trees(jit):
    x = jnp.arange(3.0)
    out = (jax.jit(call) if jit else call)(x)
    np.testing.assert_array_equal(out["scaled"], x * INTERPRETER.compute_capability)
    np.testing.assert_array_equal(out["sum"], 2 * x + 1)


def test_vmap_is_the_loop():
    x = jnp.arange(6.0).reshape(2, 3)
    out = jax.vmap(call, in_axes=1, out_axes=1)(x)
    np.testing.assert_array_equal(out["sum"], 2 * x + 1)


def test_equal_code_is_written_once():
    x = jnp.ones(5)
    TARGETS.clear()
    call(x)
    call(x)
    assert len(TARGETS) == 1


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("arch", "multiprocessors"), [(80, 108), (90, 132), (100, 148)])
def test_target_is_the_gpu_lowered_for(monkeypatch, arch, multiprocessors):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    TARGETS.clear()
    traced = jax.jit(lambda x: call(x)).trace(jax.ShapeDtypeStruct((3,), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (target,) = TARGETS
    assert (target.compute_capability, target.multiprocessors) == (arch, multiprocessors)
    assert target.tensor_maps == (arch >= 90 and jax_private.supports_tensor_maps())
    assert f"{arch:.6e}".replace("e+0", "E+0").split("E")[0] in text


def test_a_derivative_is_refused():
    with pytest.raises(DifferentiationError, match=r"jax\.custom_vjp"):
        jax.grad(lambda x: jnp.sum(call(x)["sum"]))(jnp.ones(3))


def test_without_a_gpu_the_error_names_a_setting(monkeypatch):
    """`feed_forward` does not take `compute_capability`."""
    monkeypatch.setattr(devices, "_local_gpus", list)
    x, logits, gate_up, down = (jnp.ones(shape) for shape in [(4, 8), (4, 2), (2, 8, 8), (2, 4, 8)])
    args = x, logits, moe.Experts(gate_up, down), moe.Router(1)
    layer = jax.jit(lambda *args: moe.feed_forward(*args).tokens)
    for traced in (layer.trace(*args), jax.jit(call).trace(x)):
        with pytest.raises(ArgumentValueError, match=r"\. Set TRIAX_CUDA_ARCH \(90 for an H100"):
            traced.lower(lowering_platforms=("cuda",))
