"""What the assembler that comes with Triton makes of a kernel: registers, spills, machine code.

XLA assembles a program's kernels with an assembler of its own, and does not say what it found. The
two are the same program; of other versions they may differ by a few registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from triax.compat.triton_private import triton
from triax.errors import CompilationError, MissingDependencyError


class Resources(NamedTuple):
    """What a kernel uses of a multiprocessor.

    Attributes:
      registers: of a thread, of the 255 that it may have.
      spilled_bytes: of a thread, stored to memory because they did not fit into registers.
      shared_bytes: of shared memory, of a program.
      warps: of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes} bytes of shared memory, {self.warps} warps"
        )


def resources(ptx: str, shared_bytes: int, warps: int) -> Resources:
    """Assembles a kernel to count what it uses.

    Raises:
      CompilationError: the assembler refuses the PTX.
      MissingDependencyError: Triton has no assembler for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, said = assemble(ptx, Path(folder))
    static = re.search(r"(\d+) bytes smem", said)
    return Resources(*counts(said), shared_bytes + int(static[1] if static else 0), warps)


def counts(said: str) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes that it spills, from what ptxas says.

    Raises:
      CompilationError: it says nothing of registers.
    """
    used = re.search(r"Used (\d+) registers", said)
    if used is None:
        raise CompilationError(f"ptxas does not say how many registers it used: {said}")
    return int(used[1]), sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def assemble(ptx: str, folder: Path) -> tuple[Path, str]:
    """Writes a kernel's machine code to a folder; returns its path, and what the assembler says.

    Raises:
      CompilationError: the assembler refuses the PTX.
      MissingDependencyError: Triton has no assembler for it.
    """
    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    if target is None:
        raise CompilationError("The kernel's PTX names no target.")
    name = "ptxas" if int(target[2]) < 100 else "ptxas_blackwell"
    try:
        tool = getattr(triton().knobs.nvidia, name).path
    except (AttributeError, RuntimeError, OSError) as error:
        raise MissingDependencyError(
            f"Triton has no {name} for {target[1]}: {error}. Install a Triton that supports this "
            "GPU, or set TRITON_PTXAS_PATH."
        ) from None
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    command = [tool, f"-arch={target[1]}", "-v", source, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilationError(f"ptxas refuses the kernel for {target[1]}: {done.stderr.strip()}")
    return cubin, done.stdout + done.stderr
