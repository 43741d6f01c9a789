"""glu with all gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.products import FLOATS
from tests.moe import draws
from tests.moe.bounds import TINY, U32, Array, Near, exact, rounded
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import row_sums

_erf = np.frompyfunc(math.erf, 1, 1)


class Activation(NamedTuple):
    """An activation as source, its curve of the gate, and whether there is one."""

    source: str
    curve: str
    gated: bool = True
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0


_GPT_OSS = "moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0)"
ACTIVATIONS = (
    Activation("'swiglu'", "silu"),
    Activation("'geglu'", "gelu"),
    Activation("'geglu_exact'", "gelu_exact"),
    Activation(_GPT_OSS, "silu", alpha=1.702, limit=7.0, offset=1.0),
    Activation("moe.Swiglu(limit=2.0)", "silu", limit=2.0),
    Activation("'silu'", "silu", gated=False),
    Activation("'gelu'", "gelu", gated=False),
    Activation("'gelu_exact'", "gelu_exact", gated=False),
    Activation("'relu2'", "relu2", gated=False),
)


def curve(x: Near, kind: Activation) -> tuple[Near, Near, Array]:
    """The activation, its slope, and what underflow may change of them.

    An argument z of an exponential is rounded, so the result is off by z units of float32 beside a
    few for each operation; less than 16, of a GPU's and of XLA's functions. The slope has a factor
    1 - s, which is off by a few units of s, until s is 1. What x is off by changes the activation
    by at most the slope, and the slope by at most 2, times that.
    """
    v = x.value
    change: Any = 1.0
    cancelled: Any = 0.0
    if kind.curve == "relu2":
        positive = np.where(v < 0, 0, v)
        value, slope, z = positive**2, 2 * positive, np.zeros_like(v)
        size, slope_size = value, slope
    elif kind.curve == "gelu_exact":
        cdf = 0.5 + 0.5 * np.asarray(_erf(v * math.sqrt(0.5)), np.float64)
        density = np.exp(-v * v / 2) / math.sqrt(2 * math.pi)
        value, slope, z = v * cdf, cdf + v * density, v * v / 2
        size, slope_size = abs(v), 1 + abs(v * density)
    else:
        w, change = kind.alpha * v, kind.alpha
        if kind.curve == "gelu":
            w = math.sqrt(8 / math.pi) * v * (1 + 0.044715 * v * v)
            change = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * v * v)
        with np.errstate(over="ignore"):
            s, rest = 1 / (1 + np.exp(-w)), 1 / (1 + np.exp(w))
        bend = np.where(s * rest == 0, 0, v * s * rest * change)
        value, slope, z = v * s, s + bend, -w
        size, slope_size = abs(value), s + abs(bend)
        cancelled = np.where(w < 18, 4 * U32 * abs(v * change) * s, abs(bend))
    units = U32 * (16 + 8 * np.clip(z, 0, 110))
    active, sloped = Near(value, units * size), Near(slope, units * slope_size + cancelled)
    if x.error.ndim:
        active.error = active.error + (abs(slope) + 2 * x.error) * x.error
        sloped.error = sloped.error + 2 * x.error
    return active, sloped, TINY * (1 + abs(v)) * (1 + abs(change))


def clipped(x: Near, low: float, high: float) -> tuple[Near, Array, Array]:
    """What is clipped, where it was not, and where that is not sure."""
    kept = ~((x.value > high) | (x.value < low))
    distance = np.minimum(abs(x.value - high), abs(x.value - low))
    return Near(np.clip(x.value, low, high), x.error), kept, distance <= x.error


def masked(x: Near, kept: Array, unsure: Array) -> Near:
    error = np.where(kept, x.error, 0) + np.where(unsure, abs(x.value) + x.error, 0)
    return Near(np.where(kept, x.value, 0), error)


def glu_of(gate: Near, up: Near | None, weights: Near | None, kind: Activation, g: Near) -> Any:
    """The result in float32, and the gradients of gate, up and weights for g."""
    checks: list[Any] = []
    if kind.limit is not None and up is not None:
        gate, *of_gate = clipped(gate, -math.inf, kind.limit)
        up, *of_up = clipped(up, -kind.limit, kind.limit)
        checks = [of_gate, of_up]
    active, slope, lost = curve(gate, kind)
    for factor in (up, weights, g):  # in whatever order they are multiplied
        if factor is not None:
            size = abs(factor.value)
            lost = lost * (1 + (size[:, None] if size.ndim == 1 else size))
    out = active
    if up is not None:
        up = up + exact(kind.offset) if kind.offset else up
        out = active * up
    d_weights = None
    if weights is not None:
        d_weights = row_sums(out, g)
        out, g = out * weights[:, None], g * weights[:, None]
    d_gate = g * slope if up is None else g * up * slope
    d_up = None if up is None else g * active
    if checks and d_up is not None:
        d_gate, d_up = masked(d_gate, *checks[0]), masked(d_up, *checks[1])
    for result in filter(None, (out, d_gate, d_up)):
        result.error = result.error + np.where((result.value == 0) & (result.error == 0), 0, lost)
    return out, d_gate, d_up, d_weights


def joined(gate: Near, up: Near | None, interleaved: bool) -> Near:
    """One array of gate and up."""
    if up is None:
        return gate
    both = []
    for pair in ((gate.value, up.value), (gate.error, up.error)):
        parts = np.broadcast_arrays(*pair, gate.value)[:2]
        both.append(
            np.stack(parts, -1).reshape(len(parts[0]), 2 * gate.value.shape[1])
            if interleaved
            else np.hstack(parts)
        )
    return Near(*both)


def apart(both: Near, kind: Activation, interleaved: bool) -> tuple[Near, Near | None]:
    if not kind.gated:
        return both, None
    width = both.value.shape[1] // 2
    first = slice(0, None, 2) if interleaved else slice(0, width)
    return both[:, first], both[:, slice(1, None, 2) if interleaved else slice(width, None)]


def glu(rng: Rng, path: str) -> Case:
    small = path == "interpret"
    num_rows = int(rng.integers(1, 40 if small else 200))
    width = one_of(rng, draws.SMALL_WIDTHS if small else draws.WIDTHS)
    kind = one_of(rng, ACTIVATIONS)
    dtype = np.dtype(one_of(rng, FLOATS))
    weighted = bool(rng.random() < 0.6)
    layout = one_of(rng, ("halves", "interleaved", "two")) if kind.gated else "one"
    interleaved = layout == "interleaved"
    names = ("gate", "up") if layout == "two" else ("gate_up",)
    given = "(gate, up)" if layout == "two" else "gate_up"
    call = f"moe.glu({given}, {'weights, ' * weighted}activation={kind.source}, "
    call += f"interleaved={interleaved}, implementation=how)"
    columns = width * (1 + (layout in ("halves", "interleaved")))

    def draw(rng: Rng) -> Arrays:
        value_kind = one_of(rng, draws.KINDS)
        arrays = {n: draws.values(rng, (num_rows, columns), dtype, value_kind) for n in names}
        if value_kind == "normal":
            for array in arrays.values():
                array *= np.asarray(one_of(rng, (1, 3, 20)), dtype)
        if weighted:
            arrays["weights"] = draws.values(rng, (num_rows,), np.float32)
        arrays["g_out"] = draws.values(rng, (num_rows, width), dtype)
        if rng.random() < 0.3:  # in a row, where it stays
            row = rng.integers(num_rows)
            arrays[names[0]][row] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        up: Near | None
        if layout == "two":
            gate, up = exact(arrays["gate"]), exact(arrays["up"])
        else:
            gate, up = apart(exact(arrays["gate_up"]), kind, interleaved)
        weights = exact(arrays["weights"]) if weighted else None
        out, d_gate, d_up, d_weights = glu_of(gate, up, weights, kind, exact(arrays["g_out"]))
        wanted = {"out": rounded(out, dtype)}
        if layout == "two":
            wanted |= {"d_gate": rounded(d_gate, dtype), "d_up": rounded(d_up, dtype)}
        else:
            wanted["d_gate_up"] = rounded(joined(d_gate, d_up, interleaved), dtype)
        return wanted | ({"d_weights": d_weights} if weighted else {})

    gradients = (*names, *["weights"] * weighted)
    return Case("glu", path, call, ("out",), draw, expect, gradients)


OPS = (glu,)
