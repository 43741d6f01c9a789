"""What `tune` meets in a function, with the measuring replaced."""

import jax
import numpy as np
import pytest

import triax
from tests import kernels
from tests.cases import blockwise
from tests.tuning.conftest import DEVICE, replace_measurer
from triax.tools import tune as tools
from triax.tuning import policy

pytestmark = pytest.mark.cuda_plugin


@pytest.fixture
def measurer(monkeypatch):
    monkeypatch.setattr(tools, "_device", lambda call, operands: (DEVICE, 90))
    policy.forget()
    yield replace_measurer(monkeypatch)
    policy.forget()


def add(x, n):
    return blockwise(kernels.autotuned_add_kernel, x, x, n=n)


def test_each_key_is_measured_once(measurer):
    """`n` is in the kernel's key: equal shapes do not make equal keys."""
    x = np.zeros(300, np.float32)
    tuned = triax.tune(
        lambda x: (add(x, 300), add(x, 200), jax.jit(add, static_argnums=1)(x, 300)), x
    )
    assert len(tuned) == 2
    assert len(measurer.jobs) == 2
