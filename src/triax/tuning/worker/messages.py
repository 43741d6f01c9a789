"""What a tuning worker is asked and what it answers, as plain data.

Imported by the worker, which runs without JAX and without the rest of Triax: only the
standard library may be imported here.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """A buffer of `nbytes`, filled by repeating `pattern`, or from the file at `path`.

    `restored` buffers are put back before every run, because the kernel changes them.
    """

    nbytes: int
    pattern: bytes = b"\0"
    path: str | None = None
    restored: bool = False


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of buffer `index`; its first `zeroed` bytes are zeroed."""

    index: int
    zeroed: int = 0


@dataclasses.dataclass(frozen=True)
class Number:
    """A kernel parameter: a number of type "i1", "i32", "u32", "i64", "u64", "fp32" or "fp64"."""

    value: bool | int | float
    type: str


@dataclasses.dataclass(frozen=True)
class TensorMapParameter:
    """A kernel parameter: a TMA descriptor of buffer `index`, in the driver's terms.

    The kernel takes shape (32-bit) and strides (64-bit) behind it; sizes count elements.
    """

    index: int
    element_type: int
    itemsize: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    nan_fill: bool


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A compiled config and how to launch it. Sizes in bytes."""

    label: str
    cubin: bytes
    entry: str
    grid: tuple[int, int, int]
    num_warps: int
    num_ctas: int
    shared_bytes: int
    scratch_bytes: int
    parameters: tuple[Pointer | Number | TensorMapParameter, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """Candidates to time on the same buffers.

    `limit_bytes` bounds the memory taken, besides half of what the driver reports free.
    `timeout_s` is what one run of one candidate may take. Once `budget_s` are spent, no
    further candidate is begun.
    """

    buffers: tuple[BufferSpec, ...]
    candidates: tuple[CompiledCandidate, ...]
    limit_bytes: int | None
    timeout_s: float
    budget_s: float


@dataclasses.dataclass(frozen=True)
class Ready:
    """The worker's first word: the device answers. `uuid` tells it from all other GPUs."""

    uuid: str


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The job was not done: it needs more memory than it may take."""

    needed_bytes: int
    allowed_bytes: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """The job was not done, for a reason that no candidate is to blame for."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Started:
    """What happens from here on is candidate `index`'s doing."""

    index: int


@dataclasses.dataclass(frozen=True)
class Timed:
    """Candidate `index` took `median_ms` in the median of `runs` so far; the last word counts."""

    index: int
    median_ms: float
    runs: int


@dataclasses.dataclass(frozen=True)
class Failed:
    """Candidate `index` has no time: it failed, or a run was `late`, that is, did not end.

    After a `fatal` failure the worker is gone.
    """

    index: int
    reason: str
    fatal: bool
    late: bool = False


@dataclasses.dataclass(frozen=True)
class Done:
    """Nothing more will be said of this job. Candidates not spoken of were not tried."""
