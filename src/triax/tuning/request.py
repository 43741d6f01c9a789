"""A request for a config: a call, its candidates and their compiler; and why it has no answer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from triax.binding import diagnostics
from triax.binding.launch import BoundCall, CompiledKernel, Launch
from triax.devices import Device
from triax.errors import CompilationError
from triax.tuning.key import Key, make_key

logger = logging.getLogger(__name__)

HOW_TO_TUNE = (
    "`triax tune FILE:FUNCTION` or `triax tune package.module:FUNCTION` (a function without "
    "arguments that calls it; with `--into …/triax_records` if a package ships its configs)"
)
CompileAll = Callable[..., list[CompiledKernel | Exception]]
"""`compiling.compiler.compile_all`, which this package may not import."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A call that needs a config.

    `launches` are one per candidate, at least one. Nothing is measured without a `device`; `inputs`
    are the real operands to measure on, if given. `fallback` is the launch to use if no config is
    chosen, by default the first.
    """

    call: BoundCall
    launches: Sequence[Launch]
    compute_capability: int
    compile_all: CompileAll
    device: Device | None = None
    inputs: Sequence[Any] | None = None
    fallback: Launch | None = None

    @functools.cached_property
    def key(self) -> Key:
        return make_key(self.call, self.launches, self.compute_capability, self.device)

    @property
    def stand_ins(self) -> list[Launch]:
        """The launches to try, in order, if no config is found: `fallback`, then all candidates."""
        return [*([self.fallback] if self.fallback else []), *self.launches]

    def that_compile(self, batches: Sequence[Sequence[Launch]]) -> list[Launch]:
        """The launches that compile, of the first batch in which any does.

        Raises:
          CompilationError: no launch compiles.
        """
        reasons = []
        for batch in batches:
            results = self.compile_all(batch, self.compute_capability)
            compiled = []
            for launch, result in zip(batch, results, strict=True):
                if isinstance(result, CompiledKernel):
                    compiled.append(launch)
                else:
                    reasons.append(dropped(launch, result))
            if compiled:
                return compiled
        raise self.none_left(reasons)

    def none_left(self, reasons: Sequence[str]) -> CompilationError:
        """The error for a call none of whose candidates compiles and runs."""
        listed = "\n  ".join(reasons)
        return CompilationError(
            f"None of the {len(reasons)} configs of kernel {self.call.display_name!r} compiles and "
            f"runs:\n  {listed}"
        )


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Why no config is chosen, which configs failed, and which ran out of time or memory."""

    reason: str
    failed: Collection[str] = ()
    doubtful: Collection[str] = ()


def dropped(launch: Launch, error: Exception) -> str:
    """Logs and returns why a candidate that does not compile is left out."""
    reason = diagnostics.failure(launch, error)
    logger.warning("config dropped: %s", reason)
    return reason
