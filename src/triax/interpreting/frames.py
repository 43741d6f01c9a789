"""Reduces the traceback of an error in an interpreted kernel to the kernel's own lines.

Between the call of a kernel and its failing line there are frames of JAX, Triax and Triton, and
after that line frames of Triton and NumPy. Only the kernel's own frames are useful.
"""

from __future__ import annotations

import _thread
import queue
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from triax.binding import diagnostics

MARK = "__triax_kernel__"
"""The name of a global that marks every function that the interpreter runs."""


def of_kernels(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Keeps the frames of a traceback that belong to a kernel or its helpers; None without any."""
    result = None
    for entry in reversed([*_kept(trace)]):
        result = types.TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def raise_as_text(error: Exception) -> NoReturn:
    """Raises `error` for XLA, which keeps only the name of an exception's type and its text.

    XLA prefixes the innermost frame and all its callers. So the error is first raised in a new
    thread, where it has no callers, in code that claims to be the kernel's failing line.
    """
    trace = of_kernels(error.__traceback__)
    notes = getattr(error, "__notes__", ())
    lines = [str(error), *notes, *diagnostics.causes(error), *traceback.format_tb(trace)]
    text = "\n".join(line.rstrip() for line in lines)
    said: Exception = type(type(error).__name__, (Exception,), {})(text)
    code = _raise.__code__
    if trace is not None:
        last = traceback.extract_tb(trace)[-1]
        line = (last.lineno or 5) - 4  # `_raise` ends four lines below its `def`
        code = code.replace(co_filename=last.filename, co_name=last.name, co_firstlineno=line)
    raised = queue.SimpleQueue[Exception]()
    _thread.start_new_thread(types.FunctionType(code, {}), (said, raised.put))
    raise raised.get()


def _raise(error: Exception, hand_over: Callable[[Exception], None]) -> None:
    try:
        raise error from None
    except Exception as caught:
        hand_over(caught)


def _kept(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    inside = False
    while trace is not None:
        variables: dict[str, Any] = trace.tb_frame.f_globals
        path = Path(trace.tb_frame.f_code.co_filename)
        marked = MARK in variables
        inside = inside or marked
        # Triton's library is interpreted too, but hidden; Triax's own kernels are shown.
        hidden = ("triton", "numpy") if marked else ("triton", "numpy", "triax")
        files = (getattr(sys.modules.get(package), "__file__", None) for package in hidden)
        if inside and not any(file and path.is_relative_to(Path(file).parent) for file in files):
            yield trace
        trace = trace.tb_next
