"""The compiler interface of tuning, and what it says of candidates that cannot be used."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from triax.binding import diagnostics
from triax.binding.launch import Call, CompiledKernel, Launch
from triax.errors import CompilationError

logger = logging.getLogger(__name__)


HOW_TO_TUNE = (
    "`triax tune FILE:FUNCTION` or `triax tune package.module:FUNCTION` (a function without "
    "arguments that calls it)"
)


class CompileAll(Protocol):
    """Compiles launches in parallel; one that cannot be compiled yields its exception.

    That is a `CompilationTimeout` if it took longer than `timeout_s`. With `machine_code` the
    kernels have their `cubin`; `on_each` is called after each launch.
    """

    def __call__(
        self,
        launches: Sequence[Launch],
        compute_capability: int,
        timeout_s: float | None = None,
        *,
        machine_code: bool = False,
        on_each: Callable[[], None] | None = None,
    ) -> list[CompiledKernel | Exception]: ...


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Why no config is chosen; which configs are known to fail, and which to be slow."""

    reason: str
    failed: Collection[str] = ()
    slow: Collection[str] = ()


def dropped(launch: Launch, error: Exception) -> str:
    """Logs and returns why a candidate that does not compile is left out."""
    reason = diagnostics.failure(launch, error)
    logger.warning("config dropped: %s", reason)
    return reason


def none_left(call: Call, reasons: Sequence[str]) -> CompilationError:
    """The error for a call none of whose candidates compiles and runs."""
    listed = "\n  ".join(reasons)
    return CompilationError(
        f"None of the {len(reasons)} configs of kernel {call.display_name!r} compiles and runs:\n"
        f"  {listed}"
    )
