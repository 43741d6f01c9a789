"""Cases: one op at one shape, what it reads and runs, and what its time is compared with.

Inputs are drawn outside of what is timed, as dicts of arrays by the names of `MAKERS`; a program is
a pure function of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.streams import Stream
from triax import moe

Inputs = dict[str, Any]
Program = Callable[[Inputs], Any]
Run = Callable[["Case", Any, Inputs], Any]


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
        return {name: MAKERS[name](self) for name in OPS[self.op].inputs.split()}

    def program(self, implementation: Any = None) -> Program:
        """Runs the op by `implementation`, as its functions take it.

        It may also be a function to call in their place: `moe.ragged_dot`'s, the router's, that of
        a move, or one from x, experts and weights for all moves together.
        """
        return _program(self.unnamed, implementation)

    def chain(self, program: Program, inputs: Inputs) -> Callable[[Inputs, Any], Inputs] | None:
        """Makes the inputs of a next run of inputs and outputs; None where shapes forbid it."""
        names = OPS[self.op].next.split()

        def chain(i: Inputs, outputs: Any) -> Inputs:
            made = outputs if isinstance(outputs, tuple) else (outputs,)
            given = [out.expert_of if isinstance(out, moe.Plan) else out for out in made]
            return {**i, **dict(zip(names, given, strict=True))}

        types = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
        following = lambda: types(jax.eval_shape(lambda i: chain(i, program(i)), inputs))
        return chain if names and following() == types(inputs) else None

    @property
    def unnamed(self) -> Case:
        """What programs depend on, so that one is compiled for all routings."""
        return dataclasses.replace(self, preset=None, routing=None)

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def passes(self) -> list[tuple[Stream, int]]:
        """The passes over memory that the op is made of, with every input and output in bytes.

        Those are a little more than the stream's, which leaves out indices and weights.
        """
        names = OPS[self.op].passes.split()
        return [_pass(dataclasses.replace(self.unnamed, op=name)) for name in names]

    @property
    def flops(self) -> int:
        """The operations of its matmuls; 0 where it has none."""
        return 2 * self.rows * self.hidden * self.width * OPS[self.op].matmuls


@functools.cache
def _program(case: Case, implementation: Any) -> Program:
    return functools.partial(OPS[case.op].run, case, implementation)


@functools.cache
def _pass(case: Case) -> tuple[Stream, int]:
    """The stream that stands for an op, and the bytes of all its inputs and outputs."""
    given = jax.eval_shape(case.make_inputs)
    sides = [jax.tree.leaves(side) for side in (given, jax.eval_shape(case.program("xla"), given))]
    wide = [[a.shape[0] for a in side if a.shape[1:] == (case.hidden,)] for side in sides]
    reads, writes = (sum(rows) // case.tokens for rows in wide)
    unit_bytes = case.tokens * case.hidden * jnp.dtype(case.dtype).itemsize
    num_bytes = sum(a.size * a.dtype.itemsize for side in sides for a in side)
    return Stream(reads, writes, unit_bytes), num_bytes


# --- the ops: functions of a case, an implementation and the inputs -------------------------


def _with_gradients(run: Run, *names: str, upstream: str = "gradient", alone: bool = False) -> Run:
    """An op that returns what `run` does, unless `alone`, and the gradients of the inputs named."""

    def op(case: Case, how: Any, i: Inputs) -> Any:
        # The gradient of a move does not depend on `x`, so XLA drops the forward pass.
        i = {"x": jnp.zeros((case.tokens, i[upstream].shape[1]), i[upstream].dtype), **i}
        at = lambda *values: run(case, how, {**i, **dict(zip(names, values, strict=True))})
        y, pull = jax.vjp(at, *(i[name] for name in names))
        gradients = pull(i[upstream])
        return gradients if alone else (y, *gradients)

    return op


def _call(function: Any, how: Any, *operands: Any) -> Any:
    """Calls `how` in place of a function of Triax's, or that function by this implementation."""
    return how(*operands) if callable(how) else function(*operands, implementation=how)


def _plan(case: Case, how: Any, i: Inputs) -> moe.Plan:
    return moe.make_plan(i["selected_experts"], case.experts, implementation=how)


def _permute(case: Case, how: Any, i: Inputs) -> Any:
    return moe.permute(i["x"], i["plan"], implementation=how)


def _permute_with_plan(case: Case, how: Any, i: Inputs) -> Any:
    plan = _plan(case, how, i)
    return _permute(case, how, {**i, "plan": plan}), plan


def _unpermute(case: Case, how: Any, i: Inputs) -> Any:
    return _call(moe.unpermute, how, i["rows"], i["plan"], i["weights"])


def _moves(case: Case, how: Any, i: Inputs) -> Any:
    if callable(how):
        return how(i["x"], i["selected_experts"], i["weights"])
    rows, plan = _permute_with_plan(case, how, i)
    # In place of the experts. Without it XLA could see that the two moves cancel out.
    rows = jax.lax.optimization_barrier(rows)
    return _unpermute(case, how, {**i, "rows": rows, "plan": plan})


def _sort_chunks(case: Case, how: Any, i: Inputs) -> Any:
    sort = lambda *operands, **how: moe.sort_chunks_by_index(*operands, **how).rows
    return _call(sort, how, i["x"], i["split_sizes"], i["sorted_indices"])


def _router(case: Case, how: Any, i: Inputs) -> moe.Routing:
    route = lambda x, top_k, **how: moe.route(x, moe.Router(top_k, normalize=True), **how)
    return _call(route, how, i["logits"], case.top_k)


def _ragged_dot(case: Case, how: Any, i: Inputs) -> Any:
    return _call(moe.ragged_dot, how, i["rows"], i["matrices"], i["group_sizes"])


LAYER = "x logits w_gate_up w_down"


def _feed_forward(case: Case, how: Any, i: Inputs) -> jax.Array:
    x, logits, gate_up, down = (i[name] for name in LAYER.split())
    router = moe.Router(case.top_k, normalize=True)
    if not callable(how):
        experts = moe.Experts(gate_up, down)
        return moe.feed_forward(x, logits, experts, router, implementation=how).tokens
    weights, chosen = moe.route(logits, router)
    plan = moe.make_plan(chosen, case.experts)
    gate, up = jnp.split(how(moe.permute(x, plan), gate_up, plan.group_sizes), 2, axis=1)
    inner = (jax.nn.silu(gate.astype("float32")) * up.astype("float32")).astype(gate.dtype)
    return moe.unpermute(how(inner, down, plan.group_sizes), plan, weights)


class Op(NamedTuple):
    """What a case needs to know of its op; its names stand in strings, with spaces between.

    Attributes:
      inputs: names of what it reads.
      run: from case, implementation and inputs to outputs.
      passes: the ops whose passes over memory it is made of.
      next: the inputs that its outputs become in a next run, a plan by its experts, so that many
        runs can stand in one program: the last thing computed is among them, so XLA can drop none.
        Values may overflow over many runs.
      routings: the kinds of routing that it is measured with; a chunk sort has none.
      matmuls: how many products of rows × hidden × width. Dense ones are its limit.
    """

    inputs: str
    run: Run
    passes: str = ""
    next: str = ""
    routings: tuple[str | None, ...] = ("uniform", "skewed")
    matmuls: int = 0


_gradients = functools.partial(_with_gradients, alone=True)
_permute_grad = _gradients(_permute, "x", upstream="rows")
_unpermute_grad = _gradients(_unpermute, "rows", "weights")
_moves_grad = _with_gradients(_moves, "x", "weights")
_router_grad = _with_gradients(lambda *a: _router(*a).weights, "logits", upstream="weights")
_sort_grad = _gradients(_sort_chunks, "x")
_dot_grad_rows = _gradients(_ragged_dot, "rows", upstream="d_products")
_dot_grad_weights = _gradients(_ragged_dot, "matrices", upstream="d_products")
_layer = _with_gradients(_feed_forward, *LAYER.split())

_MOVED, _BACK = "x selected_experts weights", "rows plan weights"
_BOTH_WAYS = "permute unpermute unpermute_grad permute_grad"
_CHUNKS, _DOT = "split_sizes sorted_indices", "rows matrices group_sizes"
_DRAWN, _GROUPED = ("uniform",), ("even", "uneven", "half")

OPS: dict[str, Op] = {
    "plan": Op("selected_experts", _plan, "plan", "selected_experts"),
    "permute": Op("x plan", _permute, "permute", "x"),
    "permute+plan": Op("x selected_experts", _permute_with_plan, "permute", "x selected_experts"),
    "unpermute": Op(_BACK, _unpermute, "unpermute", "rows"),
    "permute_grad": Op("rows plan", _permute_grad, "permute_grad", "rows"),
    "unpermute_grad": Op(f"{_BACK} gradient", _unpermute_grad, "unpermute_grad", "rows weights"),
    "moves": Op(_MOVED, _moves, "permute unpermute", "x"),
    "moves+grad": Op(f"{_MOVED} gradient", _moves_grad, _BOTH_WAYS, "x gradient weights"),
    "router": Op("logits", _router, "router", "", _DRAWN),
    "router+grad": Op("logits weights", _router_grad, "router+grad", "weights logits", _DRAWN),
    "sort_chunks": Op(f"x {_CHUNKS}", _sort_chunks, "sort_chunks", "x", (None,)),
    "sort_chunks_grad": Op(f"gradient {_CHUNKS}", _sort_grad, "sort_chunks", "gradient", (None,)),
    "ragged_dot": Op(_DOT, _ragged_dot, "", "", _GROUPED, 1),
    "ragged_dot_grad_rows": Op(f"{_DOT} d_products", _dot_grad_rows, "", "", _GROUPED, 1),
    "ragged_dot_grad_weights": Op(f"{_DOT} d_products", _dot_grad_weights, "", "", _GROUPED, 1),
    # Gate, up and down, forward, and two gradients of each.
    "layer": Op(f"{LAYER} gradient", _layer, "", "", _DRAWN, 9),
}


# --- what they read -------------------------------------------------------------------------


def _draw_experts(case: Case) -> jax.Array:
    """Distinct experts for each token, all equally likely; skewed, half of them become expert 0."""
    selected = jax.lax.top_k(_draw(0, (case.tokens, case.experts)), case.top_k)[1]
    if case.routing == "skewed":
        selected = jnp.where(_draw(1, selected.shape) < 0, 0, selected)
    return selected


def _draw_sizes(case: Case) -> jax.Array:
    """Sizes of groups or chunks that cover all rows: even, half of all in the first, or random."""
    count, rows = case.experts, case.rows
    if case.routing == "even":
        bounds = np.linspace(0, rows, count + 1)
    elif case.routing == "half":
        bounds = np.append(0, np.linspace(rows // 2, rows, count))
    else:
        cuts = np.random.default_rng(0).integers(0, rows + 1, count - 1)
        bounds = np.sort(np.append(cuts, [0, rows]))
    return jnp.asarray(np.diff(bounds.astype(np.int32)))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(
    number: Any, shape: tuple[int, ...], dtype: str = "float32", scale: float = 1.0
) -> jax.Array:
    """Values in [-2, 2) times `scale`: a hash of `number` and of their place.

    It compiles faster than `jax.random`.
    """
    mixed = jnp.full(shape, jnp.uint32(number + 1) * jnp.uint32(0x9E3779B9))
    for axis in range(len(shape)):
        mixed = (mixed ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(2654435761)
        mixed = mixed ^ (mixed >> 15)
    return (((mixed >> 8).astype(jnp.float32) * 2**-22 - 2) * scale).astype(dtype)


def _draw_matrices(number: int, case: Case, depth: int, columns: int) -> jax.Array:
    """Scaled so that products are about as large as the rows."""
    return _draw(number, (case.experts, depth, columns), case.dtype, depth**-0.5)


# What each input is. Gradients have the shapes of what they are the gradients of: `gradient` that
# of tokens, `rows` also that of rows, `d_products` that of rows times matrices.
MAKERS: dict[str, Callable[[Case], Any]] = {
    "x": lambda c: _draw(2, (c.tokens, c.hidden), c.dtype),
    "gradient": lambda c: _draw(3, (c.tokens, c.hidden), c.dtype),
    "rows": lambda c: _draw(4, (c.rows, c.hidden), c.dtype),
    "weights": lambda c: jax.nn.softmax(_draw(5, (c.tokens, c.top_k))),
    "selected_experts": _draw_experts,
    "plan": lambda c: moe.make_plan(_draw_experts(c), c.experts, implementation="xla"),
    "split_sizes": _draw_sizes,
    "sorted_indices": lambda c: jax.random.permutation(jax.random.key(0), c.experts),
    # Few bits, so that no two scores become equal by rounding where their logits are not.
    "logits": lambda c: _draw(6, (c.tokens, c.experts), "bfloat16").astype("float32"),
    "matrices": lambda c: _draw_matrices(7, c, c.hidden, c.width),
    "d_products": lambda c: _draw(8, (c.rows, c.width), c.dtype),
    "group_sizes": _draw_sizes,
    "w_gate_up": lambda c: _draw_matrices(9, c, c.hidden, 2 * c.width),
    "w_down": lambda c: _draw_matrices(10, c, c.width, c.hidden),
}
