"""Reads a kernel's machine code: which registers it overwrites while tensor cores read them.

Hopper's `wgmma` reads its left operand from registers, if that is where it is, after the program
has gone on. Only a wait for its group says that it has read them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"BRA(?:\.\w+)* .*`\((\.L_x_\d+)\)")
_GROUP_ENDS, _WAIT = "gsb0", re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
_MULTIPLIES = re.compile(r"HGMMA\S* R\d+, R(\d+)(?:\.reuse)?, ")
# Instructions without a register as their result.
_NO_RESULT = re.compile(
    r"ST|BAR|SYNCS|BRA|WARP|UTMA|HGMMA|RED|[FDHU]?I?SETP|R2UR|BSSY|BSYNC|NOP|EXIT|VOTE|U|MEMBAR|FENCE"
)


class Code(NamedTuple):
    """Instructions in their order, and where labels stand."""

    instructions: list[str]
    labels: dict[str, int]


def disassemble(cubin: Path) -> Code:
    """The machine code of a file with one kernel."""
    command = [_TOOLS / "nvdisasm", "-c", cubin]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code = Code([], {})
    for line in done.stdout.splitlines():
        if label := _LABEL.match(line):
            code.labels[label[1]] = len(code.instructions)
        elif found := _INSTRUCTION.match(line):
            code.instructions.append(found[1])
    return code


def results(instruction: str) -> range:
    """The registers that an instruction writes."""
    name, _, operands = re.sub(r"^@!?U?P\w+ ", "", instruction).partition(" ")
    register = re.match(r"R(\d+)\b", operands)
    if register is None or _NO_RESULT.match(name):
        return range(0)
    width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return range(int(register[1]), int(register[1]) + width)


def hazards(code: Code) -> list[str]:
    """Instructions that write what a product in flight may still have to read."""
    found = []
    for at, product in enumerate(code.instructions):
        if (operand := _MULTIPLIES.match(product)) is not None:
            first = int(operand[1])
            found += _overwritten(code, at, range(first, first + 4))
    return found


def _overwritten(code: Code, product: int, registers: range) -> list[str]:
    """Those after one product, on all ways to a wait for it."""
    found, seen = [], set()
    ends = _GROUP_ENDS in code.instructions[product]
    todo = [(product + 1, 0 if ends else -1)]  # groups after this one that have ended
    while todo:
        at, younger = todo.pop()
        while at < len(code.instructions) and (at, younger) not in seen:
            seen.add((at, younger))
            instruction = code.instructions[at]
            wait = _WAIT.search(instruction)
            if (wait and younger >= int(wait[1])) or re.match(r"EXIT", instruction):
                break
            if "HGMMA" in instruction and _GROUP_ENDS in instruction:
                younger += 1
            if set(results(instruction)) & set(registers):
                found.append(f"{code.instructions[product]}, then {instruction}")
            if branch := _BRANCH.search(instruction):
                todo.append((code.labels[branch[1]], younger))
                if not instruction.startswith("@"):
                    break
            at += 1
    return found
