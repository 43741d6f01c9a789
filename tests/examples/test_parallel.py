"""The example of all kinds of parallelism: it checks itself."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.examples.test_moe_layer import load

example = load("parallel")
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.mark.slow("what it calls has tests of its own")
def test_program_checks_itself(tmp_path, capsys):
    error, losses, same = example.main(tmp_path)
    assert error < 1e-5
    assert losses[-1] < 0.5 * losses[0]
    assert same
    assert "the same bits" in capsys.readouterr().out


def test_checkpoint_over_another_mesh(tmp_path):
    """Every array comes back whole, and what is not complete is refused."""
    axes = ("data", "expert", "tensor")
    small, large = (Mesh(np.array(jax.devices()).reshape(2, 2, 2)[:data], axes) for data in (1, 2))
    params = example.init(jax.random.key(0))
    state = jax.device_put(example.start(params), example.shardings(large))
    example.save(tmp_path, state)
    again = example.restore(tmp_path, jax.eval_shape(lambda: state), example.shardings(small))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    assert again["params"]["gate"].sharding == example.shardings(small)["params"]["gate"]

    next((tmp_path / "params.gate").glob("part*.npy")).unlink()
    with pytest.raises(ValueError, match=r"params.gate is not complete: \d+ of \d+ elements"):
        example.restore(tmp_path, jax.eval_shape(lambda: state), example.shardings(small))
