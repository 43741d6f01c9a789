"""What users would pick instead of Triax, for the ops of the benchmark's cases, in one table.

docs/how-fast.md says what each is.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import rivals
from benchmarks.ops import plain_moves as plain
from benchmarks.ops.cases import OPS, Case, Inputs
from triax import moe

OWN, DENSE = "triax", "dense"


@dataclasses.dataclass(frozen=True)
class Competitor:
    """Another way to compute what a case computes.

    What is timed is `program`, on the result of `prepare(inputs)`: what a user has at hand before
    the op runs. It is a program of JAX, or PyTorch's where it is not `is_own`.
    """

    program: Callable[[Any], Any]
    prepare: Callable[[Inputs], Any] = lambda inputs: inputs
    is_own: bool = True

    def finish(self, outputs: Any) -> Any:
        """The program's results as arrays of JAX."""
        return outputs if self.is_own else rivals.result(outputs)


Maker = Callable[[Case], Competitor]


def competitors(case: Case) -> dict[str, Competitor | str]:
    """The competitors of a case by name; for those that cannot run here, why."""
    found: dict[str, Competitor | str] = {}
    for name, make in TABLE.get(case.op, {}).items():
        try:
            found[name] = make(case)
        except Exception as error:  # importing a library can raise anything
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


def _by(function: Any) -> Maker:
    """The op with this function in place of Triax's."""
    return lambda case: Competitor(case.program(function))


def _top_k(logits: jax.Array, top_k: int) -> moe.Routing:
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    return moe.Routing(weights / jnp.sum(weights, axis=1, keepdims=True), experts)


def _unpermute_by_take(rows: jax.Array, plan: moe.Plan, weights: jax.Array) -> jax.Array:
    return plain.weigh_slots(rows, plan.row_of.reshape(-1), weights)


def _sort_by_take(x: jax.Array, sizes: jax.Array, indices: jax.Array) -> jax.Array:
    return plain.take(x, plain.chunk_index(sizes, indices, x.shape[0]), unique=True)


def _with_index(i: Inputs) -> Inputs:
    """What a move by an index reads: tokens, and which of them each row is."""
    if "plan" in i:
        row_of = i["plan"].row_of
        index = plain.invert(row_of.reshape(-1)) // row_of.shape[1]
    else:
        index = plain.chunk_index(i["split_sizes"], i["sorted_indices"], i["x"].shape[0])
    return {"x": i["x"], "index": index}


def _move_by_take(case: Case) -> Competitor:
    unique = case.op == "sort_chunks"
    return Competitor(lambda i: plain.take(i["x"], i["index"], unique=unique), _with_index)


def _by_torch(prepare: Any, program: Any) -> Competitor:
    """A program of PyTorch. Arrays go there and back through DLPack, on the device."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")

    given = lambda i: [torch.from_dlpack(a) for a in jax.block_until_ready(prepare(i))]
    return Competitor(program, given, is_own=False)


def _torch_select(case: Case) -> Competitor:
    select = lambda operands: importlib.import_module("torch").index_select(
        operands[0], 0, operands[1]
    )
    return _by_torch(lambda i: [_with_index(i)[name] for name in ("x", "index")], select)


def _engine() -> Any:
    return importlib.import_module("transformer_engine.jax.permutation")


def _engine_sort(case: Case) -> Competitor:
    sort = _engine().sort_chunks_by_index
    return Competitor(case.program(lambda *operands: sort(*operands)[0]))


def _engine_moves(case: Case) -> Competitor:
    """It takes a mask and probs [tokens, experts] in place of experts and weights.

    A router made for it would give them, so they are made before the clock starts. It also makes
    a row map, whose time counts for the moves together, and not for a single move.
    """
    if case.routing == "skewed" and case.top_k > 1:
        raise ValueError("a mask cannot name an expert twice, as tokens of a skewed routing do")
    engine = _engine()

    def prepare(i: Inputs) -> Inputs:
        selected = i["plan"].expert_of if "plan" in i else i["selected_experts"]
        at = lambda array: array.at[jnp.arange(case.tokens)[:, None], selected]
        empty = jnp.zeros((case.tokens, case.experts), jnp.float32)
        mask, probs = at(empty.astype(jnp.int32)).set(1), at(empty).set(i["weights"])
        made = {**i, "selected": selected, "selected_experts": mask, "weights": probs}
        if case.op == "unpermute":
            x = jnp.zeros((case.tokens, case.hidden), case.dtype)
            made["plan"] = engine.token_dispatch(x, mask, case.rows)[2]
        return made

    def moves(x: jax.Array, mask: jax.Array, probs: jax.Array) -> jax.Array:
        rows, _, row_id_map = engine.token_dispatch(x, mask, case.rows)[:3]
        return engine.token_combine(jax.lax.optimization_barrier(rows), row_id_map, probs)

    def with_weights_gradient(i: Inputs) -> Any:
        y, d_x, d_probs = case.program(moves)(i)
        return y, d_x, jnp.take_along_axis(d_probs, i["selected"], axis=1)

    if case.op == "moves+grad":
        return Competitor(with_weights_gradient, prepare)
    return Competitor(case.program(moves if case.op == "moves" else engine.token_combine), prepare)


_MOVES: dict[str, Maker] = {
    "argsort+take": _by(plain.moves),
    "argsort+take+sum": _by(plain.moves_summed),
    "hand-written vjp": _by(plain.moves_by_sorting),
    "hand-fused vjp": _by(plain.moves_by_hand),
    "transformer_engine": _engine_moves,
}
_DOTS: dict[str, Maker] = {
    "jax.lax.ragged_dot": _by(jax.lax.ragged_dot),
    "tokamax": lambda case: _by(importlib.import_module("tokamax").ragged_dot)(case),
}
TABLE: dict[str, dict[str, Maker]] = {
    "permute": {"jnp.take": _move_by_take, "torch.index_select": _torch_select},
    "unpermute": {"jnp.take": _by(_unpermute_by_take), "transformer_engine": _engine_moves},
    "moves": _MOVES,
    "moves+grad": _MOVES,
    "router": {"top_k": _by(_top_k)},
    "router+grad": {"top_k": _by(_top_k)},
    "sort_chunks": {
        "jnp.take": _move_by_take,
        "argsort+take": _by(_sort_by_take),
        "transformer_engine": _engine_sort,
        "torch.index_select": _torch_select,
    },
    **{op: _DOTS for op in OPS if OPS[op].matmuls},
    "layer": _DOTS,
}
