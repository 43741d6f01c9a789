"""The record of a run: as JSON, and as a table for a terminal of 110 columns."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from triax.bench.runner import OWN, SCHEMA
from triax.errors import ArgumentValueError

WIDTH = 110
_MARKS = {
    "graph": ("*", "one of many runs inside one program"),
    "host-bound": ("≤", "the host could not keep up: the device took this long at most"),
}
_IN_A_GRAPH = "in a graph: µs of one of many runs inside one program"
_BURSTS = "matmuls run in bursts with rest between; dense is a dense matmul of as many operations"
_SHAPE = ("preset", "tokens", "hidden", "experts", "dtype", "routing")


def read(path: Path) -> dict[str, Any]:
    """Reads a record that was written before."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] == SCHEMA and isinstance(record["results"], list):
            return record
        reason = f"its schema is {record['schema']}, not {SCHEMA}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ArgumentValueError(
        f"Argument `file` must be a record of `triax bench --json`; {path} is none ({reason})."
    )


def is_right(record: dict[str, Any]) -> bool:
    """Whether nothing failed, no result was wrong and nobody interrupted the run."""
    entries = [*record["results"], *record["first_call"]]
    return record["complete"] and not any(entry.get("error") for entry in entries)


def is_of_device(result: dict[str, Any]) -> bool:
    """Whether a result has a time, and it is the device's: others are compared with nothing."""
    return bool(result["median_us"]) and result["seconds_method"] in ("events", "graph", "bursts")


def table(record: dict[str, Any]) -> str:
    """What a record says, for people: by op, one line for each shape."""
    versions = (
        f"{n} {v}" for n, v in record["versions"].items() if n in ("triax", "jax", "triton")
    )
    lines = [f"{record['machine']['device']}; {', '.join(versions)}; {record['written']}", ""]
    results = record["results"]
    for (op,), of_op in _grouped(results, "op"):
        lines += [op, _head(of_op)]
        in_graph, dots = _columns(of_op)
        for _, found in _grouped(of_op, *_SHAPE):
            lines += _row(found, in_graph, dots)
        lines.append("")
    for entry in record["first_call"]:
        caches = "all cached" if entry["cached"] else "nothing cached"
        total = "error" if entry["total_s"] is None else f"{entry['total_s']:.2f} s"
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in entry["parts"].items())
        lines.append(
            f"first call  {entry['implementation']:6} {caches:15} {total:>8}   "
            f"{entry.get('error') or parts}".rstrip()
        )
    for entry in record["memory"]:
        shape = f"{entry['preset']:16} {entry['tokens']:7}  {entry['dtype']:8}"
        lines.append(
            f"memory  {entry['program']:10} {shape}  {entry['implementation']:16} "
            f"temporary {entry['temporary_bytes'] / 1e9:6.2f} GB"
        )
    for r in results:
        if r["error"]:
            shape = f"T={r['tokens']} H={r['hidden']} {r['dtype']}"
            who = " ".join(filter(None, (r["op"], r["preset"], shape, r["implementation"])))
            lines += textwrap.wrap(f"error: {who}: {r['error']}", WIDTH, subsequent_indent="  ")
    methods = {r["seconds_method"] for r in results}
    notes = [f"{mark} {text}" for name, (mark, text) in _MARKS.items() if name in methods]
    notes += [_IN_A_GRAPH] if _columns(results)[0] else []
    notes += [_BURSTS] if "bursts" in methods else []
    notes += dict.fromkeys(entry["note"] for entry in record["first_call"] if entry.get("note"))
    for note in notes + record["notes"]:
        lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ")
    return "\n".join(lines).rstrip() + "\n"


def _grouped(results: Iterable[dict[str, Any]], *keys: str) -> Any:
    """Results by the values of some keys, in the order of first sight."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in keys), []).append(result)
    return groups.items()


def _columns(results: Sequence[dict[str, Any]]) -> tuple[bool, bool]:
    """Whether some results have a time in a graph, and whether some are of matmuls."""
    has = lambda name: any(result.get(name) for result in results)
    return has("graph_us"), has("teraflops_per_second")


def _head(results: Sequence[dict[str, Any]]) -> str:
    in_graph, dots = _columns(results)
    graph = f"{'in a graph':>10}  " if in_graph else ""
    rate, limit = ("TFLOP/s", "dense") if dots else (" TB/s", "stream")
    others = [result for result in results if result["implementation"] != OWN]
    last = "" if not others else "times as fast as" if any(map(is_of_device, others)) else "others"
    return (
        f"  {'':16}{'tokens':>7}  {'dtype':8}  {'routing':7}  {'µs':>10}  {graph}{rate}  "
        f"{limit:>6}  {last}"
    ).rstrip()


def _row(results: Sequence[dict[str, Any]], in_graph: bool, dots: bool) -> list[str]:
    """One shape: Triax's figures, and how many times as long each competitor takes."""
    own = next((result for result in results if result["implementation"] == OWN), None)
    first = results[0]
    name = first["preset"] or f"{first['experts']} chunks×{first['hidden']}"
    head = f"  {name:16}{first['tokens']:7}  {first['dtype']:8}  {first['routing'] or '':7}  "
    graph = rate = share = ""
    if own is not None and own["median_us"] is not None:
        graph = "-" if own.get("graph_us") is None else f"{own['graph_us']:.2f}"
        rate = share = "-"
        if is_of_device(own):
            speed = own["teraflops_per_second" if dots else "terabytes_per_second"]
            fraction = own["fraction_of_dense" if dots else "fraction_of_stream"]
            rate = f"{speed:.1f}" if dots else f"{speed:.2f}"
            share = "" if fraction is None else f"{100 * fraction:.1f}%"
    head += f"{'-' if own is None else _time(own):>10}  " + (f"{graph:>10}  " if in_graph else "")
    head += f"{rate:>{7 if dots else 5}}  {share:>6}  "
    lines = [head]
    others = [result for result in results if result is not own]
    for index, other in enumerate(others):
        text = _against(own, other) + ("" if other is others[-1] else ", ")
        if index and len(lines[-1]) + len(text.rstrip()) > WIDTH:
            lines.append(" " * len(head))
        lines[-1] += text
    return [line.rstrip() for line in lines]


def _time(result: dict[str, Any]) -> str:
    if result["median_us"] is None:
        return "error"
    return _MARKS.get(result["seconds_method"], ("", ""))[0] + f"{result['median_us']:.2f}"


def _against(own: dict[str, Any] | None, result: dict[str, Any]) -> str:
    name = result["implementation"]
    if result["error"]:
        return f"{name}: error"
    if own is None or not is_of_device(own) or not is_of_device(result):
        return f"{name} {_time(result)} µs"
    return f"{result['median_us'] / own['median_us']:.2f}× {name}"
