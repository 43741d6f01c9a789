"""`triax doctor` on machines that lack something: what it says, and the remedy."""

import dataclasses
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

from tests.interrupts import run_program
from tests.tuning.records import record
from triax import cli
from triax.compat import triton_private, versions
from triax.tools import doctor, trial
from triax.tools.doctor import Machine
from triax.tuning import store

JAX = "0.12.0"
WITH_GPU = Machine(
    packages={
        "jax": JAX,
        "jaxlib": JAX,
        "jax-cuda13-plugin": JAX,
        "jax-cuda12-plugin": None,
        "triton": "3.9.0",
        "numpy": "2.4.0",
        "cuda-bindings": "13.1.0",
    },
    gpus=["NVIDIA H200 (sm_90)"],
    no_gpu="",
    driver=[("NVIDIA H200", "570.86")],
    triton="3.9.0",
)
WITHOUT_GPU = dataclasses.replace(WITH_GPU, gpus=[], driver=[], no_gpu="RuntimeError: no CUDA")


def with_packages(machine, **changes):
    names = {name.replace("_", "-"): version for name, version in changes.items()}
    return dataclasses.replace(machine, packages={**machine.packages, **names})


@pytest.fixture
def report(monkeypatch, capsys):
    """The exit status, the findings by name, and the verdict, for a machine that there is not."""
    sections = {name: find for name, find in doctor.SECTIONS.items() if name != "trial"}
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def run(machine):
        status = doctor.doctor(True, machine, sections)
        made = json.loads(capsys.readouterr().out)
        return status, {f["name"]: f for f in made["findings"]}, made["verdict"]

    return run


def test_nothing_to_do(report):
    status, found, verdict = report(WITH_GPU)
    assert (status, verdict) == (0, "Triton kernels run on the GPU here.")
    assert {finding["level"] for finding in found.values()} == {"ok", "info"}
    for name in ("system", versions.RUNTIME_AUTOTUNING_ON_FFI.feature):
        assert found[name]["level"] == "info"
    assert found["GPU"]["text"] == "NVIDIA H200 (sm_90), driver 570.86"


def test_no_gpu(report):
    status, found, verdict = report(WITHOUT_GPU)
    assert status == 0
    assert verdict.startswith("There is no GPU here: kernels run on the CPU")
    assert found["GPU"]["level"] == "warn"
    assert "set TRIAX_CUDA_ARCH" in found["GPU"]["remedy"]


def test_no_plugin(report):
    status, found, _ = report(with_packages(WITHOUT_GPU, jax_cuda13_plugin=None))
    assert (status, found["CUDA plugin"]["level"]) == (0, "warn")
    assert found[versions.DISPATCH.feature]["level"] == "info"  # nothing launches kernels here
    assert found[versions.TRITON.feature]["level"] == "ok"
    assert f"pip install --no-deps jax-cuda13-plugin=={JAX}" in found["CUDA plugin"]["remedy"]

    no_plugin = dataclasses.replace(WITH_GPU, gpus=[], no_gpu="RuntimeError: unknown backend")
    status, found, verdict = report(with_packages(no_plugin, jax_cuda13_plugin=None))
    assert (status, verdict[:8]) == (1, "2 to fix")
    assert f"pip install 'jax[cuda13]=={JAX}'" in found["CUDA plugin"]["remedy"]
    assert "NVIDIA H200, driver 570.86, but JAX does not use it" in found["GPU"]["text"]


def test_plugin_of_another_version(report):
    status, found, _ = report(with_packages(WITHOUT_GPU, jax_cuda13_plugin="0.11.0"))
    assert (status, found["CUDA plugin"]["level"]) == (1, "fix")
    assert f"jax-cuda13-plugin is 0.11.0 and jaxlib is {JAX}" in found["CUDA plugin"]["text"]
    assert found["CUDA plugin"]["remedy"] == f"pip install jax-cuda13-plugin=={JAX}"


@pytest.mark.parametrize(
    ("gate", "version", "level"),
    [
        (versions.DISPATCH, "0.7.2", "fix"),
        (versions.KERNEL_NUM_CTAS, "0.8.1", "warn"),
        (versions.OWNED_MODULE_KEYS, "0.9.0", "warn"),
        (versions.RUNTIME_AUTOTUNING, "0.9.2", "warn"),
        (versions.FFI_TARGET, "0.10.0", "warn"),
        (versions.COST_ESTIMATE, "0.10.2", "warn"),
        (versions.TENSOR_MAPS, "0.11.0", "warn"),
    ],
    ids=lambda value: getattr(value, "feature", None),
)
def test_jax_below_a_floor(report, gate, version, level):
    old = dict.fromkeys(("jax", "jaxlib", "jax_cuda13_plugin"), version)
    status, found, _ = report(with_packages(WITH_GPU, **old))
    finding = found[gate.feature]
    assert (status, finding["level"]) == (level == "fix", level)
    expected = f"needs jaxlib {gate.stable}, but {version} is installed: {gate.below}"
    assert finding["text"] == expected
    python = "with Python 3.12 or later, "
    needed = gate is versions.TENSOR_MAPS and sys.version_info < (3, 12)
    upgrade = f"pip install --upgrade 'jax[cuda13]>={gate.stable}'"
    assert finding["remedy"] == python * needed + upgrade


def test_every_gate_has_a_line(report):
    _, found, _ = report(WITH_GPU)
    assert {gate.feature for gate in versions.GATES} <= found.keys()


@pytest.mark.parametrize("machine", [WITH_GPU, WITHOUT_GPU], ids=["GPU", "no GPU"])
@pytest.mark.parametrize(
    ("module", "is_absent"),
    [
        (None, True),
        (SimpleNamespace(__version__="3.4.0"), False),
        (SimpleNamespace(), False),  # a folder that was left behind
    ],
)
def test_no_triton_or_an_old_one(report, monkeypatch, machine, module, is_absent):
    """Without a GPU nothing needs it, but one that is there and does not work is a fault."""
    monkeypatch.setitem(sys.modules, "triton", module)
    triton_private.triton.cache_clear()
    machine = dataclasses.replace(machine, triton=doctor.look().triton)
    triton_private.triton.cache_clear()
    status, found, _ = report(machine)
    fine = is_absent and not machine.gpus
    assert found["triton"]["level"] == ("warn" if fine else "fix")
    assert status == (not fine)
    if is_absent:
        assert found["triton"]["text"] == "not installed"
        assert "extra cuda13, cuda12 or, for the interpreter" in found["triton"]["remedy"]
    # No kernel can be launched, and none loads blocks by TMA, whatever jaxlib can do.
    assert not found.keys() & {gate.feature for gate in versions.GATES}


def test_no_cuda_bindings(report):
    status, found, _ = report(with_packages(WITH_GPU, cuda_bindings=None))
    assert (status, found["cuda-bindings"]["level"]) == (0, "warn")
    assert "configs cannot be measured" in found["cuda-bindings"]["text"]
    assert found["cuda-bindings"]["remedy"] == "pip install cuda-bindings"
    _, found, _ = report(with_packages(WITHOUT_GPU, cuda_bindings=None))
    assert found["cuda-bindings"]["level"] == "info"


def test_jax_is_told_to_use_the_cpu(report, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    _, found, _ = report(dataclasses.replace(WITH_GPU, gpus=[], no_gpu="RuntimeError: none"))
    assert found["GPU"]["remedy"] == "unset JAX_PLATFORMS, which is 'cpu'"


def test_settings(report, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "hopper")
    monkeypatch.setenv("TRIAX_TUNING_BITES", "1")
    monkeypatch.setenv("TRIAX_AUTOTUNE", "cached")
    status, found, _ = report(WITH_GPU)
    assert (status, found["TRIAX_CUDA_ARCH"]["level"]) == (1, "fix")
    assert "such as 90, 9.0 or sm_90; got 'hopper'" in found["TRIAX_CUDA_ARCH"]["text"]
    assert "Did you mean TRIAX_TUNING_BYTES?" in found["TRIAX_TUNING_BITES"]["text"]
    assert found["TRIAX_AUTOTUNE"]["text"] == "cached"


@pytest.mark.parametrize(("value", "level"), [("1", "fix"), ("0", None)])
def test_the_variable_under_which_kernels_cannot_be_called(report, monkeypatch, value, level):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    status, found, _ = report(WITH_GPU)
    assert status == (level == "fix")
    assert found.get("TRITON_INTERPRET", {}).get("level") == level


@pytest.mark.parametrize(
    ("name", "version", "newer"),
    [
        *(("jax", "0.12.0.1", False), ("jax", "0.12.0.dev20261001", False)),
        *(("jax", "0.12.1", True), ("jax", "1.0", True), ("jax", "1.0.0rc1", True)),
        *(("triton", "3.9.0+git1a2b3c4d", False), ("triton", "3.9.1", True)),
        *(("triton", "3.10.0", True), ("triton", "4.0.0+git1a2b3c4d", True)),
        *(("python", "3.13.17", False), ("python", "3.14.0", True), ("python", "4.0.1", True)),
    ],
)
def test_newer_than_tested(report, monkeypatch, name, version, newer):
    """It says so beside the version; what the version has is right, and nothing is to fix."""
    machine = WITH_GPU
    if name == "jax":
        of_jax = dict.fromkeys(("jax", "jaxlib", "jax_cuda13_plugin"), version)
        machine = with_packages(machine, **of_jax)
    elif name == "triton":
        machine = dataclasses.replace(machine, triton=version)
    else:
        monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
    status, found, _ = report(machine)
    newest = {"jax": "0.12.0.1", "triton": "3.9.0", "python": "3.13"}[name]
    text = f"{version}, newer than tested: Triax was tested up to {newest}" if newer else version
    assert (status, found[name]["level"]) == (0, "warn" if newer else "ok")
    assert found[name]["text"] == text
    assert found[name]["remedy"] == f"if something fails, try {name} {newest}" * newer


@pytest.mark.parametrize(
    ("machine", "target", "arch", "expected"),
    [
        (WITHOUT_GPU, "Imaginary GPU", "90", None),
        (WITHOUT_GPU, "Imaginary GPU", "", "TRIAX_CUDA_ARCH must name its architecture, too"),
        (WITHOUT_GPU, "imaginary", "90", "no stored config is for it. Did you mean `Imaginary GPU"),
        (WITH_GPU, "NVIDIA H200", "", "no stored config is for it. Known: Imaginary GPU."),
        (WITH_GPU, "Imaginary GPU", "90", "only for exporting: programs that run here use configs"),
    ],
)
def test_the_gpu_that_is_named(report, monkeypatch, machine, target, arch, expected):
    store.user_store().put(record(0))
    monkeypatch.setenv("TRIAX_GPU", target)
    monkeypatch.setenv("TRIAX_CUDA_ARCH", arch)
    _, found, _ = report(machine)
    finding = found["TRIAX_GPU"]
    assert finding["text"] == target if expected is None else expected in finding["text"]
    assert finding["level"] == ("ok" if expected is None else "warn")


def test_a_cache_path_that_does_not_exist(report, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIAX_CACHE_PATH", str(tmp_path / "nothing"))
    _, found, _ = report(WITH_GPU)
    assert found["store"]["level"] == "warn"
    assert found["store"]["text"] == f"{tmp_path / 'nothing'} does not exist"
    assert found["store"]["remedy"] == "correct TRIAX_CACHE_PATH"


def test_no_home(report, monkeypatch):
    monkeypatch.setattr("triax.settings.cache_folder", lambda: None)
    _, found, _ = report(WITH_GPU)
    assert found["tuned configs"]["level"] == "warn"
    assert "set TRIAX_CACHE_DIR" in found["tuned configs"]["remedy"]


def test_a_kernel_that_fails(monkeypatch, capsys):
    def fail(*args, **options):
        raise ValueError("no\nsuch thing")

    monkeypatch.setattr(trial, "double", fail)
    assert cli.main(["doctor"]) == 1
    assert "fix   in the interpreter  ValueError: no\n" in capsys.readouterr().out


# --- in a separate process, on this machine ----------------------------------------------


def run(program="", **changes):
    """Without a GPU, if there is one; None unsets a variable."""
    program += "\nimport sys\nfrom triax import cli\nsys.exit(cli.main(['doctor']))"
    return run_program(program, **{"PATH": "", **changes})


@pytest.mark.slow("its processes take seconds")
@pytest.mark.cuda_plugin
def test_this_machine():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    in the interpreter  a kernel's result is right" in done.stdout
    assert "ok    for CUDA            a kernel compiles to PTX for sm_90" in done.stdout


@pytest.mark.slow("processes are the same on every Python")
def test_triton_that_cannot_be_imported():
    done = run("import sys; sys.modules['triton'] = None")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("warn  triton +not installed\n +→ .*pip install 'triton>=3.5'", done.stdout)
    assert "features" not in done.stdout
    assert "trial" not in done.stdout


@pytest.mark.slow("processes are the same on every Python")
@pytest.mark.cuda_plugin
def test_a_home_that_cannot_be_written(tmp_path):
    """A file in its place, because root may write to any folder."""
    home = tmp_path / "home"
    home.touch()
    unset = dict.fromkeys(("TRIAX_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"))
    done = run(HOME=str(home), TMPDIR=str(tmp_path), **unset)
    assert done.returncode == 0
    assert "so Triton caches kernels in" in done.stderr
    assert "warn  tuned configs   " in done.stdout
    assert "→ set TRIAX_CACHE_DIR to a folder that can be written" in done.stdout
    place = tmp_path / f"triax-{os.getuid()}" / "triton"
    assert f"warn  Triton's cache  {place}, because {home}/.triton/cache cannot be" in done.stdout
    assert "→ set TRITON_CACHE_DIR to a folder that can be written" in done.stdout
    assert "ok    for CUDA" in done.stdout

    done = run(HOME=str(home), **{**unset, "TRITON_CACHE_DIR": str(home)})
    assert done.returncode == 1
    assert f"fix   Triton's cache  {home} cannot be written" in done.stdout
    assert "fix   for CUDA" in done.stdout
