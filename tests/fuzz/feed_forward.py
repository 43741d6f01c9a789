"""feed_forward with all gradients: its oracle is the ops' oracles in turn."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.fuzz.products import FLOATS, dot, group_sum, outer, swapped, with_bias
from tests.moe import draws
from tests.moe.activations.case import ACTIVATIONS, Activation, apart, glu_of, joined
from tests.moe.bounds import Array, Near, exact, rounded, sum_unit
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import back, move, summed
from tests.moe.plans.case import plan_of, spans
from tests.moe.router import case as routing


def draw_feed_forward(rng: Rng, path: str) -> Case:
    small = path == "interpret"
    experts = one_of(rng, (1, 3, 5) if small else (1, 2, 5, 8, 16))
    slots = int(rng.integers(1, min(4, experts) + 1))
    tokens = int(rng.integers(1, 12 if small else 70))
    hidden, width = (one_of(rng, (8, 16, 24) if small else draws.SMALL_WIDTHS) for _ in range(2))
    kind, dtype = one_of(rng, ACTIVATIONS), np.dtype(one_of(rng, FLOATS))
    capacity = int(rng.integers(0, tokens * slots + 1)) if rng.random() < 0.3 else None
    transposed, biased, by_logits = (rng.random(3) < (0.4, 0.4, 0.5)).tolist()
    interleaved = bool(kind.gated and rng.random() < 0.4)
    router = routing.draw_spec(rng, experts, slots, plain=True)
    sizes = (tokens, hidden, width)
    options = (capacity, transposed, biased, by_logits, interleaved)
    return feed_forward(path, sizes, router, kind, dtype, *options)


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
    kind: Activation,
    dtype: np.dtype[Any],
    capacity: int | None = None,
    transposed: bool = False,
    biased: bool = False,
    by_logits: bool = True,
    interleaved: bool = False,
    is_by_hand: bool = False,
) -> Case:
    """Of tokens, hidden and width. `is_by_hand` is the layer as its ops."""
    (tokens, hidden, width), experts, slots = sizes, router.experts, router.top_k
    columns = 2 * width if kind.gated else width
    biases = "b_gate_up=b_gate_up, b_down=b_down, " * biased
    call = (
        f"moe.feed_forward(x, {'logits' if by_logits else 'moe.Routing(weights, ids)'}, "
        f"moe.Experts(w_gate_up, w_down, {biases}activation={kind.source}, "
        f"interleaved={interleaved}, transposed={transposed}), "
        f"{router.source * by_logits}capacity={capacity}, implementation=how)"
    )
    if is_by_hand:
        call = "by_hand(moe, x, logits, w_gate_up, w_down, "
        call += f"{router.source}{kind.source}, {capacity}, how)"
    results = ("tokens", "group_counts", "num_dropped", "weights", "experts")
    gradients = ["x", "w_gate_up", "w_down", "logits" if by_logits else "weights"]
    gradients += ["b_gate_up", "b_down"] * biased
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
            "w_gate_up": weights_of(rng, hidden, columns),
            "w_down": weights_of(rng, width, hidden),
            "g_tokens": draws.values(rng, (tokens, hidden), dtype),
        }
        if by_logits:
            arrays["logits"] = router.logits(rng, tokens)
            if router.biased:
                arrays["bias"] = rng.standard_normal(experts, np.float32)
        else:
            arrays["ids"] = draws.ids(rng, tokens, slots, experts)
            arrays["weights"] = draws.values(rng, (tokens, slots), np.float32)
        if biased:
            arrays["b_gate_up"] = draws.values(rng, (experts, columns), dtype)
            arrays["b_down"] = draws.values(rng, (experts, hidden), dtype)
        if rng.random() < 0.2:
            arrays["x"][rng.integers(tokens), rng.integers(hidden)] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        if not by_logits:
            routed = {"weights": arrays["weights"], "experts": arrays["ids"]}
            results, d_weights = layer(arrays, arrays["ids"], exact(arrays["weights"]))
            return routed | results | {"d_weights": d_weights}
        chosen = found["experts"]
        weights, gradient = router.weigh(arrays["logits"], chosen)
        results, d_weights = layer(arrays, chosen, weights)
        wanted = router.wanted_experts(arrays, chosen) | {"weights": weights}
        return wanted | results | {"d_logits": gradient(d_weights)}

    def layer(arrays: Arrays, ids: Array, weights: Near) -> tuple[dict[str, Any], Near]:
        """All but the router, and the gradient of its weights."""
        plan = plan_of(ids, experts, num_rows, capacity, 1)
        groups = spans(plan.group_sizes, num_rows)

        def to_rows(array: Array, by_slot: bool = False) -> Array:
            return move(array, plan.row_of, num_rows, by_slot)

        error = np.broadcast_to(weights.error, weights.value.shape)
        of_rows = Near(to_rows(weights.value, True), to_rows(error, True))
        w_up, w_down = exact(arrays["w_gate_up"]), exact(arrays["w_down"])
        if transposed:
            w_up, w_down = swapped(w_up), swapped(w_down)

        rows = exact(to_rows(arrays["x"]))
        product = with_bias(dot(rows, w_up, groups, u), arrays.get("b_gate_up"), None, groups)
        gate, up = apart(rounded(product, dtype), kind, interleaved)
        g = exact(to_rows(arrays["g_tokens"]))
        d_inner = rounded(dot(g, swapped(w_down), groups, u), dtype)
        inner, d_gate, d_up, d_weights = glu_of(gate, up, of_rows, kind, d_inner)
        inner = rounded(inner, dtype)
        product = dot(inner, w_down, groups, u)
        out = rounded(with_bias(product, arrays.get("b_down"), of_rows, groups), dtype)

        d_gate_up = rounded(joined(d_gate, d_up, interleaved), dtype)
        d_rows = rounded(dot(d_gate_up, swapped(w_up), groups, u), dtype)
        d_w_up = rounded(outer(rows, d_gate_up, groups, u), dtype)
        d_w_down = rounded(outer(inner, g, groups, u), dtype)
        wanted: dict[str, Any] = {
            "tokens": rounded(summed(out, plan.row_of), dtype),
            "group_counts": plan.group_counts,
            "num_dropped": plan.num_dropped,
            "d_x": rounded(summed(d_rows, plan.row_of), dtype),
            "d_w_gate_up": swapped(d_w_up) if transposed else d_w_up,
            "d_w_down": swapped(d_w_down) if transposed else d_w_down,
        }
        if biased:
            wanted["d_b_gate_up"] = rounded(group_sum(d_gate_up, None, groups), dtype)
            wanted["d_b_down"] = rounded(group_sum(g, of_rows, groups), dtype)
            of_bias = dot(g, exact(arrays["b_down"])[:, :, None], groups, u)[:, 0]
            d_weights = d_weights + of_bias
        return wanted, Near(*(back(a, plan.row_of) for a in (d_weights.value, d_weights.error)))

    case = Case("feed_forward", path, call, results, draw, expect, tuple(gradients))
    case.widest = "float32"
    case.names = {"by_hand": by_hand}
    return case


OPS = (draw_feed_forward,)
NAMED = {
    "feed_forward": functools.partial(
        feed_forward,
        sizes=(9, 16, 16),
        router=routing.Spec(3, 2, "softmax", False, 1.0, None, biased=False),
        kind=ACTIVATIONS[0],
        dtype=np.dtype("float32"),
        capacity=9,
    ),
    "feed_forward, by hand": functools.partial(
        feed_forward,
        sizes=(9, 16, 16),
        router=routing.Spec(3, 2, "softmax", True, 1.0, None, biased=False),
        kind=ACTIVATIONS[1],
        dtype=np.dtype("bfloat16"),
        capacity=4,
        is_by_hand=True,
    ),
}
