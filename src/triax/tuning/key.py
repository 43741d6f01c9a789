"""The key of a tuned config: everything that the choice depends on.

Two calls with equal keys share a config, in this process, in the stores, and between the
processes of a job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from triax.binding import exact, sources
from triax.binding.launch import BoundCall, Descriptor, Launch, Operand, Result, Scalar, leaves
from triax.compat import triton_private
from triax.devices import Device

FORMAT = 3
SIZE_FACTOR = 4
"""A config is also used for calls that move up to this many times more or fewer bytes."""


@dataclasses.dataclass(frozen=True)
class Key:
    """Everything a choice of config depends on, in readable form.

    `arguments` are the values of the parameters in `@triton.autotune`'s `key`, and `dtypes` the
    dtypes of all arrays, as in Triton's own autotuner; `candidates` are the configs left after
    pruning, and `source` is a hash of the kernel's source and everything it reaches. `moved_bytes`
    is the size of all operands and outputs; keys that differ only in `moved_bytes`, by at most a
    factor of `SIZE_FACTOR`, may share a config (`is_near`).
    """

    format: int
    kernel: str
    source: str
    arguments: dict[str, str]
    dtypes: dict[str, str]
    candidates: tuple[str, ...]
    options: dict[str, str]
    gpu: str
    compute_capability: int
    triton: str
    moved_bytes: int

    @property
    def family(self) -> str:
        """The kernel's name and a short hash of all but the size, equal on all machines."""
        asdict = dataclasses.asdict(self).items()
        # Dicts as sorted lists of pairs.
        fields = {n: sorted(v.items()) if isinstance(v, dict) else v for n, v in asdict}
        del fields["moved_bytes"]
        text = json.dumps(fields, sort_keys=True)
        return f"{self.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"

    @property
    def name(self) -> str:
        """The family and the size: a file name."""
        return f"{self.family}-{self.moved_bytes}"

    def is_near(self, other: Key) -> bool:
        """Whether the best config for the other key may be used for this one."""
        return self.family == other.family and self.ratio(other.moved_bytes) <= SIZE_FACTOR

    def ratio(self, moved_bytes: int) -> float:
        """The factor between this size and another, 1 or more."""
        small, large = sorted((self.moved_bytes, moved_bytes))
        return large / max(small, 1)


def label(launch: Launch) -> str:
    """A config's name among the candidates of a call."""
    return str(launch.candidate.config)


def make_key(
    call: BoundCall, launches: Sequence[Launch], compute_capability: int, device: Device | None
) -> Key:
    """Makes the key of a call with several candidates."""
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
        source=sources.fingerprint(call.kernel.function),
        arguments=arguments,
        dtypes=dtypes,
        candidates=tuple(label(launch) for launch in launches),
        options=options,
        gpu=device.name if device else "",
        compute_capability=compute_capability,
        triton=triton_private.triton().__version__,
        moved_bytes=_moved_bytes(first),
    )


def _moved_bytes(launch: Launch) -> int:
    """The bytes of all buffers of a call, each counted once."""
    aliased = launch.operand_of_result
    fresh = [array for index, array in enumerate(launch.results) if index not in aliased]
    return sum(array.nbytes for array in (*launch.operands, *fresh))


def _text(launch: Launch, value: Any) -> str:
    """A keyed argument as text: a scalar's value, an array's shape."""
    if isinstance(value, (Operand, Result, Descriptor)):
        return "x".join(map(str, launch.array_type(value).shape))
    if isinstance(value, Scalar):
        return repr(value.value)
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(launch, part) for part in value) + ")"
    if exact.is_jitted(value):
        return sources.fingerprint(value)
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
