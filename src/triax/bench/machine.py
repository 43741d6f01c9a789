"""What a record says of the machine it was measured on, and how much memory there is."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from typing import Any

import jax

from triax.bridge.compat import versions as compat_versions
from triax.bridge.devices import is_cuda
from triax.version import __version__

# The rest is for fragments, and for comparing results.
_USABLE = 0.92
# The setting of JAX that says how much of the device's memory is its own.
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
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


def is_out_of_memory(error: Exception | str) -> bool:
    """Whether an error, or its text, says that the device has too little memory."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    # Under the same name XLA says that a kernel wants more shared memory than a GPU has.
    exhausted = "RESOURCE_EXHAUSTED" in text and "shared memory" not in text.lower()
    return exhausted or "OutOfMemoryError" in text or "CUDA_ERROR_OUT_OF_MEMORY" in text


def gigabytes(num_bytes: float) -> str:
    """For people, to about two digits: "0.06 GB", "1.5 GB", "128 GB"."""
    digits = next((digits for digits in (0, 1, 2) if num_bytes >= 10 ** (10 - digits)), 3)
    return f"{num_bytes / 1e9:,.{digits}f} GB"


def now() -> str:
    """The time in UTC, to the second, as records have it: "2026-01-31T23:59:59Z"."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
