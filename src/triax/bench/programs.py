"""The ops as programs: what each reads, what it runs, and how many passes over memory it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from triax import moe
from triax.bench.inputs import Inputs


def _plan(inputs: Inputs, experts: int, implementation: str | None) -> moe.Plan:
    return moe.make_plan(inputs["selected_experts"], experts, implementation=implementation)


def _permute(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    return moe.permute(inputs["x"], inputs["plan"], implementation=implementation)


def _permute_with_plan(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    plan = _plan(inputs, experts, implementation)
    return moe.permute(inputs["x"], plan, implementation=implementation), plan


def _unpermute(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    rows, plan, weights = inputs["rows"], inputs["plan"], inputs["weights"]
    return moe.unpermute(rows, plan, weights, implementation=implementation)


def _permute_grad(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    rows, plan = inputs["rows"], inputs["plan"]
    # The gradient does not depend on the tokens, so that the forward pass falls away.
    x = jnp.zeros((plan.row_of.shape[0], rows.shape[1]), rows.dtype)
    _, pull = jax.vjp(lambda x: moe.permute(x, plan, implementation=implementation), x)
    return pull(rows)[0]


def _unpermute_grad(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    plan = inputs["plan"]
    unpermute = lambda rows, w: moe.unpermute(rows, plan, w, implementation=implementation)
    _, pull = jax.vjp(unpermute, inputs["rows"], inputs["weights"])
    return pull(inputs["gradient"])


def _route(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    plan = _plan(inputs, experts, implementation)
    rows = moe.permute(inputs["x"], plan, implementation=implementation)
    # Where the experts would stand. Without it XLA is free to see that both ways cancel out.
    rows = jax.lax.optimization_barrier(rows)
    return moe.unpermute(rows, plan, inputs["weights"], implementation=implementation)


def _route_with_gradients(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    route = lambda x, w: _route({**inputs, "x": x, "weights": w}, experts, implementation)
    y, pull = jax.vjp(route, inputs["x"], inputs["weights"])
    return y, *pull(inputs["gradient"])


def _sort_chunks(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    sizes, indices = inputs["split_sizes"], inputs["sorted_indices"]
    return moe.sort_chunks_by_index(inputs["x"], sizes, indices, implementation=implementation).rows


def _sort_chunks_grad(inputs: Inputs, experts: int, implementation: str | None) -> Any:
    gradient = inputs["gradient"]
    sort = lambda x: _sort_chunks({**inputs, "x": x}, experts, implementation)
    _, pull = jax.vjp(sort, jnp.zeros_like(gradient))
    return pull(gradient)[0]


@dataclasses.dataclass(frozen=True)
class Op:
    """What a case needs to know of its op.

    Attributes:
      inputs: names of what it reads.
      program: from inputs, number of experts and implementation to outputs.
      passes: the passes over memory it is made of, which `cases` counts the bytes of.
      arrays: how many arrays of tokens and of rows are alive at its peak.
      chain: see `Case.chain`.
      chains_always: whether `chain` fits for any top-k, and not for 1 only.
    """

    inputs: tuple[str, ...]
    program: Callable[[Inputs, int, str | None], Any]
    passes: tuple[str, ...]
    arrays: dict[str, int]
    chain: Callable[[Inputs, Any], Inputs]
    chains_always: bool = True


OPS: dict[str, Op] = {
    "plan": Op(
        inputs=("selected_experts",),
        program=_plan,
        passes=("plan",),
        arrays={"pairs": 8},
        chain=lambda inputs, plan: {"selected_experts": plan.expert_of},
    ),
    "permute": Op(
        inputs=("x", "plan"),
        program=_permute,
        passes=("permute",),
        arrays={"tokens": 1, "rows": 1},
        chain=lambda inputs, rows: {**inputs, "x": rows},
        chains_always=False,
    ),
    "permute+plan": Op(
        inputs=("x", "selected_experts"),
        program=_permute_with_plan,
        passes=("permute",),
        arrays={"tokens": 1, "rows": 1},
        chain=lambda inputs, outputs: {"x": outputs[0], "selected_experts": outputs[1].expert_of},
        chains_always=False,
    ),
    "unpermute": Op(
        inputs=("rows", "plan", "weights"),
        program=_unpermute,
        passes=("unpermute",),
        arrays={"tokens": 1, "rows": 1},
        chain=lambda inputs, y: {**inputs, "rows": y},
        chains_always=False,
    ),
    "permute_grad": Op(
        inputs=("rows", "plan"),
        program=_permute_grad,
        passes=("permute_grad",),
        arrays={"tokens": 1, "rows": 1},
        chain=lambda inputs, d_x: {**inputs, "rows": d_x},
        chains_always=False,
    ),
    "unpermute_grad": Op(
        inputs=("rows", "plan", "weights", "gradient"),
        program=_unpermute_grad,
        passes=("unpermute_grad",),
        arrays={"tokens": 1, "rows": 2},
        chain=lambda inputs, grads: {**inputs, "rows": grads[0], "weights": grads[1]},
    ),
    "route": Op(
        inputs=("x", "selected_experts", "weights"),
        program=_route,
        passes=("permute", "unpermute"),
        arrays={"tokens": 2, "rows": 1},
        chain=lambda inputs, y: {**inputs, "x": y},
    ),
    "route+grad": Op(
        inputs=("x", "selected_experts", "weights", "gradient"),
        program=_route_with_gradients,
        passes=("permute", "unpermute", "unpermute_grad", "permute_grad"),
        arrays={"tokens": 4, "rows": 2},
        chain=lambda inputs, outputs: {
            **inputs,
            "x": outputs[0],
            "gradient": outputs[1],
            "weights": outputs[2],
        },
    ),
    "sort_chunks": Op(
        inputs=("x", "split_sizes", "sorted_indices"),
        program=_sort_chunks,
        passes=("sort_chunks",),
        arrays={"tokens": 2},
        chain=lambda inputs, rows: {**inputs, "x": rows},
    ),
    "sort_chunks_grad": Op(
        inputs=("gradient", "split_sizes", "sorted_indices"),
        program=_sort_chunks_grad,
        passes=("sort_chunks",),
        arrays={"tokens": 2},
        chain=lambda inputs, d_x: {**inputs, "gradient": d_x},
    ),
}
CHUNK_OPS = ("sort_chunks", "sort_chunks_grad")
