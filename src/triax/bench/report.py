"""The record of a run: as JSON, and as a table for a terminal of 110 columns."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triax.bench.runner import OWN, SCHEMA
from triax.bridge.errors import ArgumentValueError

WIDTH = 110
_MARKS = {
    "graph": ("*", "one of many runs inside one program"),
    "host-bound": ("≤", "the host could not keep up: the device took this long at most"),
}
_IN_A_GRAPH = "in a graph: µs of one of many runs inside one program"

_NEEDED = {
    "written": str,
    "machine": dict,
    "versions": dict,
    "results": list,
    "first_call": list,
    "memory": list,
    "complete": bool,
}
_SHAPE = ("preset", "tokens", "hidden", "experts", "dtype", "routing")
_NEEDED_OF_A_RESULT = {
    "op": str,
    "preset": str | None,
    "tokens": int,
    "hidden": int,
    "experts": int,
    "dtype": str,
    "routing": str | None,
    "top_k": int | None,
    "implementation": str,
    "median_us": float | int | None,
    "terabytes_per_second": float | int | None,
    "fraction_of_stream": float | int | None,
    "error": str | None,
    "seconds_method": str | None,
}


def check_target(path: Path) -> None:
    """Checks that a record that is yet to be measured can be written; makes its folder.

    Raises:
      ArgumentValueError: it cannot.
    """
    try:
        if not path.exists():
            check_folder("--json", path.parent)
        elif path.is_dir() or not os.access(path, os.W_OK):
            what = "which is a folder" if path.is_dir() else "which must not be written"
            raise ArgumentValueError(
                f"`--json` must name a file to write; got {path}, {what}. Name another one, such "
                "as record.json."
            )
    except OSError as error:
        raise _unusable("--json", path, error) from error


def check_folder(flag: str, folder: Path) -> None:
    """Makes a folder where it is missing, and checks that it can be written to.

    Raises:
      ArgumentValueError: it cannot, or it is a file.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unusable(flag, folder, error) from error


def _unusable(flag: str, path: Path, error: OSError) -> ArgumentValueError:
    reason = error.strerror or str(error)
    return ArgumentValueError(
        f"`{flag}` needs a folder that can be written to; got {path}: {reason}. Name another one."
    )


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
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentValueError(f"Argument `file` cannot be read: {path}: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ArgumentValueError(
            f"Argument `file` must be a record of `triax bench --json` of schema {SCHEMA}; {path} "
            "is none. Measure again with this version."
        )
    if missing := _missing(record):
        raise ArgumentValueError(
            f"Argument `file` must be a whole record of `triax bench --json`; {path} lacks "
            f"{', '.join(missing)}. Measure again with this version."
        )
    return record


def _missing(record: dict[str, Any]) -> list[str]:
    """What a record must have and has not, or has as something else."""
    missing = _lacking(record, _NEEDED)
    if "machine" not in missing:
        missing += [f"machine.{name}" for name in _lacking(record["machine"], {"device": str})]
    for number, result in enumerate([] if "results" in missing else record["results"]):
        has = result if isinstance(result, dict) else {}
        if lacks := _lacking(has, _NEEDED_OF_A_RESULT):  # the first will do
            return missing + [f"results[{number}].{name}" for name in lacks]
    return missing


def _lacking(found: dict[str, Any], needed: Mapping[str, Any]) -> list[str]:
    return [n for n, kind in needed.items() if n not in found or not isinstance(found[n], kind)]


def is_right(record: dict[str, Any]) -> bool:
    """Whether nothing failed, no result was wrong and nobody interrupted the run."""
    entries = [*record["results"], *record["first_call"]]
    return record["complete"] and not any(entry.get("error") for entry in entries)


def is_of_device(result: dict[str, Any]) -> bool:
    """Whether a result has a time, and it is the device's: others are compared with nothing."""
    return bool(result["median_us"]) and result["seconds_method"] in ("events", "graph")


def table(record: dict[str, Any], width: int = WIDTH) -> str:
    """What a record says, for people: by op, one line for each shape."""
    lines = [_title(record), ""]
    for op, results in _grouped(record["results"], "op"):
        in_graph = any(result.get("graph_us") for result in results)
        lines += [op, _head(results, in_graph)]
        for _, found in _grouped(results, *_SHAPE):
            lines += _row(found, width, in_graph)
        lines.append("")
    lines += _first_calls(record["first_call"], width)
    lines += _memory(record["memory"])
    lines += _errors(record["results"], width)
    methods = {result["seconds_method"] for result in record["results"]}
    notes = [f"{mark} {text}" for name, (mark, text) in _MARKS.items() if name in methods]
    if any(result.get("graph_us") for result in record["results"]):
        notes.append(_IN_A_GRAPH)
    notes += dict.fromkeys(entry["note"] for entry in record["first_call"] if entry.get("note"))
    for note in notes + record.get("notes", []):
        lines += textwrap.wrap(note, width, subsequent_indent="  ")
    return "\n".join(lines).rstrip() + "\n"


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


def _head(results: Sequence[dict[str, Any]], in_graph: bool) -> str:
    graph = f"{'in a graph':>10}  " if in_graph else ""
    others = [result for result in results if result["implementation"] != OWN]
    last = "" if not others else "times as fast as" if any(map(is_of_device, others)) else "others"
    return (
        f"  {'':16}{'tokens':>7}  {'dtype':8}  {'routing':7}  {'µs':>10}  {graph}{'TB/s':>5}  "
        f"{'stream':>6}  {last}"
    ).rstrip()


def _row(results: Sequence[dict[str, Any]], width: int, in_graph: bool) -> list[str]:
    """One shape: Triax's figures, and how many times as long each competitor takes."""
    own = next((result for result in results if result["implementation"] == OWN), None)
    first = results[0]
    name = first["preset"] or f"{first['experts']} chunks×{first['hidden']}"
    head = f"  {name:16}{first['tokens']:7}  {first['dtype']:8}  {first['routing'] or '':7}  "
    head += _figures(own, in_graph)
    others = [_against(own, result) for result in results if result is not own]
    lines = [head]
    for index, other in enumerate(others):
        text = other + ("" if other is others[-1] else ", ")
        if index and len(lines[-1]) + len(text.rstrip()) > width:
            lines.append(" " * len(head))
        lines[-1] += text
    return [line.rstrip() for line in lines]


def _figures(result: dict[str, Any] | None, in_graph: bool) -> str:
    if result is None or result["median_us"] is None:
        graph = f"{'':10}  " if in_graph else ""
        return f"{'-' if result is None else 'error':>10}  {graph}{'':5}  {'':6}  "
    inside = result.get("graph_us")
    graph = f"{'-' if inside is None else f'{inside:.2f}':>10}  " if in_graph else ""
    if not is_of_device(result):
        return f"{_time(result):>10}  {graph}{'-':>5}  {'-':>6}  "
    fraction = result["fraction_of_stream"]
    share = "" if fraction is None else f"{100 * fraction:.1f}%"
    return f"{_time(result):>10}  {graph}{result['terabytes_per_second']:5.2f}  {share:>6}  "


def _time(result: dict[str, Any]) -> str:
    return _MARKS.get(result["seconds_method"], ("", ""))[0] + f"{result['median_us']:.2f}"


def _against(own: dict[str, Any] | None, result: dict[str, Any]) -> str:
    name = result["implementation"]
    if result["error"]:
        return f"{name}: error"
    if own is None or not is_of_device(own) or not is_of_device(result):
        return f"{name} {_time(result)} µs"
    return f"{result['median_us'] / own['median_us']:.2f}× {name}"


def _first_calls(entries: Sequence[dict[str, Any]], width: int) -> list[str]:
    lines = ["first call of a fresh process"] if entries else []
    for entry in entries:
        caches = "all cached" if entry["cached"] else "nothing cached"
        total = "error" if entry["total_s"] is None else f"{entry['total_s']:.2f} s"
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in entry["parts"].items())
        lines.append(f"  {entry['implementation']:6} {caches:15} {total:>8}   {parts}".rstrip())
        if entry.get("error"):
            indent = " " * 4
            lines += textwrap.wrap(
                entry["error"], width, initial_indent=indent, subsequent_indent=indent
            )
    return [*lines, ""] if entries else []


def _memory(entries: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["memory"] if entries else []
    for entry in entries:
        shape = f"{entry['preset']:16} {entry['tokens']:7}  {entry['dtype']:8}"
        lines.append(
            f"  {entry['program']:10} {shape}  {entry['implementation']:16} "
            f"temporary {entry['temporary_bytes'] / 1e9:6.2f} GB"
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
