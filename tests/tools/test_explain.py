"""How calls are shown, as text and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import jax
import jax.numpy as jnp

import triax
from triax.tools.explain import Explanations
from triax.tuning.store import Timing

CALL = triax.Explanation(
    kernel="add<kernel>",
    config=("BLOCK=128", "BLOCK=256"),
    source="measured now",
    timings=(Timing("BLOCK=128", 0.0125, 3), Timing("BLOCK=256", error="needs 'a' < b & c")),
    target="triton_kernel_call_ffi",
    grid=((8, 1, 1), (4, 1, 1)),
    aliases=((0, 0),),
    entry=("add_1", "add_2"),
    key="add-4096",
    measured_bytes=8192,
)


class Cells(HTMLParser):
    """The texts of a page's cells, by table and row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert tag in ["table", "thead", "tbody", "tr", "th", "td"]
        rows = {"table": self.tables, "tr": self.tables and self.tables[-1]}
        if tag in rows:
            rows[tag].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        self.tables[-1][-1][-1] += data


def test_text():
    assert str(CALL).splitlines() == [
        "add<kernel>: BLOCK=128 | BLOCK=256  (measured now)",
        "  triton_kernel_call_ffi, grid 8×1×1 | 4×1×1, aliases [(0, 0)]",
        "  key add-4096, measured on 8192 bytes",
        "     0.0125 ms  BLOCK=128",
        "  needs 'a' < b & c  BLOCK=256",
    ]
    assert repr(Explanations([CALL, CALL])) == f"{CALL}\n{CALL}"


def test_tables():
    calls, candidates = Cells(Explanations([CALL, CALL])._repr_html_()).tables
    cells = ["add<kernel>", "BLOCK=128 | BLOCK=256", "measured now", "triton_kernel_call_ffi"]
    cells += ["8×1×1 | 4×1×1", "[(0, 0)]", "add-4096, measured on 8192 bytes"]
    assert calls == [
        ["kernel", "config", "source", "target", "grid", "aliases", "key"],
        cells,
        cells,
    ]
    times = [["BLOCK=128", "0.0125 ms"], ["BLOCK=256", "needs 'a' < b & c"]]
    rows = [["add<kernel>", *time] for time in times]
    assert candidates == [["kernel", "candidate", "median"], *rows, *rows]
    assert Cells(CALL._repr_html_()).tables[0] == calls[:2]


def test_a_function_without_calls():
    found = triax.explain(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert found == []
    assert repr(found) == "no Triton calls"
