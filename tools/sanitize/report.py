"""What a tool found, from what it printed."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

TOOLS = "canaries", "memcheck", "racecheck", "initcheck", "synccheck"

_RAN = re.compile(r"^ran (\w+) ", re.MULTILINE)
_CANARY = re.compile(r"^CANARY: (\w+) wrote ", re.MULTILINE)
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)
_FINDING = re.compile(
    r"=+ (?:Error|Warning|Invalid|Uninitialized|Barrier|Race|Potential|Misaligned|Unused)\b"
)
_KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(\w+)")
_EMPTY = re.compile(r"=+ *$")


@dataclasses.dataclass(frozen=True)
class Found:
    """Which kernels a tool saw, how often it complained of each, and its own count.

    `count` is None where the tool did not come to its end.
    """

    ran: Counter[str]
    findings: Counter[str]
    count: int | None

    @property
    def complete(self) -> bool:
        return self.count is not None

    @property
    def total(self) -> int:
        """The tool's count, or that of what was read, if that is more."""
        return max(self.count or 0, sum(self.findings.values()))


def read(tool: str, output: str, status: int) -> Found:
    """What a run printed, which ended with `status`."""
    ran = Counter(map(base_name, _RAN.findall(output)))
    names = _CANARY.findall(output) if tool == "canaries" else _complained_of(output)
    findings = Counter(map(base_name, names))
    if tool == "canaries":
        return Found(ran, findings, sum(findings.values()) if status == 0 else None)
    counts = [int(count) for count in _SUMMARY.findall(output)]
    return Found(ran, findings, sum(counts) if counts else None)


def _complained_of(output: str) -> Iterator[str]:
    """The kernel of each finding: its first line names it, or one that follows."""
    searching = False
    for line in output.splitlines():
        searching = bool(_FINDING.match(line)) or (searching and not _EMPTY.match(line))
        if searching and (kernel := _KERNEL.search(line)):
            searching = False
            yield kernel[1]


def base_name(entry: str) -> str:
    """A kernel's name without the hash of what it was compiled from."""
    return re.sub(r"_[0-9a-f]{16,}$", "", entry).strip("_").removesuffix("_kernel")


def table(found: dict[str, Found]) -> str:
    """A line for each kernel: its launches, and what each tool found."""
    kernels = sorted({kernel for each in found.values() for kernel in each.ran + each.findings})
    lines = [["kernel", "launches", *found]]
    for kernel in kernels:
        launches = max(each.ran[kernel] for each in found.values())
        cells = [str(each.findings[kernel]) if each.ran[kernel] else "–" for each in found.values()]
        lines.append([kernel, str(launches), *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
