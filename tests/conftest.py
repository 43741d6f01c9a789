"""What every test runs under: a known device, clean settings, caches of its own.

Without an NVIDIA GPU JAX is put on eight virtual CPU devices, which must happen
before JAX is imported. Tests marked `gpu` are skipped where JAX finds none; tests
marked `cuda_plugin` lower for CUDA (for compute capability 9.0 where there is no
GPU), which needs JAX's CUDA plugin, and are skipped without it, except in CI.
"""

from __future__ import annotations

import collections
import functools
import gc
import glob
import importlib
import importlib.metadata
import itertools
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from packaging.version import Version

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
CPU_DEVICES = 8
_ids = itertools.count()
# For CPU programs that are compiled once and run once on a few numbers: what XLA does to make them
# fast takes most of the time. A flag that XLA_FLAGS names already stays as it is there.
_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": CPU_DEVICES,
    "--xla_backend_optimization_level": 0,
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_parallel_codegen_split_count": 1,
}
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # unknown to later ones
    _XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"


def _has_nvidia_device() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


if not _has_nvidia_device():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ.get("JAX_PLATFORMS") == "cpu":
    _given = os.environ.get("XLA_FLAGS", "")
    _added = [f"{name}={value}" for name, value in _XLA_FLAGS.items() if name not in _given]
    os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()

# Processes share a GPU (`-n`), each with what its own tests need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Where JAX's persistent cache is on, a key is computed for every program, with or without a folder.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

# Tracing makes many objects, most of which stay in JAX's caches. Looking at the young ones as often
# as Python does took a tenth of the tests' time.
gc.set_threshold(20_000, 5, 5)

if sys.gettrace() is not None:  # under `make coverage`
    from triax.interpreting import run as _interpreting

    _run = _interpreting.run

    @functools.wraps(_run)
    def _traced(*args: Any, **kwargs: Any) -> Any:
        """Counts what is interpreted, too: in threads of XLA, which Python does not trace."""
        if sys.gettrace() is None:
            sys.settrace(threading.gettrace())
        return _run(*args, **kwargs)

    _interpreting.run = _traced

# The interpreter takes milliseconds a program: a deadline would time the machine, not the code.
# Examples of one test share their shapes, and so the programs that plain JAX compiles for them.
hypothesis_settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis_settings.register_profile("developer", deadline=None, max_examples=5)
hypothesis_settings.register_profile(
    "ci", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis_settings.load_profile("ci" if IN_CI else "developer")


@functools.cache
def gpu_problem() -> str | None:
    """Why tests marked `gpu` cannot run here, or None where they can."""
    import jax

    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        return f"JAX finds no GPU: {str(error).splitlines()[0]}"
    return None if devices else "JAX finds no GPU"


@functools.cache
def cuda_plugin_problem() -> str | None:
    """Why tests marked `cuda_plugin` cannot run here, or None where they can."""
    reasons = []
    for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            importlib.import_module(f"{name}._triton")
        except ImportError as error:
            reasons.append(str(error))
        else:
            return None
    return f"no JAX CUDA plugin with Triton support: {'; '.join(reasons)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `sampled`, some are quick, some slow, and the rest nightly.

    The quick ones show each value of each parameter. The slow ones show pairs of values: those that
    show the most, as many as the marker says; cases that are marked slow are not quick. Which ones
    they are depends on their names alone.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        elif item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in cases.items():
        left = sorted(of_test, key=lambda item: zlib.crc32(item.nodeid.encode()))
        limits: tuple[int | None, ...] = of_test[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        most_quick, most_slow = (*limits, *(None, 1)[len(limits) :])
        quick = _fewest([i for i in left if not i.get_closest_marker("slow")], 1, most_quick)
        left = [item for item in left if item not in quick]
        parameters = of_test[0].callspec.params  # type: ignore[attr-defined]
        pairs = left[:most_slow] if len(parameters) == 1 else _fewest(left, 2, most_slow, quick)
        for item in left:
            item.add_marker(pytest.mark.slow(f"{len(quick)} cases of {name} are quick"))
            if item not in pairs:
                item.add_marker(pytest.mark.nightly(f"{len(pairs)} cases of {name} are slow"))


def _fewest(
    left: list[pytest.Item], together: int, most: int | None, before: Sequence[pytest.Item] = ()
) -> list[pytest.Item]:
    """Cases that show all values of parameters, so many `together`, that were not shown before."""

    def shown(item: pytest.Item) -> set[Any]:
        # A value of a parameter is one object in all cases.
        values = sorted((name, id(value)) for name, value in item.callspec.params.items())  # type: ignore[attr-defined]
        return set(itertools.combinations(values, together))

    shows, chosen = {item: shown(item) for item in left}, list[pytest.Item]()
    seen: set[Any] = set().union(*map(shown, before))
    while shows and len(chosen) != most:
        best = max(shows, key=lambda item: len(shows[item] - seen))
        if not shows[best] - seen:
            break
        chosen.append(best)
        seen |= shows.pop(best)
    return chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (problem := gpu_problem()) is not None:
        pytest.skip(problem)
    if item.get_closest_marker("cuda_plugin") is not None and (problem := cuda_plugin_problem()):
        if IN_CI:
            pytest.fail(f"{problem} (a failure because CI is set)", pytrace=False)
        pytest.skip(problem)


@pytest.fixture(scope="session", autouse=True)
def _own_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this run, for all its workers: kernels compiled by one are not compiled by others."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton-cache"))
        yield


@pytest.fixture(autouse=True)
def _clean_triax_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TRIAX_")]:
            patch.delenv(name)
        if request.node.get_closest_marker("cuda_plugin") is not None:
            patch.setenv("TRIAX_CUDA_ARCH", "90")
        # A store of its own for every test: no test depends on what another, or the user, tuned.
        patch.setenv(
            "TRIAX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triax" / str(next(_ids)))
        )
        yield
