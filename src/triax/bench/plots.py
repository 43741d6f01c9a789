"""Draws a benchmark's record: how close ops come to the stream limit, and how much faster they are.

Each figure is written as PNG and as SVG, the same bytes for the same record. A figure whose data
the record does not hold is left out.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triax.bench.competitors import DENSE
from triax.bench.report import is_of_device
from triax.errors import MissingDependencyError

Result = dict[str, Any]
Bars = dict[tuple[str, str], float]  # by group and series

# By Okabe and Ito, to be told apart by the colour-blind too; their yellow is darker, black is grey.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#5F5F5F", "#9A8700")
STYLE = {
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "grid.color": "#E3E3E3",
    "legend.frameon": False,
    "svg.hashsalt": "triax",
}
NOTHING = "nothing to draw: that takes times of a GPU, with a fraction of a stream or a competitor"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures of a record into a folder; returns the files, none for a CPU's record."""
    matplotlib = import_matplotlib()
    results = [r for r in record["results"] if is_of_device(r) and not r["error"]]
    versions = record["versions"]
    names = [f"{name} {versions[name]}" for name in ("triax", "jax", "triton") if name in versions]
    origin = "  ·  ".join([record["machine"]["device"], *names, record["written"][:10]])
    written = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user has set
        matplotlib.rcParams.update(STYLE)
        for make in (fraction_of_stream, speedup):
            if (figure := make(results, origin)) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                written += [folder / f"{make.__name__}.{kind}" for kind in ("png", "svg")]
                figure.savefig(written[-2], dpi=150)
                figure.savefig(written[-1], metadata={"Date": None})
    return written


def import_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(
            "Drawing plots needs matplotlib: pip install 'triax[bench]'."
        ) from error
    return matplotlib


def fraction_of_stream(results: Sequence[Result], origin: str) -> Any:
    """Bars by op and preset: the speed as a fraction of a stream's."""
    moves = [r for r in results if r["implementation"] == "triax" and r["fraction_of_stream"]]
    moves, setting = _of_one_setting(moves)
    panels = {"": {(r["op"], _shape(r)): r["fraction_of_stream"] for r in moves}} if moves else {}
    title = "Speed of each op, as a fraction of a sequential stream of the same bytes"
    return _figure((title, setting, origin), panels, "fraction of the stream's speed", "{:.2f}")


def speedup(results: Sequence[Result], origin: str) -> Any:
    """A panel for each op, with bars by preset and competitor: its time over that of Triax."""
    names = ("op", "preset", "tokens", "hidden", "experts", "top_k", "dtype", "routing")
    case = lambda r: tuple(r[name] for name in names)
    own = {case(r): r["median_us"] for r in results if r["implementation"] == "triax"}
    rivals = [r for r in results if r["implementation"] not in ("triax", DENSE)]  # no limits
    others = [r for r in rivals if case(r) in own]
    others, setting = _of_one_setting(others)
    panels: dict[str, Bars] = collections.defaultdict(dict)
    for r in others:
        panels[r["op"]][_shape(r), f"as {r['implementation']}"] = r["median_us"] / own[case(r)]
    titles = ("How many times as fast Triax is", setting, origin)
    return _figure(titles, panels, "times as fast", "{:.2f}×")


def _figure(titles: Sequence[str], panels: dict[str, Bars], label: str, text: str) -> Any:
    """Panels of groups of bars, those of a group side by side around its tick; None of nothing."""
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2 + 2.5 * len(panels)), layout="constrained")
    figure.suptitle("\n".join(titles), x=0.01, ha="left")
    series = dict.fromkeys(name for bars in panels.values() for _, name in bars)
    colors = dict(zip(series, PALETTE, strict=False))
    handles: dict[str, Any] = {}
    axes_of = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, bars) in zip(axes_of, panels.items(), strict=True):
        groups = list(dict.fromkeys(group for group, _ in bars))
        members = [[name for name in series if (group, name) in bars] for group in groups]
        width = min(0.2, 0.85 / max(map(len, members)))
        for name, color in colors.items():
            at = {n: names.index(name) for n, names in enumerate(members) if name in names}
            x = [n + width * (place - (len(members[n]) - 1) / 2) for n, place in at.items()]
            drawn = axes.bar(x, [bars[groups[n], name] for n in at], 0.9 * width, color=color)
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(drawn, fmt=text, padding=2, rotation=90, fontsize=7, bbox=white)
            if at:
                handles[name] = drawn
        axes.axhline(1, color="black", linewidth=1, zorder=0.9)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.margins(y=0.2)
        axes.grid(axis="y")
        axes.set_ylabel(label)
        axes.set_title(title, loc="left", weight="bold")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=7)
    return figure


def _of_one_setting(results: list[Result]) -> tuple[list[Result], str]:
    """The results of the number of tokens, dtype and routing that has the most, and chunk sorts.

    And that setting in words.
    """
    setting = lambda r: f"{r['tokens']:,} tokens  ·  {r['dtype']}  ·  {r['routing']} routing"
    votes = collections.Counter((setting(r), r["tokens"]) for r in results if r["preset"])
    chosen, _ = max(votes, key=lambda key: (votes[key], key[1]), default=("", 0))
    return [r for r in results if not r["preset"] or setting(r) == chosen], chosen


def _shape(r: Result) -> str:
    """The preset's name, or a chunk sort's shape."""
    chunks = f"{r['tokens']:,} × {r['hidden']:,} {r['dtype']}, {r['experts']} chunks"
    return r["preset"] or chunks
