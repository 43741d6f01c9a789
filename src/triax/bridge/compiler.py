"""From a `Launch` to a `CompiledKernel`, through Triton's compiler and its disk cache.

In: a launch and a compute capability. Out: PTX whose entry name is unique to it, and
what the launcher must know. Bytes depend on the kernel, its specialisation and the
installed Triton alone: no paths, no line numbers, no dictionary order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from triax.bridge import dtypes, hints, workers, writes
from triax.bridge.compat import triton_private, versions
from triax.bridge.errors import CompilationError, CompilationTimeout, TriaxError
from triax.bridge.exclusion import TRITON
from triax.bridge.launch import (
    Argument,
    CompiledKernel,
    Descriptor,
    Launch,
    LaunchParameter,
    Scalar,
    TensorMap,
    rebuild,
)
from triax.bridge.values import Static

logger = logging.getLogger(__name__)

# Shared memory that one block may have, in bytes. Source: CUDA C++ Programming Guide,
# technical specifications per compute capability ("maximum amount of shared memory per
# thread block"). An architecture that is not listed is left to the driver to check.
_SHARED_BYTES = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}
_MAX_WARPS = 32  # 1024 threads per block on every architecture
_MAX_CTAS = 8  # a larger cluster is launched only where its kernel is marked, and jaxlib marks none


@dataclasses.dataclass
class _Specialization:
    """What this process knows of one specialisation: `kernel`, once `done`, unless it failed."""

    function: Any  # held, so that its id, which is in the key, stays taken
    counted: bool = False
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    kernel: CompiledKernel | None = None


_cache: dict[Any, _Specialization] = {}
_cache_lock = threading.RLock()
_compilations = 0
# A child process has none of the threads that were at something.
os.register_at_fork(
    before=_cache_lock.acquire, after_in_parent=_cache_lock.release, after_in_child=_cache.clear
)
os.register_at_fork(after_in_child=_cache_lock.release)


def compile_count() -> int:
    """How many specialisations this process has taken to Triton's compiler (or disk cache).

    One that was compiled ahead counts when it is asked for.
    """
    return _compilations


def clear_cache() -> None:
    """Forgets what this process compiled. Triton's disk cache is not touched."""
    _cache.clear()


def compile_all(
    launches: Sequence[Launch],
    compute_capability: int,
    timeout_s: float | None = None,
    *,
    machine_code: bool = False,
    on_miss: Callable[[], None] | None = None,
    on_each: Callable[[], None] | None = None,
) -> list[CompiledKernel | Exception]:
    """Compiles launches in parallel; a launch that cannot be compiled yields its exception.

    One that is not compiled `timeout_s` after it was begun yields a `CompilationTimeout`, and so do
    those not begun yet once this has happened too often. A thread cannot be stopped: it ends what
    it is at in the background, and Python's exit waits for that, not forever. An exception that
    comes meanwhile, such as Ctrl-C, waits for the threads too, until another comes.

    With `machine_code` the kernels have their `cubin`. `on_miss` is called where Triton's disk
    cache has no entry, `on_each` after each launch, by the calling thread.
    """
    results: dict[int, CompiledKernel | BaseException] = {}
    pending = collections.deque(range(len(launches)))
    begun: dict[int, float] = {}
    finished = queue.SimpleQueue[int]()

    def work() -> None:
        # Threads suffice: Triton holds the GIL only in its front end.
        while True:
            try:
                index = pending.popleft()
            except IndexError:
                return
            begun[index] = time.monotonic()
            try:
                results[index] = _compile_in_turn(
                    launches[index], compute_capability, machine_code=machine_code, on_miss=on_miss
                )
            except BaseException as error:
                results[index] = error
            finished.put(index)

    team: list[threading.Thread] = []
    late: set[int] = set()
    size = min(len(launches), os.cpu_count() or 1)
    try:
        try:
            for _ in range(size):
                if not workers.start(work, team):
                    break
            if not team:
                work()
            left = set(range(len(launches)))
            # A late thread is replaced, but not without end: each goes on in the background.
            while left and len(late) <= size:
                overdue = _wait(finished, left, begun, timeout_s)
                if overdue is None:
                    if on_each is not None:
                        on_each()
                else:
                    late.add(overdue)
                    workers.start(work, team)
        finally:
            pending.clear()
    except BaseException:  # Ctrl-C, mostly
        workers.join(team)
        raise
    return [
        _result(results[index] if index in results else _timeout(index in late, timeout_s))
        for index in range(len(launches))
    ]


def _wait(
    finished: queue.SimpleQueue[int],
    left: set[int],
    begun: Mapping[int, float],
    timeout_s: float | None,
) -> int | None:
    """Waits until one of those left is finished, or is late and returned; it is left no more."""
    while True:
        now = time.monotonic()
        ages = {index: now - begun[index] for index in left if index in begun}
        oldest = max(ages, key=lambda index: ages[index], default=None)
        if timeout_s is not None and oldest is not None and ages[oldest] >= timeout_s:
            left.discard(oldest)
            return oldest
        patience = timeout_s and timeout_s - (ages[oldest] if oldest is not None else 0.0)
        with contextlib.suppress(queue.Empty):
            index = finished.get(timeout=patience)
            if index in left:
                left.discard(index)
                return None


def _timeout(late: bool, timeout_s: float | None) -> CompilationTimeout:
    if late:
        return CompilationTimeout(f"it was not compiled after {timeout_s} s")
    return CompilationTimeout("it was not waited for, because others took too long to compile")


def _result(result: CompiledKernel | BaseException) -> CompiledKernel | Exception:
    if isinstance(result, BaseException) and not isinstance(result, Exception):
        raise result
    return result


def compile_launch(
    launch: Launch, compute_capability: int, *, on_miss: Callable[[], None] | None = None
) -> CompiledKernel:
    """Compiles one launch; `on_miss` is called where Triton's disk cache has no entry.

    Raises:
      CompilationError: Triton refuses the kernel or it does not fit the GPU.
    """
    (result,) = compile_all([launch], compute_capability, on_miss=on_miss)
    if isinstance(result, TriaxError) and not isinstance(result, CompilationError):
        raise result
    if isinstance(result, Exception):
        raise CompilationError(hints.failure(launch, result)) from result
    return result


def compile_ahead(launch: Launch, compute_capability: int) -> None:
    """Compiles one launch that nobody has asked for yet; who asks meanwhile waits for it."""
    _compile_in_turn(launch, compute_capability, ahead=True)


def _compile_in_turn(*args: Any, **kwargs: Any) -> CompiledKernel:
    return TRITON.shared(functools.partial(_compile, *args, **kwargs))


def _compile(
    launch: Launch,
    compute_capability: int,
    *,
    machine_code: bool = False,
    ahead: bool = False,
    on_miss: Callable[[], None] | None = None,
) -> CompiledKernel:
    """Compiles one launch, unless this process has done so, or a thread of it is at it.

    The caller holds the shared side of `TRITON`, and so does that thread: waiting for it ends.
    """
    function = launch.kernel.function
    backend = triton_private.backend_for(compute_capability)
    options = {
        "enable_fp_fusion": True,
        "ptx_version": versions.ptx_isa_version(compute_capability),
        **launch.options,
    }
    specialization = triton_private.specialize(
        function, backend, _values(launch), frozenset(launch.constants)
    )
    key = (
        id(function),
        compute_capability,
        repr(specialization.signature),
        tuple((path, Static(value)) for path, value in specialization.constants.items()),
        repr(sorted(specialization.attributes.items())),
        tuple((name, Static(value)) for name, value in sorted(options.items())),
    )
    while True:
        found, is_mine = _find_or_begin(key, function, count=not ahead)
        if is_mine:
            try:
                compiled = triton_private.compile_specialization(
                    function, backend, specialization, options, on_miss
                )
                _check_fits(compiled, compute_capability)
                found.kernel = _finish(launch, compute_capability, specialization, compiled)
            except BaseException:
                with _cache_lock:
                    if _cache.get(key) is found:
                        del _cache[key]
                raise
            finally:
                found.done.set()
            logger.debug(
                "compiled %s [%s] as %s",
                launch.kernel.name,
                launch.candidate.config,
                found.kernel.name,
            )
        else:
            found.done.wait()
            if found.kernel is None:
                continue  # the other thread failed: meet the same failure here
            triton_private.check_globals(function)
        if machine_code and found.kernel.cubin is None:
            cubin = triton_private.assemble(backend, found.kernel.ptx, options)
            found.kernel = dataclasses.replace(found.kernel, cubin=cubin)
        return found.kernel


def _find_or_begin(key: Any, function: Any, *, count: bool) -> tuple[_Specialization, bool]:
    """What is known of a specialisation, and whether it is for the caller to compile."""
    global _compilations
    with _cache_lock:
        found = _cache.get(key)
        is_new = found is None
        if found is None:
            found = _cache[key] = _Specialization(function)
        if count and not found.counted:
            found.counted = True
            _compilations += 1
    return found, is_new


def _values(launch: Launch) -> dict[str, Any]:
    """The values of all parameters, arrays as stubs, as Triton's binder takes them."""
    values = dict(launch.constants)
    for name, argument in launch.arguments:
        values[name] = _value(launch, argument)
    return values


def _value(launch: Launch, argument: Argument) -> Any:
    if isinstance(argument, tuple):
        return rebuild(argument, [_value(launch, part) for part in argument])
    if isinstance(argument, Scalar):
        return argument.value
    array = launch.array_type(argument)
    stub = triton_private.ArrayStub(dtypes.triton_name(array.dtype), array.dtype.itemsize)
    if isinstance(argument, Descriptor):
        return triton_private.descriptor_stub(
            stub,
            argument.shape,
            argument.strides,
            argument.block_shape,
            argument.layout,
            argument.padding,
            argument.round_f32_to_tf32,
        )
    return stub


def _check_fits(compiled: triton_private.Compiled, compute_capability: int) -> None:
    limit = _SHARED_BYTES.get(compute_capability)
    if limit is not None and compiled.shared_bytes > limit:
        raise CompilationError(
            f"it needs {compiled.shared_bytes} bytes of shared memory per block, and compute "
            f"capability {compute_capability} has {limit}; use smaller blocks or fewer stages"
        )
    if compiled.num_warps > _MAX_WARPS:
        raise CompilationError(
            f"it needs {compiled.num_warps} warps, and a block has at most {_MAX_WARPS}"
        )
    clusters = compute_capability >= 90
    if compiled.num_ctas > (_MAX_CTAS if clusters else 1):
        limit_text = f"jaxlib launches at most {_MAX_CTAS}" if clusters else "clusters need 90"
        raise CompilationError(
            f"it needs clusters of {compiled.num_ctas} blocks (num_ctas) on compute capability "
            f"{compute_capability}; {limit_text}"
        )
    if compiled.profile_scratch_bytes:
        raise CompilationError(
            "it was compiled for Triton's profiler, whose scratch memory XLA does not provide; "
            "turn the instrumentation off"
        )


def _finish(
    launch: Launch,
    compute_capability: int,
    specialization: triton_private.Specialization,
    compiled: triton_private.Compiled,
) -> CompiledKernel:
    name, ptx = unique_entry(compiled.ptx, compiled.entry)
    return CompiledKernel(
        name=name,
        ptx=ptx,
        compute_capability=compute_capability,
        num_warps=compiled.num_warps,
        num_ctas=compiled.num_ctas,
        shared_bytes=compiled.shared_bytes,
        global_scratch_bytes=compiled.global_scratch_bytes,
        global_scratch_align=compiled.global_scratch_align,
        parameters=tuple(_parameters(launch, specialization, compiled)),
        writes=_writes(launch, compiled),
    )


def _parameters(
    launch: Launch,
    specialization: triton_private.Specialization,
    compiled: triton_private.Compiled,
) -> Iterator[LaunchParameter]:
    positions = {p.name: i for i, p in enumerate(launch.kernel.parameters)}
    tensor_maps = map(_tensor_map, compiled.tensor_descriptors)
    leaves = ((name, *pair) for name, argument in launch.arguments for pair in _paths(argument))
    for index, (name, path, leaf) in enumerate(leaves):
        type_name = specialization.type_name(name, path)
        if type_name == "constexpr":
            continue
        yield LaunchParameter(
            index,
            specialization.is_divisible_by_16((positions[name], *path)),
            type_name if isinstance(leaf, Scalar) else None,
            next(tensor_maps, None) if isinstance(leaf, Descriptor) else None,
        )


def _paths(argument: Argument, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    """The leaves of one argument with their paths inside it, in `launch.leaves` order."""
    if not isinstance(argument, tuple):
        return [(path, argument)]
    return [pair for i, part in enumerate(argument) for pair in _paths(part, (*path, i))]


def _writes(launch: Launch, compiled: triton_private.Compiled) -> tuple[tuple[int, ...], ...]:
    """Which leaves the kernel writes to; nothing where its code cannot be told from them."""
    pointers = [i for i, leaf in enumerate(launch.leaves) if not isinstance(leaf, Scalar)]
    count, found = writes.origins(compiled.ir)
    if count != len(pointers):
        return ()
    return tuple(tuple(pointers[i] for i in reached) for reached in found)


def _tensor_map(meta: dict[str, Any]) -> TensorMap:
    for unsupported in ("is_im2col", "fp4_padded"):
        if meta.get(unsupported):
            raise CompilationError(
                f"it uses a TMA descriptor of kind {unsupported}, which XLA's Triton call cannot "
                "encode"
            )
    return TensorMap(tuple(meta["block_size"]), int(meta["elem_type"]), int(meta["swizzle"]))


def unique_entry(ptx: str, entry: str) -> tuple[str, str]:
    """Renames the PTX entry to its name plus a hash of the PTX.

    The hash is of the code itself, so two kernels share a name only if they are the
    same, and the name does not change with a comment, a line number or a folder.
    Before jaxlib 0.9.1 a kernel of the same name could be handed out in place of
    another (see `versions.OWNED_MODULE_KEYS`); and profiles become readable.

    Returns:
      The new name and the PTX with it.
    """
    # A kernel may be called `add` or `ld`: replace the name only where PTX has the entry's. The
    # name comes first in the pattern, and what must stand before it afterwards: that way the
    # search is for a fixed text, and PTX is long.
    escaped = re.escape(entry)
    if re.search(rf"\.entry {escaped}\(", ptx) is None:
        raise CompilationError(f"Triton's PTX has no entry named {entry!r}")
    entry_token = re.compile(
        rf"{escaped}(?:(?<=\.entry {escaped})(?=\()"
        rf"|(?<=\.globl\t{escaped})\b"
        rf"|(?<![\w$.%]{escaped})(?=_param_\d))"
    )
    digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
    name = f"{entry}_{digest}"
    # The comment "// -- Begin function x" keeps the old name; it is a comment.
    return name, entry_token.sub(name, ptx)
