"""The example of expert parallelism: the same losses on one device and on all."""

import numpy as np
import pytest

from tests.examples.test_moe_layer import load


@pytest.mark.slow("what it calls has tests of its own")
def test_losses_are_those_of_one_device(monkeypatch, capsys):
    example = load("expert_parallel")
    monkeypatch.setattr(example, "TOKENS", 240)
    one, many = example.main()
    np.testing.assert_allclose(one, many, rtol=1e-4)
    assert many[-1] < 0.9 * many[0]
    assert "8 devices of cpu: 2 data × 4 expert" in capsys.readouterr().out
