"""Which instructions of an optimised XLA program have a buffer of their own, read off its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<sizes>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")

# What hands on the buffers of others, or only runs the instructions of another computation.
_NO_BUFFER = frozenset(
    [
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "opt-barrier",
        "optimization-barrier",
        "add-dependency",
        "after-all",
        "copy-start",
        "async-update",
        "async-done",
    ]
)
_RUNS_OTHERS = frozenset(("call", "while", "conditional", "async-start"))
# These write into their first operand. XLA copies it before, where somebody still reads it.
_IN_PLACE = frozenset(("scatter", "dynamic-update-slice"))


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's type: its dtype as XLA writes it, and its sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """What it takes: a byte for a boolean, and what is smaller than a byte is packed."""
        bits = re.search(r"\d+", self.dtype)
        return -(-self.elements * int(bits[0] if bits else 8) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `arrays` are those of its result, `attributes` all after its operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[tuple[str, int | None], ...]
    attributes: str
    is_root: bool

    @property
    def label(self) -> str:
        """The kernel of a Triax call, else the opcode and where in the program it comes from."""
        if kernel := re.search(r'triax\.kernel="([^"]*)"', self.attributes):
            return f"kernel {kernel[1]}"
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        source = re.sub(r"^jit\([^/]*\)/", "", found[1]) if found else ""
        return f"{self.opcode}: {source}" if source else self.opcode

    @property
    def called(self) -> list[str]:
        """The computations that its attributes name."""
        branches = [name for text in _BRANCHES.findall(self.attributes) for name in _names(text)]
        return _CALLED.findall(self.attributes) + branches


class Program:
    """The computations of an optimised program, `compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        body: dict[str, Instruction] = {}
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                body = self.computations.setdefault(match["name"], {})
                if match["entry"]:
                    self.entry = match["name"]
            elif (match := _INSTRUCTION.match(line)) and (found := _instruction(match)):
                body[found.name] = found

    def buffers(self) -> Iterator[tuple[Instruction, Array]]:
        """Every array that an instruction makes a buffer for, the program's outputs left out.

        Instructions inside a fusion have none. A loop's body counts once.
        """
        outputs = self._outputs()
        for computation in self._run():
            for instruction in self.computations[computation].values():
                if not self._makes_buffers(instruction):
                    continue
                aliased = _aliased(instruction.attributes)
                for index, array in enumerate(instruction.arrays):
                    place = (computation, instruction.name, index)
                    if index not in aliased and place not in outputs:
                        yield instruction, array

    def _makes_buffers(self, instruction: Instruction) -> bool:
        if instruction.opcode in _NO_BUFFER | _RUNS_OTHERS | _IN_PLACE:
            return False
        if instruction.opcode != "fusion":
            return True
        return all(self._root(name).opcode not in _IN_PLACE for name in instruction.called)

    def _run(self) -> list[str]:
        """The computations whose instructions run one by one, the entry first."""
        found = [self.entry] if self.entry else []
        for computation in found:
            for instruction in self.computations[computation].values():
                if instruction.opcode in _RUNS_OTHERS:
                    found += [name for name in instruction.called if name not in found]
        return found

    def _root(self, computation: str) -> Instruction:
        return next(i for i in self.computations[computation].values() if i.is_root)

    def _outputs(self) -> set[tuple[str, str, int]]:
        """Where the program's outputs are made: computation, instruction, index in its result."""
        if not self.entry:
            return set()
        root = self._root(self.entry)
        return {
            self._source(self.entry, root.name, index if len(root.arrays) > 1 else None)
            for index in range(len(root.arrays))
        }

    def _source(self, computation: str, name: str, index: int | None) -> tuple[str, str, int]:
        """Who makes the buffer that a value, or element `index` of one, lies in."""
        instruction = self.computations[computation][name]
        opcode = instruction.opcode
        if opcode == "call":
            (computation,) = instruction.called
            return self._source(computation, self._root(computation).name, index)
        if not instruction.operands or opcode not in _NO_BUFFER:
            return computation, name, index or 0
        operand, element = instruction.operands[index or 0 if opcode == "tuple" else 0]
        if opcode == "get-tuple-element":
            found = re.search(r"\bindex=(\d+)", instruction.attributes)
            element = int(found[1]) if found else 0
        elif opcode != "tuple" and element is None:
            element = index
        return self._source(computation, operand, element)


def _instruction(match: re.Match[str]) -> Instruction | None:
    rest = match["rest"]
    # A type may hold parentheses (tuples, tiled layouts); the opcode's are the first after it.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else len(rest.split(" ", 1)[0])
    opcode = re.match(r" *([\w\-]+)\(", rest[end:])
    if opcode is None:
        return None
    start = end + opcode.end() - 1
    stop = _closing(rest, start)
    return Instruction(
        name=match["name"],
        opcode=opcode[1],
        arrays=tuple(
            Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in _ARRAY.findall(rest[:end])
        ),
        operands=tuple(
            (name, int(element) if element else None)
            for name, element in _OPERAND.findall(rest[start:stop])
        ),
        attributes=rest[stop:],
        is_root=bool(match["root"]),
    )


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _names(text: str) -> list[str]:
    return [name.strip().lstrip("%") for name in text.split(",")]


def _aliased(attributes: str) -> set[int]:
    """The outputs that a custom call writes into an operand."""
    match = re.search(r"output_to_operand_aliasing=\{(.*?)\)\s*\}", attributes)
    return {int(index or 0) for index in re.findall(r"\{(\d*)\}: \(", match[1])} if match else set()
