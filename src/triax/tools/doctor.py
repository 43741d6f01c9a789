"""`triax doctor`: what is installed, what it allows, and what to do about what is missing.

`look` inspects the machine once; the sections report on it, and the last one runs a kernel.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from triax import devices, settings
from triax.compat import triton_private, versions
from triax.compiling import disk_cache
from triax.errors import CompilationError, TriaxError
from triax.messages import counted, near_misses
from triax.tuning import packages, store

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_PACKAGES = ("jax", "jaxlib", *PLUGINS, "triton", "numpy", "cuda-bindings")
_OF_OTHERS = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PYTHON_OF_JAX_0_11 = 3, 12
_TRIAL_TARGET = 90
_ABSENT = "not installed"
_SET_CACHE = "set TRIAX_CACHE_DIR to a folder that can be written"


class Finding(NamedTuple):
    """One line of the report. `level` is "ok" (checked and right), "info" (nothing to judge, or
    absent and not needed), "warn" (something is slower, missing or untested), or "fix" (something
    fails)."""

    name: str
    level: str
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The state of the machine.

    `packages` maps names to versions. `gpus` are the GPUs that JAX sees; if there are none,
    `no_gpu` says why. `driver` lists the GPUs that the driver reports, with the driver version.
    `triton` is the version of the Triton that can be imported, or the error from importing it.
    """

    packages: dict[str, str | None]
    gpus: list[str]
    no_gpu: str
    driver: list[tuple[str, str]]
    triton: str | Exception

    @property
    def plugin(self) -> tuple[str, str] | None:
        plugins = [(name, self.packages[name]) for name in PLUGINS]
        return next(((name, version) for name, version in plugins if version), None)

    @property
    def gated(self) -> str:
        """The version that decides about features: the CUDA plugin's, else jaxlib's."""
        return self.plugin[1] if self.plugin else self.packages["jaxlib"] or "0"


def look() -> Machine:
    """Inspects the machine."""
    gpus, no_gpu = [], ""
    try:
        for device in filter(devices.is_cuda, jax.local_devices(backend="cuda")):
            gpus.append(f"{device.device_kind} (sm_{devices.capability_of(device)})")
    except Exception as error:  # JAX raises RuntimeErrors and AssertionErrors
        no_gpu = _first_line(error)
    try:
        triton: str | Exception = str(triton_private.triton().__version__)
    except Exception as error:
        triton = error
    packages = {name: versions.installed(name) for name in _PACKAGES}
    return Machine(packages, gpus, no_gpu, devices.reported_by_driver(), triton)


def doctor(
    as_json: bool,
    machine: Machine | None = None,
    sections: Mapping[str, Callable[[Machine], Findings]] | None = None,
) -> int:
    """Prints the findings and the verdict; returns the exit status, 1 if there is a "fix"."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU may be in use
    machine = machine or look()
    report = {name: [*examine(machine)] for name, examine in (sections or SECTIONS).items()}
    broken = sum(finding.level == "fix" for findings in report.values() for finding in findings)
    if broken:
        verdict = f"{broken} to fix: see the lines above that begin with fix."
    elif machine.gpus:
        verdict = "Triton kernels run on the GPU here."
    elif isinstance(machine.triton, str):
        verdict = "There is no GPU here: kernels run on the CPU, in Triton's interpreter."
    else:
        verdict = "There is no Triton here: triax.moe runs through XLA, other kernels do not."
    if as_json:
        listed = [{"section": s, **f._asdict()} for s, findings in report.items() for f in findings]
        print(json.dumps({"verdict": verdict, "findings": listed}, indent=1))
        return 1 if broken else 0
    for section, findings in report.items():
        if findings:
            print(section)
            width = max(len(finding.name) for finding in findings)
            for f in findings:
                print(f"  {f.level:4}  {f.name:{width}}  {f.text}".rstrip())
                print(f"        → {f.remedy}\n" if f.remedy else "", end="")
            print()
    print(verdict)
    return 1 if broken else 0


def _versions(machine: Machine) -> Findings:
    has_gpu = bool(machine.gpus or machine.driver)
    yield Finding("triax", "ok", versions.__version__)
    yield _installed("python", platform.python_version())
    yield Finding("system", "info", platform.platform())
    for name in ("jax", "jaxlib", "numpy"):
        version = machine.packages[name]
        yield _installed(name, version) if version else Finding(name, "fix", _ABSENT)

    jaxlib = machine.packages["jaxlib"] or "0"
    if machine.plugin is not None:
        name, version = machine.plugin
        try:
            versions.check_plugin(machine.plugin, jaxlib)
            yield Finding("CUDA plugin", "ok", f"{name} {version}")
        except TriaxError as error:
            yield Finding("CUDA plugin", "fix", str(error), f"pip install {name}=={jaxlib}")
    elif has_gpu:
        remedy = f"pip install 'jax[cuda13]=={jaxlib}' (or cuda12, if the driver is older)"
        yield Finding("CUDA plugin", "fix", _ABSENT, remedy)
    else:
        remedy = f"to lower for CUDA: pip install --no-deps jax-cuda13-plugin=={jaxlib}"
        yield Finding("CUDA plugin", "warn", _ABSENT, remedy)

    if isinstance(machine.triton, str):
        yield _installed("triton", machine.triton)
    else:
        is_absent = isinstance(machine.triton.__cause__, ModuleNotFoundError)
        level = "warn" if is_absent and not has_gpu else "fix"
        text = _ABSENT if is_absent else _first_line(machine.triton)
        remedy = triton_private.HOW_TO_INSTALL if is_absent else ""
        yield Finding("triton", level, text, remedy)

    bindings = machine.packages["cuda-bindings"]
    if bindings is None and has_gpu:
        text = f"{_ABSENT}, so configs cannot be measured and `triax.benchmark` has no clock"
        yield Finding("cuda-bindings", "warn", text, "pip install cuda-bindings")
    else:
        text = bindings or f"{_ABSENT}; needed only with a GPU"
        yield Finding("cuda-bindings", "ok" if bindings else "info", text)


def _installed(name: str, version: str) -> Finding:
    newest = versions.NEWEST_TESTED.get(name)
    if newest is None or not versions.is_newer_than_tested(name, version):
        return Finding(name, "ok", version)
    text = f"{version}, newer than tested: Triax was tested up to {newest}"
    return Finding(name, "warn", text, f"if something fails, try {name} {newest}")


def _gpu(machine: Machine) -> Findings:
    driver = f", driver {machine.driver[0][1]}" if machine.driver else ""
    if machine.gpus:
        yield Finding("GPU", "ok", f"{', '.join(machine.gpus)}{driver}")
    elif not machine.driver:
        remedy = (
            "to lower for a GPU, set TRIAX_CUDA_ARCH (90 for an H100 or H200), and for its tuned "
            "configs set TRIAX_GPU to its name"
        )
        yield Finding("GPU", "warn", "neither JAX nor nvidia-smi finds a GPU", remedy)
    else:
        text = f"{machine.driver[0][0]}{driver}, but JAX does not use it: {machine.no_gpu}"
        platforms = os.environ.get("JAX_PLATFORMS")
        remedy = "install the missing packages above; after that, JAX's message tells the cause"
        if platforms and "cuda" not in platforms:
            remedy = f"unset JAX_PLATFORMS, which is {platforms!r}"
        yield Finding("GPU", "fix", text, remedy)


def _gates(machine: Machine) -> Findings:
    if not isinstance(machine.triton, str):
        return  # all are features of Triton kernels; the versions section says what is missing
    for gate in versions.GATES:
        of_triton = gate.package == "triton"
        version = machine.triton if of_triton else machine.gated
        if gate.stable is None:
            yield Finding(gate.feature, "info", f"in no release yet: {gate.below}")
        elif gate.passes(version) and machine.plugin is None and not of_triton:
            yield Finding(gate.feature, "info", f"in CUDA plugin {version}, which is not installed")
        elif gate.passes(version):
            yield Finding(gate.feature, "ok", "")
        else:
            level = "fix" if gate in (versions.DISPATCH, versions.TRITON) else "warn"
            package = "triton"
            if not of_triton:  # the plugin and jaxlib come with the JAX of their version
                package = f"jax[{machine.plugin[0].split('-')[1]}]" if machine.plugin else "jax"
            text = f"needs {gate.package} {gate.stable}, but {version} is installed: {gate.below}"
            remedy = f"pip install --upgrade '{package}>={gate.stable}'"
            if gate is versions.TENSOR_MAPS and sys.version_info < _PYTHON_OF_JAX_0_11:
                remedy = f"with Python 3.12 or later, {remedy}"
            yield Finding(gate.feature, level, text, remedy)


def _folders(machine: Machine) -> Findings:
    try:
        folder, places = settings.cache_folder(), store.stores()
    except TriaxError:  # an invalid variable, reported in the settings section
        return
    if folder is None:
        text = "this user has no home folder, so measured configs are not saved"
        yield Finding("tuned configs", "warn", text, _SET_CACHE)
    for place in places:
        is_own, problem = place.folder == folder, ""
        try:
            paths = place.paths()
            if is_own:
                problem = disk_cache.why_not(place.folder)
            elif not place.folder.exists():
                problem = f"{place.folder} does not exist"
        except OSError as error:
            problem = f"{place.folder} cannot be read: {error.strerror}"
        name = "tuned configs" if is_own else place.name.partition(" /")[0]
        if problem:
            remedy = _SET_CACHE if is_own else "correct TRIAX_CACHE_PATH"
            yield Finding(name, "warn", problem, remedy)
        else:
            text = f"{place.folder}, {counted(len(paths), 'config')}"
            yield Finding(name, "ok", text + _about_versions(place, machine))
    for name, why in packages.folders():
        if isinstance(why, str):
            remedy = f"its author runs `triax tune … --into src/…/{packages.FOLDER}`"
            yield Finding(f"package {name}", "warn", why, remedy)
    if isinstance(machine.triton, str):
        yield _tritons_folder(machine)


def _about_versions(place: store.Store, machine: Machine) -> str:
    """Says how many of a store's configs are for another Triton than the installed one."""
    records = [record for _, record in place.records() if isinstance(record, store.Record)]
    others = [r.key.triton for r in records if r.key.triton != machine.triton]
    if not others or isinstance(machine.triton, Exception):
        return ""
    known = ", ".join(sorted({*others}))
    return f", {len(others)} of them known for Triton {known}, this is {machine.triton}"


def _tritons_folder(machine: Machine) -> Finding:
    name, remedy = "Triton's cache", "set TRITON_CACHE_DIR to a folder that can be written"
    try:
        caches, own_problem = disk_cache.choose()
        problem = disk_cache.why_not(caches)
    except CompilationError as error:
        problem = str(error)
    if problem:
        level = "fix" if machine.gpus or machine.plugin else "warn"
        return Finding(name, level, f"{problem}, so nothing can be compiled", remedy)
    if own_problem:
        return Finding(name, "warn", f"{caches}, because {own_problem}", remedy)
    return Finding(name, "ok", str(caches))


def _settings(machine: Machine) -> Findings:
    for name in sorted(os.environ):
        value = os.environ[name]
        if name in _OF_OTHERS and value:
            yield Finding(name, "info", value)
        elif name == "TRITON_INTERPRET" and value not in ("", "0"):
            remedy = "unset it: without a GPU, Triax calls the interpreter by itself"
            yield Finding(name, "fix", f"{value}: Triax refuses kernels defined with it", remedy)
        elif name in settings.VARIABLES:
            try:
                settings.VARIABLES[name]()
                problem = _about_target(machine) if name == "TRIAX_GPU" and value.strip() else ""
                yield Finding(name, "warn" if problem else "ok", problem or value)
            except TriaxError as error:
                yield Finding(name, "fix", str(error))
        elif name.startswith("TRIAX_"):
            text = f"Triax does not know it. {settings.suggestion(name)}"
            yield Finding(name, "warn", text)
    mode = "TRIAX_AUTOTUNE"
    if mode not in os.environ:
        yield Finding(mode, "info", f"{settings.mode_in_force()}, the default")


def _about_target(machine: Machine) -> str:
    """Says what is wrong with the GPU that ``TRIAX_GPU`` names; "" if nothing is."""
    target, here = str(settings.gpu()), [name.rpartition(" (")[0] for name in machine.gpus]
    problems = []
    if here and target not in here:
        problems.append(f"only for exporting: programs that run here use configs of {here[0]}")
    if target not in here and settings.cuda_arch() is None:
        problems.append("TRIAX_CUDA_ARCH must name its architecture, too")
    known = store.gpus()
    if target not in known:
        problems.append(f"no stored config is for it.{near_misses(target, known)}")
    return f"{target}: {'; '.join(problems)}" if problems else ""


def _trial(machine: Machine) -> Findings:
    """Runs a kernel where it can run, and compiles it where it can be compiled."""
    if not isinstance(machine.triton, str):
        return
    from triax.tools.trial import double

    def attempt(name: str, work: Any) -> Finding:
        try:
            return Finding(name, "ok", work())
        except Exception as error:
            return Finding(name, "fix", _first_line(error))

    def run(**options: Any) -> str:
        x = np.arange(300, dtype=np.float32)
        np.testing.assert_array_equal(jax.jit(lambda x: double(x, **options))(x), 2 * x)
        return "a kernel's result is right"

    def compile_() -> str:
        x = jax.ShapeDtypeStruct((300,), np.float32)
        lowered = jax.jit(lambda x: double(x, compute_capability=_TRIAL_TARGET)).trace(x)
        lowered.lower(lowering_platforms=("cuda",))
        return f"a kernel compiles to PTX for sm_{_TRIAL_TARGET}"

    yield attempt("in the interpreter", lambda: run(implementation="interpret"))
    if machine.gpus:
        yield attempt("on the GPU", lambda: run(implementation="triton"))
    elif machine.plugin is not None:
        yield attempt("for CUDA", compile_)


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line if isinstance(error, TriaxError) else f"{type(error).__name__}: {line}"


SECTIONS: dict[str, Callable[[Machine], Findings]] = {
    "versions": _versions,
    "GPU": _gpu,
    "features": _gates,
    "folders": _folders,
    "settings": _settings,
    "trial": _trial,
}
