"""The examples of one subject each: right, or finding what they are to find."""

import pytest

from tests.examples.test_moe_layer import EXAMPLES, load


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))  # they import `comparing`, as scripts can


@pytest.mark.parametrize(
    "name",
    ["vector_add", "softmax", "layer_norm", "flash_attention", "adam_in_place", "own_op"],
)
def test_example_agrees_with_plain_jax(name):
    assert load(name).main() < 1e-5


@pytest.mark.cuda_plugin
def test_matmul_shows_what_was_compiled(capsys):
    assert load("matmul").main() < 1e-2  # bfloat16
    assert "matmul_kernel: BK=64, BM=128, BN=256" in capsys.readouterr().out


@pytest.mark.slow("Equinox is the same")
def test_equinox_layer_learns(capsys):
    losses = load("moe_equinox").main()
    assert losses[-1] < 0.3 * losses[0]
    assert "step 40: loss" in capsys.readouterr().out


def test_every_planted_mistake_is_found(capsys):
    assert load("debugging").main() == 3
    assert "OutOfBounds in difference" in capsys.readouterr().out
