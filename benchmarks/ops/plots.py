"""Draws a benchmark's record: how near the limit ops and layers are, and how much faster they are.

Each figure is written as PNG and as SVG, the same bytes for the same record, without a background,
in colours for light and dark pages. A figure whose data the record does not hold is left out.
"""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from benchmarks.harness.record import where
from benchmarks.ops.competitors import DENSE, OWN
from benchmarks.ops.report import case_of, is_of_device
from benchmarks.ops.suites import NAMES

Result = dict[str, Any]
Point = tuple[Result, str, str, float]  # its group of rows, its row in there, and its value

# By Okabe and Ito, to be told apart by the colour-blind too; their yellow is darker, black is grey.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#9A8700", "#808080")
INK = "#767676"  # 4.5 : 1 on white; the site inverts pictures on its dark pages
_INKED = "axes.edgecolor axes.labelcolor grid.color text.color xtick.color ytick.color"
_LEFT_OUT = "axes.spines.left axes.spines.right axes.spines.top legend.frameon ytick.left"
STYLE = {
    **dict.fromkeys(_INKED.split(), INK),
    **dict.fromkeys(_LEFT_OUT.split(), False),
    "axes.axisbelow": True,
    "font.size": 10,
    "grid.alpha": 0.3,
    "savefig.transparent": True,
    "svg.hashsalt": "triax",
}
NOTHING = (
    "nothing to draw: that takes times of a GPU, of layers, or with a fraction of a stream or a "
    "competitor"
)


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures of a record into a folder; returns the files, none for a CPU's record."""
    results = [r for r in record["results"] if is_of_device(r) and not r["error"]]
    origin = where(record).replace(", ", "  ·  ")
    written = []
    with matplotlib.style.context(STYLE, after_reset=True):  # not as the user has set it
        for make in (layers, fraction_of_stream, speedup):
            if (figure := make(results, origin)) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                written += [folder / f"{make.__name__}.{kind}" for kind in ("png", "svg")]
                figure.savefig(written[-2], dpi=150)
                figure.savefig(written[-1], metadata={"Date": None})
    return written


def layers(results: list[Result], origin: str) -> Any:
    """For each model bars from zero: the TFLOP/s of its layer, with each implementation."""
    found: dict[str, dict[str, float]] = {}
    for r in results:
        if r["op"] == "layer" and r["preset"]:
            of_model = found.setdefault(_layer_name(r), {})
            of_model[r["implementation"]] = r["teraflops_per_second"]
    if not found:
        return None
    names = [*dict.fromkeys(name for of_model in found.values() for name in of_model)]
    names.sort(key=lambda name: name == DENSE)  # the limit comes last
    labels = {OWN: "Triax", DENSE: "its products alone, as dense matmuls: a limit"}
    height = 0.8 / len(names)
    inches = 0.25 + 0.15 * len(names)  # of a model
    figure = Figure(figsize=(7.5, 1.7 + inches * len(found)), layout="constrained")
    dtypes = " and ".join({r["dtype"]: None for r in results if r["op"] == "layer"})
    title = f"TFLOP/s of the whole MoE layer, forward and backward, in {dtypes}"
    figure.suptitle(f"{title}\n{origin}", x=0.01, ha="left", fontsize=10)
    axes = figure.subplots()
    for place, name in enumerate(names):
        shown = [(y, values[name]) for y, values in enumerate(found.values()) if name in values]
        label = labels.get(name, name)
        at = [y + height * (place + 0.5) - 0.4 for y, _ in shown]
        color = INK if name == DENSE else PALETTE[place]
        bars = axes.barh(at, [rate for _, rate in shown], 0.9 * height, color=color, label=label)
        axes.bar_label(bars, fmt="{:.0f}", padding=3)
    axes.set_yticks(range(len(found)), [*found])
    axes.set(ylim=(len(found) - 0.5, -0.5))
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _layer_name(r: Result) -> str:
    return f"{r['preset']}\n{r['tokens']:,} tokens, {r['top_k']} of {r['experts']} experts"


def fraction_of_stream(results: list[Result], origin: str) -> Any:
    """A row for each op: the speed as a fraction of a stream's."""
    points = [
        (r, "", r["op"], r["fraction_of_stream"])
        for r in results
        if r["implementation"] == OWN and r["fraction_of_stream"]
    ]
    title = "Speed of each op, as a fraction of a sequential stream of the same bytes"
    return _figure(title, origin, points, "{:.2f}", least=0.8)


def speedup(results: list[Result], origin: str) -> Any:
    """For each op a row for each competitor: its time over that of Triax."""
    own_us = {case_of(r): r["median_us"] for r in results if r["implementation"] == OWN}
    points = [
        (r, r["op"], r["implementation"], r["median_us"] / own_us[case_of(r)])
        for r in results
        if r["implementation"] not in (OWN, DENSE) and case_of(r) in own_us
    ]
    title = "How many times as fast Triax is, by op and what it is compared with"
    return _figure(title, origin, points, "{:.2f}×", least=0)


def _figure(title: str, origin: str, points: list[Point], text: str, *, least: float) -> Any:
    """Rows of dots on one scale from `least` on, a colour for each shape; None of no points.

    Shown are the number of tokens, dtype and routing that have the most points, and chunk sorts.
    """
    setting = lambda r: (r["tokens"], r["dtype"], r["routing"])
    votes = collections.Counter(setting(r) for r, *_ in points if r["preset"])
    chosen = max(votes, key=lambda key: (votes[key], key[0]), default=None)
    # By group and row, with a row without a name or values in front of each group that has a name.
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for r, group, row, value in points:
        if not r["preset"] or setting(r) == chosen:
            if group:
                rows.setdefault((group, ""), {})
            rows.setdefault((group, row), {})[_shape(r)] = value
    if not rows:
        return None
    series = {name for values in rows.values() for name in values}
    # A model has its colour in every figure; a chunk sort comes last.
    known = [*NAMES, *sorted(series - {*NAMES})]
    palette = zip(known, itertools.cycle(PALETTE), strict=False)
    colors = {name: color for name, color in palette if name in series}
    figure = Figure(figsize=(7.5, 2.1 + 0.3 * len(rows)), layout="constrained")
    shown = "{:,} tokens  ·  {}  ·  {} routing".format(*chosen) if chosen else ""
    figure.suptitle(f"{title}\n{shown}\n{origin}", x=0.01, ha="left", fontsize=10)
    axes = figure.subplots()
    for y, values in enumerate(rows.values()):
        for place, (name, value) in enumerate(values.items()):
            # Side by side, so that none hides another.
            at = y + 0.1 * (place - (len(values) - 1) / 2)
            axes.scatter(value, at, s=26, color=colors[name], linewidths=0)
        if values:
            ends = dict.fromkeys(text.format(end(values.values())) for end in (min, max))
            axes.text(1.02, y, " – ".join(ends), transform=axes.get_yaxis_transform(), va="center")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [row or group for group, row in rows])
    for (_, row), label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("normal" if row else "bold")
    axes.set(xlim=(min(least, axes.get_xlim()[0]), None), ylim=(len(rows) - 0.4, -0.6))
    axes.locator_params(axis="x", nbins=8)
    axes.grid()
    handles = [axes.scatter([], [], color=color) for color in colors.values()]
    figure.legend(handles, [*colors], loc="outside lower center", ncols=3)
    return figure


def _shape(r: Result) -> str:
    """The preset's name, or a chunk sort's shape."""
    chunks = f"{r['tokens']:,} × {r['hidden']:,} {r['dtype']}, {r['experts']} chunks"
    return r["preset"] or chunks
