"""The tuned configs in the package are those of its kernels as they are now."""

import importlib.util
import json
from pathlib import Path

import pytest
from triax_example_norms import tuning

import triax

FOLDER = Path(tuning.__file__).with_name("triax_records")
KEYS = [json.loads(path.read_text())["key"] for path in FOLDER.glob("*.json")]
GPUS = sorted({(key["gpu"], str(key["compute_capability"])) for key in KEYS})


def test_there_are_some():
    assert GPUS, f"{FOLDER} has no tuned configs: run the `triax tune …` of README.md on a GPU"


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="lowering for CUDA needs the plugin"
)
@pytest.mark.parametrize(("gpu", "architecture"), GPUS)
def test_are_found(monkeypatch, tmp_path, gpu, architecture):
    """With the Triton that they were measured with: its version is a part of a config's key."""
    monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path))  # what was tuned here does not count
    monkeypatch.setenv("TRIAX_GPU", gpu)
    monkeypatch.setenv("TRIAX_CUDA_ARCH", architecture)
    with triax.tuning_mode("strict"):  # an error if none is known
        calls = triax.explain(tuning.main)
    assert {call.source for call in calls} == {"package triax_example_norms"}
