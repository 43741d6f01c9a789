"""Interprets one launch: arrays in, arrays out."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import JITFunction

from triax.binding import diagnostics, dtypes
from triax.binding.launch import ArrayType, Descriptor, Launch, Leaf, Scalar, map_leaves
from triax.compat import patching
from triax.compat import triton_interpreter as compat
from triax.compat.triton_lock import TRITON
from triax.errors import ArgumentValueError, UnsupportedError
from triax.interpreting import aggregates, inside, language_extra, reductions, rewriting, rounding
from triax.interpreting.builder import Builder
from triax.interpreting.checking import CheckedMemory
from triax.interpreting.memory import Buffer, Memory

_INTEGER_RANGES = (("i32", -(2**31), 2**31), ("i64", -(2**63), 2**63), ("u64", 0, 2**64))


def run(
    launch: Launch, operands: Sequence[np.ndarray], checked: bool = False
) -> tuple[np.ndarray, ...]:
    """Runs the kernel on `operands`; returns one array per result of the launch.

    Args:
      launch: the kernel, its arguments and its grid.
      operands: one array per ``launch.operands``; they are not modified.
      checked: also look for races and uninitialised reads.

    Returns:
      One array per ``launch.results``. Elements that the kernel does not write are NaN (0xA5 in
      every byte of an integer), 0 in zeroed outputs, or the operand's elements in aliased outputs.
      With an empty grid they are 0, or the operand's elements.

    Raises:
      OutOfBounds: the kernel accessed memory outside its buffers.
      ReadOnlyOperand: the kernel wrote to an operand that no output is aliased to.
      DataRace, UninitializedRead: `checked` found a race or an uninitialised read.
      UnsupportedError: the kernel does something that only a GPU can do.
    """
    if launch.kernel.is_gluon and not launch.candidate.is_empty:
        raise UnsupportedError(
            f"Kernel `{launch.name}` is written in Gluon, which only runs on a GPU: Triton "
            "has no interpreter for it."
        )
    if launch.sanitizer is not None:
        raise UnsupportedError(
            f"Kernel `{launch.name}` runs in Triton's interpreter, inside "
            f"`triax.testing.sanitized({launch.sanitizer!r})`, which is for kernels on a GPU. Use "
            "`triax.testing.checked()` here."
        )
    buffers, results = _buffers(launch, operands)
    if not launch.candidate.is_empty:
        if checked:
            held = {*launch.operand_of_result, *launch.candidate.zeroed}
            fresh = [buffer for index, buffer in enumerate(results) if index not in held]
            memory: Memory = CheckedMemory(launch.name, buffers, fresh)
        else:
            memory = Memory(launch.name, buffers)
        TRITON.alone(functools.partial(_interpret, launch, memory))
    return tuple(
        buffers[index].data.view(type.dtype).reshape(type.shape)
        for index, type in zip(results, launch.results, strict=True)
    )


def _buffers(
    launch: Launch, operands: Sequence[np.ndarray]
) -> tuple[list[Buffer], tuple[int, ...]]:
    """Returns all buffers, operands first, and for each result the index of its buffer."""
    if len(operands) != len(launch.operands):
        raise ArgumentValueError(
            f"Kernel `{launch.name}` takes {len(launch.operands)} operands, got {len(operands)}."
        )
    names = _names(launch)
    aliased = launch.operand_of_result
    results = []
    buffers = []
    for index, (type, operand) in enumerate(zip(launch.operands, operands, strict=True)):
        array = np.asarray(operand)
        if (array.shape, array.dtype) != (type.shape, type.dtype):
            raise ArgumentValueError(
                f"Operand {index} of kernel `{launch.name}` must be {type.dtype}{type.shape}, "
                f"got {array.dtype}{array.shape}."
            )
        writable = index in aliased.values()
        array = np.array(array, order="C") if writable else np.ascontiguousarray(array)
        data = array.reshape(-1).view(np.uint8)
        buffers.append(Buffer(names.get(index, f"operand {index}"), type, data, writable))
    for index, type in enumerate(launch.results):
        if index in aliased:
            results.append(aliased[index])
            continue
        data = np.zeros(type.nbytes, np.uint8) if launch.candidate.is_empty else _unwritten(type)
        results.append(len(buffers))
        name = names.get(len(buffers), f"result {index}")
        buffers.append(Buffer(name, type, data, writable=True))
    for index in () if launch.candidate.is_empty else launch.candidate.zeroed:
        buffers[results[index]].data[...] = 0
    return buffers, tuple(results)


def _unwritten(type: ArrayType) -> np.ndarray:
    """Returns the bytes of an unwritten output, chosen so that they do not look like a result."""
    if type.dtype.kind in "biu":
        return np.full(type.nbytes, 1 if type.dtype.kind == "b" else 0xA5, np.uint8)
    return np.full(type.size, np.nan, type.dtype).view(np.uint8)


def _names(launch: Launch) -> dict[int, str]:
    """Maps the index of each buffer to the first parameter that takes it."""
    pairs = [(leaf, name) for name, leaf in launch.named_leaves if not isinstance(leaf, Scalar)]
    return {launch.buffer_index(leaf): name for leaf, name in reversed(pairs)}


def _interpret(launch: Launch, memory: Memory) -> None:
    machine = _machine()
    with rounding.standard(), np.errstate(all="ignore"), machine.running(memory) as rewriter:
        function = rewriter.function(launch.kernel.function)
        parameters = {p.name: p for p in launch.kernel.function.params}
        arguments = {}
        for name, argument in launch.arguments:
            annotation = "" if isinstance(argument, tuple) else parameters[name].annotation_type
            # Triton compiles an integer argument of 1 in as a constant.
            folds_one = not annotation and not parameters[name].do_not_specialize
            convert = functools.partial(_convert, machine, launch, memory, annotation, folds_one)
            arguments[name] = map_leaves(convert, argument)
        arguments.update({n: rewriter.inside(value) for n, value in launch.constants.items()})
        # Bound by the signature, because the operands of `*args` have no name.
        bound = inspect.BoundArguments(
            launch.kernel.function.signature, collections.OrderedDict(arguments)
        )
        machine.builder.num_warps = launch.options.get("num_warps", 4)
        machine.builder.set_grid_dim(*launch.grid)
        for z, y, x in np.ndindex(*reversed(launch.grid)):
            memory.enter((x, y, z))
            machine.builder.set_grid_idx(x, y, z)
            try:
                function(*bound.args, **bound.kwargs)
            except Exception as raised:
                error = rewriter.explained(raised)
                hint = diagnostics.hint(launch, error)
                where = f"`{launch.name}`, program {memory.program}"
                if hint or where not in str(error):
                    error.add_note(f"Raised by kernel {where}.{hint}")
                if error is not raised:
                    raise error from None
                raise


def _convert(
    machine: _Machine,
    launch: Launch,
    memory: Memory,
    annotation: str,
    folds_one: bool,
    argument: Leaf,
) -> Any:
    """Converts a leaf of the arguments to the interpreter's number, pointer or descriptor."""
    if isinstance(argument, Scalar):
        value = argument.value
        return 1 if folds_one and value == 1 and type(value) is int else _scalar(value, annotation)
    type_name = "*" + dtypes.triton_name(launch.array_type(argument).dtype)
    address = memory.address(launch.buffer_index(argument))
    pointer = inside.number(address, compat.type_from_name(type_name))
    if not isinstance(argument, Descriptor):
        return pointer
    descriptor = machine.semantic.make_tensor_descriptor(
        base=pointer,
        shape=list(argument.shape),
        strides=[*argument.strides[:-1], tl.constexpr(argument.strides[-1])],
        block_shape=[tl.constexpr(size) for size in argument.block_shape],
        padding_option=argument.padding,
    )
    descriptor.handle.round_f32_to_tf32 = argument.round_f32_to_tf32
    return descriptor


def _scalar(value: bool | int | float | None, annotation: str) -> tl.tensor | None:
    if value is None:
        return None
    if annotation:
        name = annotation
    elif isinstance(value, (bool, float)):
        name = "i1" if isinstance(value, bool) else "fp32"
    else:
        name = next(n for n, low, high in _INTEGER_RANGES if low <= value < high)
    return inside.number(value, compat.type_from_name(name))


class _Machine:
    """The interpreter of this process: Triton's language on our `Builder`."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.semantic = compat.Semantic(self.builder)
        self._rewriter: rewriting.Rewriter | None = None
        self._patch = compat.LanguagePatch(self.builder, self.semantic, self._changes())

    @contextlib.contextmanager
    def running(self, memory: Memory) -> Iterator[rewriting.Rewriter]:
        """A context in which `triton.language` computes on `memory`; `TRITON.alone` undoes it."""
        self._patch.apply()
        patching.replace(patching.grouped(aggregates.changes(self.semantic)))
        self.builder.memory = memory
        self._rewriter = rewriting.Rewriter(self.semantic, self._patch.replaced)
        try:
            yield self._rewriter
        finally:
            # If a signal interrupts the end, this runs only when the generator is discarded, when
            # another launch may be running.
            if vars(self.builder).get("memory") is memory:
                del self.builder.memory
                self._rewriter = None

    def _changes(self) -> Iterator[compat.Change]:
        yield from language_extra.changes(self.builder, self.semantic)
        yield from inside.constexpr_operators()
        tensor = tl.core.tensor
        for holder in (tl, tl.core, tensor):
            yield compat.Change(holder, "reduce", reductions.reduce)
            yield compat.Change(holder, "associative_scan", reductions.associative_scan)
        for holder in (tl, tl.core):
            yield compat.Change(holder, "map_elementwise", reductions.map_elementwise)
            yield compat.Change(holder, "range", inside.tensor_range(self.semantic))
        # Workaround: triton <=3.6: NumPy from 2.4 on refuses the conversion in its `__index__`.
        yield compat.Change(tensor, "__index__", lambda tensor: tensor.handle.data.item())

        def bind(jitted: JITFunction, owner: Any, owner_type: Any = None) -> Any:
            is_method = isinstance(owner, tl.core.base_value)
            return functools.partial(jitted, owner) if is_method else jitted

        def call(jitted: JITFunction, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("_semantic", None)
            kwargs.pop("_generator", None)
            assert self._rewriter is not None
            return self._rewriter.function(jitted)(*args, **kwargs)

        # Without `__get__`, jitted functions that are attributes of a class would not bind.
        yield compat.Change(JITFunction, "__get__", bind)
        yield compat.Change(JITFunction, "__call__", call)


_machine = functools.cache(_Machine)
