"""Draws a benchmark's record: how close ops come to the stream limit, and how much faster they are.

Each figure is written as PNG and as SVG, the same bytes for the same record. A figure whose data
the record does not hold is left out.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from triax.bench.competitors import DENSE
from triax.bench.report import is_of_device
from triax.bench.runner import OWN
from triax.errors import MissingDependencyError

Result = dict[str, Any]
Bar = tuple[Result, str, str, str, float]  # its panel, group, series and height

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
    style = import_matplotlib().style
    results = [r for r in record["results"] if is_of_device(r) and not r["error"]]
    versions = record["versions"]
    names = [f"{name} {versions[name]}" for name in ("triax", "jax", "triton") if name in versions]
    origin = "  ·  ".join([record["machine"]["device"], *names, record["written"][:10]])
    written = []
    with style.context(STYLE, after_reset=True):  # whatever the user has set
        for make in (fraction_of_stream, speedup):
            if (figure := make(results, origin)) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                written += [folder / f"{make.__name__}.{kind}" for kind in ("png", "svg")]
                figure.savefig(written[-2], dpi=150)
                figure.savefig(written[-1], metadata={"Date": None})
    return written


def import_matplotlib() -> Any:
    try:
        import matplotlib.style
    except ImportError as error:
        raise MissingDependencyError(
            "Drawing pictures needs matplotlib: `pip install matplotlib`."
        ) from error
    return matplotlib


def fraction_of_stream(results: list[Result], origin: str) -> Any:
    """Bars by op and preset: the speed as a fraction of a stream's."""
    bars = [
        (r, "", r["op"], _shape(r), r["fraction_of_stream"])
        for r in results
        if r["implementation"] == OWN and r["fraction_of_stream"]
    ]
    title = "Speed of each op, as a fraction of a sequential stream of the same bytes"
    return _figure(title, origin, bars, "fraction of the stream's speed", "{:.2f}")


def speedup(results: list[Result], origin: str) -> Any:
    """A panel for each op, with bars by preset and competitor: its time over that of Triax."""
    names = ("op", "preset", "tokens", "hidden", "experts", "top_k", "dtype", "routing")
    case = lambda r: tuple(r[name] for name in names)
    own_us = {case(r): r["median_us"] for r in results if r["implementation"] == OWN}
    bars = [
        (r, r["op"], _shape(r), f"as {r['implementation']}", r["median_us"] / own_us[case(r)])
        for r in results
        if r["implementation"] not in (OWN, DENSE) and case(r) in own_us
    ]
    return _figure("How many times as fast Triax is", origin, bars, "times as fast", "{:.2f}×")


def _figure(title: str, origin: str, bars: list[Bar], label: str, text: str) -> Any:
    """Panels of groups of bars, those of a group side by side around its tick; None of nothing.

    Shown are the number of tokens, dtype and routing that have the most bars, and chunk sorts.
    """
    setting = lambda r: (r["tokens"], r["dtype"], r["routing"])
    votes = collections.Counter(setting(r) for r, *_ in bars if r["preset"])
    chosen = max(votes, key=lambda key: (votes[key], key[0]), default=None)
    panels: dict[str, dict[tuple[str, str], float]] = collections.defaultdict(dict)
    for r, panel, group, name, height in bars:
        if not r["preset"] or setting(r) == chosen:
            panels[panel][group, name] = height
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2 + 2.5 * len(panels)), layout="constrained")
    shown = "{:,} tokens  ·  {}  ·  {} routing".format(*chosen) if chosen else ""
    figure.suptitle(f"{title}\n{shown}\n{origin}", x=0.01, ha="left")
    series = dict.fromkeys(name for heights in panels.values() for _, name in heights)
    colors = dict(zip(series, PALETTE, strict=False))
    handles: dict[str, Any] = {}
    axes_of = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (panel, heights) in zip(axes_of, panels.items(), strict=True):
        groups = collections.Counter(group for group, _ in heights)
        width = min(0.2, 0.85 / max(groups.values()))
        for n, (group, count) in enumerate(groups.items()):
            left = n - width * (count - 1) / 2
            for place, name in enumerate(name for name in colors if (group, name) in heights):
                at, height = left + width * place, heights[group, name]
                handles[name] = axes.bar(at, height, 0.9 * width, color=colors[name])
                white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
                form: Any = {"padding": 2, "rotation": 90, "fontsize": 7, "bbox": white}
                axes.bar_label(handles[name], fmt=text, **form)
        axes.axhline(1, color="black", linewidth=1, zorder=0.9)
        axes.set(xticks=range(len(groups)), xticklabels=[*groups], ylabel=label)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.margins(y=0.2)
        axes.grid(axis="y")
        axes.set_title(panel, loc="left", weight="bold")
    named = [name for name in series if name in handles]
    figure.legend([handles[n] for n in named], named, loc="outside lower center", ncols=7)
    return figure


def _shape(r: Result) -> str:
    """The preset's name, or a chunk sort's shape."""
    chunks = f"{r['tokens']:,} × {r['hidden']:,} {r['dtype']}, {r['experts']} chunks"
    return r["preset"] or chunks
