"""Requests to and answers of a tuning worker, as plain data.

The worker first sends its GPU's UUID, a string, which shows that it responds. It answers a job
with the messages below and, at the end, None; or with a string that says why the job was not begun
or finished, for a reason unrelated to its candidates, such as too little memory. Candidates without
a message were not tried.

Imported by the worker, which runs without JAX and without the rest of Triax: only the
standard library may be imported here.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """A buffer of `nbytes`, filled by repeating `pattern`, or from the file at `path`.

    `restored` buffers get their initial contents before every run, because the kernel changes them.
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

    The kernel takes the shape (32-bit) and strides (64-bit) after it; sizes count elements.
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

    Memory is limited by `limit_bytes` and by half of what the driver reports free. `timeout_s`
    limits one run of one candidate. Once `budget_s` are spent, no further candidate is started.
    """

    buffers: tuple[BufferSpec, ...]
    candidates: tuple[CompiledCandidate, ...]
    limit_bytes: int | None
    timeout_s: float
    budget_s: float


@dataclasses.dataclass(frozen=True)
class Started:
    """Candidate `index` runs from now on, so it is to blame if the worker dies."""

    index: int


@dataclasses.dataclass(frozen=True)
class Timed:
    """The median of candidate `index` over its `runs` so far; its last message counts."""

    index: int
    median_ms: float
    runs: int


@dataclasses.dataclass(frozen=True)
class Failed:
    """Candidate `index` has no time: it failed, or a run did not end in time (`late`).

    After a `fatal` failure the worker ends.
    """

    index: int
    reason: str
    fatal: bool
    late: bool = False
