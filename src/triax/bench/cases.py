"""Cases: one op at one shape, what it reads and runs, and what its time is compared with.

Inputs are drawn outside of what is timed; a program is a pure function of them. They are dicts of

    x, gradient        [tokens, hidden], tokens and the gradient of tokens
    rows               [rows, hidden], rows = tokens * top_k: rows or the gradient of rows
    weights            float32 [tokens, top_k], each token's sum up to 1
    selected_experts   int32 [tokens, top_k], and `plan`, the `triax.moe.Plan` of it
    split_sizes, sorted_indices   int32 [chunks]
    logits             float32 [tokens, experts]
    matrices           [experts, hidden, width], with `group_sizes` int32 [experts]
    d_products         [rows, width], the gradient of rows times matrices
    w_gate_up, w_down  [experts, hidden, 2 * width], [experts, width, hidden]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from triax import moe

Inputs = dict[str, Any]
Program = Callable[[Inputs], Any]


class Stream(NamedTuple):
    """A sequential pass over memory: `reads` units in for `writes` units out, of `unit_bytes`."""

    reads: int
    writes: int
    unit_bytes: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape; a chunk sort's `experts` are the chunks, its `top_k` is 1."""

    op: str
    preset: str | None
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str
    routing: str | None
    width: int = 0

    @property
    def label(self) -> str:
        shape = f"T={self.tokens} H={self.hidden}"
        return " ".join(filter(None, (self.op, self.preset, shape, self.dtype, self.routing)))

    def make_inputs(self) -> Inputs:
        """The arrays that the op reads, the same each time."""
        shape = dataclasses.replace(self, op="")
        return {name: MAKERS[name](shape) for name in OPS[self.op].inputs.split()}

    def program(self, implementation: Any = None) -> Program:
        """Runs the op by `implementation`, as its functions take it.

        For the matmuls it may also be a function that takes the place of `moe.ragged_dot`.
        """
        return _program(self.unnamed, implementation)

    @property
    def unnamed(self) -> Case:
        """What programs depend on, so that one is compiled for all routings."""
        return dataclasses.replace(self, preset=None, routing=None)

    @property
    def passes(self) -> list[tuple[Stream, int]]:
        """The passes over memory that the op is made of, each with all of its bytes.

        Those are a little more than the stream's, which stands for all passes of the same ratio.
        """
        rows = self.tokens * self.top_k
        unit = self.tokens * self.hidden * jnp.dtype(self.dtype).itemsize
        small = {
            "pairs": 4 * rows,
            "groups": 4 * self.experts,
            "logits": 4 * self.tokens * self.experts,
        }
        sizes = {"tokens": unit, "rows": self.top_k * unit, **small}
        found = []
        for name in OPS[self.op].passes.split():
            reads, writes = (
                names.count("tokens") + self.top_k * names.count("rows") for names in PASSES[name]
            )
            num_bytes = sum(sizes[name] for name in " ".join(PASSES[name]).split())
            found.append((Stream(reads, writes, unit), num_bytes))
        return found

    @property
    def num_bytes(self) -> int:
        """Every input and every output of every pass over the rows, once."""
        return sum(num_bytes for _, num_bytes in self.passes)

    @property
    def streams(self) -> list[tuple[Stream, int]]:
        """The passes that move rows: streams take as long as the op ideally does."""
        return [(stream, size) for stream, size in self.passes if stream.reads and stream.writes]

    @property
    def flops(self) -> int:
        """The operations of its matmuls; 0 where it has none."""
        return 2 * self.tokens * self.top_k * self.hidden * self.width * OPS[self.op].matmuls


@functools.cache
def _program(case: Case, implementation: Any) -> Program:
    return functools.partial(OPS[case.op].run, case, implementation)


# What a pass over memory reads and writes at least: arrays like the tokens and like the rows,
# integers or weights by (token, slot), integers by expert or chunk.
PASSES = {
    "plan": ("pairs", "pairs pairs groups groups groups"),
    "permute": ("tokens pairs groups groups", "rows"),
    "unpermute": ("rows pairs pairs", "tokens"),
    "permute_grad": ("rows pairs", "tokens"),
    "unpermute_grad": ("rows tokens pairs pairs groups groups", "rows pairs"),
    "sort_chunks": ("tokens groups groups", "tokens"),
    "router": ("logits", "pairs pairs"),
    "router_grad": ("pairs pairs pairs", "logits"),  # normalised: chosen logits alone
}


# --- the ops: functions of a case, an implementation and the inputs -------------------------


def with_gradients(run: Program, i: Inputs, *names: str, upstream: str = "gradient") -> Any:
    """What `run` makes of the inputs, and the gradients of those named."""
    at = lambda *values: run({**i, **dict(zip(names, values, strict=True))})
    y, pull = jax.vjp(at, *(i[name] for name in names))
    return y, *pull(i[upstream])


def _plan(case: Case, how: Any, i: Inputs) -> Any:
    return moe.make_plan(i["selected_experts"], case.experts, implementation=how)


def _permute(case: Case, how: Any, i: Inputs) -> Any:
    return moe.permute(i["x"], i["plan"], implementation=how)


def _permute_with_plan(case: Case, how: Any, i: Inputs) -> Any:
    plan = _plan(case, how, i)
    return _permute(case, how, {**i, "plan": plan}), plan


def _permute_grad(case: Case, how: Any, i: Inputs) -> Any:
    # The gradient does not depend on the tokens, so that the forward pass falls away.
    i = {**i, "x": jnp.zeros((case.tokens, i["rows"].shape[1]), i["rows"].dtype)}
    return with_gradients(functools.partial(_permute, case, how), i, "x", upstream="rows")[1]


def _unpermute(case: Case, how: Any, i: Inputs) -> Any:
    return moe.unpermute(i["rows"], i["plan"], i["weights"], implementation=how)


def _unpermute_grad(case: Case, how: Any, i: Inputs) -> Any:
    return with_gradients(functools.partial(_unpermute, case, how), i, "rows", "weights")[1:]


def _route(case: Case, how: Any, i: Inputs) -> Any:
    rows, plan = _permute_with_plan(case, how, i)
    # Where the experts would stand. Without it XLA is free to see that both ways cancel out.
    rows = jax.lax.optimization_barrier(rows)
    return _unpermute(case, how, {**i, "rows": rows, "plan": plan})


def _route_with_gradients(case: Case, how: Any, i: Inputs) -> Any:
    return with_gradients(functools.partial(_route, case, how), i, "x", "weights")


def _sort_chunks(case: Case, how: Any, i: Inputs) -> Any:
    sizes, indices = i["split_sizes"], i["sorted_indices"]
    return moe.sort_chunks_by_index(i["x"], sizes, indices, implementation=how).rows


def _sort_chunks_grad(case: Case, how: Any, i: Inputs) -> Any:
    i = {**i, "x": jnp.zeros_like(i["gradient"])}
    return with_gradients(functools.partial(_sort_chunks, case, how), i, "x")[1]


def _router(case: Case, how: Any, i: Inputs) -> Any:
    return moe.route(i["logits"], case.top_k, normalize=True, implementation=how)


def _router_with_gradient(case: Case, how: Any, i: Inputs) -> Any:
    return with_gradients(lambda i: _router(case, how, i).weights, i, "logits", upstream="weights")


def _ragged_dot(case: Case, how: Any, i: Inputs) -> Any:
    dot = how if callable(how) else functools.partial(moe.ragged_dot, implementation=how)
    return dot(i["rows"], i["matrices"], i["group_sizes"])


def _ragged_dot_grad(operand: str, case: Case, how: Any, i: Inputs) -> Any:
    run = functools.partial(_ragged_dot, case, how)
    return with_gradients(run, i, operand, upstream="d_products")[1]


def _feed_forward(case: Case, how: Any, i: Inputs) -> jax.Array:
    x, logits, gate_up, down = (i[name] for name in LAYER.split())
    if not callable(how):
        options: Any = {"top_k": case.top_k, "normalize": True, "implementation": how}
        return moe.feed_forward(x, logits, gate_up, down, **options).tokens
    weights, experts = moe.route(logits, case.top_k, normalize=True)
    plan = moe.make_plan(experts, case.experts)
    gate, up = jnp.split(how(moe.permute(x, plan), gate_up, plan.group_sizes), 2, axis=1)
    inner = (jax.nn.silu(gate.astype("float32")) * up.astype("float32")).astype(gate.dtype)
    return moe.unpermute(how(inner, down, plan.group_sizes), plan, weights)


def _layer(case: Case, how: Any, i: Inputs) -> Any:
    return with_gradients(functools.partial(_feed_forward, case, how), i, *LAYER.split())


def _feed(*names: str) -> Callable[[Inputs, Any], Inputs]:
    """The inputs with those named replaced by the outputs, in order."""
    outputs = lambda made: made if len(names) > 1 else (made,)
    return lambda i, made: {**i, **dict(zip(names, outputs(made), strict=True))}


class Op(NamedTuple):
    """What a case needs to know of its op.

    Attributes:
      inputs: names of what it reads.
      run: from case, implementation and inputs to outputs.
      passes: the passes over memory that it is made of, of `PASSES`.
      chain: the inputs of a next run from inputs and outputs, where their shapes allow it:
        something that the run computed last goes into the next, so that both can stand in one
        program and neither be left out. Values may run away over many runs.
      routings: those that it is measured with; a chunk sort has none.
      matmuls: how many products of rows × hidden × width. Dense ones are its limit.
    """

    inputs: str
    run: Callable[[Case, Any, Inputs], Any]
    passes: str = ""
    chain: Callable[[Inputs, Any], Inputs] | None = None
    routings: tuple[str | None, ...] = ("uniform", "skewed")
    matmuls: int = 0


LAYER = "x logits w_gate_up w_down"
_CHUNKS, _DOT = "split_sizes sorted_indices", "rows matrices group_sizes"
_DOT_GRADS = [functools.partial(_ragged_dot_grad, operand) for operand in ("rows", "matrices")]
_DRAWN, _GROUPED = ("uniform",), ("even", "uneven", "half")
_ROUTE = "x selected_experts weights"
_BOTH_WAYS = "permute unpermute unpermute_grad permute_grad"
_NEXT = _feed("x", "gradient", "weights")

OPS: dict[str, Op] = {
    "plan": Op("selected_experts", _plan, "plan", lambda i, p: {"selected_experts": p.expert_of}),
    "permute": Op("x plan", _permute, "permute", _feed("x")),
    "permute+plan": Op(
        "x selected_experts",
        _permute_with_plan,
        "permute",
        lambda i, made: {"x": made[0], "selected_experts": made[1].expert_of},
    ),
    "unpermute": Op("rows plan weights", _unpermute, "unpermute", _feed("rows")),
    "permute_grad": Op("rows plan", _permute_grad, "permute_grad", _feed("rows")),
    "unpermute_grad": Op(
        "rows plan weights gradient", _unpermute_grad, "unpermute_grad", _feed("rows", "weights")
    ),
    "route": Op(_ROUTE, _route, "permute unpermute", _feed("x")),
    "route+grad": Op(f"{_ROUTE} gradient", _route_with_gradients, _BOTH_WAYS, _NEXT),
    "router": Op("logits", _router, "router", None, _DRAWN),
    "router+grad": Op(
        "logits weights",
        _router_with_gradient,
        "router router_grad",
        _feed("weights", "logits"),
        _DRAWN,
    ),
    "sort_chunks": Op(f"x {_CHUNKS}", _sort_chunks, "sort_chunks", _feed("x"), (None,)),
    "sort_chunks_grad": Op(
        f"gradient {_CHUNKS}", _sort_chunks_grad, "sort_chunks", _feed("gradient"), (None,)
    ),
    "ragged_dot": Op(_DOT, _ragged_dot, routings=_GROUPED, matmuls=1),
    "ragged_dot_grad_rows": Op(f"{_DOT} d_products", _DOT_GRADS[0], "", None, _GROUPED, 1),
    "ragged_dot_grad_weights": Op(f"{_DOT} d_products", _DOT_GRADS[1], "", None, _GROUPED, 1),
    # Gate, up and down, forward, and two gradients of each.
    "layer": Op(f"{LAYER} gradient", _layer, routings=_DRAWN, matmuls=9),
}


# --- what they read -------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)  # the host takes seconds for many
def _draw_experts(case: Case) -> np.ndarray:
    rng = np.random.default_rng([0, case.tokens, case.experts, case.top_k])
    selected = rng.integers(0, case.experts, (case.tokens, case.top_k), dtype=np.int32)
    # Experts of a token are distinct, as routers choose them. Drawing again what is not takes a
    # few rounds; a token that is unlucky in all of them, or asks for too many, names one twice.
    for _ in range(32):
        ordered = np.sort(selected, axis=1)
        again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not again.size:
            break
        selected[again] = rng.integers(0, case.experts, (again.size, case.top_k), dtype=np.int32)
    if case.routing == "skewed":
        selected[rng.random(selected.shape) < 0.5] = 0
    return selected


def _draw_weights(case: Case) -> jax.Array:
    rng = np.random.default_rng([1, case.tokens, case.top_k])
    weights = rng.uniform(0.1, 1.0, (case.tokens, case.top_k)).astype(np.float32)
    return jnp.asarray(weights / weights.sum(axis=1, keepdims=True))


def _draw_sizes(case: Case) -> jax.Array:
    """Of groups or chunks, all rows together: even ones, the first with half, or any."""
    rng, rows = np.random.default_rng(0), case.tokens * case.top_k
    cuts = np.arange(1, case.experts) * rows // case.experts
    if case.routing == "half":
        cuts = rows // 2 + np.arange(case.experts - 1) * (rows - rows // 2) // (case.experts - 1)
    elif case.routing != "even":
        cuts = np.sort(rng.integers(0, rows + 1, case.experts - 1))
    return jnp.asarray(np.diff(cuts, prepend=0, append=rows).astype(np.int32))


def _draw_values(case: Case, number: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Numbers in [-2, 2) times `scale`; those of another `number` are others."""
    return _hashed(np.uint32((number + 1) * 0x9E3779B9 % 2**32), shape, case.dtype, scale)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _hashed(seed: Any, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    """By a hash of their place: less to compile than `jax.random`."""
    mixed = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        mixed = (mixed ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(2654435761)
        mixed = mixed ^ (mixed >> 15)
    return (((mixed >> 8).astype(jnp.float32) * 2**-22 - 2) * scale).astype(dtype)


def _draw_matrices(case: Case, number: int, depth: int, columns: int) -> jax.Array:
    """Products of them are about as large as what they are multiplied with."""
    return _draw_values(case, number, case.experts, depth, columns, scale=depth**-0.5)


def _draw_logits(case: Case) -> jax.Array:
    # Few bits, so that no two scores become equal by rounding where their logits are not.
    values = _draw_values(case, 3, case.tokens, case.experts)
    return values.astype("bfloat16").astype("float32")


MAKERS: dict[str, Callable[[Case], Any]] = {
    "x": lambda c: _draw_values(c, 0, c.tokens, c.hidden),
    "gradient": lambda c: _draw_values(c, 1, c.tokens, c.hidden),
    "rows": lambda c: _draw_values(c, 2, c.tokens * c.top_k, c.hidden),
    "weights": _draw_weights,
    "selected_experts": lambda c: jnp.asarray(_draw_experts(c)),
    "plan": lambda c: moe.make_plan(_draw_experts(c), c.experts, implementation="xla"),
    "split_sizes": _draw_sizes,
    "sorted_indices": lambda c: jax.random.permutation(jax.random.key(0), c.experts),
    "logits": _draw_logits,
    "matrices": lambda c: _draw_matrices(c, 4, c.hidden, c.width),
    "d_products": lambda c: _draw_values(c, 5, c.tokens * c.top_k, c.width),
    "group_sizes": _draw_sizes,
    "w_gate_up": lambda c: _draw_matrices(c, 6, c.hidden, 2 * c.width),
    "w_down": lambda c: _draw_matrices(c, 7, c.width, c.hidden),
}
