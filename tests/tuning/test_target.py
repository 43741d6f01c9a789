"""Programs for a GPU that is not here: its records, under the name in `TRIAX_GPU`."""

import jax
import numpy as np
import pytest

import triax
from tests import kernels
from tests.cases import blockwise
from tests.tuning.conftest import DEVICE
from triax import devices
from triax.errors import TuningError
from triax.tuning import policy

pytestmark = pytest.mark.cuda_plugin

X = jax.ShapeDtypeStruct((1003,), np.float32)
FOR_TUNING = devices.for_tuning  # before a fixture replaces it


@pytest.fixture
def tuned(measurer, monkeypatch):
    """What is left of tuning on a GPU, in a process without one. The best config has block 256."""
    measurer.times = lambda label: 0.5 if "BLOCK=256" in label else 1.0
    triax.explain(add, X)
    policy.forget()
    monkeypatch.setattr("triax.devices.for_tuning", FOR_TUNING)
    yield measurer
    assert len(measurer.jobs) == 1


def add(x):
    return blockwise(kernels.autotuned_add_kernel, x, x)


def export():
    function = jax.jit(lambda x: add(x))  # a new one, because JAX caches traces
    export = jax.export.export(function, platforms=["cuda"], disabled_checks=triax.export_checks())
    return export(X).mlir_module()


@pytest.mark.parametrize("mode", ["auto", "cached", "strict"])
def test_records_of_the_gpu_it_names_are_found(tuned, monkeypatch, mode):
    monkeypatch.setenv("TRIAX_AUTOTUNE", mode)
    monkeypatch.setenv("TRIAX_GPU", DEVICE.name)
    assert 'triax.config = "BLOCK=256, ' in export()
    (call,) = triax.explain(add, X)
    assert (call.source, call.grid) == ("user store", ((4, 1, 1),))


@pytest.mark.parametrize(
    ("name", "config", "used", "nearest", "about"),
    [
        (
            "",  # any of its architecture is a better guess than none
            "BLOCK=256",
            "the best of the nearest record, known",
            "this is a GPU without a name (user store)",
            " If that GPU is not here, set TRIAX_GPU to its name.",
        ),
        (
            "Imaginary",
            "BLOCK=64",
            "One is known",
            "this is Imaginary (user store)",
            " The GPU is 'Imaginary'.",
        ),
    ],
)
def test_without_it_or_misspelt(tuned, monkeypatch, caplog, name, config, used, nearest, about):
    nearest = f" known for {DEVICE.name}, {nearest}"
    monkeypatch.setenv("TRIAX_GPU", name)
    assert f'triax.config = "{config}, ' in export()
    assert used + nearest.removeprefix(" known") in caplog.text
    assert about in caplog.text
    monkeypatch.setenv("TRIAX_AUTOTUNE", "strict")
    with pytest.raises(TuningError) as caught:
        export()
    assert "One is" + nearest in str(caught.value)
    assert str(caught.value).endswith(about)


def test_another_architecture_is_another_gpu(tuned, monkeypatch):
    monkeypatch.setenv("TRIAX_GPU", DEVICE.name)
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    assert 'triax.config = "BLOCK=64, ' in export()
