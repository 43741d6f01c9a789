"""Draws a benchmark's record: how close ops come to the stream limit, and how much faster they are.

Each figure is written as PNG and as SVG, the same bytes for the same record. A figure whose data
the record does not hold is left out.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from triax.bench.cases import OPS
from triax.bench.report import is_of_device
from triax.bench.suites import PRESETS
from triax.bridge.errors import MissingDependencyError

Result = dict[str, Any]

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
VERSIONS = ("triax", "jax", "triton")
NOTHING = "nothing to draw: that takes times of a GPU, with a fraction of a stream or a competitor"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures of a record into a folder; returns the files, none for a CPU's record."""
    matplotlib = import_matplotlib()
    results = [r for r in record["results"] if is_of_device(r) and not r["error"]]
    versions = [
        f"{n} {v}" for n, v in record["versions"].items() if n in ("triax", "jax", "triton")
    ]
    origin = "  ·  ".join([record["machine"]["device"], *versions, record["written"][:10]])
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
    if not moves:
        return None
    bars = {(r["op"], _shape(r)): r["fraction_of_stream"] for r in moves}
    title = "Speed of each op, as a fraction of a sequential stream of the same bytes"
    figure, (axes,) = _figure(title, setting, origin, 1)
    _draw_bars(axes, bars, _in_order((shape for _, shape in bars), PRESETS), "{:.2f}")
    axes.set_ylabel("fraction of the stream's speed")
    figure.legend(loc="outside lower center", ncols=7)
    return figure


def speedup(results: Sequence[Result], origin: str) -> Any:
    """A panel for each op, with bars by preset and competitor: its time over that of Triax."""
    own = {_case(r): r["median_us"] for r in results if r["implementation"] == "triax"}
    others = [r for r in results if r["implementation"] != "triax" and _case(r) in own]
    others, setting = _of_one_setting(others)
    if not others:
        return None
    ops = _in_order((r["op"] for r in others), OPS)
    names = list(dict.fromkeys(r["implementation"] for r in others))
    figure, panels = _figure("How many times as fast Triax is", setting, origin, len(ops))
    for axes, op in zip(panels, ops, strict=True):
        ratios = {
            (_shape(r), r["implementation"]): r["median_us"] / own[_case(r)]
            for r in others
            if r["op"] == op
        }
        _draw_bars(axes, ratios, names, "{:.2f}×")
        axes.set_title(op, loc="left", weight="bold")
        axes.set_ylabel("times as fast")
    legend: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        legend |= zip(labels, handles, strict=True)
    figure.legend(legend.values(), [f"as {n}" for n in legend], loc="outside lower center", ncols=7)
    return figure


def _figure(title: str, setting: str, origin: str, panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2 + 2.5 * panels), layout="constrained")
    figure.suptitle(f"{title}\n{setting}\n{origin}", x=0.01, ha="left")
    return figure, figure.subplots(panels, squeeze=False)[:, 0]


def _draw_bars(
    axes: Any, bars: dict[tuple[str, str], float], series: Sequence[str], text: str
) -> None:
    """Groups of bars by group and series, those of a group side by side around its tick."""
    groups = _in_order((group for group, _ in bars), (*OPS, *PRESETS))
    members = {group: [name for name in series if (group, name) in bars] for group in groups}
    width = min(0.2, 0.85 / max(map(len, members.values())))
    axes.axhline(1, color="black", linewidth=1)
    for name, color in zip(series, PALETTE, strict=False):
        mine = {g: names.index(name) for g, names in members.items() if name in names}
        x = [groups.index(g) + width * (i - (len(members[g]) - 1) / 2) for g, i in mine.items()]
        if mine:
            drawn = axes.bar(x, [bars[g, name] for g in mine], 0.9 * width, color=color, label=name)
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(drawn, fmt=text, padding=2, rotation=90, fontsize=7, bbox=white)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.margins(y=0.2)
    axes.grid(axis="y")


def _of_one_setting(results: list[Result]) -> tuple[list[Result], str]:
    """The results of one number of tokens, dtype and routing, which has the most; chunk sorts too.

    And the setting in words.
    """
    setting = lambda r: (r["tokens"], r["dtype"], r["routing"])
    votes = collections.Counter(setting(r) for r in results if r["preset"])
    chosen = max(votes, key=lambda key: (votes[key], key[0]), default=None)
    words = (
        "" if chosen is None else f"{chosen[0]:,} tokens  ·  {chosen[1]}  ·  {chosen[2]} routing"
    )
    return [r for r in results if not r["preset"] or setting(r) == chosen], words


def _shape(r: Result) -> str:
    """The preset's name, or a chunk sort's shape."""
    chunks = f"{r['tokens']:,} × {r['hidden']:,} {r['dtype']}, {r['experts']} chunks"
    return r["preset"] or chunks


def _case(r: Result) -> tuple[Any, ...]:
    names = ("op", "preset", "tokens", "hidden", "experts", "top_k", "dtype", "routing")
    return tuple(r[name] for name in names)


def _in_order(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Each of `names` once: first those of `order`, as there, then the others as they come."""
    found = dict.fromkeys(names)
    known = [name for name in order if name in found]
    return known + [name for name in found if name not in known]
