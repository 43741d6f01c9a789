"""Version gates: the features of JAX, the CUDA plugin and Triton that Triax may use.

Each gate is data, with its upstream change and the reason for its version; the decisions are
functions of a version string, so that tests can check the table without installing anything.
`docs/versions.md` is made from `GATES`.

The code behind most gates ships in the CUDA plugin (``jax-cuda12-plugin`` or
``jax-cuda13-plugin``), so gates read the plugin's version, and jaxlib's where
there is no plugin.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata

from packaging.version import Version

from triax.errors import VersionError

__version__ = "0.3.0.dev0"

# The newest versions in `benchmarks/matrix.json`, the record of the tests by version.
NEWEST_TESTED = {"jax": "0.12.0.1", "triton": "3.9.0", "python": "3.13"}


@dataclasses.dataclass(frozen=True)
class Gate:
    """A feature and the first versions that have it.

    `stable` is the first release with the feature, None if no release has it. `nightly` is
    the first nightly with it, if versions do not tell: a nightly ranks below the release it
    is named after (0.9.2.dev20260317 < 0.9.2), but may have changes that this release, cut
    from an older commit, lacks.
    """

    feature: str
    stable: str | None
    why: str
    below: str
    upstream: str
    nightly: str | None = None
    package: str = "jaxlib"

    @functools.cache  # noqa: B019  # there are only a few
    def passes(self, version: str) -> bool:
        """Whether `version` has the feature."""
        if self.stable is None:
            return False
        installed = Version(version)
        if installed.is_devrelease and self.nightly is not None:
            return installed >= Version(self.nightly)
        return installed >= Version(self.stable)


DISPATCH = Gate(
    "Triton kernels can be launched",
    "0.8.0",
    "kernels of Triton 3.5 take two hidden trailing pointers; earlier jaxlib passes fewer, "
    "which is a segmentation fault",
    "an error that says what to install",
    "jax-ml/jax: jaxlib/gpu/triton_kernels.cc, two scratch parameters",
)
TRITON = Gate(
    "Triton's compiler",
    "3.5.0",
    "jaxlib passes two scratch pointers; kernels of an older Triton do not take them",
    "an error that says what to install",
    "triton-lang/triton 3.5: the kernel ABI that jaxlib 0.8.0 launches",
    package="triton",
)
GLUON = Gate(
    "matmuls in which warps share the work: in 16 bits, and in 8 bits with float32 sums",
    "3.6.0",
    "they are written in Gluon, which earlier versions have only in part",
    "Triton's own language: the same bits, more slowly",
    "triton-lang/triton: python/triton/experimental/gluon",
    package="triton",
)
TF32_DESCRIPTORS = Gate(
    "descriptors that round to tf32 (`round_f32_to_tf32`)",
    "3.7.0",
    "its descriptors and its interpreter do not round before",
    "an error that says so",
    "triton-lang/triton 3.7: python/triton/tools/tensor_descriptor.py",
    package="triton",
)
VARIADIC_KERNELS = Gate(
    "kernels with `*args`",
    "3.8.0",
    "its compiler has no name for that parameter before",
    "an error that says so; pass a tuple to a parameter without the star",
    "triton-lang/triton 3.8: CodeGenerator.visit_arguments",
    package="triton",
)
SANITIZERS = Gate(
    "Triton's sanitizers (`triax.testing.sanitized`)",
    "3.9.0",
    "its compiler passes for them, and their option, are not there before",
    "an error that says so",
    "triton-lang/triton 3.9: CUDAOptions.instrumentation_mode, consan and fpsan",
    package="triton",
)
# 0.8.2 dropped the three cluster dimensions and put num_ctas behind num_warps. No nightly floor: a
# wrong argument list is a TypeError.
KERNEL_NUM_CTAS = Gate(
    "TritonKernel takes num_ctas",
    "0.8.2",
    "the argument list changed",
    "the older argument list",
    "jax-ml/jax: jaxlib/gpu/triton.cc, constructor of TritonKernel",
)
OWNED_MODULE_KEYS = Gate(
    "jaxlib's module cache owns its keys",
    "0.9.1",
    "a dangling key can hand out another kernel of the same name",
    "nothing to do: every entry name is unique to what was compiled",
    "jax-ml/jax: jaxlib/gpu/triton_kernels.cc, cache keyed by owned strings; "
    "a likely cause of NVIDIA/TransformerEngine #2730",
)
# Before, jaxlib restored every declared alias after timing, even without a saved copy. The fix was
# merged after 0.9.2 was cut, so 0.9.3 is the first number that can have it (the first release is
# 0.10.0), while the nightlies still called 0.9.2.dev have it from 2026-03-17 on.
RUNTIME_AUTOTUNING = Gate(
    "run-time autotuned calls restore aliased operands safely",
    "0.9.3",
    "earlier jaxlib copies from a null pointer when an aliased operand outlives the call",
    "one fixed config and a UserWarning; an error with TRIAX_ENFORCE_AUTOTUNING=1",
    "jax-ml/jax #35218; NVIDIA/TransformerEngine #2814",
    nightly="0.9.2.dev20260317",
)
# Merged after the last nightly called 0.10.1.dev, which ranks below the release.
FFI_TARGET = Gate(
    "triton_kernel_call_ffi, the target that CUDA graphs can hold",
    "0.10.1",
    "the legacy target is not allowed into command buffers and cuts them in two",
    "legacy target triton_kernel_call, api_version 2",
    "jax-ml/jax #37094",
)
RUNTIME_AUTOTUNING_ON_FFI = Gate(
    "run-time autotuned calls on triton_kernel_call_ffi",
    None,
    "the FFI target tunes before its inputs exist: illegal memory access for index kernels",
    "legacy target; if that is gone, an error, never the new FFI",
    "NVIDIA/TransformerEngine #3077",
)
# XLA reads a custom call's cost from this attribute. An FFI handler refuses a whole call with an
# attribute that it does not know, so Triax adds it only where the handler is known to accept it.
COST_ESTIMATE = Gate(
    "cost estimates on Triton calls",
    "0.11.0",
    "the attribute cost_estimate_json is new, and only on the FFI target",
    "the estimate is not handed on; a log line says so",
    "jax-ml/jax-triton 0.4: cost_estimate, requires JAX 0.11.0",
)

# `jax_private.supports_tensor_maps` asks jaxlib itself.
TENSOR_MAPS = Gate(
    "matmuls load blocks by TMA (Hopper, Blackwell)",
    "0.11.1",
    "jaxlib encodes descriptors from then on; JAX 0.11 needs Python 3.12",
    "they load through pointers: the layer takes about 1.5 times as long on an H100",
    "jax-ml/jax: jaxlib/gpu/triton.cc, create_tma_descriptor_parameter",
)

GATES = tuple(gate for gate in list(vars().values()) if isinstance(gate, Gate))

LEGACY_TARGET = "triton_kernel_call"
NEW_TARGET = "triton_kernel_call_ffi"


@dataclasses.dataclass(frozen=True)
class CallTarget:
    """A custom-call target and the version of XLA's custom-call API it speaks."""

    name: str
    api_version: int


def choose_target(version: str, *, autotuned_at_run_time: bool) -> CallTarget:
    """Returns the custom-call target for one fixed kernel, or for a run-time autotuned call.

    A run-time autotuned call stays off the FFI target on every version, because that target tunes
    in its Initialize stage, before the inputs exist (see `RUNTIME_AUTOTUNING_ON_FFI`).
    """
    if FFI_TARGET.passes(version) and (
        not autotuned_at_run_time or RUNTIME_AUTOTUNING_ON_FFI.passes(version)
    ):
        return CallTarget(NEW_TARGET, api_version=4)
    return CallTarget(LEGACY_TARGET, api_version=2)


# For architectures that PTX ISA 8.6 lacks, the first ISA that has them. Triton writes the newest
# PTX that its own ptxas knows (9.4 for Triton 3.9), but the ptxas that jaxlib calls may stop at
# 9.0 and refuse it. Every ptxas since CUDA 12.7 and every Triton since 3.5 reads 8.6.
_PTX_ISA = {103: 88, 110: 90, 120: 87, 121: 88}
_PTX_ISA_DEFAULT = 86


def ptx_isa_version(compute_capability: int) -> int:
    """Returns the PTX ISA version to write for an architecture (86 means 8.6)."""
    return _PTX_ISA.get(compute_capability, _PTX_ISA_DEFAULT)


def installed(package: str) -> str | None:
    """Returns the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def cuda_plugin() -> tuple[str, str] | None:
    """Returns the name and version of the CUDA plugin, the newest CUDA's first, or None."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        if (version := installed(name)) is not None:
            return name, version
    return None


@functools.cache
def gated_version() -> str:
    """Returns the version that gates are compared with: the CUDA plugin's, else jaxlib's."""
    version = plugin[1] if (plugin := cuda_plugin()) else installed("jaxlib")
    if version is None:
        raise VersionError("jaxlib is not installed; `pip install jax`.")
    return version


def check_jax(version: str | None) -> None:
    """Raises `VersionError` if JAX is too old for Triax; None stands for an unknown version."""
    if version is not None and not DISPATCH.passes(version):
        raise VersionError(
            f"Triax needs JAX {DISPATCH.stable} or later; {version} is installed. "
            f"Install `jax>={DISPATCH.stable}`."
        )


def check_plugin(plugin: tuple[str, str] | None, jaxlib: str) -> None:
    """Raises `VersionError` if the plugin's public version differs from jaxlib's."""
    name, version = plugin or ("", jaxlib)
    if plugin is not None and Version(version).public != Version(jaxlib).public:
        raise VersionError(
            f"{name} is {version} and jaxlib is {jaxlib}; JAX ignores a plugin of another "
            f"version. Install `{name}=={jaxlib}`."
        )


def check_dispatch(version: str) -> None:
    """Raises `VersionError` if jaxlib cannot launch Triton's kernels."""
    if not DISPATCH.passes(version):
        raise VersionError(
            f"Calling Triton kernels needs JAX {DISPATCH.stable} or later; {version} is installed. "
            "Earlier versions pass kernels fewer parameters than they read. "
            f"Install `jax>={DISPATCH.stable}` with the CUDA plugin of the same version."
        )


def check_triton(version: str) -> None:
    """Raises `VersionError` if this Triton is too old. Torch's builds (3.x+git…) count as 3.x."""
    if not TRITON.passes(version):
        raise VersionError(
            f"Triax needs Triton {TRITON.stable} or later; {version} is installed. "
            f"Install `triton>={TRITON.stable}`."
        )


def is_newer_than_tested(package: str, version: str) -> bool:
    """Whether no test ran on this version, by as many numbers as `NEWEST_TESTED` has."""
    newest = Version(NEWEST_TESTED[package]).release
    return Version(version).release[: len(newest)] > newest
