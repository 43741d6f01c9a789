"""Small cases of every op, and records of `make bench`: the committed one, and parts of it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.ops.cases import OPS, Case

COMMITTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "h200.json").read_text())
PERMUTE = next(r for r in COMMITTED["results"] if r["op"] == "permute")
PLAN = next(r for r in COMMITTED["results"] if r["op"] == "plan")


def small_case(op, dtype="float32", routing=None, *, tokens=24, top_k=2):
    if OPS[op].routings == (None,):
        return Case(op, None, tokens, 80, 5, 1, dtype, None)
    routing = routing or OPS[op].routings[-1]
    return Case(op, "tiny", tokens, 80, 8, top_k, dtype, routing, 48 if OPS[op].matmuls else 0)


def result(implementation="triax", like=PERMUTE, **values):
    return like | {"implementation": implementation} | values


def record(*results, **values):
    empty = {"streams": [], "first_call": [], "memory": [], "notes": []}
    return COMMITTED | empty | {"results": list(results)} | values
