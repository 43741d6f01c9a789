"""token_dispatch and token_combine, as TransformerEngine documents them.

Rows are grouped by expert in the order of tokens, each group padded to the alignment. A row map has
three parts: the rows, not counting pad rows; their experts; and how many there are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array, exact, rounded
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import back, move, summed, weighted_sums
from tests.moe.plans.case import plan_of
from triax.moe import transformer_engine as te


class Map(NamedTuple):
    """Tokens, experts, the width of the tokens, and `token_dispatch`'s options."""

    tokens: int
    experts: int
    width: int
    top_k: int | None = None
    align: int | None = None
    num_out: int | None = None
    dtype: Any = "float32"
    probs: bool = True
    map_dtype: str = "bool"
    is_3d: bool = False

    @property
    def out(self) -> int:
        most = self.tokens * (self.top_k or self.experts)
        return most if self.num_out is None else self.num_out

    @property
    def rows(self) -> int:
        align = self.align or 1
        return (self.out + self.experts * (align - 1)) // align * align

    def shaped(self, array: Array) -> Array:
        return array.reshape(3, -1, array.shape[1]) if self.is_3d else array

    def draw(self, rng: Rng) -> Array:
        """Some experts have most tokens or none, and some tokens more experts than slots."""
        each = self.top_k or self.experts
        density = draws.shares(rng, self.experts) * each * one_of(rng, (0.5, 1, 3))
        return np.asarray(rng.random((self.tokens, self.experts)) < density)

    def routed(self, mask: Array) -> tuple[Array, Array, Array, Array]:
        """The row of each token and expert, row maps, pads before each expert, and group sizes."""
        slots = self.top_k or self.experts
        mask = mask & (np.cumsum(mask, 1) <= slots)
        ids = np.where(mask, np.arange(self.experts), -1)
        plan = plan_of(ids, self.experts, self.rows, None, self.align or 1)
        pads = plan.group_sizes - plan.group_filled
        offsets = (np.cumsum(pads) - pads).astype(np.int32)
        has_row = plan.row_of >= 0
        row_id_map = np.full((self.tokens, 2 * slots + 1), -1, np.int32)
        for token, experts in enumerate(map(np.flatnonzero, has_row)):
            row_id_map[token, : len(experts)] = plan.row_of[token, experts] - offsets[experts]
            row_id_map[token, slots : slots + len(experts)] = experts
        row_id_map[:, -1] = has_row.sum(1)
        return plan.row_of, row_id_map, offsets, plan.group_sizes


def dispatch(path: str, **settings: Any) -> Case:
    given = Map(**settings)
    dtype, probs = np.dtype(given.dtype), given.probs
    call = f"te.token_dispatch(inp, routing_map, {given.out}, {'probs' if probs else None}, "
    call += f"align_size={given.align}, top_k={given.top_k}, implementation=how)"
    results = ["output", *["permuted_probs"] * probs, "row_id_map"]
    results += [*["pad_offsets"] * (given.align is not None), "tokens_per_expert"]

    def draw(rng: Rng) -> Arrays:
        mask = given.shaped(given.draw(rng))
        arrays = {
            "inp": given.shaped(draws.bits(rng, (given.tokens, given.width), dtype)),
            "routing_map": np.where(mask, one_of(rng, (1, 2)), 0).astype(given.map_dtype),
            "g_output": draws.values(rng, (given.rows, given.width), dtype),
        }
        if probs:
            weights = draws.values(rng, (given.tokens, given.experts), np.float32, "zeros")
            arrays["probs"] = given.shaped(weights)
            arrays["g_permuted_probs"] = draws.values(rng, (given.rows,), np.float32)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        flat = {n: a.reshape(-1, a.shape[-1]) for n, a in arrays.items() if n[:2] != "g_"}
        row_of, row_id_map, offsets, sizes = given.routed(flat["routing_map"] != 0)
        d_inp = rounded(summed(exact(arrays["g_output"]), row_of), dtype)
        wanted: dict[str, Any] = {
            "output": move(flat["inp"], row_of, given.rows),
            "row_id_map": row_id_map,
            "tokens_per_expert": sizes,
            "d_inp": type(d_inp)(given.shaped(d_inp.value), given.shaped(d_inp.error)),
        }
        if given.align is not None:
            wanted["pad_offsets"] = offsets
        if probs:
            wanted["permuted_probs"] = move(flat["probs"], row_of, given.rows, by_slot=True)
            wanted["d_probs"] = given.shaped(back(arrays["g_permuted_probs"], row_of))
        return wanted

    gradients = ("inp", *["probs"] * probs)
    names = {"te": te}
    return Case("token_dispatch", path, call, (*results,), draw, expect, gradients, names)


def combine(path: str, **settings: Any) -> Case:
    given = Map(**settings)
    dtype, probs, slots = np.dtype(given.dtype), given.probs, given.top_k or given.experts
    options = "merging_probs, " if probs else "None, "
    options += "pad_offsets, " if given.align is not None else "None, "
    call = f"te.token_combine(inp, row_id_map, {options}implementation=how)"

    def draw(rng: Rng) -> Arrays:
        row_of, row_id_map, offsets, _ = given.routed(given.draw(rng))
        rows = draws.values(rng, (given.rows, given.width), dtype)
        rows[~np.isin(np.arange(given.rows), row_of)] = np.nan
        if rng.random() < 0.5:  # as TransformerEngine's kernels write it: experts descend
            for row, count in zip(row_id_map, row_id_map[:, -1], strict=True):
                for part in (row[:slots], row[slots:-1]):
                    part[:count], part[count:] = part[:count][::-1].copy(), 7
        arrays = {"inp": rows, "row_id_map": row_id_map}
        if probs:
            weights = draws.values(rng, row_of.shape, np.float32)
            arrays["merging_probs"] = given.shaped(np.where(row_of < 0, np.float32("nan"), weights))
        if given.align is not None:
            arrays["pad_offsets"] = offsets
        arrays["g_out"] = draws.values(rng, (given.tokens, given.width), dtype)
        arrays["g_out"][rng.random(given.tokens) < 0.1] = np.nan
        return arrays

    def row_of(arrays: Arrays) -> Array:
        found = np.full((given.tokens, given.experts), -1)
        pads = arrays.get("pad_offsets", np.zeros(given.experts, np.int32))
        for token, row in enumerate(arrays["row_id_map"]):
            experts = row[slots : slots + row[-1]]
            found[token, experts] = row[: row[-1]] + pads[experts]
        return found

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        weights = arrays["merging_probs"].reshape(-1, given.experts) if probs else None
        wanted = weighted_sums(arrays["inp"], weights, arrays["g_out"], row_of(arrays))
        result = {"out": wanted["out"], "d_inp": wanted["d_rows"]}
        if probs:
            d = wanted["d_weights"]
            result["d_merging_probs"] = type(d)(given.shaped(d.value), given.shaped(d.error))
        return result

    gradients = ("inp", *["merging_probs"] * probs)
    return Case("token_combine", path, call, ("out",), draw, expect, gradients, {"te": te})


_ORDINARY: dict[str, Any] = {"tokens": 12, "experts": 6, "width": 5}
_SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", top_k": {"top_k": 2, "probs": False, "is_3d": True, "map_dtype": "float32"},
    ", top_k and padding": {"top_k": 2, "align": 4, "is_3d": True, "map_dtype": "int32"},
    ", no padding asked for": {"top_k": 4, "align": 1, "is_3d": True},
    ", padding": {"align": 4, "probs": False, "map_dtype": "bfloat16"},
    ", bfloat16": {"align": 4, "dtype": "bfloat16"},
    ", no rows": {"num_out": 0},
    ", 20 rows": {"num_out": 20},
    ", 7 rows and padding": {"num_out": 7, "align": 4},
    ", 24 experts": {"experts": 24, "top_k": 5, "align": 8},
}
NAMED: dict[str, functools.partial[Case]] = {
    f"TransformerEngine's {op.__name__}{name}": functools.partial(op, **_ORDINARY | settings)
    for op in (dispatch, combine)
    for name, settings in _SETTINGS.items()
}
