"""ragged_dot and its gradients, of arrays of every float."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.moe import draws
from tests.moe.bounds import Near, exact, matmul, rounded, sum_unit
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.plans.case import spans

FLOATS = ("float32", "bfloat16", "bfloat16", "float16")


def zeros(*shape: int) -> Near:
    return Near(np.zeros(shape), np.zeros(shape))


def put(into: Near, at: Any, part: Near) -> None:
    into.value[at], into.error[at] = part.value, part.error


def dot(rows: Near, weights: Near, groups: list[slice], u: float, terms: int | None = None) -> Near:
    """Each row times the weights of its group; exact zeros elsewhere."""
    out = zeros(len(rows.value), weights.value.shape[2])
    for group, span in enumerate(groups):
        if span.stop > span.start:
            put(out, span, matmul(rows[span], weights[group], u, terms))
    return out


def outer(left: Near, right: Near, groups: list[slice], u: float) -> Near:
    """For each group the sum over its rows of left × right."""
    out = zeros(len(groups), left.value.shape[1], right.value.shape[1])
    for group, span in enumerate(groups):
        if span.stop > span.start:
            put(out, group, matmul(left[span].T, right[span], u))
    return out


def group_sum(rows: Near, row_weights: Near | None, groups: list[slice]) -> Near:
    """Each group's weighted sum of its rows."""
    ones = exact(np.ones(len(rows.value))) if row_weights is None else row_weights
    return outer(Near(ones.value[:, None], ones.error), rows, groups, 2.0**-24)[:, 0]


def with_bias(out: Near, bias: Any, row_weights: Near | None, groups: list[slice]) -> Near:
    """Rows and the biases of their groups, times their weights."""
    for group, span in enumerate(groups if bias is not None else ()):
        if span.stop > span.start:
            one = exact(bias[group])
            added = one if row_weights is None else row_weights[span, None] * one
            put(out, span, out[span] + added)
    return out


def swapped(weights: Near) -> Near:
    error = weights.error.swapaxes(1, 2) if weights.error.ndim else weights.error
    return Near(weights.value.swapaxes(1, 2), error)


def sizes_of(rng: Rng, path: str) -> tuple[int, int, int, int]:
    """Rows, depth, columns and groups."""
    if path == "interpret":
        depth, columns = one_of(rng, draws.SMALL_WIDTHS), one_of(rng, draws.SMALL_WIDTHS)
        return int(rng.integers(1, 70)), depth, columns, int(rng.integers(1, 5))
    most = one_of(rng, (4, 40, 150, 300))
    depth, columns = one_of(rng, draws.WIDTHS), one_of(rng, draws.WIDTHS)
    return int(rng.integers(1, most + 1)), depth, columns, int(rng.integers(1, 9))


def plain(rng: Rng, path: str) -> Case:
    """Arrays, with all gradients."""
    shape = sizes_of(rng, path)
    dtype = np.dtype(one_of(rng, FLOATS))
    chances = (0.5, 0.4, 0.5, 0.2)
    transposed, biased, weighted, offset = (rng.random(4) < chances).tolist()
    others = int(rng.integers(0, 4)) if offset else None
    result = np.dtype(np.float32) if rng.random() < 0.2 else dtype
    weighted &= biased
    return dense(path, shape, dtype, transposed, biased, weighted, others, result)


def dense(
    path: str,
    sizes: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    transposed: bool = False,
    biased: bool = False,
    weighted: bool = False,
    others: int | None = None,
    result: Any = None,
    given: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """Of rows, depth, columns and groups; `others` are groups that there are no weights for, and
    `given` the sizes of all groups to choose from, which else are drawn."""
    num_rows, depth, columns, num_groups = sizes
    offset, num_sizes = others is not None, num_groups + (others or 0)
    result = result or dtype
    options = {
        "bias=bias, ": biased,
        "bias_weights=bias_weights, ": weighted,
        "group_offset=group_offset, ": offset,
        "transpose_weights=True, ": transposed,
        "preferred_element_type=jnp.float32, ": result != dtype,
    }
    call = f"moe.ragged_dot(rows, weights, sizes, {''.join(o for o, on in options.items() if on)}"
    names = ("rows", "weights", *["bias"] * biased, *["bias_weights"] * weighted)
    shape = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    u = sum_unit(path, dtype)

    def draw(rng: Rng) -> Arrays:
        kind = one_of(rng, draws.KINDS)
        arrays = {
            "rows": draws.values(rng, (num_rows, depth), dtype, kind),
            "weights": draws.values(rng, shape, dtype, one_of(rng, (kind, "normal"))),
            "sizes": draws.group_sizes(rng, num_sizes, num_rows),
            "g_out": draws.values(rng, (num_rows, columns), result),
        }
        if given:
            arrays["sizes"] = np.array(one_of(rng, given), np.int32)
        if biased:
            arrays["bias"] = draws.values(rng, (num_groups, columns), dtype)
        if weighted:
            arrays["bias_weights"] = draws.values(rng, (num_rows,), np.float32)
        if offset:
            arrays["group_offset"] = np.array(rng.integers(num_sizes + 1), np.int32)
        poison(rng, arrays, groups_of(arrays), kind == "normal")
        return arrays

    def groups_of(arrays: Arrays) -> list[slice]:
        return spans(arrays["sizes"], num_rows, int(arrays.get("group_offset", 0)), num_groups)

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        groups = groups_of(arrays)
        rows, weights = exact(arrays["rows"]), exact(arrays["weights"])
        weights = swapped(weights) if transposed else weights
        out = dot(rows, weights, groups, u)
        by_row = exact(arrays["bias_weights"]) if weighted else None
        gradient = exact(arrays["g_out"].astype(dtype))
        wanted: dict[str, Any] = {}
        out = with_bias(out, arrays.get("bias"), by_row, groups)
        if biased:
            wanted["d_bias"] = rounded(group_sum(gradient, by_row, groups), dtype)
        if weighted:
            bias = exact(arrays["bias"])[:, :, None]
            # XLA may leave a gradient that no kernel reads as it came, or round it first.
            either = rounded(exact(arrays["g_out"]), dtype)
            wanted["d_bias_weights"] = dot(either, bias, groups, u)[:, 0]
        d_weights = rounded(outer(rows, gradient, groups, u), dtype)
        return wanted | {
            "out": rounded(out, result),
            "d_rows": rounded(dot(gradient, swapped(weights), groups, u), dtype),
            "d_weights": swapped(d_weights) if transposed else d_weights,
        }

    case = Case("ragged_dot", path, f"{call}implementation=how)", ("out",), draw, expect, names)
    case.widest = "float32"
    case.kernels = ("ragged_dot", "ragged_dot_transposed", "group_outer")
    case.kernels += ("ragged_dot_schedule",) * 3
    return case


def poison(rng: Rng, arrays: Arrays, groups: list[slice], special: bool) -> None:
    """NaNs where no result may come from: rows outside of groups, empty groups' weights. And
    sometimes one in a group, which stays in it."""
    inside = np.zeros(len(arrays["rows"]), bool)
    for span in groups:
        inside[span] = True
    for name in ("rows", "g_out", "bias_weights"):
        if name in arrays and rng.random() < 0.5:
            arrays[name][~inside] = np.nan
    empty = [g for g, span in enumerate(groups) if span.stop <= span.start]
    for name in ("weights", "bias"):
        if name in arrays and rng.random() < 0.5:
            arrays[name][empty] = np.nan
    if special and rng.random() < 0.3:
        group = int(rng.integers(len(groups)))
        if rng.random() < 0.5:
            draws.plant(rng, arrays["rows"], groups[group])
        else:
            draws.plant(rng, arrays["weights"], group)


OPS = (plain,)
NAMED = {"ragged_dot": functools.partial(dense, sizes=(30, 16, 16, 3), dtype=np.dtype("float32"))}
