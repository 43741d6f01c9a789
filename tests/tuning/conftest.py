"""Measuring without a GPU, in two ways.

`measurer` gives times by rule, through the real policy, store and agreement. `driver` puts an
imaginary CUDA driver under the real worker process.
"""

import functools
import sys

import numpy as np
import pytest

import triax
from tests import kernels
from tests.cases import blockwise
from tests.tuning import fake_driver
from triax.devices import Device
from triax.tuning import measure, packages, policy
from triax.tuning.store import Timing
from triax.tuning.worker import client

DEVICE = Device(0, "Imaginary GPU")
X = np.arange(1003, dtype=np.float32)


def add(x, y, kernel=kernels.autotuned_add_kernel, **options):
    return blockwise(kernel, x, y, **options)


def explain(mode="auto", x=X, **options):
    """The one call of a sum in a tuning mode."""
    with triax.tuning_mode(mode):
        (call,) = triax.explain(lambda x: add(x, x, **options), x)
    return call


class FakeMeasurer:
    """Stands in for the worker. `times` gives a config's milliseconds, or an error's text."""

    def __init__(self):
        self.jobs = []
        self.times = lambda label: 1.0
        self.error = None

    def measure(self, job, device, progress, timings):
        self.jobs.append(job)
        if self.error is not None:
            raise self.error
        for label in [candidate.label for candidate in job.candidates]:
            time = self.times(label)
            failed = isinstance(time, str)
            timings[label] = Timing(label, error=time) if failed else Timing(label, time, runs=7)


def replace_measurer(monkeypatch):
    """Puts a `FakeMeasurer` in the place of the worker process."""
    fake = FakeMeasurer()
    monkeypatch.setattr(measure, "measure", fake.measure)
    monkeypatch.setattr(client, "start", lambda device: None)
    monkeypatch.setattr(measure, "unavailable", lambda: None)
    monkeypatch.setattr(measure, "drain", lambda index: None)
    return fake


@pytest.fixture
def measurer(monkeypatch):
    monkeypatch.setattr("triax.devices.for_tuning", lambda *_: DEVICE)
    return replace_measurer(monkeypatch)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Installs the imaginary driver, which the real worker then calls; returns its log."""
    client.stop_all()
    yield functools.partial(fake_driver.install, monkeypatch, tmp_path)
    client.stop_all()
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def fresh_process():
    """As if the process had just started."""
    policy.forget()
    policy._warn.cache_clear()
    packages.folders.cache_clear()
    yield
    packages.folders.cache_clear()
    policy.forget()
