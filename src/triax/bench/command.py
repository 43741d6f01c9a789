"""The commands `triax bench` and `triax draw`: their arguments, and where results go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from triax.bench.cases import FORMER_NAMES, OPS
from triax.bench.suites import DTYPES, NAMES, ROUTINGS, SUITES
from triax.errors import ArgumentValueError

_LISTS = ("ops", "presets", "dtypes", "routing", "tokens")
FLAGS = (*_LISTS, "json", "no_competitors", "first_call", "memory")


def add_parsers(commands: Any) -> None:
    """Adds the commands to the others."""
    parser = commands.add_parser(
        "bench",
        help="how fast the MoE ops are on this machine",
        usage=f"triax bench [{' | '.join(SUITES)} | FILE:FUNCTION] [flags]",
        epilog="\n".join(f"{name}: {suite.about}\n" for name, suite in SUITES.items())
        + "FILE:FUNCTION, or package.module:FUNCTION: a function of yours without arguments; it\n"
        "returns what `triax.benchmark` does, or a list of those. The flags are not for it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "what to measure, quick if left out"
    suite: Any = {"nargs": "?", "default": "quick", "type": _suite, "metavar": "SUITE"}
    parser.add_argument("suite", help=about, **suite)
    for name, what, names in (
        ("ops", "ops to measure", OPS),
        ("presets", "models to take shapes from", NAMES),
        ("dtypes", "of tokens and rows", DTYPES),
        ("routing", "how tokens choose their experts, or rows their groups", ROUTINGS),
    ):
        text = f"{what}: {', '.join(names)}"
        several: Any = {"nargs": "+", "action": "extend", "metavar": "X"}
        read = _op if name == "ops" else str
        parser.add_argument(f"--{name}", choices=names, type=read, help=text, **several)
    parser.add_argument("--tokens", type=_count, help="how many tokens the models get", **several)
    about = "write the record, after every case"
    parser.add_argument("--json", type=Path, metavar="FILE", help=about)
    parser.add_argument("--no-competitors", action="store_true", help="measure Triax alone")
    parser.add_argument("--first-call", action="store_true", help="time first calls too")
    parser.add_argument("--memory", action="store_true", help="what memory the moves take too")
    parser.set_defaults(run=bench)

    parser = commands.add_parser("draw", help="draw pictures of what `triax bench --json` wrote")
    parser.add_argument("file", type=Path, metavar="FILE", help="the record")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write PNG and SVG")
    parser.set_defaults(run=draw)


def _suite(word: str) -> str:
    if word not in SUITES and ":" not in word:
        names = ", ".join(SUITES)
        raise argparse.ArgumentTypeError(f"{word!r} is none of {names}, nor FILE:FUNCTION")
    return word


def _op(word: str) -> str:
    if word in FORMER_NAMES:
        print(f"triax: the op `{word}` is now called `{FORMER_NAMES[word]}`", file=sys.stderr)
    return FORMER_NAMES.get(word, word)


def _count(word: str) -> int:
    if not 0 < int(word) < 10**9:
        raise ValueError
    return int(word)


def bench(options: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the record where one was asked for."""
    from triax.bench import report, runner

    file: Path | None = options.json and options.json.resolve()
    if file is not None:  # found out before anything is measured
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        if not file.is_file():
            raise ArgumentValueError(f"`--json` must name a regular file; got {options.json}.")

    def write(record: dict[str, Any]) -> None:
        if file is not None:
            part = file.with_name(f"{file.name}.part")  # a killed run leaves a whole record
            part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            os.replace(part, file)

    def keep(record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the last one counts
            write(record)

    # A record says how it was made, and nothing of the folders of the machine it was made on.
    words = (word.rpartition("=") for word in options.arguments)
    command = shlex.join(["triax", *(f"{a}{b}{Path(c).name or c}" for a, b, c in words)])
    record = runner.run(options, command, keep)
    try:
        write(record)
    finally:  # measured is measured, also where the disk is full
        print(report.table(record), end="")
    return 0 if report.is_right(record) else 1


def draw(options: argparse.Namespace) -> int:
    """Draws a record; returns 1 if there is nothing in it to draw."""
    from triax.bench import plots, report

    written = plots.draw(report.read(options.file), options.folder)
    for path in written:
        print(path)
    if not written:
        print(f"triax: {plots.NOTHING}", file=sys.stderr)
    return 0 if written else 1
