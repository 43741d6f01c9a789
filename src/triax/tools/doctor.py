"""`triax doctor`: what is installed, what it allows, and what to do about what is missing.

`look` reads the machine, once; everything else is made from what it found, except for the last
section, which runs a kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from triax import devices, settings
from triax.compat import triton_private, versions
from triax.compiling import disk_cache
from triax.errors import CompilationError, TriaxError
from triax.messages import counted, near_misses
from triax.tuning import store

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_PACKAGES = ("jax", "jaxlib", *PLUGINS, "triton", "numpy", "cuda-bindings")
_OF_OTHERS = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "TRITON_INTERPRET")
_TRIAL_TARGET = 90


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: "ok", "warn" (something is slower or missing), or "fix" (something fails)."""

    section: str
    name: str
    level: Literal["ok", "warn", "fix"]
    text: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is.

    `packages` are versions; `gpus` those that JAX sees, or none and the reason in `no_gpu`;
    `driver` those that the driver reports, each with its version. `triton` is the version of the
    package that can be imported, or why none can.
    """

    packages: dict[str, str | None]
    gpus: list[str]
    no_gpu: str
    driver: list[tuple[str, str]]
    triton: str | Exception

    @property
    def plugin(self) -> tuple[str, str] | None:
        found = [(name, self.packages[name]) for name in PLUGINS]
        return next(((name, version) for name, version in found if version), None)

    @property
    def gated(self) -> str:
        """The version that gates are read against."""
        return self.plugin[1] if self.plugin else self.packages["jaxlib"] or "0"


def look() -> Machine:
    """Reads the machine."""
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


def doctor(as_json: bool) -> int:
    """Prints the findings and the verdict; returns the exit status, 1 if there is a "fix"."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU may be in use
    machine = look()
    findings = [*examine(machine)]
    broken = sum(finding.level == "fix" for finding in findings)
    if broken:
        verdict = f"{broken} to fix: see the lines above that begin with fix."
    elif machine.gpus:
        verdict = "Triton kernels run on the GPU here."
    else:
        verdict = "There is no GPU here: kernels run on the CPU, in Triton's interpreter."
        if not isinstance(machine.triton, str):
            verdict = "There is no Triton here: triax.moe runs through XLA, other kernels do not."
    if as_json:
        report = {"verdict": verdict, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(report, indent=1))
    else:
        print(_table(findings), verdict, sep="\n")
    return 1 if broken else 0


def _table(findings: list[Finding]) -> str:
    lines = []
    for section, group in itertools.groupby(findings, key=lambda finding: finding.section):
        found = [*group]
        width = max(len(finding.name) for finding in found)
        lines.append(section)
        for f in found:
            lines.append(f"  {f.level:4}  {f.name:{width}}  {f.text}".rstrip())
            lines += [f"        → {f.remedy}"] if f.remedy else []
        lines.append("")
    return "\n".join(lines)


def examine(machine: Machine) -> Iterator[Finding]:
    """All findings, in the order that they are shown."""
    yield from _versions(machine)
    yield _gpu(machine)
    yield from _gates(machine)
    yield from _folders(machine)
    yield from _settings(machine)
    yield from _trial(machine)


def _versions(machine: Machine) -> Iterator[Finding]:
    def line(name: str, text: str | None, level: Any = "ok", remedy: str = "") -> Finding:
        return Finding("versions", name, level, text or "not installed", remedy)

    has_gpu = bool(machine.gpus or machine.driver)
    yield line("triax", versions.__version__)
    yield line("python", platform.python_version())
    yield line("system", platform.platform())
    for name in ("jax", "jaxlib", "numpy"):
        yield line(name, machine.packages[name])

    jaxlib = machine.packages["jaxlib"] or "0"
    if machine.plugin is None:
        if has_gpu:
            remedy = f"pip install 'jax[cuda13]=={jaxlib}' (or cuda12, if the driver is older)"
            yield line("CUDA plugin", None, "fix", remedy)
        else:
            remedy = f"to lower for CUDA: pip install --no-deps jax-cuda13-plugin=={jaxlib}"
            yield line("CUDA plugin", None, "warn", remedy)
    else:
        name, version = machine.plugin
        try:
            versions.check_plugin(machine.plugin, jaxlib)
            yield line("CUDA plugin", f"{name} {version}")
        except TriaxError as error:
            yield line("CUDA plugin", str(error), "fix", f"pip install {name}=={jaxlib}")

    if isinstance(machine.triton, str):
        yield line("triton", machine.triton)
    else:
        level = "fix" if sys.platform == "linux" else "warn"
        yield line("triton", _first_line(machine.triton), level)

    bindings = machine.packages["cuda-bindings"]
    if bindings is None and has_gpu:
        text = "not installed, so configs cannot be measured and `triax bench` has no clock"
        yield line("cuda-bindings", text, "warn", "pip install cuda-bindings")
    else:
        yield line("cuda-bindings", bindings or "not installed; needed only where a GPU is")


def _gpu(machine: Machine) -> Finding:
    driver = f", driver {machine.driver[0][1]}" if machine.driver else ""
    if machine.gpus:
        return Finding("GPU", "GPU", "ok", f"{', '.join(machine.gpus)}{driver}")
    if not machine.driver:
        remedy = (
            "to lower for one, set TRIAX_CUDA_ARCH (90 for an H100 or H200), and TRIAX_GPU to its "
            "name for its tuned configs"
        )
        return Finding("GPU", "GPU", "warn", "neither JAX nor nvidia-smi finds one", remedy)
    text = f"{machine.driver[0][0]}{driver}, but JAX does not use it: {machine.no_gpu}"
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and "cuda" not in platforms:
        remedy = f"unset JAX_PLATFORMS, which is {platforms!r}"
    else:
        remedy = "install what is missing above; then JAX's own message says what it lacks"
    return Finding("GPU", "GPU", "fix", text, remedy)


def _gates(machine: Machine) -> Iterator[Finding]:
    for gate in versions.GATES:
        of_triton = gate.package == "triton"
        version = machine.triton if of_triton else machine.gated
        if not isinstance(version, str):
            continue  # said above
        if gate.passes(version):
            yield Finding("features", gate.feature, "ok", "")
        elif gate.stable is None:
            yield Finding("features", gate.feature, "ok", f"in no release yet: {gate.below}")
        else:
            needed = gate in (versions.DISPATCH, versions.TRITON)
            package = "triton"
            if not of_triton:  # the plugin and jaxlib come with the JAX of their version
                package = f"jax[{machine.plugin[0].split('-')[1]}]" if machine.plugin else "jax"
            text = f"needs {gate.package} {gate.stable}, and {version} is here: {gate.below}"
            remedy = f"pip install --upgrade '{package}>={gate.stable}'"
            yield Finding("features", gate.feature, "fix" if needed else "warn", text, remedy)


def _folders(machine: Machine) -> Iterator[Finding]:
    try:
        folder, places = settings.cache_folder(), store.stores()
    except TriaxError:  # a variable is wrong, which is said below
        return
    remedy = "set TRIAX_CACHE_DIR to a folder that can be written"
    if folder is None:
        text = "this user has no home folder: what is measured is forgotten"
        yield Finding("folders", "tuned configs", "warn", text, remedy)
    for place in places:
        if place.folder == store.SHIPPED and not place.paths():
            continue
        name = "tuned configs" if place.folder == folder else place.name.partition(" /")[0]
        try:
            text = f"{place.folder}, {counted(len(place.paths()), 'config')}"
            problem = ""
            if place.folder == folder:
                problem = disk_cache.why_not(place.folder)
            elif not place.folder.exists():
                problem = f"{place.folder} does not exist"
        except OSError as error:
            problem = f"{place.folder} cannot be read: {error.strerror}"
        if problem:
            named = remedy if place.folder == folder else "correct TRIAX_CACHE_PATH"
            yield Finding("folders", name, "warn", problem, named)
        else:
            yield Finding("folders", name, "ok", text)
    if isinstance(machine.triton, str):
        yield _tritons_folder(machine)


def _tritons_folder(machine: Machine) -> Finding:
    remedy = "set TRITON_CACHE_DIR to a folder that can be written"
    try:
        caches, own_problem = disk_cache.choose()
        problem = disk_cache.why_not(caches)
    except CompilationError as error:
        caches, own_problem, problem = triton_private.cache_folder(), "", str(error)
    if problem:
        level: Any = "fix" if machine.gpus or machine.plugin else "warn"
        text = f"{problem}, so nothing can be compiled"
        return Finding("folders", "Triton's cache", level, text, remedy)
    if own_problem:
        text = f"{caches}, because {own_problem}"
        return Finding("folders", "Triton's cache", "warn", text, remedy)
    return Finding("folders", "Triton's cache", "ok", str(caches))


def _settings(machine: Machine) -> Iterator[Finding]:
    for name in sorted(os.environ):
        value = os.environ[name]
        if name in _OF_OTHERS and value:
            yield Finding("settings", name, "ok", value)
        elif name in settings.VARIABLES:
            try:
                settings.VARIABLES[name]()
                problem = _about_target(machine) if name == "TRIAX_GPU" and value.strip() else ""
                yield Finding("settings", name, "warn" if problem else "ok", problem or value)
            except TriaxError as error:
                yield Finding("settings", name, "fix", str(error))
        elif name.startswith("TRIAX_"):
            text = f"Triax does not know it. {settings.suggestion(name)}"
            yield Finding("settings", name, "warn", text)
    mode = "TRIAX_AUTOTUNE"
    if mode not in os.environ:
        yield Finding("settings", mode, "ok", f"{settings.mode_in_force()}, as it is not set")


def _about_target(machine: Machine) -> str:
    """What to know of the GPU that ``TRIAX_GPU`` names, if it is not as it should be."""
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


def _trial(machine: Machine) -> Iterator[Finding]:
    """Runs a kernel where it can run, and compiles it where it can be compiled."""
    if not isinstance(machine.triton, str):
        return
    from triax.tools.trial import double

    def attempt(name: str, work: Any) -> Finding:
        try:
            return Finding("trial", name, "ok", work())
        except Exception as error:
            return Finding("trial", name, "fix", _first_line(error))

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
