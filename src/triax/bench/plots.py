"""Draws a benchmark's record: how close the ops come to the memory's speed, how much faster than
others they are, and how both change with the number of tokens.

Each figure is written as PNG and as SVG, the same bytes for the same record. A figure whose data
the record does not hold is left out.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triax.bench.plot_parts import (
    GREY,
    MARKERS,
    PALETTE,
    Frame,
    bars_width,
    draw_bars,
    draw_line,
    draw_one,
    scale_by_tokens,
    style,
)
from triax.bench.presets import PRESETS
from triax.bench.programs import OPS
from triax.bench.report import check_folder, is_of_device

Result = dict[str, Any]

DPI = 150
_COMPETITORS = {
    "argsort+take": PALETTE[1],
    "argsort+take+sum": "#F6D58A",  # a paler shade for the more careful way of the same
    "hand-written vjp": PALETTE[2],
    "hand-fused vjp": "#85D3BC",
    "jnp.take": PALETTE[4],
    "transformer_engine": PALETTE[5],
    "torch.index_select": PALETTE[3],
}


NOTHING = (
    "nothing to draw: that takes times of a GPU, with a fraction of a stream, or of a competitor, "
    "or of several numbers of tokens"
)


def check_target(folder: Path) -> None:
    """Checks that figures of what is yet to be measured can be drawn and written to a folder.

    Raises:
      ArgumentValueError: it cannot be written to.
      MissingDependencyError: matplotlib is not installed.
    """
    with style():
        pass
    check_folder("--plots", folder)


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures of a record into a folder, which is made where it is missing.

    Args:
      record: of `triax bench`, as its JSON holds it.
      folder: gets fraction_of_stream, speedup and tokens, each as .png and .svg.

    Returns:
      The files written; none where the record has nothing to draw, as from a CPU.

    Raises:
      MissingDependencyError: matplotlib is not installed.
    """
    results = _comparable(record)
    figures = {"fraction_of_stream": _fractions, "speedup": _speedups, "tokens": _tokens}
    written = []
    with style():
        for name, make in figures.items():
            figure = make(results, _origin(record))
            if figure is None:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            written += [folder / f"{name}.png", folder / f"{name}.svg"]
            figure.savefig(written[-2], dpi=DPI)
            figure.savefig(written[-1], metadata={"Date": None})
    return written


def _comparable(record: dict[str, Any]) -> list[Result]:
    """The results that are right, with a time that was the device's."""
    return [r for r in record["results"] if is_of_device(r) and not r["error"]]


def _fractions(results: list[Result], origin: str) -> Any:
    """Bars by op and preset: the speed as a fraction of a stream's."""
    moves = [r for r in results if r["implementation"] == "triax" and r["fraction_of_stream"]]
    moves = _of_one_setting(moves, results)
    if not moves:
        return None
    bars = {(r["op"], _shape(r)): r["fraction_of_stream"] for r in moves}
    ops = _in_order((op for op, _ in bars), OPS)
    shapes = _in_order((shape for _, shape in bars), PRESETS)
    colors = dict(zip(shapes, _colors(shapes), strict=True))
    groups = [[(shape, bars[op, shape]) for shape in shapes if (op, shape) in bars] for op in ops]
    frame = Frame(
        "Speed of each op, as a fraction of a sequential stream of the same bytes",
        [_setting(moves), origin],
        legend=[(shape, colors[shape]) for shape in shapes],
        panels=1,
        columns=1,
        panel_width=max(6.5, bars_width(ops, groups)),
        panel_height=3.4,
    )
    (axes,) = frame.axes
    draw_bars(frame, axes, ops, groups, colors, "{:.2f}".format)
    draw_one(axes)
    axes.set_ylabel("fraction of the stream's speed")
    return frame.figure


def _speedups(results: list[Result], origin: str) -> Any:
    """A panel for each op, with bars by preset and competitor: its time over that of Triax."""
    triax = {_case(r): r["median_us"] for r in results if r["implementation"] == "triax"}
    others = [r for r in results if r["implementation"] != "triax" and _case(r) in triax]
    others = _of_one_setting(others, others)
    if not others:
        return None
    ops = _in_order((r["op"] for r in others), OPS)
    names = _in_order((r["implementation"] for r in others), _COMPETITORS)
    colors = {name: _COMPETITORS.get(name, GREY) for name in names}
    panels = []
    for op in ops:
        bars = {
            (_shape(r), r["implementation"]): r["median_us"] / triax[_case(r)]
            for r in others
            if r["op"] == op
        }
        shapes = _in_order((shape for shape, _ in bars), PRESETS)
        groups = [
            [(name, bars[shape, name]) for name in names if (shape, name) in bars]
            for shape in shapes
        ]
        panels.append((op, shapes, groups))
    frame = Frame(
        "How many times as fast Triax is",
        [_setting(others), origin],
        legend=[(f"as {name}", color) for name, color in colors.items()],
        panels=len(panels),
        columns=min(2, len(panels)),
        panel_width=max(4.5, *(bars_width(shapes, groups) for _, shapes, groups in panels)),
        panel_height=1.9,
    )
    for axes, (op, shapes, groups) in zip(frame.axes, panels, strict=True):
        draw_bars(frame, axes, shapes, groups, colors, _times)
        draw_one(axes)
        axes.set_title(op)
        axes.set_ylabel("times as fast")
    return frame.figure


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 2 else f"{ratio:.1f}×"


def _tokens(results: list[Result], origin: str) -> Any:
    """Lines over the number of tokens: each op's fraction of a stream, and the time of a plan."""
    lines = _longest_lines(results)
    moves = {
        op: {
            tokens: r["fraction_of_stream"]
            for tokens, r in lines[op].items()
            if r["fraction_of_stream"]
        }
        for op in _in_order(lines, OPS)
    }
    moves = {op: points for op, points in moves.items() if len(points) > 1}
    plan = {t: r["median_us"] for t, r in lines.get("plan", {}).items() if r["median_us"]}
    has_plan = len(plan) > 1
    if not moves and not has_plan:
        return None
    one = next(iter(next(iter(lines.values())).values()))
    frame = Frame(
        "Speed by the number of tokens",
        [f"{one['preset']}  ·  {one['dtype']}  ·  {one['routing']} routing", origin],
        legend=list(zip(moves, PALETTE, strict=False)),
        panels=bool(moves) + has_plan,
        columns=1,
        panel_width=7.5,
        panel_height=2.8,
        markers=MARKERS,
    )
    if moves:
        axes = frame.axes[0]
        for points, color, marker in zip(moves.values(), PALETTE, MARKERS, strict=False):
            draw_line(axes, points, color, marker)
        draw_one(axes)
        axes.set_ylim(0, 1.1 * max(1.0, *(y for points in moves.values() for y in points.values())))
        axes.set_ylabel("fraction of the stream's speed")
        scale_by_tokens(axes, (tokens for points in moves.values() for tokens in points))
    if has_plan:
        axes = frame.axes[-1]
        draw_line(axes, plan, PALETTE[0], MARKERS[0])
        for point in plan.items():
            axes.annotate(
                f"{point[1]:.3g}", point, (3, 5), textcoords="offset points", ha="right", size=8
            )
        low, high = min(plan.values()) / 1.5, 2 * max(plan.values())
        ticks = [digit * 10**power for power in range(-1, 7) for digit in (1, 2, 5)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axes.set_yscale("log")
        axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.set_ylim(low, high)
        axes.set_title("plan")
        axes.set_ylabel("µs, started alone")
        scale_by_tokens(axes, plan)
    return frame.figure


def _longest_lines(results: list[Result]) -> dict[str, dict[int, Result]]:
    """Triax's results by op and tokens, of the preset, dtype and routing with the most tokens."""
    found: dict[Any, dict[str, dict[int, Result]]] = {}
    for r in results:
        if r["implementation"] == "triax" and r["preset"]:
            lines = found.setdefault((r["preset"], r["dtype"], r["routing"]), {})
            lines.setdefault(r["op"], {})[r["tokens"]] = r
    count = lambda lines: len({tokens for line in lines.values() for tokens in line})
    return max(found.values(), key=count, default={})


def _of_one_setting(candidates: list[Result], voters: list[Result]) -> list[Result]:
    """The candidates of one number of tokens, dtype and routing, and the chunk sorts in its dtype.

    It is the setting that most of the voters were measured in, of those that there are.
    """
    setting = lambda r: (r["tokens"], r["dtype"], r["routing"])
    votes = collections.Counter(setting(r) for r in voters if r["preset"])
    there = {setting(r): votes[setting(r)] for r in candidates if r["preset"]}
    chosen = max(there, key=lambda key: (there[key], key[0]), default=None)
    sorts = [r for r in candidates if not r["preset"]]
    if chosen is not None:
        sorts = [r for r in sorts if r["dtype"] == chosen[1]] or sorts
    return [r for r in candidates if r["preset"] and setting(r) == chosen] + sorts


def _setting(results: list[Result]) -> str:
    """What `_of_one_setting` chose, in words."""
    for r in results:
        if r["preset"]:
            return f"{r['tokens']:,} tokens  ·  {r['dtype']}  ·  {r['routing']} routing"
    return results[0]["dtype"]


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


def _colors(shapes: list[str]) -> list[str]:
    """A preset's color, which is its own in every record, or grey for a chunk sort."""
    own = dict(zip(PRESETS, PALETTE, strict=False))
    return [own.get(shape, GREY) for shape in shapes]


def _origin(record: dict[str, Any]) -> str:
    """Machine, versions and day of a record."""
    versions = record["versions"]
    names = {"triax": "Triax", "jax": "JAX", "triton": "Triton"}
    known = [f"{title} {versions[name]}" for name, title in names.items() if versions.get(name)]
    return "  ·  ".join([record["machine"]["device"], *known, record["written"][:10]])
