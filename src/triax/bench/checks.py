"""Whether an implementation's results are right: asked before its speed is measured.

Each op has a law that its results keep, written down here without the op's own code. Plans are
compared with NumPy's stable sort. Moves are compared bit for bit, sums within the tolerances of
`triax.testing`; both on the device, some tokens at a time, so that the comparison takes little
memory beside arrays that fill it, and compiles little that depends on how many tokens there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from triax.bench.cases import Case
from triax.bench.inputs import Inputs, plan_by_definition, source_rows
from triax.testing import TOLERANCES

_SLICE_TOKENS = 512
_PLAN_FIELDS = (
    "row_of",
    "expert_of",
    "group_sizes",
    "group_counts",
    "group_filled",
    "num_dropped",
)


def problem(case: Case, inputs: Inputs, outputs: Any) -> str | None:
    """What is wrong with the outputs of a case, or None.

    Args:
      case: what was run.
      inputs: what it was run on.
      outputs: what came out, in the structure of what `Case.program` returns; NumPy arrays do too.
    """
    wrong = _type_problem(case, inputs, outputs)
    if wrong is not None:
        return wrong
    op = case.op
    if op in ("plan", "permute+plan"):
        plan = outputs if op == "plan" else outputs[1]
        wrong = _plan_problem(case, inputs["selected_experts"], plan)
        if wrong is not None or op == "plan":
            return wrong
        # This plan is right, so the rows have to follow it.
        op, inputs, outputs = "permute", {"x": inputs["x"], "plan": plan}, outputs[0]
    index, by_row, by_token = _ARRAYS[op](inputs, outputs)
    for name, found in _errors(op, case.tokens, index, by_row, by_token).items():
        wrong = _judge(name, *found)
        if wrong is not None:
            return wrong
    return None


def _type_problem(case: Case, inputs: Inputs, outputs: Any) -> str | None:
    expected = jax.eval_shape(lambda inputs: case.program(inputs, "xla"), inputs)
    structure = str(jax.tree.structure(outputs))
    if structure != str(jax.tree.structure(expected)):
        return f"wrong: the outputs are {structure}"
    for got, want in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return f"wrong: {got.dtype}{list(got.shape)} is not {want.dtype}{list(want.shape)}"
    return None


def _plan_problem(case: Case, selected_experts: Any, plan: Any) -> str | None:
    expected = plan_by_definition(np.asarray(selected_experts), case.experts)
    for name in _PLAN_FIELDS:
        got, want = (np.asarray(getattr(one, name)) for one in (plan, expected))
        differ = np.count_nonzero(got != want)
        if differ:
            return f"wrong: {differ} of {want.size} values of `{name}` differ"
    return None


def _judge(
    name: str, worst: float, squares: float, count: float, largest: float, limit: float
) -> str | None:
    if limit == 0:
        return None if squares == 0 else f"wrong: {squares:.0f} elements of {name} differ"
    scale = max(largest, float(np.finfo(np.float32).tiny))
    error, rms = worst / scale, math.sqrt(squares / count) / scale
    if not error <= limit:
        return f"wrong: the largest error of {name}, {error:.3g}, is over {limit:.3g}"
    if not rms <= limit / 3:
        return f"wrong: the RMS error of {name}, {rms:.3g}, is over {limit / 3:.3g}"
    return None


# --- on the device -----------------------------------------------------------------


class _Sums(NamedTuple):
    """Sums of `terms` terms and what they should be, which is float32."""

    actual: jax.Array
    expected: jax.Array
    terms: int

    def errors(self) -> jax.Array:
        """Largest error, squares of errors, elements, largest magnitude, the errors' limit."""
        limit = TOLERANCES[self.actual.dtype.name] * math.sqrt(self.terms)
        error = jnp.abs(self.actual.astype(jnp.float32) - self.expected)
        squares = jnp.sum(error * error)
        largest = jnp.max(jnp.abs(self.expected))
        return jnp.stack([jnp.max(error), squares, self.actual.size, largest, limit])


class _Moved(NamedTuple):
    """Values that were moved and what they should be, bit for bit; shapes broadcast."""

    actual: jax.Array
    expected: jax.Array

    def errors(self) -> jax.Array:
        """As for sums, with a limit of 0 and the elements that differ in place of the squares."""
        differ = jnp.sum(_bits(self.actual) != _bits(self.expected), dtype=jnp.float32)
        return jnp.stack([0, differ, self.actual.size, 0, 0])


def _errors(
    op: str, tokens: int, index: Any, by_row: Inputs, by_token: Inputs
) -> dict[str, list[float]]:
    """What `errors` says of each array that the op's law names, over all tokens.

    Args:
      op: a key of `_LAWS`.
      tokens: how many there are.
      index: int32 [tokens] or [tokens, top_k], the rows that belong to each token.
      by_row: arrays [rows, ...], of which the law sees those rows.
      by_token: arrays [tokens, ...], of which the law sees slices.
    """
    size = min(tokens, _SLICE_TOKENS)
    found = []
    for start in range(0, tokens, size):
        # The last slice may reach back into the one before: what is seen twice is as wrong.
        first = min(start, tokens - size)
        rows = _part(index, first, size)
        pieces = {name: _take(array, rows) for name, array in by_row.items()}
        pieces |= {name: _part(array, first, size) for name, array in by_token.items()}
        found.append(_errors_of_slice(op, pieces))
    stacked = jax.tree.map(lambda *errors: np.stack(errors), *jax.device_get(found))
    return {name: _over_slices(errors) for name, errors in stacked.items()}


def _over_slices(errors: np.ndarray) -> list[float]:
    worst, squares, count, largest, limit = errors.astype(np.float64).T
    return [float(v) for v in (worst.max(), squares.sum(), count.sum(), largest.max(), limit.max())]


@functools.partial(jax.jit, static_argnums=2)
def _part(array: Any, start: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, size)


@jax.jit
def _take(rows: Any, index: jax.Array) -> jax.Array:
    """Rows by an index that is in range, bit by bit."""
    taken = jnp.take(_bits(rows), index, axis=0, mode="clip")
    return jax.lax.bitcast_convert_type(taken, rows.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _errors_of_slice(op: str, pieces: Inputs) -> dict[str, jax.Array]:
    return {name: pair.errors() for name, pair in _LAWS[op](pieces).items()}


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32)


# --- what there is to compare: an index, arrays of rows, arrays of tokens -----------

Arrays = tuple[Any, Inputs, Inputs]


def _sources(inputs: Inputs) -> jax.Array:
    return jnp.asarray(source_rows(inputs["split_sizes"], inputs["sorted_indices"]))


def _of(inputs: Inputs, *names: str) -> Inputs:
    return {name: inputs[name] for name in names}


_ARRAYS: dict[str, Callable[[Inputs, Any], Arrays]] = {
    # All rows are seen, for a right plan names each.
    "permute": lambda i, rows: (i["plan"].row_of, {"rows": rows}, _of(i, "x")),
    "unpermute": lambda i, y: (i["plan"].row_of, _of(i, "rows"), {"y": y, **_of(i, "weights")}),
    "permute_grad": lambda i, d_x: (i["plan"].row_of, _of(i, "rows"), {"d_x": d_x}),
    "unpermute_grad": lambda i, grads: (
        i["plan"].row_of,
        {"d_rows": grads[0], **_of(i, "rows")},
        {"d_weights": grads[1], **_of(i, "weights", "gradient")},
    ),
    "route": lambda i, y: (i["selected_experts"], {}, {"y": y, **_of(i, "x", "weights")}),
    "route+grad": lambda i, outputs: (
        i["selected_experts"],
        {},
        {
            **dict(zip(("y", "d_x", "d_weights"), outputs, strict=True)),
            **_of(i, "x", "weights", "gradient"),
        },
    ),
    "sort_chunks": lambda i, rows: (_sources(i), _of(i, "x"), {"rows": rows}),
    "sort_chunks_grad": lambda i, d_x: (_sources(i), {"d_x": d_x}, _of(i, "gradient")),
}


# --- the laws: what should be, for some tokens ---------------------------------------


def _permute(p: Inputs) -> dict[str, Any]:
    return {"rows": _Moved(p["rows"], p["x"][:, None])}


def _unpermute(p: Inputs) -> dict[str, Any]:
    weights = p["weights"]
    expected = jnp.sum(weights[:, :, None] * _wide(p["rows"]), 1)
    return {"tokens": _Sums(p["y"], expected, weights.shape[1])}


def _permute_grad(p: Inputs) -> dict[str, Any]:
    rows = _wide(p["rows"])
    return {"the gradient of x": _Sums(p["d_x"], jnp.sum(rows, 1), rows.shape[1])}


def _unpermute_grad(p: Inputs) -> dict[str, Any]:
    gradient = _wide(p["gradient"])[:, None]
    products = jnp.sum(_wide(p["rows"]) * gradient, 2)
    return {
        "the gradient of rows": _Sums(p["d_rows"], p["weights"][:, :, None] * gradient, 1),
        "the gradient of weights": _Sums(p["d_weights"], products, gradient.shape[2]),
    }


def _route(p: Inputs) -> dict[str, Any]:
    # There and back, every token comes back as itself, times its weights.
    expected = jnp.sum(p["weights"], 1)[:, None] * _wide(p["x"])
    return {"tokens": _Sums(p["y"], expected, p["weights"].shape[1])}


def _route_with_gradients(p: Inputs) -> dict[str, Any]:
    x, gradient, weights = _wide(p["x"]), _wide(p["gradient"]), p["weights"]
    d_x = jnp.sum(weights, 1)[:, None] * gradient
    d_weights = jnp.sum(x * gradient, 1)[:, None] + jnp.zeros_like(weights)
    return {
        **_route(p),
        "the gradient of x": _Sums(p["d_x"], d_x, weights.shape[1]),
        "the gradient of weights": _Sums(p["d_weights"], d_weights, x.shape[1]),
    }


_LAWS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "permute": _permute,
    "unpermute": _unpermute,
    "permute_grad": _permute_grad,
    "unpermute_grad": _unpermute_grad,
    "route": _route,
    "route+grad": _route_with_gradients,
    "sort_chunks": lambda p: {"rows": _Moved(p["rows"], p["x"])},
    "sort_chunks_grad": lambda p: {"the gradient of rows": _Moved(p["d_x"], p["gradient"])},
}
