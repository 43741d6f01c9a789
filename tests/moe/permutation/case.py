"""permute and unpermute: calls, hostile inputs, and what results must be. Moves are exact; sums and
their gradients are bounded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array, Near, Some, exact, rounded
from tests.moe.case import Arrays, Case, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.plans.case import Sizes, draw_sizes, sizes_of
from triax import moe

FLOATS = ("float32", "bfloat16", "float16")
MOVED = (*FLOATS, "int8", "int32", "float8_e4m3fn", "bool")


def move(x: Array, row_of: Array, num_rows: int, by_slot: bool = False) -> Array:
    """What belongs to a token, or to a token and slot, moved to its rows; zeros elsewhere."""
    rows = np.zeros((num_rows, *x.shape[1 + by_slot :]), x.dtype)
    token, slot = np.nonzero(row_of >= 0)
    rows[row_of[token, slot]] = x[token, slot] if by_slot else x[token]
    return rows


def back(rows: Array, row_of: Array) -> Array:
    """What belongs to a row moved to its token and slot, [tokens, slots, …]; zeros elsewhere."""
    padded = np.concatenate([rows, np.zeros_like(rows, shape=(1, *rows.shape[1:]))])
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


def row_sums(a: Near, b: Near) -> Near:
    """The sum of each row's products."""
    product = a * b
    n = product.value.shape[1]
    size = abs(product.value).sum(1)
    return Near(product.value.sum(1), product.error.sum(1) + n * 2.0**-24 * size)


def weighted_sums(
    rows: Array, weights: Array | None, gradient: Array, row_of: Array
) -> dict[str, Any]:
    """The sums of each token's rows, times their weights, and the gradients of both."""
    num_rows, g = len(rows), exact(gradient)
    by_slot = None if weights is None else exact(weights)
    wanted: dict[str, Any] = {"out": rounded(summed(exact(rows), row_of, by_slot), rows.dtype)}
    spread = exact(move(g.value, row_of, num_rows))
    if weights is None or by_slot is None:
        return wanted | {"d_rows": rounded(spread, rows.dtype)}
    by_row = exact(move(by_slot.value, row_of, num_rows, by_slot=True)[:, None])
    taken = np.isin(np.arange(num_rows), row_of)[:, None]
    d_rows = by_row * spread
    d_rows = Near(np.where(taken, d_rows.value, 0), np.where(taken, d_rows.error, 0))
    token, slot = np.nonzero(row_of >= 0)
    products = Near(*(np.zeros(row_of.shape) for _ in range(2)))
    of_pairs = row_sums(exact(rows[row_of[token, slot]]), g[token])
    products.value[token, slot], products.error[token, slot] = of_pairs.value, of_pairs.error
    return wanted | {
        "d_rows": rounded(d_rows, rows.dtype),
        "d_weights": rounded(products, weights.dtype),
    }


# Rows that no plan names, by what is wrong.
ROWS = {"far": 2**31 - 1, "past": None, "negative": -(2**31)}


def damaged(plan: moe.Plan, how: str) -> moe.Plan:
    """A plan with rows that do not exist, or wrong sizes of groups."""
    if how != "sizes":
        wrong = plan.num_rows if ROWS[how] is None else ROWS[how]
        return dataclasses.replace(plan, row_of=plan.row_of.at[::3].set(wrong))
    most, least = 2**31 - 1, -(2**31)
    fill = functools.partial(jnp.resize, new_shape=plan.group_sizes.shape)
    return dataclasses.replace(
        plan,
        group_sizes=fill(jnp.array([most, -5, most, 7, least], jnp.int32)),
        group_filled=fill(jnp.array([-9, most, 3, least, 1], jnp.int32)),
    )


@dataclasses.dataclass(frozen=True)
class Moved:
    """Rows that are moved by a plan, which may be damaged."""

    sizes: Sizes
    damage: str = ""

    @property
    def source(self) -> str:
        made = self.sizes.source
        return f"damaged({made}, {self.damage!r})" if self.damage else made

    def row_of(self, arrays: Arrays) -> Array:
        row_of = self.sizes.plan(arrays["ids"]).row_of
        if self.damage and self.damage != "sizes":
            row_of[::3] = -1
        return row_of

    def rows(self, wanted: Any, row_of: Array) -> Any:
        """What there must be in rows: where the plan is damaged, in those of tokens, if at all."""
        if not self.damage:
            return wanted
        taken = np.isin(np.arange(self.sizes.rows), row_of) & (self.damage != "sizes")
        shape = (wanted.value if isinstance(wanted, Near) else wanted).shape
        return Some(wanted, np.broadcast_to(taken.reshape(-1, *[1] * (len(shape) - 1)), shape))


def _case(op: str, path: str, plan: Moved, *rest: Any) -> Case:
    case = Case(op, path, *rest)
    case.names = {"damaged": damaged}
    case.is_checked = plan.damage != "sizes"  # rows are then written twice
    case.is_derivative = not plan.damage
    return case


def permute(
    path: str,
    sizes: Sizes,
    width: int,
    dtype: Any = "float32",
    weights: Any = "float32",
    scales: Any = "float32",
    damage: str = "",
) -> Case:
    """`weights` and `scales` are dtypes, or "" for none."""
    dtype, plan = np.dtype(dtype), Moved(sizes, damage)
    differentiates = jnp.issubdtype(dtype, jnp.floating)
    is_scaled = bool(scales) and np.dtype(scales).itemsize > 1
    gradients = ("x",) * differentiates + ("weights",) * bool(weights) + ("scales",) * is_scaled
    options = "weights=weights, " * bool(weights) + "scales=scales, " * bool(scales)
    call = f"moe.permute(x, {plan.source}, {options}implementation=how)"
    moved = {"rows": "x"} | ({"weights": "weights"} if weights else {})
    moved |= {"scales": "scales"} if scales else {}

    def draw(rng: Rng) -> Arrays:
        arrays = {"ids": sizes.ids(rng)}
        empty = ~np.isin(np.arange(sizes.rows), plan.row_of(arrays))
        arrays["x"] = draws.bits(rng, (sizes.tokens, width), dtype)
        if differentiates:
            kind = one_of(rng, draws.KINDS if dtype.itemsize > 1 else ("normal",))
            arrays["g_rows"] = draws.values(rng, (sizes.rows, width), dtype, kind)
            arrays["g_rows"][empty] = np.nan
        if weights:
            shape = (sizes.tokens, sizes.slots)
            arrays["weights"] = draws.bits(rng, shape, weights)
            arrays["g_weights"] = draws.values(rng, (sizes.rows,), weights)
            arrays["g_weights"][empty] = np.nan
        if scales:
            arrays["scales"] = draws.bits(rng, (sizes.tokens, 3), scales)
        if is_scaled:
            arrays["g_scales"] = draws.values(rng, (sizes.rows, 3), scales)
            arrays["g_scales"][empty] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        row_of = plan.row_of(arrays)
        wanted: dict[str, Any] = {
            name: plan.rows(move(arrays[of], row_of, sizes.rows, name == "weights"), row_of)
            for name, of in moved.items()
        }
        if differentiates:
            wanted["d_x"] = rounded(summed(exact(arrays["g_rows"]), row_of), dtype)
        if weights:
            wanted["d_weights"] = back(arrays["g_weights"], row_of)
        if is_scaled:
            wanted["d_scales"] = rounded(summed(exact(arrays["g_scales"]), row_of), scales)
        return wanted

    case = _case("permute", path, plan, call, (*moved,), draw, expect, gradients)
    case.moved, case.columns = gradients, ("x",)
    case.kernels = ("place_few_pairs", "permute", *["unpermute"] * (1 + is_scaled))
    return case


def unpermute(
    path: str,
    sizes: Sizes,
    width: int,
    dtype: Any = "float32",
    weights: Any = "float32",
    damage: str = "",
) -> Case:
    dtype, plan = np.dtype(dtype), Moved(sizes, damage)
    call = f"moe.unpermute(rows, {plan.source}, {'weights, ' * bool(weights)}implementation=how)"
    gradients = ("rows", *["weights"] * bool(weights))

    def draw(rng: Rng) -> Arrays:
        kind = one_of(rng, draws.KINDS if dtype.itemsize > 1 else ("normal",))
        arrays = {
            "ids": sizes.ids(rng),
            "rows": draws.values(rng, (sizes.rows, width), dtype, kind),
            "g_out": draws.values(rng, (sizes.tokens, width), dtype),
        }
        row_of = plan.row_of(arrays)
        taken = np.isin(np.arange(sizes.rows), row_of)
        if weights:
            of_weights = one_of(rng, (kind, "normal", "zeros"))
            arrays["weights"] = draws.values(rng, row_of.shape, weights, of_weights)
            arrays["weights"][row_of < 0] = np.nan
        arrays["rows"][~taken] = np.nan
        if kind == "normal" and rng.random() < 0.3:
            draws.plant(rng, arrays["rows"], slice(None))
        if rng.random() < 0.3:
            arrays["g_out"][rng.random(sizes.tokens) < 0.2] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        row_of = plan.row_of(arrays)
        wanted = weighted_sums(arrays["rows"], arrays.get("weights"), arrays["g_out"], row_of)
        return wanted | {"d_rows": plan.rows(wanted["d_rows"], row_of)}

    case = _case("unpermute", path, plan, call, ("out",), draw, expect, gradients)
    case.columns = ("rows",)
    case.kernels = ("place_few_pairs", "unpermute", "unpermute_grad" if weights else "permute")
    return case


def draw_permute(rng: Rng, path: str) -> Case:
    sizes = draw_sizes(rng, path)
    width = one_of(rng, draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS)
    dtype = one_of(rng, FLOATS if rng.random() < 0.6 else MOVED)
    weights, scales = ("float32" if of < 0.5 else "" for of in rng.random(2))
    return permute(path, sizes, width, dtype, weights, scales)


def draw_unpermute(rng: Rng, path: str) -> Case:
    sizes = draw_sizes(rng, path)
    width = one_of(rng, draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS)
    weights = "float32" if rng.random() < 0.7 else ""
    return unpermute(path, sizes, width, one_of(rng, FLOATS), weights)


RANDOM = (draw_permute, draw_unpermute)

_SMALL: dict[str, Any] = {"sizes": Sizes(17, 3, 5, align=8), "width": 33}
# What is hard on the kernels of both.
_SETTINGS: dict[str, dict[str, Any]] = {
    "no tokens": {"sizes": Sizes(0, 2, 5, align=8), "width": 3},
    "one of each": {"sizes": Sizes(1, 1, 1), "width": 1},
    "few tokens for many rows": {"sizes": Sizes(2, 1, 8, num_rows=64), "width": 7},
    "pad rows": {"sizes": Sizes(17, 2, 5, align=8, capacity=4), "width": 67},
    "eight slots": {"sizes": Sizes(17, 8, 128), "width": 3},
    "many pad rows": {"sizes": Sizes(5, 2, 3, align=128), "width": 5},
    "too few rows": {"sizes": Sizes(40, 2, 5, align=16, num_rows=48), "width": 16},
    "too few rows, no pad rows": {"sizes": Sizes(30, 1, 8, num_rows=20), "width": 33},
    "no width": {"sizes": Sizes(4, 2, 3, align=8), "width": 0},
    "no rows": {"sizes": Sizes(9, 2, 3, align=4, num_rows=0), "width": 5},
    "more experts than are summed at once": {"sizes": Sizes(10, 3, 270, align=4), "width": 2},
    "a wide map": {"sizes": Sizes(3, 17, 9, align=4), "width": 67},
    "a wide map, few rows": {"sizes": Sizes(5, 40, 64, num_rows=32), "width": 3},
    "a wide map, no tokens": {"sizes": Sizes(0, 20, 3), "width": 5},
    "rows too wide to be held": {"sizes": Sizes(3, 2, 3, align=4), "width": 9000},
    **{
        # From four choices on, two rows of a token are written at once; the last may be alone.
        f"rows that share memory, {slots} slots": {
            "sizes": Sizes(11, slots, 6, align=4, capacity=5),
            "width": 521,
        }
        for slots in (1, 4, 5)
    },
    **{
        dtype: _SMALL | {"dtype": dtype}
        for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    },
    **{
        f"weights in {weights}, rows in {dtype}": _SMALL | {"dtype": dtype, "weights": weights}
        for dtype, weights in (("float32", "float16"), ("bfloat16", "bfloat16"))
    },
    **{
        f"a damaged plan, {damage}, {slots} slots": {
            "sizes": Sizes(17, slots, 5, align=8, num_rows=48 * slots),
            "width": 8,
            "damage": damage,
        }
        for damage, slots in (
            ("far", 2),
            ("past", 20),
            ("negative", 2),
            ("sizes", 2),
            ("sizes", 20),
        )
    },
}
NAMED: dict[str, functools.partial[Case]] = {
    f"{op.__name__}, {name}": functools.partial(op, **settings)
    for op in (permute, unpermute)
    for name, settings in _SETTINGS.items()
} | {
    "permute": functools.partial(permute, **_SMALL),
    "unpermute": functools.partial(unpermute, **_SMALL),
    "permute, scales in powers of two": functools.partial(
        permute, **_SMALL, scales="float8_e8m0fnu"
    ),
    "permute, no weights, no scales": functools.partial(permute, **_SMALL, weights="", scales=""),
    "unpermute, no weights": functools.partial(unpermute, **_SMALL, weights=""),
    **{
        f"permute, {dtype}": functools.partial(permute, **_SMALL, dtype=dtype)
        for dtype in ("int8", "uint16", "int32", "bool")
    },
}
SIZED: dict[str, Sized] = {
    "permute": lambda path, of: permute(path, sizes_of(of, align=4), of.hidden, of.dtype),
    "permute, capacity": lambda path, of: permute(
        path, sizes_of(of, capacity=4), of.hidden, of.dtype, weights="", scales=""
    ),
    "permute, 8 bits": lambda path, of: permute(
        path, sizes_of(of), of.hidden, "int8", scales="float8_e4m3fn"
    ),
    "unpermute": lambda path, of: unpermute(path, sizes_of(of, capacity=4), of.hidden, of.dtype),
    "unpermute, no weights": lambda path, of: unpermute(
        path, sizes_of(of, align=4), of.hidden, of.dtype, weights=""
    ),
}
# Several blocks of tokens and of the width, sums of many experts, and widths of models.
LARGE: dict[str, functools.partial[Case]] = {
    f"{op.__name__}, {sizes.tokens} tokens, {width} wide, {dtype}": functools.partial(
        op, sizes=sizes, width=width, dtype=dtype
    )
    for op in (permute, unpermute)
    for sizes, width, dtype in (
        (Sizes(1025, 2, 384, align=16), 33, "float32"),
        (Sizes(1000, 4, 32, align=128), 1536, "float8_e4m3fn"),
        (Sizes(999, 4, 32, align=8), 515, "bfloat16"),
        (Sizes(300, 6, 8, capacity=40, num_rows=700), 9001, "float32"),
        (Sizes(128, 8, 256, align=8), 7168, "bfloat16"),
        (Sizes(250, 4, 128, align=8), 2880, "bfloat16"),
    )
}
