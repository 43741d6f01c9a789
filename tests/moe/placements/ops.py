"""The ops, their arguments, and what of their results must be exact.

`run(place, *arrays, **options)` returns named arrays. `place` puts what is between two ops
somewhere; `place.mesh` is None for the uncut reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.moe import draws, flat
from triax import moe, testing
from triax.moe import transformer_engine as te


class Op(NamedTuple):
    """An op, and its arguments by name: those of `draw_array`.

    Attributes:
      moves: the results, and as "d_…" gradients, that must have the bits of the uncut ones.
        Integers must have them anyway.
      terms: how many values are summed into the others.
    """

    run: Callable[..., dict[str, Any]]
    arrays: str
    options: dict[str, Any] = {}  # noqa: RUF012
    moves: str = ""
    terms: int = 64


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int

    def rows(self, align_size: int = 1) -> int:
        most = self.tokens * self.top_k + self.experts * (align_size - 1)
        return most // align_size * align_size


# The last two have dimensions that few devices divide, or none.
SIZES = (Sizes(16, 8, 8, 8, 2), Sizes(8, 16, 4, 4, 2), Sizes(12, 6, 4, 6, 2), Sizes(7, 5, 3, 6, 3))
# All devices divide the tokens and the experts. The wide tokens are sent from where they are.
EXCHANGED = (Sizes(16, 8, 8, 8, 2), Sizes(24, 256, 4, 16, 3))


def draw_array(name: str, rng: np.random.Generator, s: Sizes, op: Op, dtype: Any) -> np.ndarray:
    rows, experts = s.rows(op.options.get("align_size", 1)), s.experts
    shapes = {
        "x": (s.tokens, s.hidden),
        "logits": (s.tokens, experts),
        "bias": (experts,),
        "weights": (s.tokens, s.top_k),
        "rows": (rows, s.hidden),
        "gate_up": (rows, 2 * s.width),
        "row_weights": (rows,),
        "probs": (s.tokens, experts),
        "w_gate_up": (experts, s.hidden, 2 * s.width),
        "w_up": (experts, s.hidden, s.width),
        "w_down": (experts, s.width, s.hidden),
        "b_gate_up": (experts, 2 * s.width),
        "b_up": (experts, s.width),
        "b_down": (experts, s.hidden),
        "gate": (rows, s.width),
        "up": (rows, s.width),
    }
    if name in shapes:
        float32 = ("logits", "bias", "weights", "probs")
        values = rng.standard_normal(shapes[name]) / (2 if name.startswith("w_") else 1)
        return values.astype(np.float32 if name in float32 else dtype)
    if name == "ids":
        return draws.ids(rng, s.tokens, s.top_k, experts)
    if name == "mask":
        return rng.random((s.tokens, experts)) < 0.3
    if name == "sizes":  # less than all rows, some of them zero
        return rng.multinomial(rng.integers(rows + 1), rng.dirichlet(np.ones(experts) / 2)).astype(
            np.int32
        )
    if name == "order":
        return rng.permutation(experts).astype(np.int32)
    if name.startswith("hostile"):
        shape = shapes["rows" if name == "hostile_rows" else "x"]
        # Where XLA reshards by a sum, which it does, -0.0 becomes 0.0.
        return testing.hostile_values(rng, shape, dtype) + np.zeros((), dtype)
    if name == "bytes":
        return rng.integers(-128, 128, (s.tokens, s.hidden)).astype(np.int8)
    if name == "scales":
        return rng.standard_normal((s.tokens, 3)).astype(dtype)
    if name == "small_scales":
        return draws.bits(rng, (s.tokens, 4), ml_dtypes.float8_e4m3fn)
    raise KeyError(name)


# --- the ops -----------------------------------------------------------------------------------


def fields(result: Any, *names: str) -> dict[str, jax.Array]:
    return {name: getattr(result, name) for name in names}


def plan_arrays(plan: moe.Plan) -> dict[str, jax.Array]:
    found = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return {name: value for name, value in found.items() if not isinstance(value, int)}


def route(place, sizes, logits, bias=None, **options):
    return flat.route(logits, sizes.top_k, bias=bias, **options)._asdict()


def plan(place, sizes, ids, **options):
    return plan_arrays(moe.make_plan(ids, sizes.experts, **options))


def plan_from_mask(place, sizes, mask, **options):
    top_k = options.pop("top_k", sizes.top_k)
    return plan_arrays(moe.make_plan_from_mask(mask, top_k, **options))


def permute(place, sizes, x, ids, weights=None, scales=None, **options):
    plan = place(moe.make_plan(ids, sizes.experts, **options))
    out = moe.permute(x, plan, weights=weights, scales=scales)
    if weights is None and scales is None:
        return {"rows": out}
    return {name: value for name, value in out._asdict().items() if value is not None}


def unpermute(place, sizes, rows, ids, weights=None, **options):
    plan = place(moe.make_plan(ids, sizes.experts, **options))
    return {"tokens": moe.unpermute(rows, plan, weights)}


def there_and_back(place, sizes, x, ids, weights, **options):
    plan = place(moe.make_plan(ids, sizes.experts, **options))
    out = moe.permute(x, plan, weights=weights)
    rows = place(jnp.sin(place(out.rows)))
    return {"tokens": moe.unpermute(rows, plan, place(weights)), "weights": out.weights}


def products(place, sizes, rows, weights, group_sizes, **options):
    return {"rows": moe.ragged_dot(rows, weights, group_sizes, **options)}


def scaled_products(place, sizes, rows, weights, group_sizes):
    """Of rows and weights in 8 bits."""
    narrow = lambda array: jax.lax.stop_gradient(array).astype("float32")
    rows = moe.quantize(narrow(rows), block=(1, None))
    weights = moe.quantize(narrow(weights), block=(1, None, 1), transposed=True)
    return {"rows": moe.ragged_dot(rows, weights, group_sizes, preferred_element_type="float32")}


def products_with_bias(place, sizes, rows, weights, group_sizes, bias, bias_weights, **options):
    biases = {"bias": bias, "bias_weights": bias_weights}
    return {"rows": moe.ragged_dot(rows, weights, group_sizes, **biases, **options)}


def glu_of_two(place, sizes, gate, up, row_weights=None, **options):
    return {"rows": moe.glu((gate, up), row_weights, **options)}


def glu(place, sizes, gate_up, row_weights=None, **options):
    return {"rows": moe.glu(gate_up, row_weights, **options)}


def smooth(gate, up):
    """An activation that is a function."""
    return jnp.sin(gate) * up


def sort_chunks(place, sizes, x, split_sizes, order, probs=None):
    out = moe.sort_chunks_by_index(x, split_sizes, order, probs)
    return {name: value for name, value in out._asdict().items() if value is not None}


def feed_forward(place, sizes, x, logits, w_gate_up, w_down, bias=None, **options):
    if bias is not None:
        options |= {"bias": bias, "score": "sigmoid", "normalize": True}
    out = flat.layer(x, logits, w_gate_up, w_down, top_k=sizes.top_k, **options)
    return fields(out, "tokens", "group_counts", "num_dropped")


def feed_forward_with_biases(place, sizes, x, logits, w_gate_up, w_down, *biases, **options):
    how = dict(zip(("b_gate_up", "b_down"), biases, strict=True))
    clamped = moe.Swiglu(alpha=1.702, limit=1.0, up_offset=1.0)
    how |= {"activation": clamped, "interleaved": True, "normalize": True} | options
    out = flat.layer(x, logits, w_gate_up, w_down, top_k=sizes.top_k, **how)
    return fields(out, "tokens", "group_counts") | out.routing._asdict()


def layer(place, sizes, x, logits, w_gate_up, w_down, **options):
    """The same by hand, with something between all ops."""
    weights, experts = place(moe.route(logits, moe.Router(sizes.top_k, normalize=True)))
    plan = place(moe.make_plan(experts, sizes.experts, **options))
    rows, row_weights, _ = place(moe.permute(x, plan, weights=weights))
    gate_up = place(moe.ragged_dot(rows, w_gate_up, plan.group_sizes))
    inner = place(moe.glu(gate_up, row_weights))
    out = place(moe.ragged_dot(inner, w_down, plan.group_sizes))
    return {"tokens": moe.unpermute(out, plan)}


def losses(place, sizes, logits, group_sizes, **options):
    return {
        "balance": moe.load_balancing_loss(logits, group_sizes, **options),
        "z": moe.router_z_loss(logits),
    }


def exchange(place, sizes, x, weights, ids, w_up, w_down, **options):
    """Expert parallelism over some axes of the mesh, data parallelism over others."""
    if place.mesh is None:
        plan = moe.make_plan(ids, sizes.experts)
        rows = moe.permute(x, plan)
        inner = jnp.tanh(moe.ragged_dot(rows, w_up, plan.group_sizes))
        out = moe.ragged_dot(inner, w_down, plan.group_sizes)
        return {
            "tokens": moe.unpermute(out, plan, weights),
            "back": moe.unpermute(jax.lax.stop_gradient(rows), plan),
            "counts": plan.group_counts,
        }
    experts, data = place.exchange_axes

    def part(x, weights, ids, w_up, w_down):
        sent = moe.dispatch(x, weights, ids, sizes.experts, experts, **options)
        inner = jnp.tanh(moe.ragged_dot(place(sent.rows), w_up, sent.group_sizes))
        out = place(moe.ragged_dot(place(inner), w_down, sent.group_sizes))
        back = moe.combine(jax.lax.stop_gradient(sent.rows), sent.plan, weights=None)
        counts = jax.lax.psum(sent.group_counts, data) if data else sent.group_counts
        tokens = moe.combine(out, sent.plan, weights=sent.weights)
        return {"tokens": tokens, "back": back, "counts": counts}

    of_tokens, of_experts = P((*data, *experts)), P(experts)
    return place.shard_map(
        part,
        (of_tokens, of_tokens, of_tokens, of_experts, of_experts),
        {"tokens": of_tokens, "back": of_tokens, "counts": of_experts},
        {*experts, *data},
    )(x, weights, ids, w_up, w_down)


def te_maps(place, sizes, x, mask, probs, **options):
    most = sizes.tokens * sizes.experts
    out = place(te.token_dispatch(x, mask, most, probs, **options))
    tokens = te.token_combine(place(jnp.sin(out.output)), out.row_id_map, probs, out.pad_offsets)
    return {"tokens": tokens, "rows": out.output, "probs": out.permuted_probs} | fields(
        out, "row_id_map", "tokens_per_expert"
    )


def te_ids(place, sizes, x, mask, probs, **options):
    ids, weights = place(te.routing_map_to_selected_experts(probs, mask, sizes.top_k))
    how = (sizes.experts, sizes.top_k)
    rows, state, group_sizes = te.pure_jax_token_dispatch(x, ids, *how, **options)
    state = place(state)
    tokens = te.pure_jax_token_combine(
        place(jnp.sin(rows)), state, weights, sizes.top_k, 1, sizes.tokens
    )
    return {"tokens": tokens[0], "rows": rows, "group_sizes": group_sizes, "ids": ids}


def te_router(place, sizes, logits, bias=None, **options):
    options = {"topk": sizes.top_k, "expert_bias": bias} | options
    probs, mask = te.fused_topk_with_score_function(logits, **options)
    scores, aux_mask = te.fused_topk_with_score_function(
        logits, sizes.top_k, compute_aux_scores=True
    )
    counts = jnp.sum(place(aux_mask), axis=0, dtype=jnp.int32)
    loss = te.fused_moe_aux_loss(place(scores), counts, sizes.top_k, 0.1)
    return {"probs": probs, "mask": mask, "scores": scores, "loss": loss}


def te_chunks(place, sizes, x, split_sizes, order):
    rows, row_id_map = te.sort_chunks_by_index(x, split_sizes, order)
    return {"rows": rows, "row_id_map": row_id_map}


# A name with several options is several ops of one function.
OPS: dict[str, list[Op]] = {
    "route": [
        Op(route, "logits"),
        Op(route, "logits bias", {"score": "sigmoid", "normalize": True, "scale": 2.5}),
        Op(route, "logits bias", {"num_groups": 2, "top_groups": 1}),
    ],
    "make_plan": [
        Op(plan, "ids"),
        Op(plan, "ids", {"align_size": 4, "capacity": 3}),
        Op(plan_from_mask, "mask", {"align_size": 4}),
        Op(plan_from_mask, "mask", {"capacity": 3, "top_k": 2}),
    ],
    "permute": [
        Op(permute, "x ids", {"capacity": 4}),
        Op(
            permute,
            "hostile ids weights scales",
            {"align_size": 4},
            "rows weights scales d_weights",
        ),
        Op(permute, "hostile ids weights", {}, "rows weights d_weights"),
        Op(permute, "bytes ids weights small_scales", {}, "rows weights scales d_weights"),
    ],
    "unpermute": [
        Op(unpermute, "rows ids", {"align_size": 4}, "d_rows"),
        Op(unpermute, "rows ids weights", {"capacity": 4}),
        Op(there_and_back, "x ids weights", {"align_size": 4}, "weights"),
    ],
    "ragged_dot": [
        Op(products, "rows w_up sizes"),
        Op(products, "rows w_up sizes", {"preferred_element_type": "float32"}),
        Op(scaled_products, "rows w_up sizes"),
        Op(products_with_bias, "rows w_up sizes b_up row_weights"),
    ],
    "glu": [
        Op(glu, "gate_up row_weights"),
        Op(glu, "gate_up", {"activation": "geglu"}),
        Op(glu_of_two, "gate up row_weights"),
        Op(glu, "gate row_weights", {"activation": "relu2"}),
        Op(glu, "gate_up row_weights", {"activation": smooth, "interleaved": True}),
        Op(glu_of_two, "gate up row_weights", {"activation": smooth}),
    ],
    "sort_chunks_by_index": [
        Op(
            sort_chunks,
            "hostile_rows sizes order row_weights",
            {},
            "rows probs d_hostile_rows d_row_weights",
        ),
        Op(sort_chunks, "hostile_rows sizes order", {}, "rows d_hostile_rows"),
    ],
    "feed_forward": [
        Op(feed_forward, "x logits w_gate_up w_down"),
        Op(feed_forward, "x logits w_gate_up w_down", {"capacity": 4, "activation": "geglu"}),
        Op(feed_forward, "x logits w_gate_up w_down", {"activation": smooth}),
    ],
    "feed_forward, by sigmoids": [
        Op(feed_forward, "x logits w_gate_up w_down bias"),
    ],
    "feed_forward, with biases": [
        Op(feed_forward_with_biases, "x logits w_gate_up w_down b_gate_up b_down"),
        Op(feed_forward_with_biases, "x logits w_gate_up w_down b_gate_up b_down", {"capacity": 4}),
    ],
    "feed_forward, by hand": [Op(layer, "x logits w_gate_up w_down")],
    "losses": [
        Op(losses, "logits sizes"),
        Op(losses, "logits sizes", {"score": "sigmoid"}),
    ],
    "exchange, padded": [
        Op(exchange, "x weights ids w_up w_down", {"exchange": "padded"}, "back", 512),
    ],
    "exchange, ragged": [
        Op(
            exchange,
            "x weights ids w_up w_down",
            {"scheme": "token", "exchange": "ragged"},
            "back",
            512,
        )
    ],
    "exchange, choices": [
        Op(exchange, "x weights ids w_up w_down", {"scheme": "choice"}, "back", 512)
    ],
    "TransformerEngine's maps": [
        Op(te_maps, "x mask probs", {"align_size": 4}, "rows probs"),
        Op(te_maps, "x mask probs", {}, "rows probs"),
        Op(te_ids, "x mask probs", {"align_size": 4, "roll_to_expert_id": 1}, "rows"),
    ],
    "TransformerEngine's router": [
        Op(te_router, "logits"),
        Op(te_router, "logits bias", {"score_function": "sigmoid", "routing_map_format": 1}),
        Op(te_chunks, "hostile_rows sizes order", {}, "rows d_hostile_rows"),
    ],
}
