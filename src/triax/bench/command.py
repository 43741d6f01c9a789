"""The command `triax bench`: its flags, what they are turned into, and where results go."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from triax.bench.cases import OPS
from triax.bench.suites import DTYPES, NAMES, ROUTINGS, SUITES
from triax.errors import ArgumentValueError

DRAW = "draw"


def add_parser(commands: Any) -> None:
    """Adds the command to the others.

    Its words may stand anywhere between the flags, which argparse cannot do for a command: those
    that it does not know what to do with are to be added to `words`.
    """
    parser = commands.add_parser(
        "bench",
        help="how fast the MoE ops are on this machine",
        usage=f"triax bench [{' | '.join(SUITES)}] [flags]\n"
        f"       triax bench {DRAW} FILE --plots FOLDER",
        epilog="\n".join(f"{name}: {suite.about}\n" for name, suite in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = f"what to measure, quick if left out; {DRAW} FILE: pictures of what --json wrote"
    parser.add_argument("words", nargs="*", metavar="SUITE", help=about)
    for name, what, names in (
        ("ops", "ops to measure", OPS),
        ("presets", "models to take shapes from", NAMES),
        ("dtypes", "of tokens and rows", DTYPES),
        ("routing", "how tokens choose their experts, or rows their groups", ROUTINGS),
    ):
        text = f"{what}: {', '.join(names)}"
        several: Any = {"nargs": "+", "action": "extend", "metavar": "X"}
        parser.add_argument(f"--{name}", choices=names, help=text, **several)
    parser.add_argument("--tokens", type=_count, help="how many tokens the models get", **several)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pictures")
    parser.add_argument("--no-competitors", action="store_true", help="measure Triax alone")
    parser.add_argument("--first-call", action="store_true", help="time first calls too")
    parser.add_argument("--memory", action="store_true", help="what memory a route takes too")
    parser.set_defaults(run=run)


def _count(word: str) -> int:
    if not 0 < int(word) < 10**9:
        raise ValueError
    return int(word)


def run(options: argparse.Namespace) -> int:
    """Measures, or draws what was measured before; returns the exit status."""
    from triax.bench import plots, report

    options.suite, *files = options.words or ["quick"]
    draws = options.suite == DRAW
    known = options.suite in SUITES and not files
    if not known and not (draws and len(files) == 1 and options.plots):
        raise ArgumentValueError(
            f"`triax bench` takes one of {', '.join(SUITES)}, or {DRAW} FILE --plots FOLDER; got "
            f"{' '.join(options.words)!r}."
        )
    if options.plots is not None:  # found out before anything is measured
        plots.import_matplotlib()
        options.plots.mkdir(parents=True, exist_ok=True)
    record = report.read(Path(files[0])) if draws else _measure(options)
    written = plots.draw(record, options.plots) if options.plots is not None else []
    for path in written:
        print(path)
    if options.plots is not None and not written:
        print(f"triax: {plots.NOTHING}", file=sys.stderr)
    return 0 if (written if draws else report.is_right(record)) else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the table, and writes the record where one was asked for."""
    from triax.bench import report, runner

    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.open("a").close()
    # A record says how it was made, and nothing of the folders of the machine it was made on.
    words = (word.rpartition("=") for word in options.arguments)
    command = shlex.join(["triax", *(f"{a}{b}{Path(c).name or c}" for a, b, c in words)])
    record = runner.run(options, command)
    try:
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    finally:  # measured is measured, also where the disk is full
        print(report.table(record), end="")
    return record
