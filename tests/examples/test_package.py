"""The template of a package: its wheel brings tuned configs along."""

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton

import triax
from tests.examples.test_moe_layer import EXAMPLES
from tests.interrupts import run_program
from tests.tuning.conftest import replace_measurer
from triax.devices import Device
from triax.tuning import policy, store

TEMPLATE, NAME = EXAMPLES / "package", "triax_example_norms"
GPU = "NVIDIA H200"

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp
from triax_example_norms import rms_norm
x = jnp.arange(6.0).reshape(2, 3)
out, pull = jax.vjp(rms_norm, x, jnp.ones(3))
print(jnp.sum(out * out, -1), pull(out)[1])
"""

EXPLAIN = """
import json, jax, triax
from triax_example_norms import rms_norm
x, weight = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 2048), (2048,)))
calls = triax.explain(lambda x, weight: jax.vjp(rms_norm, x, weight)[1](x), x, weight)
print(json.dumps([(call.kernel, call.source, call.config) for call in calls]))
"""


def run(*command, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def own_modules():
    """The package is imported anew, and this process knows no configs."""
    policy.forget()
    yield
    policy.forget()
    for name in [n for n in sys.modules if n.partition(".")[0] == NAME]:
        del sys.modules[name]


def write_records(package: Path, monkeypatch) -> None:
    """As `triax tune --into` does on a GPU: those of the Triton that is here, 8 warps the best."""
    monkeypatch.syspath_prepend(str(package / "src"))
    monkeypatch.setattr("triax.devices.for_tuning", lambda *_: Device(0, GPU))
    replace_measurer(monkeypatch).times = lambda label: 1.0 - ("num_warps=8" in label)
    with own_modules(), triax.record() as records:
        triax.explain(importlib.import_module(f"{NAME}.tuning").main)
    records.save(package / "src" / NAME / "triax_records")


@pytest.mark.slow("what it is made of has tests of its own")
@pytest.mark.cuda_plugin
def test_an_installed_wheel_brings_its_configs(tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    package, site = tmp_path / "package", tmp_path / "site"
    shutil.copytree(TEMPLATE, package, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    with monkeypatch.context() as patch:
        write_records(package, patch)
    run("-m", "build", "--wheel", "--no-isolation", cwd=package)
    (wheel,) = (package / "dist").glob("*.whl")
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    run(*pip, "--no-compile", "--target", site, wheel, cwd=tmp_path)
    paths = os.pathsep.join([str(site), str(EXAMPLES.parent / "src")])
    environment = {"PYTHONPATH": paths, "TRIAX_CACHE_DIR": str(tmp_path / "empty")}
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", package / "tests", cwd=site, **environment)
    environment |= {"TRIAX_GPU": GPU, "TRIAX_CUDA_ARCH": "90", "TRIAX_AUTOTUNE": "strict"}
    (tmp_path / "program.py").write_text(EXPLAIN)
    config = ["BLOCK=2048, num_ctas=1, num_stages=3, num_warps=8"]
    assert json.loads(run("program.py", cwd=tmp_path, **environment)) == [
        ["rms_norm_fwd_kernel", f"package {NAME}", config],
        ["rms_norm_bwd_kernel", f"package {NAME}", config],
    ]


def test_without_triton_it_is_plain_jax():
    done = run_program(WITHOUT_TRITON, TEMPLATE / "src")
    assert done.returncode == 0, done.stderr
    # Rows of 3 whose mean square is 1: [0, 1, 2] and [3, 4, 5], divided by the roots of 5/3, 50/3.
    vectors = re.findall(r"\[(.*?)\]", done.stdout)
    sums, d_weight = (np.array(vector.split(), np.float32) for vector in vectors)
    np.testing.assert_allclose(sums, 3, rtol=1e-5)
    np.testing.assert_allclose(d_weight, [27 / 50, 3 / 5 + 48 / 50, 12 / 5 + 75 / 50], rtol=1e-5)


@pytest.mark.slow("its tests are run in a process")
@pytest.mark.cuda_plugin
@pytest.mark.skipif(triton.__version__ == "3.6.0", reason="its configs are for this Triton")
@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("*.json", "has no tuned configs: run the `triax tune …` of README.md on a GPU"),
        ("", "One is known for Triton 3.6.0, this is"),
    ],
)
def test_its_tests_fail_without_configs_for_this_triton(tmp_path, left_out, expected):
    package = tmp_path / "package"
    shutil.copytree(TEMPLATE, package, ignore=shutil.ignore_patterns("__pycache__", left_out))
    source = package / "src"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_records.py"],
        cwd=package,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), str(EXAMPLES.parent / "src")]),
            "TRIAX_CACHE_PATH": str(source / NAME / "triax_records") if not left_out else "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, expected in done.stdout) == (1, True), done.stdout


@pytest.mark.slow("compiled for a GPU, to look at its code")
@pytest.mark.cuda_plugin
def test_its_records_are_of_its_kernels(monkeypatch):
    """As the template's own test says, which needs the Triton that they were measured with."""
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    monkeypatch.setenv("TRIAX_CACHE_PATH", str(TEMPLATE / "src" / NAME / "triax_records"))
    monkeypatch.setenv("TRIAX_GPU", GPU)
    with own_modules():
        tuning = importlib.import_module(f"{NAME}.tuning")
        with triax.record() as records:
            triax.explain(tuning.main)
    assert len(records) == len(store.stores()[1].paths()) == 12
    assert {record.key.gpu for record in records} == {GPU}
