"""Finds the operands that a compiled kernel writes to, in Triton's intermediate code.

In: the text of the module that Triton's front end made. Out: for every store and atomic, the
pointer parameters whose memory it may reach. A pointer is followed back through arithmetic,
choices, loops, branches and calls. One from anywhere else (memory, an integer) has an unknown
origin, and writes through it are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

# These write through their first operand.
_WRITES = {
    "tt.store",
    "tt.atomic_rmw",
    "tt.atomic_cas",
    "tt.descriptor_store",
    "tt.descriptor_reduce",
    "tt.descriptor_scatter",
    "ttng.async_tma_copy_local_to_global",
    "ttng.async_tma_reduce",
    "ttng.async_tma_scatter",
}
# The result points to the same memory as the first operand.
_FOLLOWS = {
    "tt.addptr",
    "tt.splat",
    "tt.unsplat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.trans",
    "tt.bitcast",
    "tt.make_tensor_descriptor",
    "tt.make_tensor_ptr",
    "tt.advance",
    "ttg.convert_layout",
}
_POINTERS = ("!tt.ptr", "!tt.tensordesc", "!ttng.tensordesc")
_UNKNOWN = -1

_LOCATION = re.compile(r" ?loc\((?:[^()]|\([^()]*\))*\)")
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_OPERATION = re.compile(r'(?:(%[^=]*) = )?"?([\w.]+)')
_RESULT = re.compile(r"(%[\w$.-]+)(?::(\d+))?")
_PARAMETER = re.compile(r"(%[\w$.-]+): (\S*)")
_JUMP = re.compile(r"(\^\w+)(?:\(([^:)]*))?")
_FUNCTION = re.compile(r"@([^(]+)\((.*)")
_CALL = re.compile(r"@([^(]+)\(([^)]*)\)")
_CARRIED = re.compile(r"(?:iter_args|scf\.while )\(([^)]*)\)")


def origins(code: str) -> tuple[int, list[tuple[int, ...]]]:
    """How many pointers and descriptors a kernel takes, and which of them each write may reach."""
    flow = _Flow()
    for line in code.splitlines():
        if "ptr" in line or "desc" in line or "{" in line or "}" in line or "^" in line:
            flow.read(_LOCATION.sub("", line).strip())
    return len(flow.parameters), sorted(set(flow.written()))


@dataclasses.dataclass
class _Region:
    """The code between two braces.

    `names` are the values it defines and `blocks` the arguments of its blocks, by label. Its
    terminator passes values on to `carried` and `results`.
    """

    operation: str = ""
    carried: Sequence[int] = ()
    results: Sequence[int] = ()
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    blocks: dict[str, list[int]] = dataclasses.field(default_factory=dict)


class _Flow:
    """Where pointers come from: for each value the values that it may be.

    Names are looked up from the inside out. An unknown name is not a pointer, or has an unknown
    origin; so has a value without sources.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, int] = {}  # the kernel's own, by value
        self._sources: list[list[int]] = []
        self._regions = [_Region()]
        self._functions: dict[str, list[int]] = {}
        self._calls: list[tuple[str, list[int]]] = []
        self._jumps: list[tuple[_Region, str, list[int]]] = []
        self._writes: list[int] = []

    def read(self, line: str) -> None:
        """Reads one line: an operation, the head of a block, or braces."""
        opens = line.endswith("{")
        if line.startswith("}") and len(self._regions) > 1:
            closed = self._regions.pop()
            if opens:  # "} else {", "} do {"
                self._regions.append(dataclasses.replace(closed, names={}))
        elif line.startswith("^"):
            self._block(line)
        else:
            region = self._operation(line)
            if opens:
                self._regions.append(region)

    def written(self) -> Iterator[tuple[int, ...]]:
        """For each write through pointers of known origin the parameters it may reach."""
        for name, values in self._calls:
            self._hand_on(values, self._functions.get(name, []))
        for region, label, values in self._jumps:
            self._hand_on(values, region.blocks.get(label, []))
        for value in self._writes:
            reached = self._reached(value)
            if reached and _UNKNOWN not in reached:
                yield tuple(sorted(reached))

    def _reached(self, value: int) -> set[int]:
        reached, pending, seen = set(), [value], {value}
        while pending:
            current = pending.pop()
            if current in self.parameters:
                reached.add(self.parameters[current])
            elif current == _UNKNOWN or not self._sources[current]:
                return {_UNKNOWN}
            else:
                new = set(self._sources[current]) - seen
                seen |= new
                pending += new
        return reached

    def _operation(self, line: str) -> _Region:
        """Records what an operation does with pointers; returns the region that it may open."""
        match = _OPERATION.match(line)
        if match is None:
            return _Region()
        defined, operation = match.groups()
        rest = line[match.end() :]
        if operation == "tt.func":
            return self._function(rest)
        results = self._define(defined or "")
        if operation in _WRITES:
            self._writes += self._values(rest)[:1]
        elif operation in _FOLLOWS:
            self._hand_on(self._values(rest)[:1], results)
        elif operation == "arith.select":
            for choice in self._values(rest)[1:3]:
                self._hand_on([choice], results)
        elif operation in ("scf.for", "scf.while"):
            return self._loop(operation, line, results)
        elif operation == "scf.if":
            return _Region(operation, results=results)
        elif operation in ("scf.yield", "scf.condition"):
            self._terminate(operation, self._values(rest))
        elif operation == "tt.call" and (called := _CALL.search(rest)):
            self._calls.append((called[1], self._values(called[2])))
        for label, values in _JUMP.findall(rest):
            self._jumps.append((self._regions[-1], label, self._values(values)))
        return _Region()

    def _function(self, text: str) -> _Region:
        region = _Region()
        if (match := _FUNCTION.search(text)) is not None:
            arguments = []
            for name, kind in _PARAMETER.findall(match[2]):
                value = region.names[name] = self._new()
                arguments.append(value)
                if text.startswith(" public") and kind.startswith(_POINTERS):
                    self.parameters[value] = len(self.parameters)
            self._functions[match[1]] = arguments
        return region

    def _loop(self, operation: str, line: str, results: Sequence[int]) -> _Region:
        region = _Region(operation, results=results)
        carried = []
        if (match := _CARRIED.search(line)) is not None:
            names = _NAME.findall(match[1])
            for name, initial in zip(names[::2], names[1::2], strict=False):
                region.names[name] = self._new(self._value(initial))
                carried.append(region.names[name])
            if operation == "scf.for":  # it may not run at all
                self._hand_on([self._value(name) for name in names[1::2]], results)
        region.carried = carried
        return region

    def _terminate(self, operation: str, values: list[int]) -> None:
        """`scf.yield` and `scf.condition`, whose first operand is the condition itself."""
        region = self._regions[-1]
        if operation == "scf.condition":
            self._hand_on(values[1:], region.results)
            region.blocks["handed on"] = values[1:]
            return
        self._hand_on(values, region.carried)
        if region.operation != "scf.while":
            self._hand_on(values, region.results)

    def _block(self, line: str) -> None:
        region = self._regions[-1]
        label, _, rest = line.partition(":" if line.find("(") < 0 else "(")
        arguments = self._define(", ".join(name for name, _ in _PARAMETER.findall(rest)))
        handed_on = region.blocks.pop("handed on", None)
        if handed_on is not None:
            self._hand_on(handed_on, arguments)
        region.blocks[label] = arguments

    def _new(self, *sources: int) -> int:
        self._sources.append(list(sources))
        return len(self._sources) - 1

    def _define(self, names: str) -> list[int]:
        values = []
        for name, count in _RESULT.findall(names):
            labels = [f"{name}#{i}" for i in range(int(count))] if count else [name]
            for label in labels:
                values.append(self._new())
                self._regions[-1].names[label] = values[-1]
        return values

    def _value(self, name: str) -> int:
        for region in reversed(self._regions):
            if name in region.names:
                return region.names[name]
        return _UNKNOWN

    def _values(self, text: str) -> list[int]:
        return [self._value(name) for name in _NAME.findall(text)]

    def _hand_on(self, values: Sequence[int], targets: Sequence[int]) -> None:
        """Makes values the sources of targets, one by one; unknown ones if the counts differ."""
        if len(values) != len(targets):
            values = [_UNKNOWN] * len(targets)
        for value, target in zip(values, targets, strict=True):
            self._sources[target].append(value)
