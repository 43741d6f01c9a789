"""TransformerEngine's functions, as it documents them: by maps, by ids, its router and its chunks.

By maps, rows are grouped by expert in the order of tokens, each group padded to the alignment. A
row map has three parts: the rows, not counting pad rows; their experts; and how many there are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.moe import draws
from tests.moe.bounds import U32, Array, Near, Some, exact, rounded
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.chunk_sort.case import sort_chunks
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import back, move, summed, weighted_sums
from tests.moe.plans.case import Sizes, plan_of, sizes_of
from tests.moe.products.case import ragged_dot
from tests.moe.router.case import Spec, harden
from triax.moe import transformer_engine as te


class Map(NamedTuple):
    """Tokens, experts, the width of the tokens, and `token_dispatch`'s options.

    `each` is how many experts a token has about, by default as many as there may be.
    """

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
    each: int | None = None

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
        each = self.each or self.top_k or self.experts
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
    case = Case("token_dispatch", path, call, (*results,), draw, expect, gradients, names)
    case.moved, case.columns = gradients, ("inp",)
    return case


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
    case = Case("token_combine", path, call, ("out",), draw, expect, gradients, {"te": te})
    case.columns = ("inp",)
    return case


def select(path: str, **settings: Any) -> Case:
    """A map and probs, as ids and weights."""
    given = Map(**settings)
    slots = given.top_k or given.experts
    call = f"te.routing_map_to_selected_experts(probs, routing_map, {slots}, implementation=how)"

    def draw(rng: Rng) -> Arrays:
        mask = given.draw(rng)
        one = 0.5 if given.map_dtype == "float32" else 1
        return {
            "probs": given.shaped(draws.values(rng, mask.shape, np.float32)),
            "routing_map": given.shaped(np.where(mask, one, 0).astype(given.map_dtype)),
            "g_weights": given.shaped(draws.values(rng, (given.tokens, slots), np.float32)),
        }

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        flat = {n: a.reshape(given.tokens, -1) for n, a in arrays.items()}
        selected = np.full((given.tokens, slots), -1, np.int32)
        weights = np.zeros((given.tokens, slots), np.float32)
        d_probs = np.zeros((given.tokens, given.experts))
        for token, mask in enumerate(flat["routing_map"] != 0):
            experts = np.flatnonzero(mask)[:slots]
            at = token, slice(len(experts))
            selected[at], weights[at] = experts, flat["probs"][token, experts]
            d_probs[token, experts] = flat["g_weights"][at]
        return {
            "selected": given.shaped(selected),
            "weights": given.shaped(weights),
            "d_probs": Near(given.shaped(d_probs)),
        }

    names = {"te": te}
    results = ("selected", "weights")
    return Case("selected_experts", path, call, results, draw, expect, ("probs",), names)


def by_ids(
    path: str,
    sizes: Sizes,
    width: int,
    roll: int | None = None,
    align: int = 0,
    is_3d: bool = False,
    ids: Any = "int32",
) -> Case:
    """There and back; `align` may be 0 for none, and experts `roll` are first."""
    sizes = sizes._replace(align=max(align, 1))
    tokens, slots, experts = sizes[:3]
    lead = (2, tokens // 2) if is_3d else (tokens,)
    shaped: Any = lambda array: array.reshape(*lead, -1)

    def there_and_back(x: Any, ids: Any, weights: Any, how: Any) -> Any:
        rows, state, group_sizes = te.pure_jax_token_dispatch(
            x, ids, experts, slots, align, roll, implementation=how
        )
        sums = te.pure_jax_token_combine(
            rows, state, weights, slots, 2, tokens // 2, implementation=how
        )
        return rows, sums, group_sizes

    def rows_of(ids: Array) -> Array:
        ids = ids.reshape(tokens, slots)
        known = (ids >= 0) & (ids < experts)
        return np.where(known, (ids.astype(np.int64) - (roll or 0)) % experts, -1)

    def draw(rng: Rng) -> Arrays:
        kind = "wild" if ids == "int64" else None
        drawn = draws.ids(rng, tokens, slots, experts, ids, kind)
        row_of = sizes.plan(rows_of(drawn)).row_of
        weights = draws.values(rng, (tokens, slots), np.float32)
        weights[row_of < 0] = np.nan
        arrays = {
            "x": shaped(draws.values(rng, (tokens, width), np.float32)),
            "ids": shaped(drawn),
            "weights": shaped(weights),
            "g_rows": draws.values(rng, (sizes.rows, width), np.float32),
            "g_sums": draws.values(rng, (2, tokens // 2, width), np.float32),
        }
        arrays["g_rows"][~np.isin(np.arange(sizes.rows), row_of)] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        plan = sizes.plan(rows_of(arrays["ids"]))
        x, weights, g = (arrays[n].reshape(tokens, -1) for n in ("x", "weights", "g_sums"))
        rows = move(x, plan.row_of, sizes.rows)
        back = weighted_sums(rows, weights, g, plan.row_of)
        d_x = summed(exact(arrays["g_rows"]) + back["d_rows"], plan.row_of)
        reshaped: Any = lambda of, *shape: Near(of.value.reshape(shape), of.error.reshape(shape))
        return {
            "rows": rows,
            "sums": reshaped(back["out"], 2, tokens // 2, width),
            "group_sizes": plan.group_sizes,
            "d_x": reshaped(rounded(d_x, np.float32), *lead, width),
            "d_weights": reshaped(back["d_weights"], *lead, slots),
        }

    call = "there_and_back(x, ids, weights, how)"
    names = {"there_and_back": there_and_back}
    results, gradients = ("rows", "sums", "group_sizes"), ("x", "weights")
    return Case("pure_jax_token", path, call, results, draw, expect, gradients, names)


def route(
    path: str,
    spec: Spec,
    tokens: int,
    pre: bool = False,
    aux: bool = False,
    bits: str = "",
    dtype: Any = "float32",
) -> Case:
    """Scores of chosen experts, or of all with `aux`, and a map of the chosen, which may be in
    bits by that name of the format."""
    experts, top_k, score = spec.experts, spec.top_k, spec.score
    dtype = np.dtype(dtype)
    count, top, _ = spec.groups or (-1, -1, 0)
    call = f"te.fused_topk_with_score_function(logits, {top_k}, {pre}, {count}, {top}, "
    call += f"{spec.scale}, {score!r}, {'bias' if spec.biased else None}, {aux}, "
    call += f"routing_map_format={bits}, " * bool(bits) + "implementation=how)"
    weighing = spec
    if aux:
        weighing = Spec(experts, experts, score, score != "softmax")

    def draw(rng: Rng) -> Arrays:
        arrays = {"logits": spec.logits(rng, tokens)}
        harden(rng, arrays["logits"], spec, one_of(rng, ("low", "far", "alike", "last", "", "")))
        arrays["logits"] = arrays["logits"].astype(dtype)
        if spec.biased:
            arrays["bias"] = rng.standard_normal(experts, np.float32)
        shape, of = (tokens, experts), np.float32 if aux else dtype
        return arrays | {"g_probs": draws.values(rng, shape, of)}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        logits = arrays["logits"].astype(np.float32)
        choice = Spec(experts, top_k) if aux else spec
        chosen, sure = choice.choose(logits, arrays.get("bias"))
        wanted = np.zeros((tokens, experts), bool)
        np.put_along_axis(wanted, chosen, True, 1)
        mask = found["map"]
        if bits:
            mask = np.unpackbits(mask, axis=1, count=experts, bitorder="little").astype(bool)
            wanted = np.packbits(wanted, axis=1, bitorder="little")
        certain = sure | (mask.sum(1) != top_k)  # else any that are different
        taken = np.broadcast_to(np.arange(experts), mask.shape)
        if not aux:
            taken = np.argsort(~mask, axis=1, kind="stable")[:, :top_k].astype(np.int32)
        weights, gradient = weighing.weigh(logits, taken)
        probs = Near(*(np.zeros(mask.shape) for _ in range(2)))
        for into, of in ((probs.value, weights.value), (probs.error, weights.error)):
            np.put_along_axis(into, taken, of, 1)
        g = np.take_along_axis(arrays["g_probs"].astype(np.float64), taken, 1)
        result = {
            "probs": rounded(probs, arrays["g_probs"].dtype),
            "map": Some(wanted, np.broadcast_to(certain[:, None], wanted.shape)),
            "d_logits": rounded(gradient(Near(g)), dtype),
        }
        return result | ({"d_bias": np.zeros(experts, np.float32)} if spec.biased else {})

    gradients = ("logits", *["bias"] * spec.biased)
    case = Case("fused_topk", path, call, ("probs", "map"), draw, expect, gradients, {"te": te})
    case.widest = "float32"
    return case


def chunks(path: str, is_3d: bool = False, **settings: Any) -> Case:
    """Chunks that there is room for, and where each row went."""
    of = sort_chunks(path, probs="", **settings)

    def draw(rng: Rng) -> Arrays:
        arrays = of.draw(rng)
        rows, width = arrays["x"].shape
        sizes = rng.multinomial(rows, draws.shares(rng, len(arrays["sizes"]))) // one_of(
            rng, (1, 2)
        )
        x = arrays["x"].reshape(2, rows // 2, width) if is_3d else arrays["x"]
        return arrays | {"x": x, "sizes": sizes.astype(np.int32)}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        x = arrays["x"]
        wanted = of.expect(arrays | {"x": x.reshape(-1, x.shape[-1])}, found)
        numbers = {"x": np.arange(len(arrays["g_rows"]), dtype=np.int32)}
        numbers["g_rows"] = numbers["x"]
        target = of.expect(arrays | numbers, found)["d_x"]
        return wanted | {"d_x": wanted["d_x"].reshape(x.shape), "row_id_map": target}

    call = "te.sort_chunks_by_index(x, sizes, order, implementation=how)"
    results = ("rows", "row_id_map")
    return Case("te_chunks", path, call, results, draw, expect, ("x",), {"te": te})


def aux_loss(path: str, tokens: int, experts: int, dtype: Any = "float32") -> Case:
    def draw(rng: Rng) -> Arrays:
        return {
            "probs": draws.values(rng, (tokens, experts), dtype, one_of(rng, draws.KINDS[:4])),
            "counts": rng.multinomial(2 * tokens, draws.shares(rng, experts)).astype(np.int32),
            "g_loss": draws.values(rng, (), dtype),
        }

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        factor = experts * 0.1 * arrays["counts"] / (2 * tokens**2)
        terms = arrays["probs"].astype(np.float64) * factor
        d_probs = np.broadcast_to(float(arrays["g_loss"]) * factor, terms.shape)
        loss = Near(terms.sum(), (tokens + experts + 8) * U32 * abs(terms).sum())
        back = Near(d_probs, 8 * U32 * abs(d_probs))
        return {"loss": rounded(loss, dtype), "d_probs": rounded(back, dtype)}

    call = "te.fused_moe_aux_loss(probs, counts, 2, 0.1)"
    return Case("aux_loss", path, call, ("loss",), draw, expect, ("probs",), {"te": te})


def dense(path: str, dtype: Any = "float32", **settings: Any) -> Case:
    """`ragged_dot` by another name; the default precision of it is another, too."""
    of = ragged_dot(path, (31, 24, 10, 4), dtype, **settings)
    call = of.call.replace("moe.ragged_dot(", "te.grouped_dense(")
    call = call.replace("transpose_weights=True", "contracting_dims=((1,), (2,))")
    call = call.replace("implementation=", "precision='highest', implementation=")
    return dataclasses.replace(of, op="grouped_dense", call=call, names={"te": te}, kernels=())


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
    ", 32 experts, any number": {"experts": 32, "num_out": 64, "align": 4, "each": 4},
}
_SIGMOID: dict[str, Any] = {"score": "sigmoid", "normalize": True, "scale": 1.2}
_ROUTERS: dict[str, dict[str, Any]] = {
    "one": {"spec": Spec(16, 1, "softmax", True, 1.2)},
    "softmax, groups": {"spec": Spec(16, 8, "softmax", True, 1.2, (4, 2, 4), by_logits=True)},
    "softmax before": {"spec": Spec(16, 4, scale=1.2), "pre": True},
    "softmax before, groups": {"spec": Spec(16, 2, scale=1.2, groups=(4, 2, 1)), "pre": True},
    "sigmoid of one": {"spec": Spec(16, 1, "sigmoid", False, 1.2)},
    "sigmoid": {"spec": Spec(16, 8, **_SIGMOID, groups=(4, 2, 4))},
    "sigmoid, bias": {"spec": Spec(16, 4, **_SIGMOID, biased=True)},
    "sqrtsoftplus, bias": {
        "spec": Spec(16, 2, "sqrtsoftplus", True, groups=(4, 2, 1), biased=True)
    },
    "bfloat16": {"spec": Spec(24, 3, "softmax", True), "dtype": "bfloat16"},
    **{
        f"bits, {name}": {"spec": Spec(13, 3, "softmax", True), "bits": name}
        for name in ("'bitmap_u8'", "1", "te.RoutingMapFormat.BITMAP_U8")
    },
    **{
        f"auxiliary scores, {score}": {"spec": Spec(16, 4, score), "aux": True}
        for score in ("softmax", "sigmoid", "sqrtsoftplus")
    },
}
_IDS: dict[str, dict[str, Any]] = {
    "padding": {"align": 8},
    "no padding": {"is_3d": True},
    "rolled": {"roll": 3, "align": 1, "is_3d": True},
    "rolled, padding": {"roll": 6, "align": 8},
    "64 bits": {"roll": 1, "ids": "int64"},
}
_OTHERS: tuple[tuple[str, Callable[..., Case], dict[str, Any]], ...] = (
    ("selected experts, 2", select, _ORDINARY | {"top_k": 2}),
    ("selected experts, all", select, _ORDINARY | {"is_3d": True, "map_dtype": "int32"}),
    ("selected experts, floats", select, _ORDINARY | {"top_k": 2, "map_dtype": "float32"}),
    *(
        (f"loss, {dtype}", aux_loss, {"tokens": 20, "experts": 6, "dtype": dtype})
        for dtype in ("float32", "bfloat16")
    ),
    ("chunks, 3-D", chunks, {"rows": 70, "width": 5, "chunks": 6, "is_3d": True}),
    ("chunks, 2-D", chunks, {"rows": 33, "width": 5, "chunks": 6}),
    ("dense, biased", dense, {"bias": "float32"}),
    ("dense, transposed", dense, {"bias": "float32", "transposed": True, "dtype": "bfloat16"}),
    ("dense, to float32", dense, {"dtype": "bfloat16", "result": "float32"}),
    *(
        (f"ids, {name}", by_ids, {"sizes": Sizes(12, 2, 4), "width": 5} | settings)
        for name, settings in _IDS.items()
    ),
    *((f"router, {name}", route, {"tokens": 20} | of) for name, of in _ROUTERS.items()),
)
NAMED: dict[str, functools.partial[Case]] = {
    f"TransformerEngine's {op.__name__}{name}": functools.partial(op, **_ORDINARY | settings)
    for op in (dispatch, combine)
    for name, settings in _SETTINGS.items()
} | {
    f"TransformerEngine's {name}": functools.partial(op, **settings)
    for name, op, settings in _OTHERS
}
# Maps as wide as the experts, of which tokens have a few.
LARGE: dict[str, functools.partial[Case]] = {
    f"TransformerEngine's {op.__name__}, {tokens} tokens, {width} wide, {align}": functools.partial(
        op,
        tokens=tokens,
        experts=256,
        width=width,
        num_out=8 * tokens,
        align=align,
        dtype="bfloat16",
        each=8,
    )
    for op in (dispatch, combine)
    for tokens, width, align in ((1, 64, None), (400, 515, 128), (500, 1024, None))
}


def _sized(op: Callable[..., Case], **settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        return op(
            path, tokens=of.tokens, experts=of.experts, width=of.hidden, dtype=of.dtype, **settings
        )

    return made


SIZED: dict[str, Sized] = {
    "TransformerEngine's dispatch": _sized(dispatch),
    "TransformerEngine's dispatch, padding": _sized(dispatch, align=4),
    "TransformerEngine's combine": _sized(combine),
    "TransformerEngine's combine, padding": _sized(combine, align=4),
    "TransformerEngine's selected experts": _sized(select),
    "TransformerEngine's ids": lambda path, of: by_ids(
        path, sizes_of(of)._replace(tokens=2 * of.tokens), of.hidden, roll=1, align=4
    ),
    "TransformerEngine's router": lambda path, of: route(
        path, Spec(of.experts, of.top_k, "sigmoid", biased=True), of.tokens, bits="1"
    ),
    "TransformerEngine's scores": lambda path, of: route(
        path, Spec(of.experts, of.top_k), of.tokens, aux=True
    ),
    "TransformerEngine's loss": lambda path, of: aux_loss(path, of.tokens, of.experts, of.dtype),
    "TransformerEngine's chunks": lambda path, of: chunks(
        path, rows=of.rows, width=of.hidden, chunks=of.experts, dtype=of.dtype
    ),
}
# What tests look at first: others are as these.
QUICK = [
    name
    for name in NAMED
    if "router" not in name
    or name.endswith(
        ("softmax, groups", "sigmoid of one", "sigmoid, bias", "scores, sigmoid", " 1")
    )
]
