"""What a tuned config depends on.

Two calls with equal keys share a config, in this process, in the stores, and between the
processes of a job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from triax.bridge.compat import triton_private, versions
from triax.bridge.launch import Call, Launch, Scalar, leaves

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Device:
    """A local GPU that a program is lowered for.

    `index` is the driver's ordinal. Not `measurable` is a GPU whose name serves to look
    configs up while no time may be taken on it, as when a program is exported.
    """

    index: int
    name: str
    measurable: bool = True


@dataclasses.dataclass(frozen=True)
class Key:
    """Everything a choice of config depends on, readable.

    `arguments` are the values of the parameters in `@triton.autotune`'s `key`, `dtypes` those
    of all arrays, as Triton's own autotuner has it; `candidates` are the configs left after
    pruning, `source` is a hash of the kernel's source and that of all it calls.
    """

    format: int
    kernel: str
    source: str
    arguments: tuple[tuple[str, str], ...]
    dtypes: tuple[tuple[str, str], ...]
    candidates: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    gpu: str
    compute_capability: int
    triton: str

    @property
    def digest(self) -> str:
        """A short hash, equal on all machines."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @property
    def name(self) -> str:
        """The kernel and the hash: a file name."""
        return f"{self.kernel}-{self.digest}"


def label(launch: Launch) -> str:
    """A config's name among the candidates of a call."""
    return str(launch.candidate.config)


def make_key(
    call: Call, launches: Sequence[Launch], compute_capability: int, device: Device | None
) -> Key:
    """The key of a call with several candidates."""
    first = launches[0]
    config_values = {name for name, _ in first.candidate.config.values}
    config_values |= set(first.candidate.config.options())
    tuner = call.kernel.autotuner
    names = list(tuner.keys) if tuner is not None else []
    known: dict[str, Any] = {**first.constants, **dict(first.arguments)}
    arguments = {name: _text(first, known[name]) for name in names if name in known}
    dtypes = {
        f"{name}.{position}": first.array_type(leaf).dtype.name
        for name, argument in first.arguments
        for position, leaf in enumerate(leaves(argument))
        if not isinstance(leaf, Scalar)
    }
    options = {n: repr(v) for n, v in first.options.items() if n not in config_values}
    return Key(
        format=FORMAT,
        kernel=call.kernel.name,
        source=triton_private.fingerprint(call.kernel.function),
        arguments=tuple(sorted(arguments.items())),
        dtypes=tuple(sorted(dtypes.items())),
        candidates=tuple(label(launch) for launch in launches),
        options=tuple(sorted(options.items())),
        gpu=device.name if device else "",
        compute_capability=compute_capability,
        triton=versions.installed("triton") or "",
    )


def _text(launch: Launch, value: Any) -> str:
    """A keyed argument as text: a scalar's value, an array's shape."""
    if not isinstance(value, (tuple, Scalar)) and hasattr(value, "index"):
        return "x".join(map(str, launch.array_type(value).shape))
    if isinstance(value, Scalar):
        return repr(value.value)
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(launch, part) for part in value) + ")"
    return repr(value)
