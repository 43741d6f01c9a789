"""What users would pick instead of Triax, for the ops of the benchmark's cases, in one table.

- "argsort+take": two sorts, `jnp.take` there and back, an einsum, derivatives by autodiff, as in
  public training code. For a chunk sort, the index made from the sizes, and `jnp.take`.
- "argsort+take+sum": the same with a sum that XLA can fuse in place of the einsum.
- "hand-written vjp": takes whose gradient, by hand, is the take by the inverse permutation.
- "hand-fused vjp": one sort, and all gradients by hand, each one pass over the rows.
- "jnp.take", "torch.index_select": a single move by an index that was made before.
- "transformer_engine", "tokamax": their JAX functions, where they are installed.
- "top_k": `jax.lax.top_k` of the softmax. "jax.lax.ragged_dot": that, also inside the layer.
- "dense": no other way to do it, but the limit of matmuls: one of as many operations.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from triax import moe
from triax.bench import plain_moves as plain
from triax.bench.cases import OPS, Case, Inputs, with_gradients

DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Competitor:
    """Another way to compute what a case computes.

    What is timed is `program`, on the result of `prepare(inputs)`: what a user has at hand before
    the op runs. `clock` is that of another library, whose program is not jitted and whose result
    `finish` makes an array of JAX.
    """

    program: Callable[[Any], Any]
    prepare: Callable[[Inputs], Any] = lambda inputs: inputs
    clock: Any = None
    finish: Callable[[Any], Any] = lambda outputs: outputs


def competitors(case: Case) -> dict[str, Competitor | str]:
    """The competitors of a case by name; for those that cannot run here, why."""
    found: dict[str, Competitor | str] = {}
    for name, make in TABLE.get(case.op, {}).items():
        try:
            found[name] = make(case)
        except Exception as error:  # what a library's import raises is its own affair
            found[name] = f"{type(error).__name__}: {error}"
    return found


def dense(case: Case) -> Competitor:
    """Dense matmuls of as many operations, on operands of the same shapes."""
    dot = lambda rows, matrices, *sizes: rows @ matrices[0]
    if case.op != "layer":
        one = lambda i: {**i, "matrices": i["matrices"][:1]}
        return Competitor(case.program(dot), one)

    def prepare(i: Inputs) -> Any:
        rows, gate_up = jnp.repeat(i["x"], case.top_k, axis=0), i["w_gate_up"][:1]
        return rows, gate_up, dot(rows, gate_up)[:, : case.width], i["w_down"][:1]

    def program(operands: Any) -> Any:
        products, pull = jax.vjp(lambda a, b, c, d: (dot(a, b), dot(c, d)), *operands)
        return products, pull(products)

    return Competitor(program, prepare)


def _top_k(case: Case) -> Competitor:
    def run(i: Inputs) -> moe.Routed:
        weights, experts = jax.lax.top_k(jax.nn.softmax(i["logits"]), case.top_k)
        return moe.Routed(weights / jnp.sum(weights, axis=1, keepdims=True), experts)

    if case.op == "router":
        return Competitor(run)
    return Competitor(
        lambda i: with_gradients(lambda i: run(i).weights, i, "logits", upstream="weights")
    )


def _route_by(route: Callable[..., jax.Array]) -> Callable[[Case], Competitor]:
    run = lambda i: route(i["x"], i["selected_experts"], i["weights"])
    grad = lambda i: with_gradients(run, i, "x", "weights")
    return lambda case: Competitor(run if case.op == "route" else grad)


def _unpermute_by_take(case: Case) -> Competitor:
    weigh = lambda i: plain.weigh_slots(i["rows"], i["plan"].row_of.reshape(-1), i["weights"])
    return Competitor(weigh)


def _source_rows(i: Inputs) -> jax.Array:
    """What a move's rows are read from."""
    if "plan" in i:
        row_of = i["plan"].row_of
        return plain.invert(row_of.reshape(-1)) // row_of.shape[1]
    return plain.chunk_index(i["split_sizes"], i["sorted_indices"], i["x"].shape[0])


def _with_index(i: Inputs) -> Inputs:
    return {"x": i["x"], "index": _source_rows(i)}


def _move_by_take(case: Case) -> Competitor:
    unique = case.op == "sort_chunks"
    return Competitor(lambda i: plain.take(i["x"], i["index"], unique=unique), _with_index)


def _sort_by_take(case: Case) -> Competitor:
    return Competitor(lambda i: plain.take(i["x"], _source_rows(i), unique=True))


def _transformer_engine(case: Case) -> Competitor:
    """It takes a mask and probs [tokens, experts], which a router made for it would give.

    So they are made before the clock starts. Its row map is its own to make: it is on the clock of
    a route, and not of a single move.
    """
    if case.routing == "skewed" and case.top_k > 1:
        raise ValueError("a mask cannot name an expert twice, as tokens of a skewed routing do")
    engine = importlib.import_module("transformer_engine.jax.permutation")
    num_rows = case.tokens * case.top_k

    def prepare(i: Inputs) -> Inputs:
        selected = i["plan"].expert_of if "plan" in i else i["selected_experts"]
        at = lambda array: array.at[jnp.arange(case.tokens)[:, None], selected]
        empty = jnp.zeros((case.tokens, case.experts), jnp.float32)
        mask, probs = at(empty.astype(jnp.int32)).set(1), at(empty).set(i["weights"])
        more = {"mask": mask, "probs": probs, "selected": selected}
        if case.op == "unpermute":
            x = jnp.zeros((case.tokens, case.hidden), case.dtype)
            more["row_id_map"] = engine.token_dispatch(x, mask, num_rows)[2]
        return {**i, **more}

    def route(i: Inputs) -> jax.Array:
        rows, _, row_id_map = engine.token_dispatch(i["x"], i["mask"], num_rows)[:3]
        return engine.token_combine(jax.lax.optimization_barrier(rows), row_id_map, i["probs"])

    def route_with_gradients(i: Inputs) -> Any:
        y, d_x, d_probs = with_gradients(route, i, "x", "probs")
        return y, d_x, jnp.take_along_axis(d_probs, i["selected"], axis=1)

    sort = lambda i: engine.sort_chunks_by_index(i["x"], i["split_sizes"], i["sorted_indices"])[0]
    combine = lambda i: engine.token_combine(i["rows"], i["row_id_map"], i["probs"])
    if case.op == "sort_chunks":
        return Competitor(sort)
    programs = {"route": route, "route+grad": route_with_gradients, "unpermute": combine}
    return Competitor(programs[case.op], prepare)


def _torch(case: Case) -> Competitor:
    """Arrays go there and back through DLPack, on the device; the time is PyTorch's events'."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")

    def prepare(i: Inputs) -> Any:
        operands = jax.block_until_ready(_with_index(i))
        return [torch.from_dlpack(operands[name]) for name in ("x", "index")]

    def finish(tensor: Any) -> jax.Array:
        torch.cuda.synchronize()
        return jnp.from_dlpack(tensor)

    select = lambda operands: torch.index_select(operands[0], 0, operands[1])
    return Competitor(select, prepare, TorchClock(torch), finish)


class TorchClock:
    """PyTorch's events by number, on its current stream; see `CudaClock`."""

    # What a GPU's clock ticks at most in a microsecond: a busy wait is no shorter than asked for.
    ticks_per_us = 2000

    def __init__(self, torch: Any):
        self._torch = torch
        self._events: dict[int, Any] = {}

    def now_us(self) -> float:
        return time.perf_counter() * 1e6

    def record(self, index: int, output: Any) -> None:
        if index not in self._events:
            self._events[index] = self._torch.cuda.Event(enable_timing=True)
        self._events[index].record()

    def is_pending(self, index: int) -> bool:
        return not self._events[index].query()

    def wait(self, index: int) -> None:
        self._events[index].synchronize()

    def between_us(self, first: int, second: int) -> float:
        return 1e3 * self._events[first].elapsed_time(self._events[second])

    def hold(self, us: float) -> None:
        self._torch.cuda._sleep(round(us * self.ticks_per_us))


_ROUTES: dict[str, Callable[[Case], Competitor]] = {
    "argsort+take": _route_by(plain.route),
    "argsort+take+sum": _route_by(plain.route_summed),
    "hand-written vjp": _route_by(plain.route_by_sorting),
    "hand-fused vjp": _route_by(plain.route_by_hand),
    "transformer_engine": _transformer_engine,
}
_DOTS: dict[str, Callable[[Case], Competitor]] = {
    "jax.lax.ragged_dot": lambda case: Competitor(case.program(jax.lax.ragged_dot)),
    "tokamax": lambda case: Competitor(case.program(importlib.import_module("tokamax").ragged_dot)),
}
TABLE: dict[str, dict[str, Callable[[Case], Competitor]]] = {
    "permute": {"jnp.take": _move_by_take, "torch.index_select": _torch},
    "unpermute": {"jnp.take": _unpermute_by_take, "transformer_engine": _transformer_engine},
    "route": _ROUTES,
    "route+grad": _ROUTES,
    "router": {"top_k": _top_k},
    "router+grad": {"top_k": _top_k},
    "sort_chunks": {
        "jnp.take": _move_by_take,
        "argsort+take": _sort_by_take,
        "transformer_engine": _transformer_engine,
        "torch.index_select": _torch,
    },
    **{op: _DOTS for op in OPS if OPS[op].matmuls},
}
