"""The example of all kinds of parallelism: it checks itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.examples.test_moe_layer import load

example = load("parallel")
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.mark.nightly("two processes that make layers have a test that is slow")
def test_program_checks_itself(tmp_path, capsys):
    error, losses, same = example.main(tmp_path)
    assert error < 1e-5
    assert losses[-1] < 0.5 * losses[0]
    assert same
    assert "the same bits" in capsys.readouterr().out


@pytest.mark.slow("its processes take seconds")
def test_checkpoint_over_another_mesh(tmp_path):
    """Every array comes back whole; missing parts, and those of two meshes, are refused."""
    axes = ("data", "expert", "tensor")
    small, large = (Mesh(np.array(jax.devices()).reshape(2, 2, 2)[:data], axes) for data in (1, 2))
    params = example.init(jax.random.key(0))
    state = jax.device_put(example.start(params), example.shardings(large))
    state["mean"]["gate"] = state["params"]["gate"].astype(jnp.bfloat16)
    example.save(tmp_path, state)
    again = example.restore(tmp_path, jax.eval_shape(lambda: state), example.shardings(small))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    assert again["params"]["gate"].sharding == example.shardings(small)["params"]["gate"]

    wrong = lambda what: pytest.raises(ValueError, match=rf"{what}: \d+ elements of \d+")
    next((tmp_path / "params.gate").glob("part*.npy")).unlink()
    with wrong("params.gate lacks parts"):
        example.restore(tmp_path, jax.eval_shape(lambda: state), example.shardings(small))
    example.save(tmp_path, again)
    with wrong("has parts of another mesh too"):
        example.restore(tmp_path, jax.eval_shape(lambda: state), example.shardings(large))
