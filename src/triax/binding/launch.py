"""A kernel launch as plain frozen data.

`triton_call` binds a user's call into a `BoundCall`: the kernel, which buffer each
parameter takes, and the candidate configs with the grid of each. Lowering
resolves one candidate against concrete array types into a `Launch`, which the
compiler, the custom call and the interpreter read. Everything here is hashable,
compares by exact value, and knows nothing of JAX or of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from triax.binding.kernel import Kernel
from triax.binding.values import Config, Static, Values, describe
from triax.compat import triton_private

Grid: TypeAlias = tuple[int, int, int]
KernelImplementation = Literal["triton", "interpret"]
SANITIZER_OPTION = "instrumentation_mode"


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of a buffer, row-major and dense."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, array: Any) -> ArrayType:
        """The type of anything with `shape` and `dtype`."""
        return cls(tuple(map(int, array.shape)), np.dtype(array.dtype))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Operand:
    """A parameter that takes the `index`-th array operand."""

    index: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A parameter that takes the `index`-th output buffer."""

    index: int


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A parameter that takes a Python bool, int, float or None."""

    static: Static

    @property
    def value(self) -> bool | int | float | None:
        value: bool | int | float | None = self.static.value
        return value


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A parameter that takes a host-side TMA descriptor of an array operand or output.

    Shapes and strides count elements. `block_shape` is empty if the candidates set it.
    """

    buffer: Operand | Result
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any
    padding: str
    round_f32_to_tf32: bool


Argument: TypeAlias = "Operand | Result | Scalar | Descriptor | tuple[Argument, ...]"


Leaf: TypeAlias = Operand | Result | Scalar | Descriptor
Path: TypeAlias = tuple[int, ...]


def leaves(argument: Argument) -> list[Leaf]:
    """The leaves of one argument, tuples flattened in order."""
    return [leaf for _, leaf in leaves_with_paths(argument)]


def leaves_with_paths(argument: Argument, path: Path = ()) -> list[tuple[Path, Leaf]]:
    """The leaves of one argument, each with its indices in the tuples that it is in."""
    if not isinstance(argument, tuple):
        return [(path, argument)]
    return [pair for i, part in enumerate(argument) for pair in leaves_with_paths(part, (*path, i))]


def rebuild(argument: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """A tuple of the same type with other parts; a named tuple keeps its names."""
    return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)


def map_leaves(function: Callable[[Leaf], Any], argument: Argument) -> Any:
    """Applies a function to each leaf of an argument, and keeps its tuples."""
    if isinstance(argument, tuple):
        return rebuild(argument, [map_leaves(function, part) for part in argument])
    return function(argument)


@dataclasses.dataclass(frozen=True)
class Alias:
    """Output `result` shares its buffer with array operand `operand`."""

    operand: int
    result: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config with everything that follows from it.

    `constants` are all constexpr parameters of the kernel, `options` all compiler options, `zeroed`
    the outputs to zero before the launch; `block_shapes` pairs the buffers of descriptors with the
    block shapes of this config.
    """

    config: Config
    constants: Values
    options: Values
    grid: Grid
    zeroed: tuple[int, ...] = ()
    block_shapes: tuple[tuple[Operand | Result, tuple[int, ...]], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the grid has no program in it."""
        return 0 in self.grid

    def __str__(self) -> str:
        return describe(self.constants, self.options)


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A user's call bound to its kernel: everything known before devices and shapes.

    `arguments` gives the runtime parameters in the kernel's order; `aliases`
    index array operands and flattened outputs; `tuning` is the tuning mode and
    `implementation` one of None, "triton", "interpret". `fallback` is the candidate to use if none
    is chosen; None means the first. `checked` turns on the interpreter's checks. `code` is the
    fingerprint of the kernel at trace time, so that an eager call does not find an older program.
    """

    kernel: Kernel
    arguments: tuple[tuple[str, Argument], ...]
    candidates: tuple[Candidate, ...]
    aliases: tuple[Alias, ...] = ()
    name: str = ""
    tuning: str = "auto"
    implementation: KernelImplementation | None = None
    compute_capability: int | None = None
    cost_estimate: Values = ()
    has_side_effect: bool = False
    serialized_metadata: bytes = b""
    debug: bool = False
    # Not compared: calls that differ only in `tuning_inputs` are equal.
    tuning_inputs: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)
    fallback: Candidate | None = None
    checked: bool = False
    code: str = ""

    @functools.cached_property
    def display_name(self) -> str:
        """The name to show in logs, errors and profiles."""
        return self.name or self.kernel.name

    def launch(
        self, candidate: Candidate, operands: tuple[ArrayType, ...], results: tuple[ArrayType, ...]
    ) -> Launch:
        """The launch of one candidate on arrays of the given types."""
        arguments = self.arguments
        if block_shapes := dict(candidate.block_shapes):

            def complete(leaf: Leaf) -> Leaf:
                if isinstance(leaf, Descriptor) and leaf.buffer in block_shapes:
                    return dataclasses.replace(leaf, block_shape=block_shapes[leaf.buffer])
                return leaf

            arguments = tuple((name, map_leaves(complete, part)) for name, part in arguments)
        name, aliases = self.display_name, self.aliases
        return Launch(self.kernel, arguments, candidate, operands, results, aliases, name)

    def launches(
        self, operands: tuple[ArrayType, ...], results: tuple[ArrayType, ...]
    ) -> list[Launch]:
        """The launches of all candidates whose grid is not empty."""
        return [self.launch(c, operands, results) for c in self.candidates if not c.is_empty]

    def __repr__(self) -> str:
        return f"BoundCall({self.display_name}, {len(self.candidates)} candidate(s))"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, one config, one grid, and the types of its buffers."""

    kernel: Kernel
    arguments: tuple[tuple[str, Argument], ...]
    candidate: Candidate
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    aliases: tuple[Alias, ...]
    name: str

    @property
    def grid(self) -> Grid:
        return self.candidate.grid

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        return {name: static.value for name, static in self.candidate.constants}

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        return {name: static.value for name, static in self.candidate.options}

    @property
    def sanitizer(self) -> str | None:
        """The sanitizer that the kernel is compiled with."""
        return self.options.get(SANITIZER_OPTION) or None

    @property
    def operand_of_result(self) -> dict[int, int]:
        """For each aliased output, the operand whose buffer it shares."""
        return {alias.result: alias.operand for alias in self.aliases}

    def array_type(self, leaf: Operand | Result | Descriptor) -> ArrayType:
        """The type of a leaf's buffer."""
        if isinstance(leaf, Descriptor):
            leaf = leaf.buffer
        return self.results[leaf.index] if isinstance(leaf, Result) else self.operands[leaf.index]

    def buffer_index(self, leaf: Operand | Result | Descriptor) -> int:
        """The index of a leaf's buffer: operands first, then the outputs that are not aliased."""
        if isinstance(leaf, Descriptor):
            leaf = leaf.buffer
        if not isinstance(leaf, Result):
            return leaf.index
        aliased = self.operand_of_result
        if leaf.index in aliased:
            return aliased[leaf.index]
        fresh = [index for index in range(len(self.results)) if index not in aliased]
        return len(self.operands) + fresh.index(leaf.index)

    def zeroed_bytes(self) -> dict[Operand | Result, int]:
        """The number of bytes to zero before the launch, for each leaf with a zeroed buffer."""
        sizes = {index: self.results[index].nbytes for index in self.candidate.zeroed}
        zeroed: dict[Operand | Result, int] = {Result(index): n for index, n in sizes.items()}
        aliased = [alias for alias in self.aliases if alias.result in sizes]
        return zeroed | {Operand(alias.operand): sizes[alias.result] for alias in aliased}

    @functools.cached_property
    def named_leaves(self) -> tuple[tuple[str, Leaf], ...]:
        """The leaves of all runtime parameters, in the kernel's order, each with its name: the
        parameter, plus the position in a tuple."""
        named: list[tuple[str, Leaf]] = []
        for name, argument in self.arguments:
            if not isinstance(argument, tuple):
                named.append((name, argument))
                continue
            for path, leaf in leaves_with_paths(argument):
                named.append((name + "".join(f"[{index}]" for index in path), leaf))
        return tuple(named)


os.register_at_fork(
    after_in_child=lambda: triton_private.renew_property_locks(Kernel, BoundCall, Launch)
)


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """The compiler's decisions about one host TMA descriptor, in the driver's terms."""

    block_shape: tuple[int, ...]
    element_type: int
    swizzle: int


Assumption: TypeAlias = bool | str | TensorMap | None
"""What compiled code assumes of an argument: of an array whether its address is divisible by 16,
of a scalar its type in Triton's words, of a descriptor its tensor map, or None without TMA."""


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """Triton's output for one launch, in the form that XLA's custom call needs.

    `name` is the PTX entry, unique to the code. `cubin` is the machine code of `ptx`, made only on
    request because XLA makes its own. A block of the grid has its own part of each scratch; that of
    a sanitizer (Triton's profile scratch) begins as zeros.
    """

    name: str
    ptx: str
    compute_capability: int
    num_warps: int
    num_ctas: int
    shared_bytes: int
    global_scratch_bytes: int
    global_scratch_align: int
    sanitizer_scratch_bytes: int
    sanitizer_scratch_align: int
    parameters: tuple[tuple[int, Assumption], ...]
    """The parameters in the kernel's order, each as its number in `Launch.named_leaves` and what
    the code assumes of it; without None and integers of 1, which Triton folds into the code."""
    writes: tuple[tuple[int, ...], ...] = ()
    """For each write that can be traced to arguments, the leaves whose memory it may reach."""
    cubin: bytes | None = None
