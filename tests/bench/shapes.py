"""Small cases of every op."""

from __future__ import annotations

from triax.bench.cases import OPS, Case


def small_case(op, dtype="float32", routing=None, *, tokens=24, top_k=2):
    """A case of any op; 80 columns, so that results are compared in parts."""
    if OPS[op].routings == (None,):
        return Case(op, None, tokens, 80, 5, 1, dtype, None)
    routing = routing or OPS[op].routings[-1]
    return Case(op, "tiny", tokens, 80, 8, top_k, dtype, routing, 48 if OPS[op].matmuls else 0)
