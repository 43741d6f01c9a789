"""The limits and features of GPUs that kernels depend on, by compute capability."""

from __future__ import annotations

import dataclasses
from typing import Literal

Products = Literal["mma.sync", "wgmma", "tcgen05.mma"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The limits and features of a compute capability.

    Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; PTX ISA,
    target notes of the instructions.

    Attributes:
      compute_capability: 90 for an H100 or H200.
      cards: some GPUs that have it.
      shared_bytes: the most shared memory of a block.
      multiprocessors: the number on the first of `cards`, for programs lowered without a GPU.
      tma: whether the hardware loads and stores blocks by descriptors.
      products: the PTX instruction for matrix products on tensor cores.
    """

    compute_capability: int
    cards: str
    shared_bytes: int
    multiprocessors: int
    tma: bool
    products: Products

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether tensor cores read operands from shared memory, while the program goes on.

        Such tensor cores need large blocks. `mma.sync` multiplies operands in registers.
        """
        return self.products != "mma.sync"


_ALL = (
    Architecture(75, "T4, RTX 20", 64 << 10, 40, False, "mma.sync"),
    Architecture(80, "A100, A30", 163 << 10, 108, False, "mma.sync"),
    Architecture(86, "A40, A10, RTX 30", 99 << 10, 84, False, "mma.sync"),
    Architecture(87, "Jetson Orin", 163 << 10, 16, False, "mma.sync"),
    Architecture(89, "L40S, L4, RTX 40", 99 << 10, 142, False, "mma.sync"),
    Architecture(90, "H100, H200, GH200", 227 << 10, 132, True, "wgmma"),
    Architecture(100, "B200, GB200", 227 << 10, 148, True, "tcgen05.mma"),
    Architecture(103, "B300, GB300", 227 << 10, 148, True, "tcgen05.mma"),
    Architecture(110, "Jetson Thor", 227 << 10, 20, True, "tcgen05.mma"),
    Architecture(120, "RTX 50, RTX PRO Blackwell", 99 << 10, 170, True, "mma.sync"),
    Architecture(121, "DGX Spark", 99 << 10, 48, True, "mma.sync"),
)
BY_CAPABILITY = {each.compute_capability: each for each in _ALL}


def of(compute_capability: int) -> Architecture:
    """The architecture of a compute capability; for an unlisted one, the next below."""
    known = [each for each in _ALL if each.compute_capability <= compute_capability]
    return (known or _ALL)[-1 if known else 0]
