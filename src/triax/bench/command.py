"""The command `triax bench`: its flags, what they are turned into, and where results go.

In: the words of the command line. Out: the table on standard output, and the files asked for.
What is wrong with them is found before anything is measured.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from triax.bench.cases import DTYPES, ROUTINGS
from triax.bench.presets import PRESETS, SUITES
from triax.bench.programs import OPS
from triax.bridge.errors import ArgumentValueError

DRAW = "draw"
_USAGE = f"""triax bench [{" | ".join(SUITES)}] [flags]
       triax bench {DRAW} FILE --plots FOLDER"""


def add_parser(commands: Any) -> None:
    """Adds the command to the others.

    Its words may stand anywhere between the flags, which argparse cannot do for a command: those
    that it does not know what to do with are to be added to `words`.
    """
    parser = commands.add_parser(
        "bench",
        help="how fast the MoE ops are on this machine",
        usage=_USAGE,
        epilog=_choices(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SUITE",
        help=f"what to measure, quick if left out; {DRAW} FILE: pictures of what --json wrote",
    )
    for name, what in (
        ("ops", "ops to measure"),
        ("presets", "models to take shapes from"),
        ("tokens", "how many tokens the models get"),
        ("dtypes", "of tokens and rows"),
        ("routing", "how tokens choose their experts"),
    ):
        parser.add_argument(f"--{name}", nargs="+", action="extend", metavar="X", help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pictures")
    parser.add_argument("--no-competitors", action="store_true", help="measure Triax alone")
    parser.add_argument("--first-call", action="store_true", help="time first calls too")
    parser.add_argument("--memory", action="store_true", help="what memory a route takes too")
    parser.set_defaults(run=run)


def _choices() -> str:
    """What the flags can name, for the help."""
    lists: dict[str, Iterable[str]] = {
        "ops": OPS,
        "presets": PRESETS,
        "dtypes": DTYPES,
        "routing": ROUTINGS,
    }
    return "\n".join(
        [
            "suites, and what they cover on a GPU:",
            *(_entry(name, str(suite)) for name, suite in SUITES.items()),
            "",
            "lists, each in place of the suite's, with spaces or commas between the names:",
            *(_entry(f"--{flag}", " ".join(values)) for flag, values in lists.items()),
        ]
    )


def _entry(name: str, text: str) -> str:
    indent = 13 * " "
    return textwrap.fill(
        f"  {name:11}{text}", 100, subsequent_indent=indent, break_on_hyphens=False
    )


def run(options: argparse.Namespace) -> int:
    """Measures, or draws what was measured before; returns the exit status.

    Raises:
      ArgumentValueError: a word or a flag makes no sense.
      MissingDependencyError: there is no matplotlib to draw with.
    """
    from triax.bench import plots, report, runner

    suite, *files = options.words or ["quick"]
    if suite not in (*SUITES, DRAW):
        raise ArgumentValueError(
            f"`SUITE` must be one of {', '.join(SUITES)}, or {DRAW} for a FILE; got {suite!r}."
        )
    if len(files) > (suite == DRAW):
        extra = " ".join(files[suite == DRAW :])
        raise ArgumentValueError(
            f"`triax bench {suite}` takes nothing more; got {extra!r}. A FILE is for "
            f"`triax bench {DRAW} FILE --plots FOLDER`."
        )
    if suite == DRAW:
        if not files or options.plots is None:
            lacks = " and ".join(
                ([] if files else ["a FILE that --json wrote"])
                + ([] if options.plots else ["--plots FOLDER"])
            )
            raise ArgumentValueError(f"`triax bench {DRAW} FILE --plots FOLDER` lacks {lacks}.")
        record = report.read(Path(files[0]))
        plots.import_matplotlib()
        report.check_folder("--plots", options.plots)
        return 0 if _draw(record, options.plots) else 1

    request = runner.Request(
        suite=suite,
        ops=_names("--ops", options.ops),
        presets=_names("--presets", options.presets),
        tokens=_counts("--tokens", options.tokens),
        dtypes=_names("--dtypes", options.dtypes),
        routings=_names("--routing", options.routing),
        competitors=not options.no_competitors,
        first_call=options.first_call,
        memory=options.memory,
        command=shlex.join(["triax", *map(_without_folder, options.arguments)]),
    )
    if options.json is not None:
        report.check_target(options.json)
    if options.plots is not None:
        plots.import_matplotlib()
        report.check_folder("--plots", options.plots)
    record = runner.run(request)
    try:
        if options.json is not None:
            report.write(record, options.json)
    finally:  # measured is measured, also where the disk is full
        print(report.table(record), end="")
    if options.plots is not None:
        _draw(record, options.plots)
    return 0 if report.is_right(record) else 1


def _without_folder(word: str) -> str:
    """A record says how it was made, and nothing of the folders of the machine it was made on."""
    flag, equals, value = word.rpartition("=")
    return flag + equals + (Path(value).name or value)


def _names(flag: str, words: Sequence[str] | None) -> list[str] | None:
    """A flag's list, from words that are lists with commas themselves; each name once."""
    if words is None:
        return None
    names = [name.strip() for word in words for name in word.split(",")]
    names = list(dict.fromkeys(filter(None, names)))
    if not names:
        raise ArgumentValueError(f"`{flag}` must name something; got {' '.join(words)!r}.")
    if names[-1] in (*SUITES, DRAW):
        raise ArgumentValueError(
            f"`{flag}` takes all words behind it; got {names[-1]!r}. Put that first: "
            f"triax bench {names[-1]} {flag} ..."
        )
    return names


def _counts(flag: str, words: Sequence[str] | None) -> list[int] | None:
    names = _names(flag, words)
    if names is None:
        return None
    for name in names:
        if not name.isdecimal() or len(name) > 18 or not int(name):
            raise ArgumentValueError(
                f"`{flag}` must be whole numbers from 1, such as 128,8192; got {name!r}."
            )
    return list(dict.fromkeys(map(int, names)))


def _draw(record: dict[str, Any], folder: Path) -> list[Path]:
    from triax.bench import plots

    written = plots.draw(record, folder)
    for path in written:
        print(path)
    if not written:
        print(f"triax: {plots.NOTHING}", file=sys.stderr)
    return written
