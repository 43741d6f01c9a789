"""What a record says of the machine it was measured on, and how much memory there is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import jax

from triax.bridge.compat import versions as compat_versions
from triax.bridge.lowering import is_cuda
from triax.version import __version__

# The rest is for fragments, and for comparing results.
_USABLE = 0.92
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "triton",
    "cuda-bindings",
    "torch",
    "transformer-engine",
    "transformer-engine-jax",
)


def memory_limit_bytes() -> int | None:
    """The bytes that arrays may take on the device, or None where JAX does not know."""
    stats = jax.devices()[0].memory_stats()
    limit = None if stats is None else stats.get("bytes_limit")
    return None if limit is None else int(_USABLE * limit)


def describe() -> dict[str, Any]:
    """The record's `machine`."""
    on_gpu = is_cuda(jax.devices()[0])
    return {
        "platform": "cuda" if on_gpu else "cpu",
        "device": jax.devices()[0].device_kind,
        "driver": _driver() if on_gpu else None,
        "host_cores": os.cpu_count(),
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver, if its tool says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def versions() -> dict[str, str]:
    """The versions of all that a measurement depends on, as far as it is installed."""
    found = {name: compat_versions.installed(name) for name in _PACKAGES}
    return {
        "triax": __version__,
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version is not None},
    }
