"""Records of `triax bench`: the committed one, and parts of it with other values."""

from __future__ import annotations

import json
from pathlib import Path

COMMITTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "h200.json").read_text())
PERMUTE = next(r for r in COMMITTED["results"] if r["op"] == "permute")
PLAN = next(r for r in COMMITTED["results"] if r["op"] == "plan")


def result(implementation="triax", like=PERMUTE, **values):
    return like | {"implementation": implementation} | values


def record(*results, **values):
    empty = {"streams": [], "first_call": [], "memory": [], "notes": []}
    return COMMITTED | empty | {"results": list(results)} | values
