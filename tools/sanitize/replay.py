"""Runs recorded launches without JAX: each buffer is an allocation of its own, of exact size.

    python tools/sanitize/replay.py FOLDER [--canaries]

JAX's pool, and what XLA puts side by side, would hide where a buffer ends. With `--canaries` each
buffer lies between two pages of a pattern, which are looked at after each launch. Prints a line for
each launch, and one for each broken page.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pickle
import sys
import types
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).resolve().parents[2] / "src" / "triax"
if "triax" not in sys.modules:  # leaves out what importing the package would import
    _package = sys.modules["triax"] = types.ModuleType("triax")
    _package.__path__ = [str(_SOURCE)]

from triax.tuning.worker import driver, messages  # noqa: E402

PAGE, PATTERN = 4096, 0xA5


class Bench(driver.Bench):
    """The buffers of one job; results hold what nobody has written."""

    def __init__(self, device: driver.Context, job: messages.Job, canaries: bool):
        super().__init__(device, job)
        self.canaries = canaries
        self.flush_bytes = 1

    def allocate(self) -> None:
        """Fills the operands. Buffers from no file are results, and stay as they are."""
        for buffer in self.job.buffers:
            room = buffer.nbytes + 2 * PAGE if self.canaries else buffer.nbytes
            address = self.device.allocate(room)
            self.addresses.append(address)
            if self.canaries:
                driver.call(self.cu.cuMemsetD8, address, PATTERN, room)
                self.addresses[-1] += PAGE
            if buffer.path is not None:
                self.device.fill(self.addresses[-1], buffer)
        if self.scratch_bytes():
            self.scratch = self.device.allocate(self.scratch_bytes())
        driver.call(self.cu.cuCtxSynchronize)

    def run_once(self) -> None:
        (candidate,) = self.job.candidates
        function, parameters = self.load(candidate), self.parameters(candidate)
        for parameter in candidate.parameters:
            if isinstance(parameter, messages.Pointer) and parameter.zeroed:
                address = self.addresses[parameter.index]
                driver.call(self.cu.cuMemsetD8, address, 0, parameter.zeroed)
        self.launch(candidate, function, parameters)
        driver.call(self.cu.cuCtxSynchronize)

    def broken_pages(self) -> list[str]:
        """Which buffers were written before their beginning or past their end."""
        found = []
        page = (ctypes.c_uint8 * PAGE)()
        for index, (buffer, address) in enumerate(
            zip(self.job.buffers, self.addresses, strict=True)
        ):
            for side, start in (("before", address - PAGE), ("past", address + buffer.nbytes)):
                driver.call(self.cu.cuMemcpyDtoH, ctypes.addressof(page), start, PAGE)
                if any(byte != PATTERN for byte in page):
                    found.append(f"{side} buffer {index} of {buffer.nbytes} bytes")
        return found

    def free(self) -> None:
        if self.canaries:
            self.addresses = [address - PAGE for address in self.addresses]
        self.release()


def located(job: messages.Job, folder: Path) -> messages.Job:
    """The job with its files' whole paths."""
    buffers = tuple(
        dataclasses.replace(b, path=b.path and str(folder / b.path)) for b in job.buffers
    )
    return dataclasses.replace(job, buffers=buffers)


def main(folder: Path, canaries: bool) -> None:
    device = driver.Context(0)
    jobs: list[tuple[str, Any]] = pickle.loads((folder / "jobs.pickle").read_bytes())
    for name, job in jobs:
        bench = Bench(device, located(job, folder), canaries)
        bench.allocate()
        bench.run_once()
        entry = job.candidates[0].entry
        print(f"ran {entry} ({name})", flush=True)
        if canaries:
            for broken in bench.broken_pages():
                print(f"CANARY: {entry} wrote {broken}", flush=True)
        bench.free()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--canaries" in sys.argv[2:])
