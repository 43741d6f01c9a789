"""Reads XLA's dumped buffer assignment: which buffers the Triton calls of a program share."""

import re
from dataclasses import dataclass
from pathlib import Path

TARGET = re.compile(r'custom_call_target="triton_kernel_call(_ffi)?"')
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_VALUE = re.compile(
    r"value: <\d+ (?P<name>[\w.\-]+)(?:\{(?P<index>[\d,]*)\})? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\)"
)


@dataclass(frozen=True)
class Place:
    """Where a value lies: allocation, first byte, bytes."""

    allocation: int
    offset: int
    size: int

    def overlaps(self, other):
        return (
            self.allocation == other.allocation
            and self.offset < other.offset + other.size
            and other.offset < self.offset + self.size
        )


def places(assignment):
    """Each value's place, by (instruction, tuple index or "")."""
    found = {}
    allocation = None
    for line in assignment.splitlines():
        if match := re.match(r"\s*allocation (\d+):", line):
            allocation = int(match.group(1))
        if match := _VALUE.search(line):
            key = (match["name"], match["index"] or "")
            found[key] = Place(allocation, int(match["offset"]), int(match["size"]))
    return found


def instructions(hlo):
    """Opcode with operands, by instruction."""
    found = {}
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        call = re.search(
            r"\s(?P<opcode>[\w\-]+)\((?P<operands>[^()]*(?:\([^()]*\)[^()]*)*)\)", match["rest"]
        )
        if call is not None:
            # XLA writes the third element of a tuple as `%call.8#2`, or as an instruction.
            operands = re.findall(r"%([\w.\-]+)(?:#(\d+))?", call["operands"])
            found[match["name"]] = (call["opcode"], operands, match["rest"])
    return found


def source(operand, program):
    """The instruction, and the tuple index, that made the buffer an operand names."""
    name, index = operand
    if index:
        return name, index
    opcode, operands, rest = program[name]
    if opcode == "get-tuple-element":
        return operands[0][0], re.search(r"index=(\d+)", rest).group(1)
    if opcode in ("bitcast", "copy-done"):
        return source(operands[0], program)
    return name, ""


def triton_calls(folder, function):
    """For each Triton call of the dumped jit_<function>: places of its operands and outputs.

    Outputs that are declared to be aliased are left out.
    """
    (hlo,) = Path(folder).glob(f"*jit_{function}.*gpu_after_optimizations.txt")
    (assignment,) = Path(folder).glob(f"*jit_{function}.*after_optimizations-buffer-assignment.txt")
    program = instructions(hlo.read_text())
    found = places(assignment.read_text())
    calls = {}
    for name, (_, operands, rest) in program.items():
        if TARGET.search(rest):
            aliased = _aliased(rest)
            inputs = [found[source(operand, program)] for operand in operands]
            outputs = [
                place
                for (owner, index), place in found.items()
                if owner == name and _is_array(index, rest) and index not in aliased
            ]
            calls[name] = (inputs, outputs, aliased)
    return calls


def _aliased(rest):
    """The outputs that `output_to_operand_aliasing={{0}: (1, {})}` names."""
    match = re.search(r"output_to_operand_aliasing=\{(.*?)\)\s*\}", rest)
    return set(re.findall(r"\{([\d,]*)\}: \(", match.group(1))) if match else set()


def _is_array(index, rest):
    """A tuple's own table of pointers is no output."""
    return not rest.startswith("(") or index != ""
