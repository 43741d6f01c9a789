"""Runs kernels in Gluon for Hopper on the CPU: each warp partition in a thread, in a random order.

    with gluon.emulated(seed=3):
        sm90_16_bits.ragged_dot(product)  # whose `implementation` is "interpret"

What Triton's interpreter has no part of: shared memory by address, as TMA and the tensor cores lay
it out, and all that is asynchronous. Copies by TMA, copies of a thread's own, products and stores
are put in queues. Whenever a partition waits or arrives, a random choice says which partition goes
on, or which of the queued operations happens now. A result that depends on that choice is a race;
one seed in a few finds it.

Refused as errors: a wait that nobody ends, accesses outside of arrays, an element that is stored
twice, an accumulator that is used before its product has been waited for, a store by TMA of what
has not been fenced, more arrivals or bytes than a barrier expects, and operations that are still on
their way when the kernel ends. Sums are exact, then rounded to float32.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime import JITFunction

from triax.binding.launch import Descriptor, Launch, Operand, Result, Scalar, map_leaves
from triax.interpreting import run as interpreting

_WARP = 32
_ANNOTATIONS = annotations.compiler_flag  # those of locals are not evaluated; of functions, neither


class Fault(Exception):
    """The kernel did what hardware does not define, or never ends."""


class _Stopped(BaseException):
    """Another partition has failed."""


# --- values -----------------------------------------------------------------------------------


class Dtype:
    """A dtype by its name in Triton's language, with what kernels read of it."""

    def __init__(self, numpy: Any):
        self.numpy = np.dtype(numpy)
        self.primitive_bitwidth = 8 * self.numpy.itemsize


class Block(np.ndarray):
    """A tensor: operators never work in place."""

    def to(self, dtype: Any) -> Block:
        return self.astype(getattr(dtype, "numpy", dtype))

    def split(self) -> tuple[Block, Block]:
        return self[..., 0], self[..., 1]

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(shape=self.shape, layout=None)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self * other


def _block(values: Any) -> Block:
    return np.asarray(values).view(Block)


class Accumulator:
    """The sum of a product that is on its way; `Block` once it has been waited for."""

    def __init__(self) -> None:
        self.value: Block | None = None

    def __getattr__(self, name: str) -> Any:
        raise Fault(f"`{name}` of a product that has not been waited for")


class Pointer:
    """Elements of an array in global memory."""

    def __init__(self, name: str, array: np.ndarray, at: Any = 0, stored: Any = None):
        self.name, self.array, self.at = name, array, at
        self.stored = np.zeros(array.size, bool) if stored is None else stored

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.name, self.array, self.at + offset, self.stored)

    def checked(self, at: np.ndarray) -> np.ndarray:
        if at.size and (at.min() < 0 or at.max() >= self.array.size):
            where = at.min() if at.min() < 0 else at.max()
            raise Fault(f"element {where} of `{self.name}`, which has {self.array.size}")
        return at

    def store(self, at: np.ndarray, values: np.ndarray) -> None:
        self.checked(at)
        if self.stored[at].any() or len(np.unique(at)) < at.size:
            raise Fault(f"an element of `{self.name}` is stored twice")
        self.stored[at] = True
        self.array[at] = values


class TensorMap:
    """A TMA descriptor: zeros and nothing stored where an index is outside of `shape`."""

    def __init__(self, of: Descriptor, memory: Pointer):
        self.of, self.memory = of, memory
        self.dtype = Dtype(memory.array.dtype)
        self.block_shape, self.layout = [*of.block_shape], of.layout
        self.nbytes = math.prod(of.block_shape) * memory.array.itemsize

    @property
    def block_type(self) -> TensorMap:
        return self

    def _elements(self, first: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """For each element of a block, whether it is inside, and its place in the array."""
        inside, at = np.True_, np.zeros((), np.uint64)
        for axis, (start, size) in enumerate(zip(first, self.of.block_shape, strict=True)):
            index = np.arange(int(start), int(start) + size)
            index = index.reshape([-1 if i == axis else 1 for i in range(len(first))])
            inside = inside & (index >= 0) & (index < self.of.shape[axis])
            # Addresses wrap around.
            stride = np.uint64(self.of.strides[axis] % 2**64)
            at = at + index.astype(np.int64).astype(np.uint64) * stride
        return np.broadcast_to(inside, at.shape), at.astype(np.int64)

    def load(self, first: Sequence[Any]) -> np.ndarray:
        inside, at = self._elements(first)
        block = np.zeros(at.shape, self.memory.array.dtype)
        block[inside] = self.memory.array[self.memory.checked(at[inside])]
        return block

    def store(self, first: Sequence[Any], block: np.ndarray) -> None:
        inside, at = self._elements(first)
        self.memory.store(at[inside], block[inside])


class Barrier:
    """Counts arrivals and bytes; a phase ends when none are missing."""

    def __init__(self) -> None:
        self.count = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1, nbytes: int = 0) -> None:
        if not self.count:
            raise Fault("a barrier is used before it is initialized")
        self.missing -= count
        self.bytes += nbytes
        if self.missing < 0:
            raise Fault("a barrier has more arrivals than it counts")
        self._turn()

    def complete(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self._turn()

    def _turn(self) -> None:
        if not self.missing and not self.bytes:
            self.missing = self.count
            self.phase ^= 1


class Barriers(list[Barrier]):
    @property
    def type(self) -> Any:
        return types.SimpleNamespace(shape=[len(self), 1])

    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


class Shared:
    """A view of shared memory: the address of each of its elements."""

    def __init__(self, memory: np.ndarray, unfenced: np.ndarray, dtype: Any, at: Any, layout: Any):
        self.memory, self.unfenced, self.dtype = memory, unfenced, dtype
        self.at, self.layout = at, layout

    @classmethod
    def allocate(cls, dtype: Dtype, shape: Sequence[int], layout: Any) -> Any:
        if isinstance(layout, hopper.mbarrier.MBarrierLayout):
            return Barriers(Barrier() for _ in range(shape[0]))
        memory = np.full(math.prod(shape) * dtype.numpy.itemsize, 0xFF, np.uint8)
        return cls(memory, memory == 0, dtype, addresses(0, shape, layout, dtype.numpy), layout)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(shape=self.at.shape)

    def _with(self, at: np.ndarray) -> Shared:
        return Shared(self.memory, self.unfenced, self.dtype, at, self.layout)

    def index(self, i: Any) -> Shared:
        return self._with(self.at[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._with(self.at.take(range(start, start + length), dim))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._with(self.at.transpose(order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._with(self.at.reshape(shape))

    def reinterpreted(self, dtype: Dtype, shape: Sequence[int], layout: Any) -> Shared:
        at = addresses(self.at.min(), shape, layout, dtype.numpy)
        if at.size != self.at.size:
            raise Fault(f"{self.at.shape} is reinterpreted as {shape}")
        return Shared(self.memory, self.unfenced, dtype, at, layout)

    @property
    def _places(self) -> np.ndarray:
        return self.at // self.dtype.numpy.itemsize

    def read(self) -> np.ndarray:
        return self.memory.view(self.dtype.numpy)[self._places]

    def write(self, values: np.ndarray) -> None:
        self.memory.view(self.dtype.numpy)[self._places] = values.reshape(self.at.shape)

    def load(self, layout: Any) -> Block:
        _program().pause()
        return _block(self.read())

    def store(self, values: Block) -> None:
        if values.shape != self.at.shape or values.dtype != self.dtype.numpy:
            raise Fault(f"{values.dtype}{values.shape} is stored in {self.at.shape}")
        _program().pause()
        self.write(values)
        self.unfenced[self._places] = True

    @property
    def is_fenced(self) -> bool:
        return not self.unfenced[self._places].any()


def addresses(base: int, shape: Sequence[int], layout: Any, dtype: np.dtype) -> np.ndarray:
    """The address in bytes of each element, as TMA and tensor cores count on it.

    In a block of `NVMMASharedLayout`, panels as wide as the swizzle follow one another, and bits 4
    to 6 of an address are changed by bits 7 to 9. Anything else is row-major: other layouts of
    the kernels change places in ways that only their own loads and stores see.
    """
    at = np.arange(math.prod(shape)) * dtype.itemsize + base
    width = getattr(layout, "swizzle_byte_width", 0)
    if not width:
        return at.reshape(shape)
    rank = layout.rank
    rows, columns = math.prod(shape[-rank:-1]), shape[-1]
    panel = width // dtype.itemsize
    at ^= (at >> 7 & width // 16 - 1) << 4
    return at.reshape(-1, columns // panel, rows, panel).swapaxes(1, 2).reshape(shape)


# --- one program ------------------------------------------------------------------------------


class _Partition:
    """A warp partition, and what it has started."""

    def __init__(self, run: Callable[[], None]):
        self.run, self.goes = run, threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.done = False
        self.products: deque[Any] = deque()
        self.copies: deque[Any] = deque()
        self.stores: deque[Any] = deque()
        self.accumulators: list[Accumulator] = []


class Program:
    """Partitions that take turns, and the operations that are on their way."""

    def __init__(self, index: int, count: int, seed: int):
        self.index, self.count = index, count
        self.random = random.Random(seed)
        self.partitions: list[_Partition] = []
        self.loads: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.ended = threading.Semaphore(0)
        self.current: _Partition | None = None
        # Half of the runs keep all stores, say, waiting as long as anything else can go on.
        scale = lambda: 10 ** self.random.uniform(-4, 4)
        self.weights = [scale() * self.random.choice((1, 1e-16)) for _ in range(4)]
        self.weights += [scale() for _ in range(8)]

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        self.partitions = [_Partition(part) for part in parts]
        threads = [
            threading.Thread(target=self._partition, args=(p,), daemon=True)
            for p in self.partitions
        ]
        for thread in threads:
            thread.start()
        self._next()
        self.ended.acquire()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _partition(self, partition: _Partition) -> None:
        _LOCAL.program = self
        partition.goes.acquire()
        try:
            if self.error is None:
                with np.errstate(all="ignore"):
                    partition.run()
        except _Stopped:
            pass
        except BaseException as raised:
            self._fail(raised)
        partition.done = True
        if self.error is None:
            self._next()
        if all(p.done for p in self.partitions):
            self.ended.release()

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for partition in self.partitions:
            partition.goes.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on, and operations happen, until the partition's turn comes again."""
        me = self.current
        if me is None:  # before the partitions begin
            return
        me.ready = ready
        self._next()
        me.goes.acquire()
        if self.error is not None:
            raise _Stopped

    def _next(self) -> None:
        """Chooses who goes on; operations happen on the way."""
        while True:
            choices: list[tuple[float, Any]] = [(self.weights[0], self.loads)]
            for i, each in enumerate(self.partitions, 4):
                if not each.done and each.ready():
                    choices.append((self.weights[i], each))
                queues = each.products, each.copies, each.stores
                choices += zip(self.weights[1:4], queues, strict=True)
            choices = [(weight, of) for weight, of in choices if isinstance(of, _Partition) or of]
            if not choices:
                if any(not p.done for p in self.partitions):
                    self._fail(Fault("all partitions wait: nobody will arrive"))
                return
            weights, things = zip(*choices, strict=True)
            (chosen,) = self.random.choices(things, weights)
            try:
                if isinstance(chosen, deque):
                    chosen.popleft()()
                elif isinstance(chosen, list):
                    chosen.pop(self.random.randrange(len(chosen)))()
                else:
                    self.current = chosen
                    chosen.goes.release()
                    return
            except Fault as raised:
                self._fail(raised)
                return

    def drained(self) -> None:
        """Raises if stores or products have not been waited for by the end of a partition."""
        me = self.current
        assert me is not None
        if me.stores or me.products:
            raise Fault("the kernel ends before what it has started")


_LOCAL = threading.local()


def _program() -> Program:
    program: Program = _LOCAL.program
    return program


# --- the language -----------------------------------------------------------------------------


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    at = np.asarray(pointer.at)
    if mask is None:
        values = pointer.array[pointer.checked(at)]
        return _block(values) if at.ndim else values
    at, mask = np.broadcast_arrays(at, mask)
    values = np.full(at.shape, other, pointer.array.dtype)
    values[mask] = pointer.array[pointer.checked(at[mask])]
    return _block(values)


def _store(pointer: Pointer, values: Any, mask: Any) -> None:
    at, values, mask = np.broadcast_arrays(np.asarray(pointer.at), values, mask)
    pointer.store(at[mask], values[mask])


def _warp_specialize(parts: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(parts) - 1 == len(warps) == len(registers)
    program = _program()

    def run(function: Any, arguments: Any) -> None:
        function(*arguments)
        program.drained()

    program.run([functools.partial(run, *part) for part in parts])
    program.current = None


def _wait(barrier: Barrier, phase: int, pred: Any = True) -> None:
    if pred:
        # The phase of this parity has ended when the barrier is in one of the other parity.
        _program().pause(lambda: barrier.phase != int(phase))


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    _program().pause()
    if pred:
        barrier.arrive(count)


def _expect(barrier: Barrier, nbytes: int, pred: Any = True) -> None:
    _program().pause()
    if pred:
        barrier.arrive(nbytes=nbytes)


def _async_load(
    source: TensorMap, at: Sequence[Any], barrier: Barrier, target: Shared, pred: Any = True
) -> None:
    if pred:

        def happen() -> None:
            target.write(source.load(at))
            barrier.complete(source.nbytes)

        _program().loads.append(happen)
        _program().pause()


def _async_store(target: TensorMap, at: Sequence[Any], source: Shared) -> None:
    if not source.is_fenced:
        raise Fault("a store by TMA of what has not been fenced")
    program = _program()
    assert program.current is not None
    program.current.stores.append(lambda: target.store(at, source.read()))
    program.pause()


def _store_wait(pendings: int) -> None:
    program = _program()
    assert program.current is not None
    stores = program.current.stores
    program.pause(lambda: len(stores) <= pendings)


def _fence() -> None:
    """A fence of each of the memories that this thread knows; the others are of other programs."""
    for unfenced in _LOCAL.program.shared:
        unfenced[:] = False


def _copy(target: Shared, source: Pointer) -> None:
    program = _program()
    assert program.current is not None
    values = source.array[source.checked(np.asarray(source.at))]
    program.current.copies.append(lambda: target.write(values))
    program.pause()


def _arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    """Each thread of a warp arrives once its copies are there."""
    if increment_count:
        raise NotImplementedError
    program = _program()
    assert program.current is not None
    program.current.copies.append(lambda: barrier.arrive(_WARP))
    program.pause()


def _warpgroup_mma(
    a: Shared, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False
) -> Accumulator:
    assert is_async
    program = _program()
    me = program.current
    assert me is not None
    made = Accumulator()

    def happen() -> None:
        total = a.read().astype(np.float64) @ b.read().astype(np.float64)
        if use_acc:
            total += acc.value if isinstance(acc, Accumulator) else acc
        made.value = _block(total.astype(np.float32))

    me.products.append(happen)
    me.accumulators.append(made)
    program.pause()
    return made


def _warpgroup_mma_wait(pendings: int, deps: Sequence[Any]) -> Any:
    program = _program()
    me = program.current
    assert me is not None
    products = me.products
    program.pause(lambda: len(products) <= pendings)
    running = me.accumulators[-pendings:] if pendings else []
    (acc,) = deps
    is_done = isinstance(acc, Accumulator) and not any(acc is of for of in running)
    return acc.value if is_done else acc


def _sigmoid(x: Block) -> Block:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def _erf(x: Block) -> Block:
    return np.vectorize(math.erf, otypes=[np.float32])(x).view(Block)


def _allocate(dtype: Dtype, shape: Sequence[int], layout: Any) -> Any:
    made = Shared.allocate(dtype, shape, layout)
    if isinstance(made, Shared):
        _LOCAL.program.shared.append(made.unfenced)
    return made


_LANGUAGE: dict[str, Any] = {
    "program_id": lambda axis: _program().index,
    "num_programs": lambda axis: _program().count,
    "static_range": range,
    "static_assert": lambda condition, message: None,
    "cdiv": lambda a, b: -(-a // b),
    "arange": lambda start, end, layout=None: _block(np.arange(start, end, dtype=np.int32)),
    "zeros": lambda shape, dtype, layout=None: _block(np.zeros(shape, dtype.numpy)),
    "load": _load,
    "store": _store,
    "where": lambda c, a, b: np.where(c, a, b).view(Block) if np.ndim(c) else (a if c else b),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": np.abs,
    "exp": np.exp,
    "sigmoid": _sigmoid,
    "math": types.SimpleNamespace(erf=_erf),
    "allocate_shared_memory": _allocate,
    "warp_specialize": _warp_specialize,
    "thread_barrier": lambda: _program().pause(),
    "constexpr": None,  # of annotations
    **{n: Dtype(n) for n in ("int32", "int64", "float32")},
    **{n: getattr(gl, n) for n in dir(gl) if n.endswith("Layout")},
}


def _named(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _meanings() -> dict[int, Any]:
    """What stands in kernels' modules, and what it is here."""
    import triton.language as tl

    language = types.SimpleNamespace(**_LANGUAGE)
    views = gl.shared_memory_descriptor
    mbarrier = {"MBarrierLayout": hopper.mbarrier.MBarrierLayout, "init": Barrier.init}
    mbarrier |= {"wait": _wait, "arrive": _arrive, "expect": _expect}
    pairs = [
        (gl, language),
        (tl, language),
        (hopper.mbarrier, types.SimpleNamespace(**mbarrier)),
        (hopper.tma, types.SimpleNamespace(store_wait=_store_wait)),
        (hopper.async_copy, types.SimpleNamespace(mbarrier_arrive=_arrive_after_copies)),
        (hopper.fence_async_shared, _fence),
        (hopper.warpgroup_mma, _warpgroup_mma),
        (hopper.warpgroup_mma_wait, _warpgroup_mma_wait),
        (_named(hopper.tma, "async_load", "async_copy_global_to_shared"), _async_load),
        (_named(hopper.tma, "async_store", "async_copy_shared_to_global"), _async_store),
        (_named(hopper.async_copy, "async_load", "async_copy_global_to_shared"), _copy),
        (_named(views, "reinterpret", "_reinterpret"), Shared.reinterpreted),
        (_named(gl, "thread_barrier", "barrier"), _LANGUAGE["thread_barrier"]),
    ]
    return {id(of): meaning for of, meaning in pairs}


class _Kernels:
    """Kernels as Python functions of this language.

    `edits` are pairs of texts: the first, which must stand once in all sources, becomes the second.
    """

    def __init__(self, edits: Sequence[tuple[str, str]]):
        self.edits, self.meanings = edits, _meanings()
        self.found = dict.fromkeys(edits, 0)
        self.functions: dict[int, Callable[..., Any]] = {}
        self.modules: dict[str, dict[str, Any]] = {}

    def function(self, jitted: JITFunction) -> Callable[..., Any]:
        """The function, in the names of its module as they are here."""
        python = jitted.fn
        if id(python) in self.functions:
            return self.functions[id(python)]
        lines, first = inspect.getsourcelines(python)
        decorators = next(i for i, line in enumerate(lines) if line.startswith("def "))
        text = "\n" * (first + decorators - 1) + "".join(lines[decorators:])
        for edit in self.edits:
            self.found[edit] += text.count(edit[0])
            text = text.replace(*edit)
        names: dict[str, Any] = {}
        # Deferred: functions call one another.
        self.functions[id(python)] = lambda *args, **kwargs: found(*args, **kwargs)
        for name, value in python.__globals__.items():
            if name in python.__code__.co_names:
                names[name] = self._meaning(value)
        exec(compile(text, inspect.getsourcefile(python) or "", "exec", _ANNOTATIONS), names)
        found = names[python.__name__]
        return self.functions[id(python)]

    def _meaning(self, value: Any) -> Any:
        if isinstance(value, JITFunction):
            return self.function(value)
        if id(value) in self.meanings:
            return self.meanings[id(value)]
        return value.value if type(value) is gl.constexpr else value


def _run(
    kernels: _Kernels, seed: int, launch: Launch, operands: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    buffers, results = interpreting._buffers(launch, operands)
    memories = [
        Pointer(buffer.name, buffer.data.view(buffer.type.dtype).reshape(-1)) for buffer in buffers
    ]

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, Scalar):
            return leaf.value
        memory = memories[launch.buffer_index(leaf)]
        assert isinstance(leaf, Operand | Result | Descriptor)
        return TensorMap(leaf, memory) if isinstance(leaf, Descriptor) else memory

    arguments = {name: map_leaves(argument, of) for name, of in launch.arguments}
    function = kernels.function(launch.kernel.function)
    missing = [edit for edit, count in kernels.found.items() if count != 1]
    if missing:
        raise ValueError(f"{missing} stand in the kernels {[*kernels.found.values()]} times")
    count = launch.grid[0]
    for index in range(count):
        _LOCAL.program = Program(index, count, seed * 1000 + index)
        _LOCAL.program.shared = []
        function(**arguments, **launch.constants)
    for index, type in zip(results, launch.results, strict=True):
        if type.size and not memories[index].stored.all():
            raise Fault(f"elements of `{memories[index].name}` are not stored")
    return tuple(
        memories[index].array.reshape(type.shape)
        for index, type in zip(results, launch.results, strict=True)
    )


@contextlib.contextmanager
def emulated(seed: int = 0, edits: Sequence[tuple[str, str]] = ()) -> Iterator[None]:
    """A context in which launches of kernels in Gluon by the interpreter run here."""
    kernels, plain = _Kernels(edits), interpreting.run

    def run(launch: Launch, operands: Sequence[np.ndarray], checked: bool = False) -> Any:
        if launch.kernel.is_gluon:
            return _run(kernels, seed, launch, operands)
        return plain(launch, operands, checked)

    with mock.patch.object(interpreting, "run", run):
        yield
