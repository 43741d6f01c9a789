"""make_plan and make_plan_from_mask: calls, hostile inputs, and plans from a stable sort."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.draws import Rng, one_of
from triax import moe
from triax.moe.plans import launchers
from triax.moe.plans.configs import FewPairsConfig, SortConfig

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


def sizes_of(of: ModelSizes, **options: int) -> Sizes:
    """Those of a layer, and `make_plan`'s options."""
    return Sizes(of.tokens, of.top_k, of.experts)._replace(**options)


def ready_plan(ids: Array, num_experts: int, **options: int) -> moe.Plan:
    """What `moe.make_plan` returns, with nothing to compile."""
    sizes = Sizes(len(ids), ids.shape[1], num_experts, **options)
    static: dict[str, Any] = {
        "num_rows": sizes.rows,
        "num_experts": num_experts,
        "align_size": sizes.align,
    }
    fields: dict[str, Any] = sizes.plan(ids)._asdict()
    return moe.Plan(**fields, **static)


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
        sizes = sizes._replace(capacity=int(rng.integers(1, most)))
    if rng.random() < 0.4:
        sizes = sizes._replace(num_rows=int(rng.integers(0, sizes.rows // align + 1)) * align)
    return sizes


def make_plan(path: str, sizes: Sizes, dtype: Any = "int32", within: Any = None) -> Case:
    def draw(rng: Rng) -> Arrays:
        return {"ids": sizes.ids(rng, np.dtype(dtype))}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        return sizes.plan(arrays["ids"])._asdict()

    case = Case("make_plan", path, sizes.source, FIELDS, draw, expect)
    case.within = within or contextlib.nullcontext
    case.kernels = ("place_few_pairs",)
    return case


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
        ids = np.pad(ids, ((0, 0), (0, slots - ids.shape[1])), constant_values=-1)
        plan = sizes.plan(ids)
        counts = mask.sum(0).astype(np.int32)
        dropped = np.asarray(counts.sum() - (plan.row_of >= 0).sum(), np.int32)
        return plan._replace(group_counts=counts, num_dropped=dropped)._asdict()

    case = Case("make_plan_from_mask", path, call, FIELDS, draw, expect)
    case.kernels = ("select_experts", "place_few_pairs")
    return case


def draw_plan(rng: Rng, path: str) -> Case:
    sizes = draw_sizes(rng, path)
    return make_plan(path, sizes, one_of(rng, ("int32", "int32", "int16", "uint32")))


def draw_plan_from_mask(rng: Rng, path: str) -> Case:
    sizes = draw_sizes(rng, path, distinct=True)
    return make_plan_from_mask(path, sizes, one_of(rng, ("bool", "int8", "int32")))


RANDOM = (draw_plan, draw_plan_from_mask)


@contextlib.contextmanager
def kernels_for(pairs: str, max_blocks: int = 3) -> Iterator[None]:
    """The kernels for "few" or "many" pairs, for any number of them, with blocks so small that
    every loop is run more than once."""
    bins: Any = lambda experts: 32 if experts < 512 else 512
    few: Any = {"heuristic": lambda experts: FewPairsConfig(bins(experts), block_others=32)}
    many: Any = {"heuristic": lambda experts: SortConfig(bins(experts), part=16)}
    most = 0 if pairs == "many" else 2048
    with (
        mock.patch.multiple(FewPairsConfig, max_pairs=most, **few),
        mock.patch.multiple(SortConfig, max_blocks=max_blocks, **many),
        mock.patch.dict(launchers._SCAN, BLOCK_BLOCKS=2, BLOCK_EXPERTS=256),
    ):
        yield


_SIZES = {
    "no tokens": Sizes(0, 2, 5, align=8),
    "one of each": Sizes(1, 1, 1, align=128, num_rows=640),
    "several parts": Sizes(33, 3, 8, align=8, num_rows=8),
    "more experts than pairs": Sizes(15, 6, 128, align=16, capacity=1, num_rows=32),
    "more experts than bins": Sizes(42, 2, 1100, align=2, capacity=9),
    "one slot": Sizes(100, 1, 5, capacity=3),
    "no slots": Sizes(4, 0, 3),
    "more rows than pairs": Sizes(17, 4, 5, align=4, capacity=8, num_rows=4000),
    "one pair each": Sizes(17, 4, 5, capacity=1),
    "no rows": Sizes(9, 4, 5, align=2, num_rows=0),
    **{  # groups that would end past 2**31 are cut off where the rows end
        f"aligned to {align}": Sizes(40, 2, 128, align=align, num_rows=align)
        for align in (2**20, 2**30, 2**31 - 1)
    },
}
# Those of the second line keep every expert and have too many for their ids to be sorted.
_MASKS = [(0, 2, 5), (33, 3, 8), (9, 4, 384)]
_MASKS += [(0, 20, 20), (70, 64, 64), (130, 40, 33), (7, 300, 300)]
_of = functools.partial
NAMED: dict[str, functools.partial[Case]] = {
    "plan": _of(make_plan, sizes=Sizes(17, 3, 5, align=8)),
    "mask": _of(make_plan_from_mask, sizes=Sizes(17, 3, 5, align=8)),
    **{
        f"plan, {name}{kernels and ', kernels for '}{kernels}": _of(
            make_plan, sizes=sizes, within=_of(kernels_for, kernels) if kernels else None
        )
        for name, sizes in _SIZES.items()
        for kernels in ("", "few", "many")
    },
    **{
        f"plan, {dtype}": _of(make_plan, sizes=Sizes(30, 2, 384), dtype=dtype)
        for dtype in ("uint8", "uint32", "int64")
    },
    **{
        # More than one program looks at together: blocks of many parts, and of no whole number.
        f"plan, {tokens} tokens, {blocks} blocks": _of(
            make_plan,
            sizes=Sizes(tokens, 3, 3, align=8),
            within=_of(mock.patch.object, SortConfig, "max_blocks", blocks),
        )
        for tokens, blocks in ((456, 1), (684, 2), (2000, 20))
    },
    **{
        f"mask, {tokens} tokens, {slots} of {experts} experts": _of(
            make_plan_from_mask,
            sizes=Sizes(tokens, slots, experts, align, capacity),
            dtype=("bool", "int8", "uint32")[i % 3],
        )
        for i, (tokens, slots, experts) in enumerate(_MASKS)
        for align, capacity in [((1, None), (8, 7), (16, None))[i % 3]]
    },
}
SIZED: dict[str, Sized] = {
    "plan": lambda path, of: make_plan(path, sizes_of(of)),
    "plan, aligned": lambda path, of: make_plan(path, sizes_of(of, align=4, capacity=3)),
    "mask": lambda path, of: make_plan_from_mask(path, sizes_of(of, align=4)),
    "mask, capacity": lambda path, of: make_plan_from_mask(path, sizes_of(of, slots=2, capacity=3)),
}
LARGE: dict[str, functools.partial[Case]] = {
    f"mask, {tokens} tokens, {slots} of {experts} experts": _of(
        make_plan_from_mask, sizes=Sizes(tokens, slots, experts, align=8)
    )
    for tokens, slots, experts in (
        (3000, 8, 100),
        (1, 17, 17),
        (3000, 100, 100),
        (20_000, 256, 256),
        (500, 1100, 1100),
    )
} | {
    f"plan, {name}": _of(make_plan, sizes=sizes)
    for name, sizes in (
        ("Mixtral", Sizes(8192, 2, 8, align=8)),
        ("DeepSeek-V3", Sizes(16384, 8, 256, align=8)),
        ("gpt-oss", Sizes(4096, 4, 128, align=8)),
        ("Kimi K2", Sizes(4096, 8, 384, align=8)),
        ("Llama 4", Sizes(8192, 1, 128, align=8)),
    )
}
