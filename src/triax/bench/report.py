"""The record of a run: as JSON, and as a table for a terminal of 110 columns."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from triax.bench.runner import SCHEMA
from triax.bridge.errors import ArgumentValueError

WIDTH = 110
OWN = "triax"
_COLUMNS = (
    f"  {'':17}{'tokens':>7}  {'dtype':8}  {'routing':7}  {'µs':>10}  {'TB/s':>5}  {'stream':>6}  "
)
_MARKS = {
    "graph": ("*", "one of many runs inside one program"),
    "host-bound": ("≤", "the host could not keep up: the device took this long at most"),
}


def write(record: dict[str, Any], path: Path) -> None:
    """Writes a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Reads a record that was written before.

    Raises:
      ArgumentValueError: there is no such file, or it holds something else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArgumentValueError(f"Argument `file` cannot be read: {path}: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ArgumentValueError(
            f"Argument `file` must be a record of `triax bench --json` of schema {SCHEMA}; {path} "
            "is none. Measure again with this version."
        )
    return record


def is_right(record: dict[str, Any]) -> bool:
    """Whether nothing failed, no result was wrong and nobody interrupted the run."""
    return record["complete"] and not any(result["error"] for result in record["results"])


def table(record: dict[str, Any], width: int = WIDTH) -> str:
    """What a record says, for people: by op, one line for each shape."""
    lines = [_title(record), ""]
    for op, results in _grouped(record["results"], "op"):
        lines += [op, _COLUMNS + "times as fast as"]
        for _, found in _grouped(results, *_SHAPE):
            lines += _row(found, width)
        lines.append("")
    lines += _first_calls(record["first_call"])
    lines += _memory(record["memory"])
    lines += _errors(record["results"], width)
    methods = {result["seconds_method"] for result in record["results"]}
    notes = [f"{mark} {text}" for name, (mark, text) in _MARKS.items() if name in methods]
    for note in notes + record.get("notes", []):
        lines += textwrap.wrap(note, width, subsequent_indent="  ")
    return "\n".join(lines).rstrip() + "\n"


_SHAPE = ("preset", "tokens", "hidden", "experts", "dtype", "routing")


def _grouped(
    results: Iterable[dict[str, Any]], *keys: str
) -> Iterable[tuple[Any, list[dict[str, Any]]]]:
    """Results by the values of some keys, in the order of first sight."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for result in results:
        values = tuple(result[key] for key in keys)
        groups.setdefault(values[0] if len(keys) == 1 else values, []).append(result)
    return groups.items()


def _title(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    names = ", ".join(
        f"{name} {versions[name]}" for name in ("triax", "jax", "triton") if name in versions
    )
    return f"{machine['device']}; {names}; {record['written']}"


def _row(results: Sequence[dict[str, Any]], width: int) -> list[str]:
    """One shape: Triax's figures, and how many times as long each competitor takes."""
    own = next((result for result in results if result["implementation"] == OWN), None)
    first = results[0]
    name = first["preset"] or f"{first['experts']} chunks×{first['hidden']}"
    head = f"  {name:17}{first['tokens']:7}  {first['dtype']:8}  {first['routing'] or '':7}  "
    head += _figures(own)
    others = [_against(own, result) for result in results if result is not own]
    lines = [head]
    for index, other in enumerate(others):
        text = other + ("" if other is others[-1] else ", ")
        if index and len(lines[-1]) + len(text.rstrip()) > width:
            lines.append(" " * len(head))
        lines[-1] += text
    return [line.rstrip() for line in lines]


def _figures(result: dict[str, Any] | None) -> str:
    if result is None or result["median_us"] is None:
        return f"{'-' if result is None else 'error':>10}  {'':5}  {'':6}  "
    method = result["seconds_method"]
    time = _MARKS.get(method, ("", ""))[0] + f"{result['median_us']:.2f}"
    if method == "host-bound":
        return f"{time:>10}  {'-':>5}  {'-':>6}  "
    fraction = result["fraction_of_stream"]
    share = "" if fraction is None else f"{100 * fraction:.1f}%"
    return f"{time:>10}  {result['terabytes_per_second']:5.2f}  {share:>6}  "


def _against(own: dict[str, Any] | None, result: dict[str, Any]) -> str:
    name = result["implementation"]
    if result["error"]:
        return f"{name}: error"
    if own is None or own["median_us"] is None:
        return f"{name} {result['median_us']:.2f} µs"
    return f"{result['median_us'] / own['median_us']:.2f}× {name}"


def _first_calls(entries: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["first call of a fresh process"] if entries else []
    for entry in entries:
        caches = "all cached" if entry["cached"] else "nothing cached"
        total = "error" if entry["total_s"] is None else f"{entry['total_s']:.2f} s"
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in entry["parts"].items())
        lines.append(f"  {entry['implementation']:6} {caches:15} {total:>8}   {parts}".rstrip())
    return [*lines, ""] if entries else []


def _memory(entries: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["memory"] if entries else []
    for entry in entries:
        rows = sum(buffer["count"] for buffer in entry["row_buffers"])
        shape = f"{entry['preset']:16} {entry['tokens']:7}  {entry['dtype']:8}"
        lines.append(
            f"  {entry['program']:10} {shape}  {entry['implementation']:16} "
            f"temporary {entry['temporary_bytes'] / 1e9:6.2f} GB, {rows} buffers of rows"
        )
    return [*lines, ""] if entries else []


def _errors(results: Sequence[dict[str, Any]], width: int) -> list[str]:
    lines = []
    for result in results:
        if result["error"]:
            shape = f"T={result['tokens']} H={result['hidden']} {result['dtype']}"
            who = f"{result['op']} {result['preset'] or ''} {shape} {result['implementation']}"
            text = f"error: {' '.join(who.split())}: {result['error']}"
            lines += textwrap.wrap(text, width, subsequent_indent="  ")
    return [*lines, ""] if lines else []
