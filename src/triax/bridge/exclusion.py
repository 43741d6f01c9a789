"""Compiling and interpreting exclude each other in one process.

Triton's interpreter replaces functions of `triton.language` while it runs, and
its grid index is a global: compiling, or interpreting a second kernel, in that
window gives nonsense. Any number of threads may compile together; a thread that
interprets is alone. Nothing here may be held while waiting on JAX: a callback on
another device may be what JAX is waiting for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from triax.bridge.compat import triton_private


class Exclusion:
    """A lock with a shared side and an exclusive side; waiting exclusives go first.

    `on_share` is a context manager entered by the first thread of a shared period
    and left by the last.
    """

    def __init__(self, on_share: Callable[[], contextlib.AbstractContextManager] | None = None):
        self._condition = threading.Condition()
        self._sharing = 0
        self._waiting = 0
        self._exclusive = False
        self._on_share: Callable[[], contextlib.AbstractContextManager] = (
            on_share or contextlib.nullcontext
        )
        self._shared_scope: contextlib.AbstractContextManager | None = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive and not self._waiting)
            if self._sharing == 0:
                scope = self._on_share()
                scope.__enter__()
                self._shared_scope = scope
            self._sharing += 1
        try:
            yield
        finally:
            with self._condition:
                self._sharing -= 1
                if self._sharing == 0:
                    entered, self._shared_scope = self._shared_scope, None
                    assert entered is not None
                    entered.__exit__(None, None, None)
                    self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._exclusive and self._sharing == 0)
            except BaseException:
                self._condition.notify_all()
                raise
            finally:
                self._waiting -= 1
            self._exclusive = True
        try:
            yield
        finally:
            with self._condition:
                self._exclusive = False
                self._condition.notify_all()


TRITON = Exclusion(on_share=triton_private.compiling)
"""Shared by compilers, held alone by the interpreter, in this process."""
