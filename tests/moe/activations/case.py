"""glu, its gradients with the result made again, and glu in 8 bits: calls, hostile inputs, and what
results must be."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.moe import draws
from tests.moe.bounds import TINY, U32, Array, Near, Numbers, exact, rounded
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import FLOATS, row_sums
from tests.moe.quantization.case import quantized as values_of
from triax.moe.activations import ops
from triax.moe.activations.options import resolve

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
FUNCTIONS = (
    Activation("lambda gate, up: jnp.tanh(gate) * up", "tanh"),
    Activation("jnp.tanh", "tanh", gated=False),
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
    elif kind.curve == "tanh":
        value, z = np.tanh(v), np.zeros_like(v)
        slope = 1 - value**2
        size, slope_size = abs(value), np.ones_like(v)
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
    unsure = (distance <= x.error) & (x.error > 0)
    return Near(np.clip(x.value, low, high), x.error), kept, unsure


def masked(x: Near, kept: Array, unsure: Array) -> Near:
    """The numbers where they are kept, else zeros, whatever the numbers."""
    anything = unsure & ~np.isfinite(x.value)
    error = np.where(kept, x.error, 0) + np.where(unsure, abs(x.value) + x.error, 0)
    return Near(np.where(kept & ~anything, x.value, 0), np.where(anything, np.inf, error))


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
    if kind.curve == "relu2":  # max(x, 0) is a constant below zero
        d_gate = masked(d_gate, *clipped(gate, 0.0, math.inf)[1:])
    if kind in FUNCTIONS and weights is not None:  # rows of weight 0 have no derivative
        error = np.broadcast_to(weights.error, weights.value.shape)
        unsure = (abs(weights.value) <= error) & (error > 0)
        of_rows = (weights.value != 0)[:, None], unsure[:, None]
        d_gate, d_up = masked(d_gate, *of_rows), None if d_up is None else masked(d_up, *of_rows)
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


@dataclasses.dataclass(frozen=True)
class Operands:
    """Gate and up, in some layout, and the rows' weights: how they are drawn and passed."""

    rows: int
    width: int
    kind: Activation = ACTIVATIONS[0]
    dtype: Any = "float32"
    weights: Any = "float32"
    layout: str = "halves"

    @property
    def names(self) -> tuple[str, ...]:
        return ("gate", "up") if self.layout == "two" else ("gate_up",)

    @property
    def is_interleaved(self) -> bool:
        return self.kind.gated and self.layout == "interleaved"

    @property
    def positional(self) -> str:
        both = "(gate, up)" if self.layout == "two" else "gate_up"
        return f"{both}, {'weights' if self.weights else None}"

    @property
    def options(self) -> str:
        activation = f"activation={self.kind.source}, interleaved={self.is_interleaved}"
        return f"{activation}, implementation=how"

    def draw(self, rng: Rng, gradient: str = "") -> Arrays:
        dtype = np.dtype(self.dtype)
        columns = self.width * (1 + (self.kind.gated and self.layout != "two"))
        shape, kinds = (self.rows, columns), rng.permutation(draws.KINDS)
        arrays = {name: draws.rows_in_turn(rng, kinds, shape, dtype) for name in self.names}
        for array in arrays.values():
            if self.kind.limit is not None:  # where it is kept, and where what is clipped is not
                limit = self.kind.limit
                at = np.asarray(rng.random(array.shape) < 0.1)
                array[at] = rng.choice([limit, -limit, np.inf], at.sum()).astype(dtype)
        if self.weights:
            arrays["weights"] = draws.values(rng, (self.rows,), self.weights)
        if gradient:
            arrays[gradient] = draws.values(rng, (self.rows, self.width), dtype)
        for name in (*self.names, *[gradient] * bool(gradient)):
            if arrays[name].size and rng.random() < 0.3:
                arrays[name][tuple(map(rng.integers, arrays[name].shape))] = np.nan
        if rng.random() < 0.3:  # as pad rows are
            for name in {*arrays} - {gradient}:
                arrays[name][-(self.rows // 3) - 1 :] = 0
        return arrays

    def expect(self, arrays: Arrays, gradient: Array) -> dict[str, Any]:
        """The result, and the gradients."""
        up: Near | None
        if self.layout == "two":
            gate, up = exact(arrays["gate"]), exact(arrays["up"])
        else:
            gate, up = apart(exact(arrays["gate_up"]), self.kind, self.is_interleaved)
        weights = exact(arrays["weights"]) if self.weights else None
        out, d_gate, d_up, d_weights = glu_of(gate, up, weights, self.kind, exact(gradient))
        wanted = {"out": out, "d_gate": d_gate, "d_up": d_up}
        if self.layout != "two":
            wanted = {"out": out, "d_gate_up": joined(d_gate, d_up, self.is_interleaved)}
        found = {name: rounded(of, self.dtype) for name, of in wanted.items()}
        return found | ({"d_weights": rounded(d_weights, self.weights)} if self.weights else {})


def glu_gradients(
    gate_up: Any,
    weights: Any,
    gradient: Any,
    *,
    activation: Any,
    interleaved: bool,
    implementation: Any,
) -> Any:
    gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    operands = gate, up, weights, resolve(activation, interleaved), gradient
    return ops.activate_gradients(*operands, again=True, implementation=implementation)


def quantized_glu(
    gate_up: Any,
    weights: Any,
    dtype: str,
    *,
    activation: Any = "swiglu",
    interleaved: bool = False,
    implementation: Any = None,
) -> Any:
    gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    operands = gate, up, weights, resolve(activation, interleaved), dtype
    return ops.activate_quantized(*operands, implementation=implementation)


def glu(path: str, **settings: Any) -> Case:
    """Settings are the fields of `Operands`."""
    of = Operands(**settings)

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        return of.expect(arrays, arrays["g_out"])

    call = f"moe.glu({of.positional}, {of.options})"
    gradients = (*of.names, *["weights"] * bool(of.weights))
    draw = functools.partial(of.draw, gradient="g_out")
    case = Case("glu", path, call, ("out",), draw, expect, gradients)
    case.widest = "float32"
    case.kernels = ("glu", "glu_grad")
    case.columns = of.names if of.layout == "two" and of.kind in ACTIVATIONS else ()
    return case


def gradients_of(path: str, **settings: Any) -> Case:
    """The gradients, and the result again, in memory of operands that are still the caller's."""
    of = Operands(**settings)
    kept = (*of.names, "gradient")

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        wanted = of.expect(arrays, arrays["gradient"])
        return wanted | {f"kept_{name}": arrays[name] for name in kept}

    call = f"glu_gradients({of.positional}, gradient, {of.options}), {', '.join(kept)}"
    first, *second = (f"d_{name}" for name in of.names)
    results = (first, *["d_weights"] * bool(of.weights), *second, "out")
    results += tuple(f"kept_{name}" for name in kept)
    draw = functools.partial(of.draw, gradient="gradient")
    names = {"glu_gradients": glu_gradients}
    case = Case("glu_gradients", path, call, results, draw, expect, names=names)
    case.widest = "float32"
    return case


def quantized(path: str, to: str = "float8_e4m3fn", **settings: Any) -> Case:
    """In 8 bits, those that quantize makes of the result."""
    of = Operands(**settings)

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        block = (1, max(of.width, 1))
        values, scales = values_of(found["out"], to, block, False)
        out = of.expect(arrays, found["out"])["out"]
        return {"out": out, "values": Numbers(values.reshape(of.rows, of.width)), "scales": scales}

    call = f"moe.glu({of.positional}, {of.options}), "
    call += f"quantized_glu({of.positional}, {to!r}, {of.options})"
    names = {"quantized_glu": quantized_glu}
    results = ("out", "values", "scales")
    case = Case("quantized_glu", path, call, results, of.draw, expect, names=names)
    case.widest = "float32"
    return case


def _drawn(rng: Rng, path: str) -> dict[str, Any]:
    small = path == "interpret"
    kind = one_of(rng, (*ACTIVATIONS, *FUNCTIONS))
    return {
        "rows": int(rng.integers(1, 40 if small else 200)),
        "width": one_of(rng, draws.SMALL_WIDTHS if small else draws.WIDTHS),
        "kind": kind,
        "dtype": one_of(rng, FLOATS),
        "weights": one_of(rng, ("", "float32", "float32", *FLOATS)),
        "layout": one_of(rng, ("halves", "interleaved", "two")) if kind.gated else "halves",
    }


def draw_glu(rng: Rng, path: str) -> Case:
    return glu(path, **_drawn(rng, path))


def draw_glu_gradients(rng: Rng, path: str) -> Case:
    return gradients_of(path, **_drawn(rng, path))


def draw_quantized_glu(rng: Rng, path: str) -> Case:
    return quantized(path, to=one_of(rng, _TO), **_drawn(rng, path))


_TO = ("float8_e4m3fn", "float8_e5m2")
OPS = {"glu": glu, "glu_gradients": gradients_of, "quantized_glu": quantized}
RANDOM = (draw_glu, draw_glu_gradients, draw_quantized_glu)
_CLAMPED = ACTIVATIONS[4]
_SETTINGS: dict[str, dict[str, Any]] = {
    "no rows": {"rows": 0, "width": 4},
    "no width": {"rows": 4, "width": 0},
    "one of each": {"rows": 1, "width": 1},
    "no weights": {"rows": 7, "width": 40, "weights": ""},
    "several blocks of the width": {"rows": 3, "width": 2100, "dtype": "bfloat16"},
    "several blocks of rows": {"rows": 130, "width": 1, "dtype": "float16", "layout": "two"},
    "clamped, two": {"rows": 23, "width": 40, "kind": _CLAMPED, "layout": "two"},
    "interleaved, odd": {"rows": 33, "width": 45, "kind": _CLAMPED, "layout": "interleaved"},
    "interleaved, 16 bits": {
        "rows": 23,
        "width": 40,
        "kind": ACTIVATIONS[3],
        "dtype": "bfloat16",
        "layout": "interleaved",
    },
    "a function": {"rows": 9, "width": 20, "kind": FUNCTIONS[0], "layout": "two"},
    "a function of interleaved columns": {
        "rows": 6,
        "width": 10,
        "kind": FUNCTIONS[0],
        "dtype": "bfloat16",
        "layout": "interleaved",
    },
    "a function of interleaved columns, no rows": {
        "rows": 0,
        "width": 4,
        "kind": FUNCTIONS[0],
        "dtype": "bfloat16",
        "layout": "interleaved",
    },
}
_SMALL: dict[str, Any] = {"rows": 7, "width": 40}
NAMED: dict[str, functools.partial[Case]] = (
    {"glu": functools.partial(glu, **_SMALL, kind=ACTIVATIONS[3])}
    | {
        f"{name_of}, {name}": functools.partial(op, **settings)
        for name_of, op in OPS.items()
        for name, settings in _SETTINGS.items()
    }
    | {
        f"glu, {kind.source}": functools.partial(glu, **_SMALL, kind=kind, dtype=dtype)
        for kind, dtype in zip((*ACTIVATIONS, FUNCTIONS[1]), (*FLOATS, "float32") * 3, strict=False)
    }
    | {
        f"glu, weights in {weights}": functools.partial(glu, **_SMALL, weights=weights)
        for weights in FLOATS[1:]
    }
    | {
        f"{name_of}, no gate": functools.partial(op, **_SMALL, kind=ACTIVATIONS[-1])
        for name_of, op in OPS.items()
    }
    | {
        f"quantized_glu, {dtype} to {to}": functools.partial(
            quantized, rows=9, width=33, kind=ACTIVATIONS[2], dtype=dtype, to=to
        )
        for dtype in FLOATS
        for to in _TO
    }
)


def _sized(op: Callable[..., Case] = glu, **settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        return op(path, rows=of.rows, width=of.width, dtype=of.dtype, **settings)

    return made


SIZED: dict[str, Sized] = {
    "glu": _sized(),
    "glu, no weights": _sized(kind=ACTIVATIONS[1], weights=""),
    "glu, clamped and interleaved": _sized(kind=ACTIVATIONS[3], layout="interleaved"),
    "glu, two": _sized(layout="two"),
    "glu, no gate": _sized(kind=ACTIVATIONS[-1]),
    "glu, a function of interleaved columns": _sized(kind=FUNCTIONS[0], layout="interleaved"),
    "glu, a function of two": _sized(kind=FUNCTIONS[0], layout="two"),
    "glu_gradients": _sized(gradients_of, layout="two"),
    "quantized_glu": _sized(quantized),
}
# Widths of models.
LARGE: dict[str, functools.partial[Case]] = {
    f"{name_of}, {rows} rows, {width} wide, {kind.source}, {layout}": functools.partial(
        op, rows=rows, width=width, kind=kind, dtype=dtype, layout=layout
    )
    for name_of, op in OPS.items()
    for rows, width, kind, dtype, layout in (
        (1000, 2048, ACTIVATIONS[0], "bfloat16", "halves"),
        (1000, 2880, ACTIVATIONS[3], "bfloat16", "interleaved"),
        (333, 1536, ACTIVATIONS[1], "float32", "two"),
        (65, 14336, ACTIVATIONS[7], "bfloat16", "halves"),
        (333, 77, ACTIVATIONS[2], "float16", "halves"),
    )
}
