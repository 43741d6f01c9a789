"""Patches Triton while Triax compiles."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from triax.compat import patching
from triax.compat.patching import Change
from triax.compat.triton_private import STOPS_AT, front_end_lock, triton


def prepare() -> None:
    """Patches Triton's compiler: no line info, and quick keys for its disk cache.

    Line info would make the output depend on the machine's source paths. The patched names are
    globals of the process, so they stay patched while any compilation runs, until `patching.undo`.
    """
    patching.replace(_changes())


@functools.cache
def _changes() -> patching.Changes:
    cache = importlib.import_module("triton.runtime.cache")
    nvidia = importlib.import_module("triton.backends.nvidia.compiler")
    make_cubin = nvidia.CUDABackend.make_cubin

    def make_cubin_if_needed(self: Any, src: str, metadata: Any, *rest: Any) -> bytes:
        if STOPS_AT in metadata:
            return b""
        return bytes(make_cubin(self, src, metadata, *rest))

    # Computing a kernel's `cache_key` needs a lock: meanwhile the kernel has a placeholder as hash.
    jit_callable = triton().runtime.jit.JITCallable
    code_generator = importlib.import_module("triton.compiler.code_generator")
    # Patched without Triton's own `scope`, which writes environment variables, and reverts settings
    # that the rest of the program makes in the meantime.
    settings = vars(triton().knobs.compilation)
    changes = [
        (settings, "disable_line_info", True),
        (settings, "store_binary_only", False),
        # Workaround: triton all: to identify its version, it hashes all its files, hundreds of
        # megabytes, and asks ptxas for a version, in every process.
        (cache, "triton_key", _installation_key),
        (nvidia, "get_ptxas_version", _ptxas_key),
        (nvidia.CUDABackend, "make_cubin", make_cubin_if_needed),
        (triton().runtime.jit, "ast", _copy(ast, parse=parse)),
        (jit_callable, "cache_key", property(_one_at_a_time(jit_callable.cache_key.fget))),
        # Workaround: triton <3.7: the code generator turns deprecation warnings off for every node
        # that it visits. That takes time, and turns them off in other threads too, permanently if
        # two threads overlap. Only Triton 3.5 needs it, because it uses `ast.Num`.
        (code_generator, "ast", _copy(ast, Num=ast.Constant)),
        (code_generator, "warnings", _copy(warnings, **_NO_FILTERS)),
    ]
    return patching.grouped(Change(*change) for change in changes)


_NO_FILTERS = {"catch_warnings": contextlib.nullcontext, "simplefilter": lambda *_: None}


def _copy(module: ModuleType, **changes: Any) -> ModuleType:
    """Returns a copy of a module with some of its names changed."""
    copy = ModuleType(module.__name__)
    vars(copy).update({**vars(module), **changes})
    return copy


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def locked(*args: Any) -> Any:
        with front_end_lock:
            return function(*args)

    return locked


def parse(*args: Any, **kwargs: Any) -> Any:
    """Runs `ast.parse`, in one thread at a time."""
    # Workaround: python <3.13: the depth of the tree is counted in a variable that all threads
    # share. If a garbage collection switches to another thread that parses too, the wrong count
    # raises a SystemError.
    with front_end_lock:
        with contextlib.suppress(SystemError):  # code outside Triax parses without the lock
            return ast.parse(*args, **kwargs)
        return ast.parse(*args, **kwargs)


@functools.cache
def _installation_key() -> str:
    """Returns Triton's version and a hash that identifies its installation."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        record = importlib.metadata.distribution("triton").read_text("RECORD")
        if record and "libtriton" in record:  # a wheel's list of its files with their hashes
            return f"triax-{triton().__version__}-{hashlib.sha256(record.encode()).hexdigest()}"
    root = pathlib.Path(str(triton().__file__)).parent
    files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".so", ".bc"))
    stats = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return f"triax-{triton().__version__}-{hashlib.sha256(repr(stats).encode()).hexdigest()}"


def _ptxas_key(arch: int = 0) -> str:
    """Identifies the ptxas that Triton runs: by path, unless it is the installation's own."""
    others = []
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        if path := os.environ.get(name):
            stat = os.stat(path) if os.path.exists(path) else None
            others.append((path, stat and (stat.st_size, stat.st_mtime_ns)))
    return f"triax-ptxas-{others}"
