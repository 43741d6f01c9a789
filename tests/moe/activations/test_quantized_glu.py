"""glu in 8 bits: where there are no kernels for it, over devices, and that it has no derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe.activations.case import quantized_glu
from tests.moe.activations.test_glu import draw
from triax import moe
from triax.errors import DifferentiationError
from triax.moe.shared import target
from triax.testing import assert_same_bits

run = functools.partial(quantized_glu, dtype="float8_e4m3fn")


def test_gpus_that_do_not_round_to_8_bits(monkeypatch):
    gate_up, weights, _ = draw(6, 40, "bfloat16")
    old = target.Target(80, 3, False)
    monkeypatch.setattr(target, "INTERPRETER", old)
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    traced = jax.jit(run).trace(jnp.asarray(gate_up), weights)
    assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_are_cut(kind):
    gate_up, weights, _ = draw(8, 40, "bfloat16")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
        found = jax.jit(run)(put(gate_up), put(weights))
    found, wanted = jax.tree.map(np.asarray, (found, jax.jit(run)(gate_up, weights)))
    jax.tree.map(assert_same_bits, found, wanted)


def test_no_derivative():
    gate_up, *_ = draw(6, 40, "float32")
    with pytest.raises(DifferentiationError, match="8 bits has no derivative"):
        jax.grad(lambda x: jnp.sum(run(x, None).scales))(jnp.asarray(gate_up))


@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
def test_an_infinity_without_a_nan(to):
    """A result that overflows leaves its row the scale of the others, as in `quantize`."""
    gate_up = np.ones((3, 2, 20), np.float16)
    gate_up[1, :, 7] = 300
    out = moe.glu(gate_up.reshape(3, 40), implementation="xla")
    assert np.isinf(np.asarray(out, np.float32)).sum() == 1
    wanted = moe.quantize(out, to, block=(1, None), implementation="xla")
    found = run(gate_up.reshape(3, 40), None, dtype=to, implementation="interpret")
    jax.tree.map(assert_same_bits, jax.tree.leaves(found), jax.tree.leaves(wanted))
