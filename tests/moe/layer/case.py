"""feed_forward with all gradients, whose oracle is the ops' oracles in turn; and one product of it
with what a recipe has in 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.moe import draws
from tests.moe.activations.case import (
    ACTIVATIONS,
    FUNCTIONS,
    Activation,
    apart,
    glu_of,
    joined,
)
from tests.moe.bounds import U32, Array, Near, exact, gamma, rounded, sum_unit
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import back, move, summed
from tests.moe.plans.case import plan_of, spans
from tests.moe.products.case import FLOATS, dot, group_sum, outer, put, swapped, with_bias, zeros
from tests.moe.quantization.case import array_of, quantized
from tests.moe.router import case as routing
from triax.moe.layer import ops, products
from triax.moe.layer.experts import Matrix
from triax.moe.layer.parts import KEPT
from triax.moe.layer.recipes import Recipe


def draw_feed_forward(rng: Rng, path: str) -> Case:
    small = path == "interpret"
    experts = one_of(rng, (1, 3, 5) if small else (1, 2, 5, 8, 16))
    slots = int(rng.integers(1, min(4, experts) + 1))
    tokens = int(rng.integers(1, 12 if small else 70))
    hidden, width = (one_of(rng, (8, 16, 24) if small else draws.SMALL_WIDTHS) for _ in range(2))
    kind = one_of(rng, (*ACTIVATIONS, *FUNCTIONS))
    capacity = int(rng.integers(1, tokens * slots + 1)) if rng.random() < 0.3 else None
    chances = (0.4, 0.4, 0.5, 0.3, 0.3)
    transposed, biased, by_logits, scaled, kept = (rng.random(5) < chances).tolist()
    layout = one_of(rng, ("halves", "interleaved", "two")) if kind.gated else "halves"
    return feed_forward(
        path,
        (tokens, hidden, width),
        routing.draw_spec(rng, experts, slots, plain=True),
        kind,
        one_of(rng, FLOATS),
        capacity=capacity,
        transposed=transposed,
        biased=biased,
        by_logits=by_logits,
        layout=layout,
        is_scaled=scaled and by_logits,
        keep=(KEPT[1:], KEPT)[int(rng.integers(2))] if kept else (),
    )


FORWARD: tuple[str, ...] = ("route", "place_few_pairs", "permute", "glu", "unpermute")
FORWARD += ("ragged_dot_schedule", "ragged_dot") * 2
# Rows are permuted again, and so are the gradients of tokens.
BACKWARD: tuple[str, ...] = ("permute", "permute", "glu_grad", "unpermute", "route_grad")
BACKWARD += ("ragged_dot_schedule", "ragged_dot_transposed") * 2
KERNELS = FORWARD + BACKWARD + ("ragged_dot_schedule", "group_outer") * 2


def by_hand(
    moe: Any,
    x: Any,
    logits: Any,
    w_gate_up: Any,
    w_down: Any,
    router: Any,
    activation: Any,
    capacity: int | None,
    implementation: Any,
) -> Any:
    """The layer's ops in turn."""
    how: Any = {"implementation": implementation}
    routed = moe.route(logits, router, **how)
    plan = moe.make_plan(routed.experts, len(w_down), capacity=capacity, **how)
    rows, weights, _ = moe.permute(x, plan, weights=routed.weights, **how)
    product = moe.ragged_dot(rows, w_gate_up, plan.group_sizes, **how)
    inner = moe.glu(product, weights, activation=activation, **how)
    out = moe.ragged_dot(inner, w_down, plan.group_sizes, **how)
    return moe.unpermute(out, plan, **how), plan.group_counts, plan.num_dropped, *routed


def feed_forward(
    path: str,
    sizes: tuple[int, int, int],
    router: routing.Spec,
    kind: Activation = ACTIVATIONS[0],
    dtype: Any = "float32",
    *,
    capacity: int | None = None,
    transposed: bool = False,
    biased: bool = False,
    by_logits: bool = True,
    layout: str = "halves",
    is_scaled: bool = False,
    keep: tuple[str, ...] = (),
    ids: Any = "int32",
    is_by_hand: bool = False,
) -> Case:
    """Of tokens, hidden and width. The `layout` of gate and up is "halves", "interleaved" or "two"
    arrays; `is_scaled` is whether experts have scales, `is_by_hand` the layer as its ops."""
    (tokens, hidden, width), experts, slots = sizes, router.experts, router.top_k
    dtype = np.dtype(dtype)
    two, interleaved = layout == "two", layout == "interleaved"
    columns = 2 * width if kind.gated and not two else width
    firsts = ("gate", "up") if two else ("gate_up",)
    named: Any = lambda letter: [f"{letter}_{name}" for name in (*firsts, "down")]
    first: Any = lambda names: f"({', '.join(names[:-1])})" if two else names[0]
    biases = f"b_gate_up={first(named('b'))}, b_down=b_down, " * biased
    call = (
        f"moe.feed_forward(x, {'logits' if by_logits else 'moe.Routing(weights, ids)'}, "
        f"moe.Experts({first(named('w'))}, w_down, {biases}activation={kind.source}, "
        f"interleaved={interleaved}, transposed={transposed}), "
        f"{router.source * by_logits}{'expert_scale=expert_scale, ' * is_scaled}"
        f"capacity={capacity}, keep={keep}, implementation=how)"
    )
    if is_by_hand:
        call = "by_hand(moe, x, logits, w_gate_up, w_down, "
        call += f"{router.source}{kind.source}, {capacity}, how)"
    results = ("tokens", "group_counts", "num_dropped", "weights", "experts")
    gradients = ["x", *named("w"), *(named("b") if biased else [])]
    gradients += ["logits"] if by_logits else ["weights"]
    gradients += ["bias"] * (router.biased and by_logits) + ["expert_scale"] * is_scaled
    u = sum_unit(path, dtype)
    num_rows = tokens * slots
    if capacity is not None:
        num_rows = min(num_rows, experts * capacity)

    def weights_of(rng: Rng, into: int, out: int) -> Array:
        shape = (experts, out, into) if transposed else (experts, into, out)
        return np.asarray(draws.values(rng, shape, dtype) * dtype.type(into**-0.5))

    def draw(rng: Rng) -> Arrays:
        value_kind = one_of(rng, ("normal",) * 3 + ("integers", "zeros"))
        arrays = {
            "x": draws.values(rng, (tokens, hidden), dtype, value_kind),
            **{f"w_{name}": weights_of(rng, hidden, columns) for name in firsts},
            "w_down": weights_of(rng, width, hidden),
            "g_tokens": draws.values(rng, (tokens, hidden), dtype),
        }
        if by_logits:
            arrays["logits"] = router.logits(rng, tokens)
            if router.biased:
                arrays["bias"] = rng.standard_normal(experts, np.float32) / 8
            if is_scaled:
                arrays["expert_scale"] = draws.values(rng, (experts,), np.float32)
            chosen = router.choose(arrays["logits"], arrays.get("bias"))[0]
        else:
            chosen = draws.ids(rng, tokens, slots, experts, ids, "wild" if ids == "int64" else None)
            arrays["ids"] = chosen
            arrays["weights"] = draws.values(rng, (tokens, slots), np.float32)
        if biased:
            arrays |= {f"b_{n}": draws.values(rng, (experts, columns), dtype) for n in firsts}
            arrays["b_down"] = draws.values(rng, (experts, hidden), dtype)
        if tokens and rng.random() < 0.2:
            arrays["x"][rng.integers(tokens), rng.integers(hidden)] = np.nan
        if not router.biased:
            empty = ~np.isin(np.arange(experts), chosen)
            if rng.random() < 0.5:  # what is nobody's
                for name in named("w"):
                    arrays[name][empty] = np.nan
            elif rng.random() < 0.3:  # and one expert's, which stays with its tokens
                arrays["w_down"][rng.integers(experts)] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        if not by_logits:
            nearest = np.clip(arrays["ids"], -(2**31), 2**31 - 1).astype(np.int32)
            routed = {"weights": arrays["weights"], "experts": nearest}
            results, d_weights = layer(arrays, arrays["ids"], exact(arrays["weights"]))
            return routed | results | {"d_weights": d_weights}
        chosen = found["experts"]
        weights, gradient = router.weigh(arrays["logits"], chosen)
        wanted = router.wanted_experts(arrays, chosen)
        if router.biased:
            wanted["d_bias"] = np.zeros(experts, np.float32)
        if not is_scaled:
            results, d_weights = layer(arrays, chosen, weights)
            return wanted | results | {"weights": weights, "d_logits": gradient(d_weights)}
        scales = exact(arrays["expert_scale"])[chosen]
        scaled = weights * scales
        results, d_scaled = layer(arrays, chosen, scaled)
        each, d_scale = d_scaled * weights, Near(np.zeros(experts), np.zeros(experts))
        np.add.at(d_scale.value, chosen, each.value)
        size = np.zeros(experts)
        np.add.at(size, chosen, abs(each.value))
        np.add.at(d_scale.error, chosen, each.error)
        d_scale.error = d_scale.error + gamma(max(tokens * slots, 1), U32) * size
        wanted |= {"weights": scaled, "d_expert_scale": rounded(d_scale, np.float32)}
        return wanted | results | {"d_logits": gradient(d_scaled * scales)}

    def layer(arrays: Arrays, ids: Array, weights: Near) -> tuple[dict[str, Any], Near]:
        """All but the router, and the gradient of its weights."""
        plan = plan_of(ids, experts, num_rows, capacity, 1)
        groups = spans(plan.group_sizes, num_rows)

        def to_rows(array: Array, by_slot: bool = False) -> Array:
            return move(array, plan.row_of, num_rows, by_slot)

        error = np.broadcast_to(weights.error, weights.value.shape)
        of_rows = Near(to_rows(weights.value, True), to_rows(error, True))
        *w_firsts, w_down = (exact(arrays[name]) for name in named("w"))
        if transposed:
            *w_firsts, w_down = map(swapped, (*w_firsts, w_down))
        b_firsts = [arrays.get(f"b_{name}") for name in firsts]

        rows = exact(to_rows(arrays["x"]))
        made = [
            rounded(with_bias(dot(rows, w, groups, u), bias, None, groups), dtype)
            for w, bias in zip(w_firsts, b_firsts, strict=True)
        ]
        gate, up = made if two else apart(made[0], kind, interleaved)
        g = exact(to_rows(arrays["g_tokens"]))
        d_inner = rounded(dot(g, swapped(w_down), groups, u), dtype)
        inner, d_gate, d_up, d_weights = glu_of(gate, up, of_rows, kind, d_inner)
        inner = rounded(inner, dtype)
        product = dot(inner, w_down, groups, u)
        out = rounded(with_bias(product, arrays.get("b_down"), of_rows, groups), dtype)

        both = [d_gate, d_up] if two else [joined(d_gate, d_up, interleaved)]
        d_firsts = [rounded(of, dtype) for of in both]
        parts = [
            rounded(dot(d, swapped(w), groups, u), dtype)
            for d, w in zip(d_firsts, w_firsts, strict=True)
        ]
        d_rows = rounded(parts[0] + parts[1], dtype) if two else parts[0]
        d_w = [rounded(outer(rows, d, groups, u), dtype) for d in d_firsts]
        d_w.append(rounded(outer(inner, g, groups, u), dtype))
        wanted: dict[str, Any] = {
            "tokens": rounded(summed(out, plan.row_of), dtype),
            "group_counts": plan.group_counts,
            "num_dropped": plan.num_dropped,
            "d_x": rounded(summed(d_rows, plan.row_of), dtype),
        }
        wanted |= {
            f"d_{name}": swapped(d) if transposed else d
            for name, d in zip(named("w"), d_w, strict=True)
        }
        if biased:
            for name, d in zip(firsts, d_firsts, strict=True):
                wanted[f"d_b_{name}"] = rounded(group_sum(d, None, groups), dtype)
            wanted["d_b_down"] = rounded(group_sum(g, of_rows, groups), dtype)
            of_bias = dot(g, exact(arrays["b_down"])[:, :, None], groups, u)[:, 0]
            d_weights = d_weights + of_bias
        return wanted, Near(*(back(a, plan.row_of) for a in (d_weights.value, d_weights.error)))

    case = Case("feed_forward", path, call, results, draw, expect, tuple(gradients))
    case.widest = "float32"
    case.names = {"by_hand": by_hand}
    if by_logits and not (two or keep):
        case.kernels = KERNELS
    return case


def in_8_bits(x: Array, to: str, block: tuple[int, ...]) -> Near:
    """The numbers that quantize makes of an array, times their scales."""
    values, scales = quantized(x, to, block, False)
    numbers = array_of(values.astype(np.float64) * scales[..., None], block, x.shape)
    return Near(numbers, abs(numbers) * 2 * U32)


def product(path: str, recipe: Recipe, transposed: bool = False) -> Case:
    """One of a layer's products, of rows and weights that are quantized as a recipe says."""
    num_rows, depth, columns, num_groups = 60, 144, 136, 4
    e4m3, dtype = "float8_e4m3fn", np.dtype(np.float32)
    sizes = np.array([20, 0, 17, 15], np.int32)
    groups = spans(sizes, num_rows)
    u = sum_unit(path, e4m3)

    def multiplied(rows: Any, weights: Any, bias: Any, by: Any, how: Any) -> Any:
        matrix, of_groups = Matrix(weights, bias), jnp.asarray(sizes)
        return ops.multiply(products.Products(recipe, transposed, how), rows, matrix, of_groups, by)

    def draw(rng: Rng) -> Arrays:
        shape = (columns, depth) if transposed else (depth, columns)
        arrays = {
            "rows": draws.values(rng, (num_rows, depth), dtype),
            "weights": draws.values(rng, (num_groups, *shape), dtype),
            "bias": draws.values(rng, (num_groups, columns), dtype),
            "by": draws.values(rng, (num_rows,), dtype),
            "g_out": draws.values(rng, (num_rows, columns), dtype),
        }
        arrays["rows"][:, 3] *= 100  # what scales are for
        for name in ("rows", "g_out"):
            arrays[name][sum(sizes) :] = np.nan
        return arrays

    def scaled(rows: Array, weights: Array, scaling: str | None, to: str) -> tuple[Near, Near]:
        """Both sides of a product: rows, and weights [depth, columns] of each group."""
        if scaling is None:
            return exact(rows), exact(weights)
        wide, deep = (rows.shape[1], weights.shape[1]) if scaling == "rows" else (128, 128)
        block = (1, deep, 1 if scaling == "rows" else 128)
        return in_8_bits(rows, to, (1, wide)), in_8_bits(weights, e4m3, block)

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        weights, gradient = arrays["weights"], arrays["g_out"]
        if transposed:
            weights = weights.swapaxes(1, 2)
        by, bias = exact(arrays["by"]), arrays["bias"]
        sides = scaled(arrays["rows"], weights, recipe.forward, e4m3)
        out = with_bias(dot(*sides, groups, u), bias, by, groups)
        back = weights.swapaxes(1, 2)
        d_rows = dot(
            *scaled(gradient, back, recipe.rows_gradient, recipe.gradient_dtype), groups, u
        )
        left, right = exact(arrays["rows"]), exact(gradient)
        d_bias = group_sum(right, by, groups)
        d_by = dot(right, exact(bias)[:, :, None], groups, U32)[:, 0]
        if recipe.weight_gradient:
            left, right = zeros(num_rows, depth), zeros(num_rows, columns)
            for side, name, to in (
                (left, "rows", e4m3),
                (right, "g_out", recipe.gradient_dtype),
            ):
                for span in groups:
                    if span.stop > span.start:
                        part = arrays[name][span]
                        put(side, span, in_8_bits(part, to, (len(part), 1)))
        d_weights = outer(left, right, groups, u if recipe.weight_gradient else U32)
        wanted = {
            "out": out,
            "d_rows": d_rows,
            "d_weights": swapped(d_weights) if transposed else d_weights,
            "d_bias": d_bias,
            "d_by": d_by,
        }
        return {name: rounded(of, dtype) for name, of in wanted.items()}

    call, names = "multiplied(rows, weights, bias, by, how)", {"multiplied": multiplied}
    gradients = ("rows", "weights", "bias", "by")
    case = Case("recipe", path, call, ("out",), draw, expect, gradients, names)
    case.widest, case.is_derivative = "float32", False
    return case


RANDOM = (draw_feed_forward,)


def _swiglu(limit: float, alpha: float = 1.0, offset: float = 0.0) -> Activation:
    source = f"moe.Swiglu(alpha={alpha}, limit={limit}, up_offset={offset})"
    return Activation(source, "silu", alpha=alpha, limit=limit, offset=offset)


_GPT_OSS = _swiglu(0.7, 1.702, 1.0)
_SIGMOID: dict[str, Any] = {"score": "sigmoid", "normalize": True, "biased": True}
_MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"router": routing.Spec(8, 2, normalize=True)},
    "DBRX": {"router": routing.Spec(8, 3, normalize=2)},
    "OLMoE": {"router": routing.Spec(8, 3)},
    "DeepSeek-V2": {"router": routing.Spec(8, 2, scale=16, groups=(4, 2, "max"))},
    "DeepSeek-V3": {"router": routing.Spec(8, 3, **_SIGMOID, scale=2.5)},
    "DeepSeek-V4": {
        "router": routing.Spec(8, 3, "sqrtsoftplus", True, 1.5, biased=True),
        "kind": _swiglu(1.0),
    },
    "gpt-oss": {
        "router": routing.Spec(8, 2, normalize=True),
        "kind": _GPT_OSS,
        "layout": "interleaved",
        "biased": True,
    },
    "MiniMax-M3": {"router": routing.Spec(8, 3, **_SIGMOID, scale=2.0), "kind": _GPT_OSS},
    "Nemotron 3": {"router": routing.Spec(8, 3, **_SIGMOID, scale=2.5), "kind": ACTIVATIONS[8]},
    "Gemma 4": {
        "router": routing.Spec(8, 3, normalize=True),
        "kind": ACTIVATIONS[1],
        "is_scaled": True,
    },
}
_SOFTMAX = routing.Spec(5, 2)
_SETTINGS: dict[str, dict[str, Any]] = {
    "no tokens": {"sizes": (0, 16, 24), "router": _SOFTMAX},
    "all experts": {"router": routing.Spec(5, 5), "dtype": "bfloat16"},
    "one of many experts": {"router": routing.Spec(24, 1, normalize=True)},
    "room for one": {"router": _SOFTMAX, "capacity": 1},
    "a capacity": {"router": _SOFTMAX, "capacity": 3, "dtype": "bfloat16", "biased": True},
    "two arrays": {
        "router": _SOFTMAX,
        "kind": ACTIVATIONS[2],
        "layout": "two",
        "biased": True,
        "transposed": True,
    },
    "a function": {"router": _SOFTMAX, "kind": FUNCTIONS[0], "transposed": True, "biased": True},
    "a routing": {"router": _SOFTMAX, "by_logits": False, "biased": True, "dtype": "float16"},
    "a routing in 64 bits": {"router": _SOFTMAX, "by_logits": False, "ids": "int64"},
    "activations are kept": {"router": _SOFTMAX, "keep": KEPT[1:], "biased": True},
    "by hand": {
        "router": routing.Spec(5, 2, normalize=True),
        "kind": ACTIVATIONS[1],
        "dtype": "bfloat16",
        "capacity": 4,
        "is_by_hand": True,
    },
    "all is kept": {"router": _SOFTMAX, "keep": KEPT, "dtype": "bfloat16", "layout": "two"},
}
_E5M2: dict[str, Any] = {"gradient_dtype": "float8_e5m2"}
_RECIPES = {
    "rows": Recipe(),
    "blocks": Recipe("blocks", "blocks"),
    "forward alone": Recipe("rows", None, fast_sums=False),
    "gradient alone": Recipe(None, "blocks", **_E5M2),
    "all": Recipe(weight_gradient="rows"),
    "all, e5m2": Recipe(weight_gradient="rows", **_E5M2),
}
_SMALL: dict[str, Any] = {"sizes": (22, 16, 12)}
NAMED: dict[str, functools.partial[Case]] = (
    {
        "feed_forward": functools.partial(
            feed_forward, sizes=(9, 16, 16), router=routing.Spec(3, 2), capacity=9
        )
    }
    | {
        f"feed_forward, {name}": functools.partial(feed_forward, **_SMALL | settings)
        for name, settings in (_MODELS | _SETTINGS).items()
    }
    | {
        f"recipe, {name}": functools.partial(product, recipe=recipe, transposed=i % 2 == 1)
        for i, (name, recipe) in enumerate(_RECIPES.items())
    }
)
# What tests look at first: their parts are those of all.
QUICK = (
    "feed_forward",
    "feed_forward, gpt-oss",
    "feed_forward, two arrays",
    "feed_forward, a routing in 64 bits",
    "feed_forward, by hand",
    "feed_forward, all is kept",
    "recipe, blocks",
    "recipe, all, e5m2",
)
# Uneven groups, and widths and a depth that are no multiples of a block.
LARGE: dict[str, functools.partial[Case]] = {
    f"feed_forward, 500 tokens, {name}": functools.partial(
        feed_forward, **_MODELS[name] | {"sizes": (500, 200, 328), "dtype": dtype}
    )
    for name, dtype in (
        ("Mixtral", "bfloat16"),
        ("DeepSeek-V3", "float32"),
        ("gpt-oss", "bfloat16"),
        ("Nemotron 3", "float16"),
    )
}


def _sized(score: Any = (), **settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        spec = routing.Spec(of.experts, of.top_k, *score)
        shape = (of.tokens, of.hidden, of.width)
        return feed_forward(path, shape, spec, dtype=of.dtype, **settings)

    return made


SIZED: dict[str, Sized] = {
    "feed_forward": _sized(),
    "feed_forward, geglu": _sized(kind=ACTIVATIONS[1], capacity=4),
    "feed_forward, a function": _sized(kind=FUNCTIONS[0]),
    "feed_forward, sigmoids": _sized(("sigmoid", True, 2.5, None, True)),
    "feed_forward, biases": _sized(
        ("softmax", True), kind=ACTIVATIONS[3], biased=True, layout="interleaved", capacity=4
    ),
    "feed_forward, given": _sized(by_logits=False, transposed=True),
    "feed_forward, by hand": _sized(("softmax", True), is_by_hand=True),
}
