"""Compiles a program's kernels in parallel, although lowering meets them one by one.

All kernels of a program are traced before the first is lowered. As long as Triton's disk cache has
the kernels that lowering asks for, nothing happens. On the first miss, threads compile the traced
calls that have not been lowered yet; lowering then finds them compiled, or waits for the thread
that is compiling them.

Kernels with several configs are left out, because none is chosen yet. So are all kernels in a
process whose programs do not run on a GPU by default, unless ``TRIAX_CUDA_ARCH`` names the target.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from triax import settings
from triax.binding import diagnostics
from triax.binding.launch import ArrayType, BoundCall, CompiledKernel, Launch
from triax.compat import jax_private
from triax.compiling import compiler, threads
from triax.errors import SettingError

logger = logging.getLogger(__name__)

_MAX_WAITING = 256  # traced calls may never be lowered
_MAX_THREADS = 16

_lock = threading.RLock()
_waiting: dict[Launch, None] = {}  # in the order of tracing, which is also that of lowering
_threads: list[threading.Thread] = []


def expect(call: BoundCall, operands: Sequence[np.dtype], results: Sequence[np.dtype]) -> None:
    """Records a traced call; `operands` and `results` are the dtypes of its arrays."""
    candidates = [candidate for candidate in call.candidates if not candidate.is_empty]
    if len(candidates) != 1 or call.implementation == "interpret" or not _compiles_for_cuda():
        return
    launch = _without_shapes(call.launch(candidates[0], _types(operands), _types(results)))
    with _lock:
        _waiting[launch] = None
        if len(_waiting) > _MAX_WAITING:
            del _waiting[next(iter(_waiting))]


def met(launches: Iterable[Launch]) -> None:
    """Records that lowering has reached these launches, so they need no compiling ahead."""
    with _lock:
        for launch in launches if _waiting else ():
            _waiting.pop(_without_shapes(launch), None)


def compile_launch(launch: Launch, compute_capability: int) -> CompiledKernel:
    """Compiles a launch; if Triton's disk cache lacks it, starts compiling the waiting ones too."""
    on_miss = functools.partial(_start, compute_capability)
    return compiler.compile_launch(launch, compute_capability, on_miss=on_miss)


def _compiles_for_cuda() -> bool:
    if jax_private.default_platform() in ("gpu", "cuda"):
        return True
    try:
        return settings.cuda_arch() is not None
    except SettingError:  # lowering raises the error if it needs the setting
        return False


def _types(dtypes: Sequence[np.dtype]) -> tuple[ArrayType, ...]:
    return tuple(ArrayType((), np.dtype(dtype)) for dtype in dtypes)


def _without_shapes(launch: Launch) -> Launch:
    """The launch without the shapes of its buffers, which do not change the compiled kernel."""
    return dataclasses.replace(
        launch,
        operands=_types([array.dtype for array in launch.operands]),
        results=_types([array.dtype for array in launch.results]),
    )


def _start(compute_capability: int) -> None:
    """Starts threads that compile the waiting launches."""
    with _lock:
        # As many threads as cores: the calling thread will mostly wait for one of them.
        most = min(len(_waiting), os.cpu_count() or 1, _MAX_THREADS)
        for _ in range(most - len(_threads)):
            if not threads.start(functools.partial(_work, compute_capability), _threads):
                return


def _work(compute_capability: int) -> None:
    while True:
        with _lock:
            if not _waiting:
                _threads.remove(threading.current_thread())
                return
            launch = next(iter(_waiting))
            del _waiting[launch]
        try:
            compiler.compile_in_turn(launch, compute_capability)
        except Exception as error:  # lowering will raise the error
            logger.debug("not compiled ahead: %s", diagnostics.failure(launch, error))


def _drop() -> None:
    with _lock:
        _waiting.clear()


def _after_fork() -> None:  # a child process has none of the threads
    _waiting.clear()
    _threads.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork)
atexit.register(_drop)
