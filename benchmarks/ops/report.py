"""The record of a run: as JSON, and as a table for a terminal of 120 columns."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.record import where
from benchmarks.ops.cases import Case
from benchmarks.ops.competitors import OWN
from triax.benchmark import HOST, HOST_BOUND, CallTiming

Result = dict[str, Any]

WIDTH = 120
_LINE = "  {:15}{:>7}  {:8}  {:7}  {:>9}  {:>10}  {:>7}  {:>6}  {}"
_RATES = {
    "stream": ("TB/s", "terabytes_per_second", ".2f", "fraction_of_stream"),
    "dense": ("TFLOP/s", "teraflops_per_second", ".1f", "fraction_of_dense"),
}
_MARKS = {"graph": "*", "host-bound": "≤"}
_NOTES = {
    "graph": "* one of many runs inside one program",
    "host-bound": "≤ the host could not keep up: the device took this long at most",
    "in a graph": "in a graph: µs of one of many runs inside one program",
    "bursts": "matmuls run in bursts with rest between; dense has as many operations",
}


def entry(
    case: Case,
    name: str,
    times: dict[str, Any] | None,
    stream_us: float | None,
    error: str | None,
) -> dict[str, Any]:
    """One entry of the record's `results`."""
    known = times or dict.fromkeys((*CallTiming.__match_args__, "graph_us")) | {"samples": 0}
    num_bytes = sum(size for _, size in case.passes)
    per_us = lambda amount: amount / known["median_us"] if times and amount else None
    # The host's time says nothing about how near the device is to its limit.
    on_device = known["method"] != HOST_BOUND
    return {
        **dataclasses.asdict(case),
        "implementation": name,
        "seconds_method": known["method"],
        **{key: value for key, value in known.items() if key != "method"},
        "bytes": num_bytes,
        "terabytes_per_second": per_us(num_bytes * 1e-6),
        "stream_us": stream_us,
        "fraction_of_stream": per_us(stream_us) if on_device else None,
        "teraflops_per_second": per_us(case.flops * 1e-6),
        "fraction_of_dense": None,
        "error": error,
    }


def is_right(record: dict[str, Any]) -> bool:
    """Whether nothing failed, no result was wrong and nobody interrupted the run."""
    entries = [*record["results"], *record["first_call"]]
    return record["complete"] and not any(entry.get("error") for entry in entries)


def is_of_device(result: Result) -> bool:
    """Whether a result has a time, and it is the device's: others are compared with nothing."""
    return bool(result["median_us"]) and result["seconds_method"] in ("events", "graph", "bursts")


def case_of(result: Result) -> Case:
    """The case that a result is of."""
    return Case(*map(result.__getitem__, Case.__match_args__))


def table(record: dict[str, Any]) -> str:
    """What a record says, for people: by op, one line for each shape."""
    lines = [where(record), ""]
    results, notes = record["results"], []
    for op in dict.fromkeys(r["op"] for r in results):
        lines += [op, *_rows([r for r in results if r["op"] == op]), ""]
    for entry in record["first_call"]:
        caches = "all cached" if entry["cached"] else "nothing cached"
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in entry["parts"].items())
        total = "error" if entry.get("error") else f"{entry['total_s']:.2f} s"
        head = f"first call  {entry['implementation']:6} {caches:15} {total:>8}   "
        lines.append(head + entry.get("error", parts))
        notes += [entry["note"]] if entry.get("note") else []
    for entry in record["memory"]:
        shape = f"{entry['preset']:16} {entry['tokens']:7}  {entry['dtype']:8}"
        memory = f"{entry['implementation']:16} temporary {entry['temporary_bytes'] / 1e9:6.2f} GB"
        lines.append(f"memory  {entry['program']:10} {shape}  {memory}")
    for r in results:
        if r["error"]:
            notes.append(f"error: {case_of(r).label} {r['implementation']}: {r['error']}")
    seen = {"in a graph" if r["graph_us"] else None for r in results}
    seen |= {r["seconds_method"] for r in results}
    notes += [text for name, text in _NOTES.items() if name in seen]
    for note in dict.fromkeys(notes + record["notes"]):
        lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ")
    return "\n".join(lines).rstrip() + "\n"


def _rows(results: Sequence[Result]) -> list[str]:
    """The table of one op: by shape Triax's figures, and how many times as long others take."""
    limit = "dense" if any(r["teraflops_per_second"] for r in results) else "stream"
    unit, rate, digits, fraction = _RATES[limit]
    last = "times as fast as" if any(map(is_of_device, results)) else "others"
    time = "ms" if any(r["seconds_method"] == HOST for r in results) else "µs"
    titles = ("", "tokens", "dtype", "routing", time, "in a graph", unit, limit, last)
    lines = [_LINE.format(*titles).rstrip()]
    for case, of_case in itertools.groupby(results, case_of):
        found: Any = [*of_case]
        own = next((r for r in found if r["implementation"] == OWN), None)
        of_device = own if own and is_of_device(own) else {}
        head = _LINE.format(
            case.preset or f"{case.experts} chunks×{case.hidden}",
            case.tokens,
            case.dtype,
            case.routing or "",
            _time(own),
            _text(own and own["graph_us"], ".2f"),
            _text(of_device.get(rate), digits),
            _text(of_device.get(fraction), ".1%"),
            "",
        )
        # A no-break space within what must stay together.
        others = ", ".join(_against(own, r).replace(" ", "\xa0") for r in found if r is not own)
        how: Any = {"initial_indent": head, "subsequent_indent": " " * len(head)}
        how |= {"break_on_hyphens": False, "break_long_words": False}
        lines += textwrap.wrap(others, WIDTH, **how) or [head.rstrip()]
    return [line.replace("\xa0", " ") for line in lines]


def _time(result: Result | None) -> str:
    if result is None:
        return "-"
    if result["error"]:
        return "error"
    if result["seconds_method"] == HOST:
        return f"{result['median_us'] / 1e3:.3f}"
    return f"{_MARKS.get(result['seconds_method'], '')}{result['median_us']:.2f}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _against(own: Result | None, result: Result) -> str:
    name = result["implementation"]
    if result["error"]:
        return f"{name}: error"
    if own is None or not is_of_device(own) or not is_of_device(result):
        return f"{name} {_time(result)} {'ms' if result['seconds_method'] == HOST else 'µs'}"
    return f"{result['median_us'] / own['median_us']:.2f}× {name}"
