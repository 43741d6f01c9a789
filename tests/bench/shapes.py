"""Small cases of every op."""

from __future__ import annotations

from triax.bench.cases import Case
from triax.bench.presets import Chunks, Preset
from triax.bench.programs import CHUNK_OPS

TINY = Preset("tiny", hidden=32, experts=8, top_k=2)
ONE = Preset("one", hidden=32, experts=8, top_k=1)


def small_case(op, dtype="float32", routing="uniform", tokens=24, preset=TINY):
    """A case of any op, of the same size."""
    if op in CHUNK_OPS:
        return Case.chunked(op, Chunks(tokens=tokens, hidden=preset.hidden, count=5), dtype)
    return Case.routed(op, preset, tokens, dtype, routing)
