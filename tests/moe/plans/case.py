"""make_plan and make_plan_from_mask: calls, hostile inputs, and plans from a stable sort."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of

FIELDS = ("row_of", "expert_of", "group_sizes", "group_counts", "group_filled", "num_dropped")


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


def spans(sizes: Array, num_rows: int, offset: int = 0, count: int | None = None) -> list[slice]:
    """The rows of each group: negative sizes are empty, and groups end at the last row."""
    ends = np.minimum(np.cumsum(np.clip(sizes.astype(np.int64), 0, num_rows)), num_rows)
    starts = np.concatenate([[0], ends[:-1]])
    which = range(offset, offset + (len(sizes) if count is None else count))
    there_are = range(len(sizes))
    return [slice(starts[g], ends[g]) if g in there_are else slice(0, 0) for g in which]


class Sizes(NamedTuple):
    """Of a plan: tokens, slots, experts, and `make_plan`'s options."""

    tokens: int
    slots: int
    experts: int
    align: int = 1
    capacity: int | None = None
    num_rows: int | None = None

    @property
    def rows(self) -> int:
        most = self.tokens * self.slots + self.experts * (self.align - 1)
        return most // self.align * self.align if self.num_rows is None else self.num_rows

    @property
    def options(self) -> str:
        named = {"align_size": self.align, "capacity": self.capacity, "num_rows": self.num_rows}
        given = "".join(f"{name}={value}, " for name, value in named.items() if value is not None)
        return f"{given}implementation=how"

    @property
    def source(self) -> str:
        """The call that makes it from ids."""
        return f"moe.make_plan(ids, {self.experts}, {self.options})"

    def ids(self, rng: Rng, dtype: Any = np.int32) -> Array:
        return draws.ids(rng, self.tokens, self.slots, self.experts, dtype)

    def plan(self, ids: Array) -> Plan:
        return plan_of(ids, self.experts, self.rows, self.capacity, self.align)


def draw_sizes(rng: Rng, path: str, distinct: bool = False) -> Sizes:
    small = path == "interpret"
    experts = one_of(rng, (1, 3, 8, 13, 64) if small else (1, 2, 5, 8, 16, 60, 128, 257))
    slots = int(rng.integers(1, min(9, experts + 1) if distinct else 9))
    tokens = int(rng.integers(1, 30 if small else one_of(rng, (4, 40, 200))))
    align = one_of(
        rng, [a for a in (1, 1, 4, 8, 16, 128) if a * experts <= (256 if small else 1024)]
    )
    sizes = Sizes(tokens, slots, experts, align)
    if rng.random() < 0.4:
        most = max(2, 3 * tokens * slots // experts)
        sizes = sizes._replace(capacity=int(rng.integers(0, most)))
    if rng.random() < 0.4:
        sizes = sizes._replace(num_rows=int(rng.integers(0, sizes.rows // align + 1)) * align)
    return sizes


def make_plan(path: str, sizes: Sizes, dtype: Any = "int32") -> Case:
    def draw(rng: Rng) -> Arrays:
        return {"ids": sizes.ids(rng, np.dtype(dtype))}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        return sizes.plan(arrays["ids"])._asdict()

    return Case("make_plan", path, sizes.source, FIELDS, draw, expect)


def make_plan_from_mask(path: str, sizes: Sizes, dtype: Any = "bool") -> Case:
    tokens, slots, experts = sizes[:3]
    call = f"moe.make_plan_from_mask(mask, {slots}, {sizes.options})"

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

    return Case("make_plan_from_mask", path, call, FIELDS, draw, expect)


def draw_plan(rng: Rng, path: str) -> Case:
    sizes = draw_sizes(rng, path)
    return make_plan(path, sizes, one_of(rng, ("int32", "int32", "int16", "uint32")))


def draw_plan_from_mask(rng: Rng, path: str) -> Case:
    sizes = draw_sizes(rng, path, distinct=True)
    return make_plan_from_mask(path, sizes, one_of(rng, ("bool", "int8", "int32")))


RANDOM = (draw_plan, draw_plan_from_mask)
