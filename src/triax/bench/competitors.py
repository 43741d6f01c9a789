"""What users would pick instead of Triax, for the ops of the benchmark's cases.

- "argsort+take": two sorts, `jnp.take` there and back, an einsum, derivatives by autodiff, as in
  public training code. For a chunk sort, the index made from the sizes, and `jnp.take`.
- "argsort+take+sum": the same with a sum that XLA can fuse in place of the einsum.
- "hand-written vjp": takes whose gradient, by hand, is the take by the inverse permutation.
- "hand-fused vjp": one sort, and all gradients by hand, each one pass over the rows as far as
  XLA's fusion goes: the best plain JAX that is known to us.
- "jnp.take": a single move by an index that was made before and is not on the clock, derivatives
  by autodiff.
- "transformer_engine": its JAX functions, where it is installed.

PyTorch's move is no JAX program and stands in `torch_competitor`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from triax.bench import plain_moves as plain
from triax.bench import transformer_engine_competitor as engine
from triax.bench.inputs import Inputs

if TYPE_CHECKING:
    from triax.bench.cases import Case


@dataclasses.dataclass(frozen=True)
class Competitor:
    """Another way to compute what a case computes.

    Called with the case's inputs it returns what the case's program returns, and can be called
    under `jax.jit`. What is to be timed is `program`, on the result of `prepare(inputs)`: what
    a user has at hand before the op runs is made there, outside of the timed program.
    """

    program: Callable[[Any], Any]
    prepare: Callable[[Inputs], Any] = lambda inputs: inputs

    def __call__(self, inputs: Inputs) -> Any:
        return self.program(self.prepare(inputs))


def competitors(case: Case) -> dict[str, Competitor]:
    """The competitors of a case by name, each of which can be traced here."""
    found = {name: Competitor(*parts) for name, parts in _PLAIN.get(case.op, {}).items()}
    if (theirs := _transformer_engine(case)) and not isinstance(theirs, str):
        found[engine.NAME] = theirs
    return found


def left_out(case: Case) -> dict[str, str]:
    """The competitors that the case's op has and that cannot run it here, and why."""
    theirs = _transformer_engine(case)
    return {engine.NAME: theirs} if isinstance(theirs, str) else {}


def _transformer_engine(case: Case) -> Competitor | str | None:
    """TransformerEngine as a competitor; why it cannot be one; None where it has no such op."""
    if case.op not in engine.OPS:
        return None
    if (reason := engine.problem(case)) is not None:
        return reason
    competitor = Competitor(*engine.OPS[case.op](case.experts))
    small = dataclasses.replace(case, tokens=16, hidden=64)
    # Its functions have changed their arguments and results before; a trace tells.
    try:
        made = jax.eval_shape(competitor, small.make_inputs())
    except Exception as error:
        return f"its functions take other arguments: {type(error).__name__}: {error}"
    expected = jax.eval_shape(small.compiled("xla"), small.make_inputs())
    if jax.tree.map(_type_of, made) != jax.tree.map(_type_of, expected):
        return f"its functions give other results: {made}"
    return competitor


def _type_of(array: Any) -> tuple[Any, Any]:
    return array.shape, array.dtype


def _gradients(route: Callable[..., jax.Array]) -> Callable[[Inputs], Any]:
    """`route` forward and backward, as the op "route+grad"."""

    def program(inputs: Inputs) -> Any:
        y, pull = jax.vjp(
            lambda x, weights: route(x, inputs["selected_experts"], weights),
            inputs["x"],
            inputs["weights"],
        )
        return y, *pull(inputs["gradient"])

    return program


def _forward(route: Callable[..., jax.Array]) -> Callable[[Inputs], Any]:
    return lambda inputs: route(inputs["x"], inputs["selected_experts"], inputs["weights"])


def _transposed(array: Any, shape: tuple[int, ...], index: jax.Array, **how: Any) -> jax.Array:
    """What autodiff makes of `take` from an array of that shape: a scatter-add."""
    source = jax.ShapeDtypeStruct(shape, array.dtype)
    (result,) = jax.linear_transpose(lambda x: plain.take(x, index, **how), source)(array)
    return result


def _with_order(inputs: Inputs) -> Inputs:
    """The plan's rows both ways: `order` and `inverse`, as in `plain_moves`."""
    inverse = inputs["plan"].row_of.reshape(-1)
    return {**inputs, "inverse": inverse, "order": plain.invert(inverse)}


def _with_token(inputs: Inputs) -> Inputs:
    """The token of each row, and shapes."""
    row_of = inputs["plan"].row_of
    order = plain.invert(row_of.reshape(-1))
    return {**inputs, "token": order // row_of.shape[1]}


def _permute_grad_by_hand(inputs: Inputs) -> jax.Array:
    row_of = inputs["plan"].row_of
    return plain.sum_slots(inputs["rows"], row_of.reshape(-1), row_of.shape[0])


def _unpermute_by_take(inputs: Inputs) -> jax.Array:
    return plain.weigh_slots(inputs["rows"], inputs["plan"].row_of.reshape(-1), inputs["weights"])


def _permute_grad_by_take(inputs: Inputs) -> jax.Array:
    rows = inputs["rows"]
    shape = (inputs["plan"].row_of.shape[0], rows.shape[1])
    return _transposed(rows, shape, inputs["token"])


def _unpermute_grad_by_take(inputs: Inputs) -> Any:
    unpermute = lambda rows, w: _unpermute_by_take({**inputs, "rows": rows, "weights": w})
    _, pull = jax.vjp(unpermute, inputs["rows"], inputs["weights"])
    return pull(inputs["gradient"])


def _unpermute_grad_by_hand(inputs: Inputs) -> Any:
    names = ("rows", "order", "inverse", "weights", "gradient")
    return plain.weigh_slots_grad(*(inputs[name] for name in names))


def _chunk_index(inputs: Inputs, index: Callable[..., jax.Array] = plain.chunk_index) -> jax.Array:
    array = inputs["x"] if "x" in inputs else inputs["gradient"]
    return index(inputs["split_sizes"], inputs["sorted_indices"], array.shape[0])


def _with_index(inputs: Inputs) -> Inputs:
    return {**inputs, "index": _chunk_index(inputs)}


def _sort_by_take(inputs: Inputs) -> jax.Array:
    return plain.take(inputs["x"], inputs["index"], unique=True)


def _sort_grad_by_take(inputs: Inputs) -> jax.Array:
    gradient = inputs["gradient"]
    return _transposed(gradient, gradient.shape, inputs["index"], unique=True)


def _sort_grad_by_hand(inputs: Inputs) -> jax.Array:
    return plain.take(inputs["gradient"], _chunk_index(inputs, plain.chunk_index_back))


_ROUTES: dict[str, Callable[..., jax.Array]] = {
    "argsort+take": plain.route,
    "argsort+take+sum": plain.route_summed,
    "hand-written vjp": plain.route_by_sorting,
    "hand-fused vjp": plain.route_by_hand,
}

# By op and competitor: the program, and what is prepared for it.
_PLAIN: dict[str, dict[str, tuple[Callable[..., Any], ...]]] = {
    "permute": {
        "jnp.take": (lambda inputs: plain.take(inputs["x"], inputs["token"]), _with_token),
    },
    "unpermute": {"jnp.take": (_unpermute_by_take,)},
    "permute_grad": {
        "jnp.take": (_permute_grad_by_take, _with_token),
        "hand-fused vjp": (_permute_grad_by_hand,),
    },
    "unpermute_grad": {
        "jnp.take": (_unpermute_grad_by_take,),
        "hand-fused vjp": (_unpermute_grad_by_hand, _with_order),
    },
    "sort_chunks": {
        "jnp.take": (_sort_by_take, _with_index),
        "argsort+take": (lambda inputs: _sort_by_take(_with_index(inputs)),),
    },
    "sort_chunks_grad": {
        "jnp.take": (_sort_grad_by_take, _with_index),
        "argsort+take": (lambda inputs: _sort_grad_by_take(_with_index(inputs)),),
        "hand-written vjp": (_sort_grad_by_hand,),
    },
    "route": {name: (_forward(route),) for name, route in _ROUTES.items()},
    "route+grad": {name: (_gradients(route),) for name, route in _ROUTES.items()},
}
