"""What moves rows, and plans of moves: make_plan, permute and unpermute, chunks. Integers and moves
are exact; sums and their gradients are bounded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.fuzz import draws
from tests.fuzz.bounds import Array, Near, exact, rounded
from tests.fuzz.draws import Rng, one_of
from tests.fuzz.products import spans
from tests.fuzz.program import Arrays, Program
from triax import testing

_FIELDS = ("row_of", "expert_of", "group_sizes", "group_counts", "group_filled", "num_dropped")
_MOVED = ("float32", "bfloat16", "float16", "int8", "int32", "float8_e4m3fn", "bool")


class Plan(NamedTuple):
    row_of: Array
    expert_of: Array
    group_sizes: Array
    group_counts: Array
    group_filled: Array
    num_dropped: Array


def plan_of(ids: Array, count: int, num_rows: int, capacity: int | None, align: int) -> Plan:
    """A plan, from a stable sort of the pairs by expert."""
    ids = ids.astype(np.int64)
    known = (ids >= 0) & (ids < count)
    flat = np.where(known, ids, count).reshape(-1)
    counts = np.bincount(flat, minlength=count + 1)[:count]
    order = np.argsort(flat, kind="stable")
    rank = np.empty(len(flat), np.int64)
    rank[order] = np.arange(len(flat)) - np.concatenate([[0], np.cumsum(counts)])[flat[order]]
    kept = counts if capacity is None else np.minimum(counts, capacity)
    sizes = -(-kept // align) * align
    starts = np.concatenate([[0], np.cumsum(sizes)])
    fit = np.clip(num_rows - starts[:-1], 0, sizes)
    filled = np.minimum(kept, fit)
    placed = rank < np.append(filled, 0)[flat]
    row_of = np.where(placed, starts[flat] + rank, -1).reshape(ids.shape)
    fields = row_of, np.where(known, ids, -1), fit, counts, filled, counts.sum() - placed.sum()
    return Plan(*(np.asarray(field).astype(np.int32) for field in fields))


class Sizes(NamedTuple):
    """Of a plan that is drawn: tokens, slots, experts, and `make_plan`'s options."""

    tokens: int
    slots: int
    experts: int
    capacity: int | None
    align: int
    num_rows: int
    options: str

    def plan(self, ids: Array) -> Plan:
        return plan_of(ids, self.experts, self.num_rows, self.capacity, self.align)


def draw_sizes(rng: Rng, path: str, distinct: bool = False) -> Sizes:
    small = path == "interpret"
    experts = one_of(rng, (1, 3, 8, 13, 64) if small else (1, 2, 5, 8, 16, 60, 128, 257))
    slots = int(rng.integers(1, min(9, experts + 1) if distinct else 9))
    tokens = int(rng.integers(1, 30 if small else one_of(rng, (4, 40, 200))))
    align = one_of(
        rng, [a for a in (1, 1, 4, 8, 16, 128) if a * experts <= (256 if small else 1024)]
    )
    num_pairs = tokens * slots
    capacity = (
        int(rng.integers(0, max(2, 3 * num_pairs // experts))) if rng.random() < 0.4 else None
    )
    num_rows = (num_pairs + experts * (align - 1)) // align * align
    options = f"align_size={align}, " * (align > 1)
    if capacity is not None:
        options += f"capacity={capacity}, "
    if rng.random() < 0.4:
        num_rows = int(rng.integers(0, num_rows // align + 1)) * align
        options += f"num_rows={num_rows}, "
    return Sizes(tokens, slots, experts, capacity, align, num_rows, options)


def make_plan(rng: Rng, path: str) -> Program:
    sizes = draw_sizes(rng, path)
    dtype = np.dtype(one_of(rng, ("int32", "int32", "int16", "uint32")))
    call = f"moe.make_plan(ids, {sizes.experts}, {sizes.options}implementation=how)"

    def draw(rng: Rng) -> Arrays:
        return {"ids": draws.ids(rng, sizes.tokens, sizes.slots, sizes.experts, dtype)}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        return sizes.plan(arrays["ids"])._asdict()

    return Program("make_plan", path, call, _FIELDS, draw, expect)


def make_plan_from_mask(rng: Rng, path: str) -> Program:
    sizes = draw_sizes(rng, path, distinct=True)
    dtype = np.dtype(one_of(rng, ("bool", "int8", "int32")))
    tokens, slots, experts = sizes[:3]
    call = f"moe.make_plan_from_mask(mask, {slots}, {sizes.options}implementation=how)"

    def draw(rng: Rng) -> Arrays:
        density = draws.shares(rng, experts) * slots * one_of(rng, (0.5, 1, 3))
        mask = rng.random((tokens, experts)) < density
        return {"mask": np.where(mask, one_of(rng, (1, -1)), 0).astype(dtype)}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        mask = arrays["mask"] != 0
        first = mask & (np.cumsum(mask, 1) <= slots)
        order = np.argsort(~first, axis=1, kind="stable")[:, :slots]
        ids = np.where(np.take_along_axis(first, order, 1), order, -1)
        plan = sizes.plan(ids)
        counts = mask.sum(0).astype(np.int32)
        dropped = np.asarray(counts.sum() - (plan.row_of >= 0).sum(), np.int32)
        return plan._replace(group_counts=counts, num_dropped=dropped)._asdict()

    return Program("make_plan_from_mask", path, call, _FIELDS, draw, expect)


# --- rows ----------------------------------------------------------------------------------------


def move(x: Array, row_of: Array, num_rows: int, by_slot: bool = False) -> Array:
    """What belongs to a token, or to a token and slot, moved to its rows; zeros elsewhere."""
    rows = np.zeros((num_rows, *x.shape[1 + by_slot :]), x.dtype)
    token, slot = np.nonzero(row_of >= 0)
    rows[row_of[token, slot]] = x[token, slot] if by_slot else x[token]
    return rows


def back(rows: Array, row_of: Array) -> Array:
    """What belongs to a row moved to its token and slot, [tokens, slots, …]; zeros elsewhere."""
    padded = np.concatenate([rows, np.zeros_like(rows[:1], shape=(1, *rows.shape[1:]))])
    return padded[row_of]


def summed(rows: Near, row_of: Array, weights: Near | None = None) -> Near:
    """Each token's sum over its rows, in float32."""
    total = Near(*(np.zeros((len(row_of), rows.value.shape[1])) for _ in range(2)))
    for slot, row in enumerate(row_of.T):
        at = row >= 0
        part = rows[row[at]]
        part = part if weights is None else weights[at, slot, None] * part
        before = total[at] if slot else Near(np.zeros(1), np.zeros(1))
        after = before + part if slot else part
        total.value[at], total.error[at] = after.value, after.error
    return total


def permute(rng: Rng, path: str) -> Program:
    sizes = draw_sizes(rng, path)
    width = one_of(rng, draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS)
    dtype = np.dtype(one_of(rng, _MOVED[:3] if rng.random() < 0.6 else _MOVED))
    weighted, scaled = (rng.random(2) < 0.5).tolist()
    gradients = ("x",) * (dtype.name in _MOVED[:3]) + ("weights",) * weighted
    plan = f"moe.make_plan(ids, {sizes.experts}, {sizes.options}implementation=how)"
    options = "weights=weights, " * weighted + "scales=scales, " * scaled
    call = f"moe.permute(x, {plan}, {options}implementation=how)"
    results = ("rows", *["weights"] * weighted, *["scales"] * scaled)

    def draw(rng: Rng) -> Arrays:
        arrays = {
            "ids": draws.ids(rng, sizes.tokens, sizes.slots, sizes.experts),
            "x": testing.hostile_values(rng, (sizes.tokens, width), dtype),
        }
        if "x" in gradients:
            kind = one_of(rng, draws.KINDS)
            arrays["g_rows"] = draws.values(rng, (sizes.num_rows, width), dtype, kind)
        if weighted:
            weights = rng.standard_normal((sizes.tokens, sizes.slots), np.float32)
            arrays["weights"] = testing.hostile_values(rng, weights.shape, np.float32)
            arrays["g_weights"] = rng.standard_normal(sizes.num_rows, np.float32)
        if scaled:
            arrays["scales"] = testing.hostile_values(rng, (sizes.tokens, 3), np.float32)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        row_of = sizes.plan(arrays["ids"]).row_of
        moved = {"rows": "x", "weights": "weights", "scales": "scales"}
        wanted: dict[str, Any] = {
            name: move(arrays[moved[name]], row_of, sizes.num_rows, name == "weights")
            for name in results
        }
        if "x" in gradients:
            gradient = exact(arrays["g_rows"])
            wanted["d_x"] = rounded(summed(gradient, row_of), dtype)
        if weighted:
            wanted["d_weights"] = back(arrays["g_weights"], row_of)
        return wanted

    return Program("permute", path, call, results, draw, expect, gradients)


def unpermute(rng: Rng, path: str) -> Program:
    sizes = draw_sizes(rng, path)
    width = one_of(rng, draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS)
    dtype = np.dtype(one_of(rng, _MOVED[:3]))
    weighted = bool(rng.random() < 0.7)
    plan = f"moe.make_plan(ids, {sizes.experts}, {sizes.options}implementation=how)"
    call = f"moe.unpermute(rows, {plan}, {'weights, ' * weighted}implementation=how)"
    gradients = ("rows", *["weights"] * weighted)

    def draw(rng: Rng) -> Arrays:
        kind = one_of(rng, draws.KINDS)
        shape = (sizes.tokens, sizes.slots)
        arrays = {
            "ids": draws.ids(rng, *shape, sizes.experts),
            "rows": draws.values(rng, (sizes.num_rows, width), dtype, kind),
            "g_out": draws.values(rng, (sizes.tokens, width), dtype),
        }
        row_of = sizes.plan(arrays["ids"]).row_of
        taken = np.isin(np.arange(sizes.num_rows), row_of)
        if weighted:
            arrays["weights"] = draws.values(rng, shape, np.float32, one_of(rng, (kind, "normal")))
            arrays["weights"][row_of < 0] = np.nan
        arrays["rows"][~taken] = np.nan
        if kind == "normal" and rng.random() < 0.3:
            draws.plant(rng, arrays["rows"], slice(None))
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        row_of = sizes.plan(arrays["ids"]).row_of
        rows, gradient = exact(arrays["rows"]), exact(arrays["g_out"])
        weights = exact(arrays["weights"]) if weighted else None
        wanted: dict[str, Any] = {"out": rounded(summed(rows, row_of, weights), dtype)}
        spread = move(gradient.value, row_of, sizes.num_rows)
        if weights is None:
            return wanted | {"d_rows": rounded(exact(spread), dtype)}
        by_row = exact(move(weights.value, row_of, sizes.num_rows, by_slot=True)[:, None])
        taken = np.isin(np.arange(sizes.num_rows), row_of)
        d_rows = by_row * exact(spread)
        d_rows = Near(
            np.where(taken[:, None], d_rows.value, 0), np.where(taken[:, None], d_rows.error, 0)
        )
        token, slot = np.nonzero(row_of >= 0)
        products = Near(*(np.zeros(row_of.shape) for _ in range(2)))
        of_pairs = row_sums(rows[row_of[token, slot]], gradient[token])
        products.value[token, slot], products.error[token, slot] = of_pairs.value, of_pairs.error
        return wanted | {"d_rows": rounded(d_rows, dtype), "d_weights": products}

    return Program("unpermute", path, call, ("out",), draw, expect, gradients)


def row_sums(a: Near, b: Near) -> Near:
    """The sum of each row's products."""
    product = a * b
    n = product.value.shape[1]
    size = abs(product.value).sum(1)
    return Near(product.value.sum(1), product.error.sum(1) + n * 2.0**-24 * size)


def chunks(rng: Rng, path: str) -> Program:
    num_rows = int(rng.integers(1, 60 if path == "interpret" else 300))
    num_chunks = int(rng.integers(1, 70))
    width = one_of(rng, draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS)
    dtype = np.dtype(one_of(rng, _MOVED))
    with_probs = bool(rng.random() < 0.5)
    call = f"moe.sort_chunks_by_index(x, sizes, order, {'probs, ' * with_probs}implementation=how)"
    results = ("rows", *["probs"] * with_probs)
    gradients = ("x",) * (dtype.name in _MOVED[:3]) + ("probs",) * with_probs

    def draw(rng: Rng) -> Arrays:
        arrays = {
            "x": testing.hostile_values(rng, (num_rows, width), dtype),
            "sizes": draws.group_sizes(rng, num_chunks, num_rows),
            "order": rng.permutation(num_chunks).astype(np.int32),
        }
        if with_probs:
            arrays["probs"] = testing.hostile_values(rng, (num_rows,), np.float32)
            arrays["g_probs"] = rng.standard_normal(num_rows, np.float32)
        if "x" in gradients:
            arrays["g_rows"] = draws.values(rng, (num_rows, width), dtype)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        source = np.arange(num_rows)
        groups = spans(arrays["sizes"], num_rows)
        sorted_rows = np.concatenate([source[groups[chunk]] for chunk in arrays["order"]])
        source[: len(sorted_rows)] = sorted_rows
        inverse = np.argsort(source)
        of = {"rows": "x", "probs": "probs"}
        wanted = {name: arrays[of[name]][source] for name in results}
        return wanted | {
            f"d_{of[name]}": arrays[f"g_{name}"][inverse]
            for name in results
            if of[name] in gradients
        }

    return Program("sort_chunks_by_index", path, call, results, draw, expect, gradients)


OPS = (make_plan, permute, unpermute, chunks, make_plan_from_mask)
