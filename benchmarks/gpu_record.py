"""The records that the scripts of this folder write, each of one run on one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from triax.bench.runner import environment
from triax.devices import is_cuda


def missing_gpu() -> str | None:
    """What to say where JAX has no NVIDIA GPU; None where it has one."""
    device = jax.devices()[0]
    return None if is_cuda(device) else f"This needs an NVIDIA GPU; JAX has {device}."


def write(path: Path, **found: Any) -> None:
    """Writes what was found, with the time, the device and the versions."""
    made = environment()
    device = {"written": made["written"], "device": made["machine"]["device"]}
    record = {**device, "versions": made["versions"], **found}
    path.write_text(json.dumps(record, indent=1) + "\n")
