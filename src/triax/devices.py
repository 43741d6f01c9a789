"""The GPUs that a program is lowered for, and their properties."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

from triax import settings
from triax.compat import jax_private
from triax.errors import ArgumentValueError, UnsupportedError


@dataclasses.dataclass(frozen=True)
class Device:
    """A local GPU that a program is lowered for.

    `index` is the driver's ordinal. If not `measurable`, as when a program is exported, the GPU's
    name is used to look configs up, but nothing is timed on it.
    """

    index: int
    name: str
    measurable: bool = True


def gpus(ctx: Any) -> list[Any]:
    """The GPUs that the program is lowered for, else those of this process."""
    return [d for d in jax_private.lowering_devices(ctx) if is_cuda(d)] or _local_gpus()


def compute_capability(kernel: str, given: int | None, devices: Sequence[Any]) -> int:
    """What the caller gave, else that of the GPUs, else ``TRIAX_CUDA_ARCH``."""
    if given is not None:
        return given
    found = {capability_of(device) for device in devices}
    if len(found) > 1:
        raise UnsupportedError(
            f"Kernel {kernel!r} is lowered for GPUs of compute capabilities "
            f"{', '.join(map(str, sorted(found)))} at once. Pass `compute_capability` (the lowest)."
        )
    if found:
        return found.pop()
    if (arch := settings.cuda_arch()) is not None:
        return arch
    raise ArgumentValueError(
        f"Kernel {kernel!r} is lowered for CUDA, and there is no GPU here to tell the "
        "architecture. Pass `compute_capability` (90 for an H100 or H200), or set TRIAX_CUDA_ARCH."
    )


def for_tuning(ctx: Any, devices: Sequence[Any], compute_capability: int) -> Device | None:
    """The first of the GPUs that belongs to this process and has this compute capability."""
    for device in devices:
        index = jax_private.local_index(device)
        if index is not None and capability_of(device) == compute_capability:
            return Device(index, str(device.device_kind), not jax_private.is_exporting(ctx))
    return None


def capability_of(device: Any) -> int:
    """A GPU's compute capability as an int: 90 for 9.0."""
    return int(str(device.compute_capability).replace(".", ""))


def is_cuda(device: Any) -> bool:
    """Whether a device is an NVIDIA GPU."""
    return device.platform in ("gpu", "cuda") and hasattr(device, "compute_capability")


def reported_by_driver() -> list[tuple[str, str]]:
    """The GPUs that `nvidia-smi` reports, each with the driver's version; none if it fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.check_output(command, text=True, timeout=30).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    parts = [line.rpartition(", ") for line in lines]
    return [(name, version) for name, _, version in parts if name]


def _local_gpus() -> list[Any]:
    try:
        return [device for device in jax.local_devices(backend="cuda") if is_cuda(device)]
    except RuntimeError:  # no CUDA backend in this process
        return []
