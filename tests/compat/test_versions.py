"""The table of version gates, walked version string by version string."""

import importlib
import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path

import pytest
from packaging.version import Version

from tests.interrupts import run_program
from triax.compat import jax_private, triton_private, versions
from triax.errors import MissingDependencyError, VersionError

ROOT = Path(__file__).resolve().parents[2]

# In order of age, as pip ranks them, but for nightlies that hold what their release lacks.
HISTORY = """
    0.7.2 0.8.0.dev20251001 0.8.0rc1 0.8.0 0.8.1 0.8.2.dev20251201 0.8.2 0.8.3 0.9.0 0.9.0.1
    0.9.1rc1 0.9.1 0.9.2.dev20260316 0.9.2.dev20260317 0.9.2.dev20260401 0.9.2 0.9.3
    0.10.0.dev20260410 0.10.0rc1 0.10.0 0.10.1.dev20260510 0.10.1rc1 0.10.1 0.10.2.dev20260601
    0.10.2 0.11.0 0.11.1 0.11.2 0.12.0.1 0.12.0+cuda13.abcdef
""".split()  # noqa: SIM905  # a list would have one per line

FIRST = {
    versions.DISPATCH: "0.8.0",
    versions.KERNEL_NUM_CTAS: "0.8.2",
    versions.OWNED_MODULE_KEYS: "0.9.1",
    versions.FFI_TARGET: "0.10.1",
    versions.COST_ESTIMATE: "0.11.0",
    versions.TENSOR_MAPS: "0.11.1",
}


@pytest.mark.parametrize("gate", FIRST, ids=lambda gate: gate.feature)
def test_gates_open_once_and_stay_open(gate):
    position = HISTORY.index(FIRST[gate])
    assert [gate.passes(v) for v in HISTORY] == [i >= position for i in range(len(HISTORY))]


def test_run_time_autotuning_differs_between_release_and_nightly():
    passing = [v for v in HISTORY if versions.RUNTIME_AUTOTUNING.passes(v)]
    nightlies = ["0.9.2.dev20260317", "0.9.2.dev20260401"]
    assert passing == nightlies + HISTORY[HISTORY.index("0.9.3") :]


def test_run_time_autotuning_on_the_ffi_is_never_safe():
    assert not any(versions.RUNTIME_AUTOTUNING_ON_FFI.passes(v) for v in [*HISTORY, "99.0"])


@pytest.mark.parametrize("version", HISTORY)
def test_target(version):
    tuned = versions.choose_target(version, autotuned_at_run_time=True)
    assert (tuned.name, tuned.api_version) == ("triton_kernel_call", 2)
    fixed = versions.choose_target(version, autotuned_at_run_time=False)
    if HISTORY.index(version) >= HISTORY.index("0.10.1"):
        assert (fixed.name, fixed.api_version) == ("triton_kernel_call_ffi", 4)
    else:
        assert (fixed.name, fixed.api_version) == ("triton_kernel_call", 2)


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("3.4.0", False),
        ("3.5.0.dev20250901", False),
        ("3.5.0", True),
        ("3.5.1+gitabcdef12", True),  # torch's own build
        ("3.6.0", True),
        ("3.9.0", True),
    ],
)
def test_triton_floor(version, ok):
    if ok:
        versions.check_triton(version)
    else:
        with pytest.raises(VersionError, match=r"needs Triton 3\.5\.0 or later; " + version[:3]):
            versions.check_triton(version)


def test_old_jax_is_refused():
    with pytest.raises(VersionError, match=r"needs JAX 0\.8\.0 or later; 0\.7\.2 is installed"):
        versions.check_dispatch("0.7.2")
    versions.check_dispatch("0.8.0")


def test_old_jax_is_refused_at_import(tmp_path):
    """In one line, whatever the rest of Triax would have made of it."""
    (tmp_path / "jax-0.7.2.dist-info").mkdir()
    (tmp_path / "jax-0.7.2.dist-info" / "METADATA").write_text("Name: jax\nVersion: 0.7.2\n")
    done = run_program("import triax", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 1
    message = "Triax needs JAX 0.8.0 or later; 0.7.2 is installed. Install `jax>=0.8.0`."
    assert done.stderr.splitlines()[-1] == f"triax.errors.VersionError: {message}"


def test_newer_jax_is_imported_in_silence(tmp_path):
    """`triax doctor` is the place that says so."""
    (tmp_path / "jax-99.0.dist-info").mkdir()
    (tmp_path / "jax-99.0.dist-info" / "METADATA").write_text("Name: jax\nVersion: 99.0\n")
    program = "import triax; from triax.compat import versions; print(versions.installed('jax'))"
    done = run_program(program, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (done.returncode, done.stdout, done.stderr) == (0, "99.0\n", "")


def test_newest_tested_versions_are_the_record_s():
    runs = json.loads((ROOT / "benchmarks" / "matrix.json").read_text())
    newest = {
        name: max((run[name] for run in runs), key=Version) for name in versions.NEWEST_TESTED
    }
    assert newest == versions.NEWEST_TESTED


def test_plugin_of_another_version_is_refused():
    versions.check_plugin(None, "0.10.2")
    versions.check_plugin(("jax-cuda13-plugin", "0.10.2+local"), "0.10.2")
    with pytest.raises(VersionError, match=r"jax-cuda13-plugin is 0\.10\.1 and jaxlib is 0\.10\.2"):
        versions.check_plugin(("jax-cuda13-plugin", "0.10.1"), "0.10.2")


def test_missing_plugin_is_named(monkeypatch):
    jax_private.gpu_triton.cache_clear()
    monkeypatch.setattr(versions, "cuda_plugin", lambda: None)
    monkeypatch.setattr(importlib, "import_module", _lib_without_triton)
    with pytest.raises(MissingDependencyError, match=r"needs JAX's CUDA plugin, which is not"):
        jax_private.gpu_triton()
    jax_private.gpu_triton.cache_clear()


def _lib_without_triton(name):
    return types.SimpleNamespace(gpu_triton=types.SimpleNamespace())


def test_ptx_isa():
    known = {75: 86, 80: 86, 90: 86, 100: 86, 103: 88, 120: 87, 121: 88}
    assert {target: versions.ptx_isa_version(target) for target in known} == known


@pytest.fixture
def fresh_triton():
    triton_private.triton.cache_clear()
    yield
    triton_private.triton.cache_clear()


@pytest.mark.usefixtures("fresh_triton")
class TestOtherTritons:
    def test_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(MissingDependencyError, match=r"needs `triton`, which is not installed"):
            triton_private.triton()

    def test_placeholder(self, monkeypatch, tmp_path):
        """pytorch-triton 0.0.1 raises RuntimeError on import."""
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('install from …')\n")
        monkeypatch.syspath_prepend(tmp_path)
        for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(MissingDependencyError, match=r"is the placeholder package"):
            triton_private.triton()

    def test_old(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.3.1"))
        with pytest.raises(VersionError, match=r"needs Triton 3\.5\.0 or later; 3\.3\.1"):
            triton_private.triton()


def test_docs_page_has_the_table():
    rows = [
        "| Feature | First release | First nightly | Below it | Upstream |",
        "|---|---|---|---|---|",
    ]
    for gate in versions.GATES:
        stable = f"{gate.package} {gate.stable}" if gate.stable else "none so far"
        nightly = gate.nightly or ("as the release" if gate.stable else "none so far")
        cells = (gate.feature, stable, nightly, f"{gate.below} ({gate.why})", gate.upstream)
        rows.append(f"| {' | '.join(cells)} |")
    assert "\n".join(rows) + "\n" in (ROOT / "docs" / "versions.md").read_text()


@pytest.mark.cuda_plugin
def test_the_installed_jax_encodes_descriptors_if_the_table_says_so():
    expected = versions.TENSOR_MAPS.passes(versions.gated_version())
    assert jax_private.supports_tensor_maps() == expected
