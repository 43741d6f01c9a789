"""The command line: `triax doctor`, `tune`, `explain` and `cache`."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triax.compat import triton_private
from triax.compat.versions import __version__
from triax.errors import ArgumentValueError, TriaxError
from triax.messages import counted
from triax.settings import tuning_mode
from triax.tools import cache, doctor, programs
from triax.tools.explain import explain
from triax.tools.tune import tune
from triax.tuning.recording import record
from triax.tuning.store import Record

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # unencodable names must not fail
    try:
        try:
            return _run(arguments)
        finally:
            _flush()
    except BrokenPipeError:  # the reader has stopped, as `head` does
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"triax: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except TriaxError as error:
        print(f"triax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("triax: interrupted", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO if options.verbose else "WARNING")
    status: int = options.run(options)
    return status


def _flush() -> None:
    """Flushes the output while a failure can still be handled; at Python's exit it cannot."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triax", description="Triton kernels in JAX programs.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")

    command = commands.add_parser("doctor", help="what works here, and how to fix the rest")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=lambda options: doctor.doctor(options.json))

    command = commands.add_parser("tune", help="measure the Triton calls of a function")
    command.set_defaults(run=_tune, tool=lambda function, _: tune(function), show=_show_tuned)
    command.set_defaults(nothing="nothing to tune: no Triton call with several configs ran")
    _add_function(command)
    about = "also write the tuned configs there, to ship in a package or for TRIAX_CACHE_PATH"
    command.add_argument("--into", type=Path, metavar="FOLDER", help=about)

    command = commands.add_parser("explain", help="which configs a function's calls get, and why")
    command.add_argument("--ptx", action="store_true", help="print the kernels' PTX, too")
    about = "print the registers, spills and shared memory of every config, too"
    command.add_argument("--resources", action="store_true", help=about)
    command.set_defaults(run=_with_function, tool=_explain, show=print)
    command.set_defaults(
        nothing="nothing to explain: no kernel is behind what the function returns"
    )
    _add_function(command)

    command = commands.add_parser("cache", help="the tuned configs on disk")
    actions = command.add_subparsers(required=True, metavar="action")
    action = actions.add_parser("list", help="one line per config: date, size, time, config")
    action.set_defaults(run=lambda options: cache.list_configs())
    action = actions.add_parser("show", help="print the records of configs in full")
    action.add_argument("name", help="a kernel, or the name that `list` shows")
    action.set_defaults(run=lambda options: cache.show(options.name))
    action = actions.add_parser("clear", help="delete configs from the user's store")
    which = action.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", help="a kernel, or the name that `list` shows")
    which.add_argument("--all", action="store_true", help="everything")
    action.set_defaults(run=lambda options: cache.clear(options.name))
    return parser


def _tune(options: argparse.Namespace) -> int:
    folder: Path | None = options.into
    if folder is None:
        return _with_function(options)
    if folder.is_file():
        raise ArgumentValueError(f"`--into` must be a folder; {folder} is a file.")
    folder.mkdir(parents=True, exist_ok=True)  # fails before anything is measured
    with record() as records:
        status = _with_function(options)
    if records:
        print(f"wrote {counted(len(records.save(folder)), 'config')} to {folder}")
    return status


def _add_function(command: argparse.ArgumentParser) -> None:
    about = "a function without arguments that calls kernels; or package.module:FUNCTION"
    command.add_argument("function", metavar="FILE:FUNCTION", help=about)


def _with_function(options: argparse.Namespace) -> int:
    """Applies a tool to a user's function, and prints the results."""
    path = ""
    try:
        program = programs.find(options.function, f"triax {options.command}")
        path = program.path
        results = options.tool(program.load(), options)
    except BrokenPipeError:
        raise
    except Exception as error:
        logger.info("the exception and its traceback:", exc_info=error)
        print(f"triax: {_said(error, path)}", file=sys.stderr)
        return 1
    for result in results:
        options.show(result)
    if not results:
        print(options.nothing)
    return 0


def _show_tuned(result: Record) -> None:
    print(f"{result.key.kernel}: {result.config}")
    for timing in result.timings:
        time = "failed" if timing.median_ms is None else f"{timing.median_ms:10.4f} ms"
        print(f"  {time:>13}  {timing.config}" + (f"  {timing.error}" if timing.error else ""))


def _explain(function: Callable[[], Any], options: argparse.Namespace) -> list[str]:
    """The text of each call, then of each choice of a kernel for a matmul."""
    calls = explain(function)
    texts = [[str(call)] for call in calls]
    if options.resources:
        with tuning_mode("runtime"):  # such programs hold every config, not only the chosen one
            for text, call in zip(texts, explain(function), strict=True):
                used = zip(call.resources(), call.config, strict=True)
                text += [f"  {resources}  {config}" for resources, config in used]
    if options.ptx:
        for text, call in zip(texts, calls, strict=True):
            text += call.ptx
    return ["\n".join(text) for text in texts] + [*map(str, calls.products)]


def _said(error: Exception, path: str) -> str:
    """The message of an exception, with the last line of the user's program that led to it.

    `path` is the program's file, "" if unknown.
    """
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == path]
    where = f"{path}:{lines[-1]}: " if lines else ""
    if isinstance(error, TriaxError):
        return f"{where}{error}"
    what: object = error
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}: " if error.filename else ""
        what = error.msg
    where = where or f"{path}: " * bool(path)
    said = f"{where}{type(error).__name__}: {what}".removesuffix(": ")
    is_triton = isinstance(error, ModuleNotFoundError) and error.name == "triton"
    return f"{said}. {triton_private.HOW_TO_INSTALL}" if is_triton else said
