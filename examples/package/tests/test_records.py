"""The tuned configs in the package are those of its kernels as they are now."""

import importlib.util

import pytest
import triton
from triax_example_norms import tuning

import triax

GPU, ARCHITECTURE = "NVIDIA H200", "90"
TRITON = "3.6.0"  # a version of Triton is a part of a config's key


@pytest.mark.skipif(triton.__version__ != TRITON, reason=f"configs are for Triton {TRITON}")
@pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="lowering for CUDA needs the plugin"
)
def test_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path))  # what was tuned here does not count
    monkeypatch.setenv("TRIAX_GPU", GPU)
    monkeypatch.setenv("TRIAX_CUDA_ARCH", ARCHITECTURE)
    with triax.tuning_mode("strict"):  # an error if none is known
        calls = triax.explain(tuning.main)
    assert {call.source for call in calls} == {"package triax_example_norms"}
