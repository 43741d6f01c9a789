"""What is said of candidates that do not compile or run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from triax.bridge import compiler
from triax.bridge.errors import CompilationError
from triax.bridge.launch import Call, Launch

logger = logging.getLogger(__name__)


def dropped(launch: Launch, error: Exception) -> str:
    """Why a candidate that does not compile is left out; logged."""
    reason = compiler.failure(launch, error)
    logger.warning("config dropped: %s", reason)
    return reason


def none_left(call: Call, reasons: Sequence[str]) -> CompilationError:
    """The error that none of a call's candidates compiles and runs."""
    listed = "\n  ".join(reasons)
    return CompilationError(
        f"None of the {len(reasons)} configs of kernel {call.display_name!r} compiles and runs:\n"
        f"  {listed}"
    )
