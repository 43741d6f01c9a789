"""Compiles a `Launch` to a `CompiledKernel`, through Triton's compiler and its disk cache.

In: a launch and a compute capability. Out: PTX with a unique entry name, and the launch parameters.
The PTX depends only on the kernel, its specialisation and the installed Triton: no paths, no line
numbers, no dictionary order.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from triax.binding import diagnostics, dtypes, sources
from triax.binding.launch import CompiledKernel, Descriptor, Launch, Leaf, Scalar, map_leaves
from triax.binding.values import Static
from triax.compat import triton_private, versions
from triax.compat.triton_lock import TRITON
from triax.compiling import compiled_kernel, disk_cache, threads
from triax.errors import CompilationError, TriaxError

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _CacheEntry:
    """What this process keeps of one specialisation: `kernel` is None until it is compiled.

    A thread holds `compiling` while it compiles. A lock is given back whatever interrupts the
    thread, so none waits for ever; the next to hold it compiles if there is no kernel.
    """

    function: Any  # kept alive, so that its id, which is in the key, is not reused
    compiling: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    kernel: CompiledKernel | None = None


_cache: dict[Any, _CacheEntry] = {}
_launched: dict[tuple[Launch, int, str], CompiledKernel] = {}  # finds repeated requests fast
_MOST_LAUNCHED = 1024
_cache_lock = threading.RLock()
_compilations = 0
# A forked child has none of the threads that were compiling, so their locks would stay held.
os.register_at_fork(
    before=_cache_lock.acquire, after_in_parent=_cache_lock.release, after_in_child=_cache.clear
)
os.register_at_fork(after_in_child=_cache_lock.release)


def compile_count() -> int:
    """The number of specialisations this process has taken to Triton's compiler (or disk cache)."""
    return _compilations


def clear_cache() -> None:
    """Forgets the kernels that this process compiled. Triton's disk cache is not touched."""
    _cache.clear()
    _launched.clear()


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

    A launch that takes longer than `timeout_s` yields a `CompilationTimeout`; after too many of
    them, so do all unfinished launches. A thread cannot be stopped: it finishes in the background,
    and Python's exit waits for it for a while. An exception such as Ctrl-C waits for the threads
    too, unless another follows.

    With `machine_code` the kernels have their `cubin`. `on_miss` is called if Triton's disk cache
    has no entry, `on_each` by the calling thread after each launch.
    """
    options: Any = {"machine_code": machine_code, "on_miss": on_miss}
    one = lambda launch: compile_in_turn(launch, compute_capability, **options)
    return threads.each(one, launches, timeout_s, on_each)


def compile_launch(
    launch: Launch, compute_capability: int, *, on_miss: Callable[[], None] | None = None
) -> CompiledKernel:
    """Compiles one launch; `on_miss` is called if Triton's disk cache has no entry.

    Raises:
      CompilationError: Triton refuses the kernel or it does not fit the GPU.
    """
    key = (launch, compute_capability, _code(launch))
    if (known := _launched.get(key)) is not None:
        return known
    (result,) = compile_all([launch], compute_capability, on_miss=on_miss)
    if isinstance(result, TriaxError) and not isinstance(result, CompilationError):
        raise result
    if isinstance(result, Exception):
        raise CompilationError(diagnostics.failure(launch, result)) from result
    if len(_launched) >= _MOST_LAUNCHED:
        _launched.clear()
    _launched[key] = result
    return result


def compile_in_turn(launch: Launch, compute_capability: int, **options: Any) -> CompiledKernel:
    """Compiles one launch in this thread, at a time when no thread interprets a kernel."""
    return TRITON.shared(functools.partial(_compile, launch, compute_capability, **options))


def _compile(
    launch: Launch,
    compute_capability: int,
    *,
    machine_code: bool = False,
    on_miss: Callable[[], None] | None = None,
) -> CompiledKernel:
    """Compiles one launch, unless this process has done so or another thread is doing so.

    Both threads hold the shared side of `TRITON`, so waiting for the other cannot deadlock.
    """
    global _compilations
    function = launch.kernel.function
    backend = triton_private.backend_for(compute_capability)
    options = {
        "enable_fp_fusion": True,
        "ptx_version": versions.ptx_isa_version(compute_capability),
        **launch.options,
    }
    source = triton_private.specialize(
        function, backend, _values(launch), frozenset(launch.constants)
    )
    code = functools.partial(_code, launch)
    key = (
        id(function),
        code(),
        compute_capability,
        repr(source.signature),
        tuple((path, Static(value)) for path, value in source.constants.items()),
        repr(sorted(source.attrs.items())),
        tuple((name, Static(value)) for name, value in sorted(options.items())),
    )
    with _cache_lock:
        entry = _cache.setdefault(key, _CacheEntry(function))
    with entry.compiling:
        if entry.kernel is None:
            with _cache_lock:
                _compilations += 1
            disk_cache.prepare()
            compiled = triton_private.compile_to_ptx(source, backend, options, code, on_miss)
            compiled_kernel.check_fits(launch, compiled, compute_capability)
            entry.kernel = compiled_kernel.finish(launch, compute_capability, source, compiled)
            name, config = launch.kernel.name, launch.candidate.config
            logger.debug("compiled %s [%s] as %s", name, config, entry.kernel.name)
        if machine_code and entry.kernel.cubin is None:
            cubin = triton_private.assemble(backend, entry.kernel.ptx, options)
            entry.kernel = dataclasses.replace(entry.kernel, cubin=cubin)
        return entry.kernel


def _code(launch: Launch) -> str:
    """The fingerprint of the kernel's code and constants, as they are now."""
    return sources.fingerprint(launch.kernel.function, *launch.constants.values())


def _values(launch: Launch) -> dict[str, Any]:
    """The values of all parameters for Triton's binder, with arrays as stubs."""

    def value(leaf: Leaf) -> Any:
        if isinstance(leaf, Scalar):
            return leaf.value
        array = launch.array_type(leaf)
        stub = triton_private.array_stub(dtypes.triton_name(array.dtype), array.dtype.itemsize)
        if isinstance(leaf, Descriptor):
            return triton_private.descriptor_stub(stub, leaf)
        return stub

    return launch.constants | {name: map_leaves(value, part) for name, part in launch.arguments}
