"""The key of a tuned config: everything that it depends on.

Two calls with equal keys share a config, in this process, in the stores, and between the
processes of a job.
"""

from __future__ import annotations

import dataclasses
import dis
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

from triax.binding.launch import Call, Descriptor, Launch, Operand, Result, Scalar, leaves
from triax.compat import triton_private
from triax.devices import Device

FORMAT = 3
SIZE_FACTOR = 4
"""A config is also used for calls that move up to this many times more or fewer bytes."""


@dataclasses.dataclass(frozen=True)
class Key:
    """Everything a choice of config depends on, in readable form.

    `arguments` are the values of the parameters in `@triton.autotune`'s `key`, and `dtypes` are
    those of all arrays, as in Triton's own autotuner; `candidates` are the configs left after
    pruning, and `source` is a hash of the source of the kernel and all it reaches. `moved_bytes`
    counts all operands and outputs; keys that differ only in it, by at most a factor of
    `SIZE_FACTOR`, may share a config (`is_near`).
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
    moved_bytes: int

    @property
    def family(self) -> str:
        """The kernel's name and a short hash of all but the size, equal on all machines."""
        fields = dataclasses.asdict(self)
        del fields["moved_bytes"]
        text = json.dumps(fields, sort_keys=True)
        return f"{self.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"

    @property
    def name(self) -> str:
        """The family and the size: a file name."""
        return f"{self.family}-{self.moved_bytes}"

    def is_near(self, other: Key) -> bool:
        """Whether the best config for the other may be used for this one."""
        return self.family == other.family and self.ratio(other.moved_bytes) <= SIZE_FACTOR

    def ratio(self, moved_bytes: int) -> float:
        """The factor between this size and another, 1 or more."""
        small, large = sorted((self.moved_bytes, moved_bytes))
        return large / max(small, 1)


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
        source=_fingerprint(call.kernel.function),
        arguments=tuple(sorted(arguments.items())),
        dtypes=tuple(sorted(dtypes.items())),
        candidates=tuple(label(launch) for launch in launches),
        options=tuple(sorted(options.items())),
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
    if triton_private.is_called_in_kernels(value):
        return _fingerprint(value)
    return _stable_text(value)


def _fingerprint(function: Any) -> str:
    """A hash of a kernel's source and of all functions and constants that it can reach.

    Functions count by their source and by what their names stand for, not by the module that they
    are in: a kernel is the same run as a script, imported, or loaded by `triax tune`. Unlike
    Triton's own hash, it does not depend on the kernel's position in its file either.
    """
    functions, numbers = [function], {id(function): 0}

    def text(value: Any) -> str:
        if triton_private.is_called_in_kernels(value):
            if id(value) not in numbers:
                numbers[id(value)] = len(functions)
                functions.append(value)
            return f"function {numbers[id(value)]}"
        if isinstance(value, tuple):
            return f"({', '.join(map(text, value))})"
        return _stable_text(value)

    parts = []
    for current in functions:  # grows
        defaults = text(current.fn.__defaults__ or ())
        reached = [
            (name, text(triton_private.without_constexpr(value)))
            for name, value in _names_reached(current.fn)
            if triton_private.is_seen_by_kernels(value)
        ]
        parts.append((str(current.src), defaults, reached))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _names_reached(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals and closure variables a function reads, each with its name, sorted by that.

    A name in a module is read through the module: "helpers.scale".
    """
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    namespace = {**function.__globals__, **{n: c.cell_contents for n, c in cells}}
    for names in sorted(set(_names_read(code, code.co_freevars))):
        value = namespace.get(names[0])
        for name in names[1:]:
            if not isinstance(value, ModuleType):
                break
            # Triton's version is part of every key.
            is_tritons = value.__name__.split(".")[0] == "triton"
            value = None if is_tritons else getattr(value, name, None)
        yield ".".join(names), value


def _names_read(code: CodeType, closure: Collection[str]) -> Iterator[tuple[str, ...]]:
    """The names that code reads from outside it, each with the attributes read from it.

    By its instructions, because `co_names` has attributes too, and these may be the names of
    globals that a program has only if it is run as a script.
    """
    names: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation in ("EXTENDED_ARG", "NOP"):
            continue
        if names and operation in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (*names, name)
            continue
        if names:
            yield names
        is_outside = operation == "LOAD_GLOBAL" or (operation == "LOAD_DEREF" and name in closure)
        names = (name,) if is_outside else ()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_read(constant, closure)


def _stable_text(value: Any) -> str:
    """A value as text that is the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
