"""The GPUs that a program is lowered for, and their properties."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

from triax import settings
from triax.compat import jax_private, versions
from triax.errors import ArgumentValueError, UnsupportedError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU that a program is lowered for.

    `index` is the driver's ordinal. If `measurable` is false, as when a program is exported, only
    the name is used, to look configs up: the GPU may be absent, and `index` is meaningless.
    """

    index: int
    name: str
    measurable: bool = True


def gpus(ctx: Any) -> list[Any]:
    """The GPUs that the program is lowered for, else those of this process.

    For an exported program, ``TRIAX_GPU`` keeps only the GPUs of that name.
    """
    lowered_for = [d for d in jax_private.lowering_devices(ctx) if is_cuda(d)] or _local_gpus()
    if (
        lowered_for
        and jax_private.exported_platforms(ctx)
        and (named := settings.gpu()) is not None
    ):
        return [device for device in lowered_for if device.device_kind == named]
    return lowered_for


def compute_capability(kernel: str, requested: int | None, devices: Sequence[Any]) -> int:
    """The architecture to compile for: `requested`, else the devices', else ``TRIAX_CUDA_ARCH``."""
    if requested is not None:
        return requested
    capabilities = {capability_of(device) for device in devices}
    if len(capabilities) == 1:
        return capabilities.pop()
    if (arch := settings.cuda_arch()) is not None:
        return arch
    own = "for a kernel of your own, you can pass `compute_capability` instead"
    if capabilities:
        raise UnsupportedError(
            f"Kernel {kernel!r} is lowered for GPUs of compute capabilities "
            f"{', '.join(map(str, sorted(capabilities)))} at once. Set "
            f"TRIAX_CUDA_ARCH to the lowest; {own}."
        )
    plugin = "" if versions.cuda_plugin() else f" and run {jax_private.how_to_lower()}"
    raise ArgumentValueError(
        f"Kernel {kernel!r} is lowered for CUDA, and there is no {settings.gpu() or 'GPU'} here to "
        f"take the architecture from. Set TRIAX_CUDA_ARCH (90 for an H100 or H200){plugin}; {own}."
    )


def for_tuning(ctx: Any, devices: Sequence[Any], compute_capability: int) -> Device | None:
    """Picks the GPU whose tuned configs a program uses; None if it is unknown.

    It is the first of `devices` that belongs to this process and has this compute capability,
    because the program runs there; else the GPU that ``TRIAX_GPU`` names.
    """
    named = settings.gpu()
    for device in devices:
        index = jax_private.local_index(device)
        if index is not None and capability_of(device) == compute_capability:
            target = Device(index, str(device.device_kind), not jax_private.exported_platforms(ctx))
            if named not in (None, target.name):
                _say_ignored(str(named), target.name)
            return target
    return Device(-1, named, measurable=False) if named is not None else None


@functools.cache
def _say_ignored(named: str, target: str) -> None:
    logger.warning(
        "TRIAX_GPU is %r, but programs that run here use the tuned configs of this GPU, %r: "
        "TRIAX_GPU applies only to exported or cross-compiled programs",
        named,
        target,
    )


def capability_of(device: Any) -> int:
    """A GPU's compute capability as an int: 90 for 9.0."""
    return int(str(device.compute_capability).replace(".", ""))


def is_cuda(device: Any) -> bool:
    """Whether a device is an NVIDIA GPU."""
    return device.platform in ("gpu", "cuda") and hasattr(device, "compute_capability")


def reported_by_driver() -> list[tuple[str, str]]:
    """The GPUs that `nvidia-smi` reports, with the driver's version; none if the command fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.check_output(command, text=True, timeout=30).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    parts = [line.rpartition(", ") for line in lines]
    return [(name, version) for name, _, version in parts if name]


def _local_gpus() -> list[Any]:
    with contextlib.suppress(RuntimeError):  # no CUDA backend in this process
        return [device for device in jax.local_devices(backend="cuda") if is_cuda(device)]
    return []
