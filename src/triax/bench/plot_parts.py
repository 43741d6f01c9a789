"""The parts of a figure: its frame with title, notes and legend, bars, lines, and their style.

Sizes are in inches. matplotlib is imported where it is used, and its global state is left alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from triax.bridge.errors import MissingDependencyError

# By Okabe and Ito, to be told apart by the colour-blind too; their yellow, which is hard to see
# on white, is darker.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000", "#9A8700")
MARKERS = "osD^vPX*"
GREY = "#5F5F5F"

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": "#E3E3E3",
    "svg.hashsalt": "triax",
    "svg.fonttype": "path",
}
_MARGIN, _LEFT, _RIGHT, _BOTTOM, _BETWEEN = 0.2, 0.75, 0.25, 0.6, 0.75
_POINTS = 72  # of type, in an inch


@contextlib.contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults and this module's, whatever the user has set; put back at the end.

    Raises:
      MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(
            "Drawing plots needs matplotlib: pip install 'triax[bench]'."
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


class Frame:
    """A figure with a title, notes and a legend on top, and a grid of panels below.

    Attributes:
      figure: matplotlib's.
      axes: one for each panel asked for, row by row.
      panel_width: of each.
    """

    def __init__(
        self,
        title: str,
        notes: Sequence[str],
        *,
        legend: Sequence[tuple[str, str]],
        panels: int,
        columns: int,
        panel_width: float,
        panel_height: float,
        markers: str = "",
    ):
        from matplotlib.figure import Figure

        rows = math.ceil(panels / columns)
        width = _LEFT + _RIGHT + columns * panel_width + (columns - 1) * _BETWEEN
        legend_columns = _legend_columns([name for name, _ in legend], width - 2 * _MARGIN)
        legend_top = 0.55 + 0.2 * len(notes)
        legend_rows = math.ceil(len(legend) / legend_columns)
        top = legend_top + 0.2 * legend_rows + 0.35
        height = top + _BOTTOM + rows * panel_height + (rows - 1) * _BETWEEN
        self.panel_width = panel_width
        self.panel_height = panel_height
        self.figure = Figure(figsize=(width, height))
        self.axes = [
            self.figure.add_axes(
                (
                    (_LEFT + column * (panel_width + _BETWEEN)) / width,
                    1 - (top + row * (panel_height + _BETWEEN) + panel_height) / height,
                    panel_width / width,
                    panel_height / height,
                )
            )
            for row, column in (divmod(panel, columns) for panel in range(panels))
        ]
        write = lambda y, text, **how: self.figure.text(
            _MARGIN / width, 1 - y / height, text, va="center", **how
        )
        write(0.27, title, fontsize=12, fontweight="bold")
        for number, note in enumerate(notes):
            write(0.52 + 0.2 * number, note, fontsize=8.5, color=GREY)
        if legend:
            place = (_MARGIN / width, 1 - legend_top / height)
            self._add_legend(legend, markers, legend_columns, place)

    def _add_legend(
        self,
        legend: Sequence[tuple[str, str]],
        markers: str,
        columns: int,
        place: tuple[float, float],
    ) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Any] = [Patch(color=color, label=name) for name, color in legend]
        if markers:
            handles = [
                Line2D([], [], color=color, marker=marker, markersize=4.5, label=name)
                for (name, color), marker in zip(legend, markers, strict=False)
            ]
        self.figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=place,
            ncols=columns,
            frameon=False,
            borderaxespad=0,
            borderpad=0,
            handlelength=2.0 if markers else 1.0,
            columnspacing=1.5,
        )


def _legend_columns(names: Sequence[str], width: float) -> int:
    """The most columns whose entries, filled in one after the other, fit into the width."""
    for columns in range(len(names), 1, -1):
        full = len(names) % columns
        sizes = [len(names) // columns + (column < full) for column in range(columns)]
        ends = [sum(sizes[: column + 1]) for column in range(columns)]
        longest = [max(map(len, names[e - s : e])) for e, s in zip(ends, sizes, strict=True)]
        if sum(_text_width("x" * length) + 0.55 for length in longest) <= width:
            return columns
    return 1


def _text_width(text: str, size: float = 9) -> float:
    """About how wide a text is, at most."""
    return len(text) * 0.62 * size / _POINTS


Groups = Sequence[Sequence[tuple[str, float]]]


def bars_width(labels: Sequence[str], groups: Groups, bar: float = 0.2) -> float:
    """How wide a panel is to be for groups of bars, and for their labels."""
    return sum(_group_widths(labels, groups, bar))


def _group_widths(labels: Sequence[str], groups: Groups, bar: float) -> list[float]:
    return [
        max(len(group) * bar, _text_width(label)) + 0.2
        for label, group in zip(labels, groups, strict=True)
    ]


def draw_bars(
    frame: Frame,
    axes: Any,
    labels: Sequence[str],
    groups: Groups,
    colors: dict[str, str],
    text: Callable[[float], str],
) -> None:
    """Groups of bars, each bar with its value in it, or on top of it where it is too low.

    Args:
      frame: what `axes` is a panel of; at least `bars_width` wide.
      axes: to draw on.
      labels: one for each group.
      groups: for each, the series' name and value of each bar.
      colors: by name of the series.
      text: of a value.
    """
    # As wide as fits. Positions are in inches.
    bar = next(
        width / 100
        for width in range(50, 0, -1)
        if bars_width(labels, groups, width / 100) <= frame.panel_width
    )
    widths = _group_widths(labels, groups, bar)
    spare = (frame.panel_width - sum(widths)) / len(groups)
    values = [value for group in groups for _, value in group]
    longest = max(_text_width(text(value), 7) for value in values)
    upright = longest > 0.88 * bar
    room = (longest if upright else 7 / _POINTS) + 0.1
    top = max(1.0, *values) * (1 + room / frame.panel_height)
    low = room * top / frame.panel_height

    centers, position = [], 0.0
    for group, width in zip(groups, widths, strict=True):
        centers.append(position + (width + spare) / 2)
        position += width + spare
        for number, (name, value) in enumerate(group):
            x = centers[-1] + (number - (len(group) - 1) / 2) * bar
            axes.bar(x, value, width=0.88 * bar, color=colors[name])
            inside = value > low
            axes.annotate(
                text(value),
                (x, value),
                xytext=(0, -3 if inside else 3),
                textcoords="offset points",
                ha="center",
                va="top" if inside else "bottom",
                fontsize=7,
                rotation=90 if upright else 0,
                color=_readable_on(colors[name]) if inside else "black",
                bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
    axes.set_ylim(0, top)
    axes.set_xlim(0, frame.panel_width)
    axes.set_xticks(centers, labels)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")


def _readable_on(color: str) -> str:
    """Black or white, whichever stands out more."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "white"


def draw_line(axes: Any, points: dict[int, float], color: str, marker: str) -> None:
    """A line through the points, in order of x."""
    x = sorted(points)
    axes.plot(x, [points[key] for key in x], color=color, marker=marker, markersize=4.5, lw=1.5)


def draw_one(axes: Any) -> None:
    """The line at 1, which all is compared with."""
    axes.axhline(1.0, color="black", linewidth=1, zorder=0.9)


def scale_by_tokens(axes: Any, tokens: Iterable[int]) -> None:
    """A logarithmic axis with a tick for every number of tokens, and nothing between them."""
    ticks = sorted(set(tokens))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.grid(axis="both")
