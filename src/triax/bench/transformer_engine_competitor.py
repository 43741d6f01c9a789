"""TransformerEngine's JAX functions as competitors, where they are installed.

They take a mask and probs [tokens, experts] where Triax takes experts and weights [tokens, top_k].
A router made for them would give those, so they are made before the clock starts. Their row map is
theirs to make: it is on the clock of a route, and not of a single move or gradient.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from triax.bench.inputs import Inputs

if TYPE_CHECKING:
    from triax.bench.cases import Case

NAME = "transformer_engine"
PACKAGE = "transformer_engine"
MODULE = "transformer_engine.jax.permutation"
FUNCTIONS = ("token_dispatch", "token_combine", "sort_chunks_by_index")

# The program, and what is prepared for it.
Parts = tuple[Callable[[Any], Any], Callable[[Inputs], Any]]


def problem(case: Case) -> str | None:
    """Why they cannot run a case here, or None where they may."""
    if case.routing == "skewed" and case.top_k > 1:
        return "a mask cannot name an expert twice, as tokens of a skewed routing do"
    try:
        if importlib.util.find_spec(PACKAGE) is None:
            return "it is not installed"
        module = importlib.import_module(MODULE)
    except Exception as error:  # its import loads libraries, which fail in ways of their own
        return f"{MODULE} cannot be imported: {type(error).__name__}: {error}"
    missing = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
    return f"{MODULE} has no {', '.join(missing)}" if missing else None


def _function(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(MODULE), name)


def _dispatch(x: jax.Array, mask: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """The rows, and the map that `token_combine` takes."""
    results = _function("token_dispatch")(x, mask, num_rows)
    return results[0], results[2]


def _combine(rows: jax.Array, row_id_map: jax.Array, probs: jax.Array) -> jax.Array:
    return _function("token_combine")(rows, row_id_map, probs)


def _mask(selected: jax.Array, experts: int) -> jax.Array:
    token = jnp.arange(selected.shape[0])[:, None]
    return jnp.zeros((selected.shape[0], experts), jnp.int32).at[token, selected].set(1)


def _probs(selected: jax.Array, weights: jax.Array, experts: int) -> jax.Array:
    token = jnp.arange(selected.shape[0])[:, None]
    return jnp.zeros((selected.shape[0], experts), weights.dtype).at[token, selected].set(weights)


def _of_slots(probs: jax.Array, selected: jax.Array) -> jax.Array:
    return jnp.take_along_axis(probs, selected, axis=1)


def _route_inputs(inputs: Inputs, experts: int) -> Inputs:
    selected = inputs["selected_experts"]
    return {
        **inputs,
        "mask": _mask(selected, experts),
        "probs": _probs(selected, inputs["weights"], experts),
    }


def _route(inputs: Inputs) -> jax.Array:
    rows, row_id_map = _dispatch(inputs["x"], inputs["mask"], inputs["selected_experts"].size)
    rows = jax.lax.optimization_barrier(rows)  # where the experts would stand
    return _combine(rows, row_id_map, inputs["probs"])


def _route_with_gradients(inputs: Inputs) -> Any:
    route = lambda x, probs: _route({**inputs, "x": x, "probs": probs})
    y, pull = jax.vjp(route, inputs["x"], inputs["probs"])
    d_x, d_probs = pull(inputs["gradient"])
    return y, d_x, _of_slots(d_probs, inputs["selected_experts"])


def _tokens(inputs: Inputs) -> jax.Array:
    """Some tokens: the rows' shape and dtype are all that a map or a gradient needs of them."""
    rows = inputs["rows"]
    return jnp.zeros((inputs["plan"].row_of.shape[0], rows.shape[1]), rows.dtype)


def _unpermute(experts: int) -> Parts:
    def prepare(inputs: Inputs) -> Any:
        rows, selected = inputs["rows"], inputs["plan"].expert_of
        _, row_id_map = _dispatch(_tokens(inputs), _mask(selected, experts), rows.shape[0])
        return rows, row_id_map, _probs(selected, inputs["weights"], experts)

    return lambda prepared: _combine(*prepared), prepare


# Of a gradient, the forward pass is run where it is prepared: what `jax.vjp` returns is a pytree
# and can be given to a program.


def _permute_grad(experts: int) -> Parts:
    def prepare(inputs: Inputs) -> Any:
        rows, mask = inputs["rows"], _mask(inputs["plan"].expert_of, experts)
        _, pull = jax.vjp(lambda x: _dispatch(x, mask, rows.shape[0])[0], _tokens(inputs))
        return pull, rows

    return lambda prepared: prepared[0](prepared[1])[0], prepare


def _unpermute_grad(experts: int) -> Parts:
    _, prepare_forward = _unpermute(experts)

    def prepare(inputs: Inputs) -> Any:
        rows, row_id_map, probs = prepare_forward(inputs)
        _, pull = jax.vjp(lambda rows, probs: _combine(rows, row_id_map, probs), rows, probs)
        return pull, inputs["gradient"], inputs["plan"].expert_of

    def program(prepared: Any) -> Any:
        pull, gradient, selected = prepared
        d_rows, d_probs = pull(gradient)
        return d_rows, _of_slots(d_probs, selected)

    return program, prepare


def _sort(inputs: Inputs, x: jax.Array) -> jax.Array:
    return _function("sort_chunks_by_index")(x, inputs["split_sizes"], inputs["sorted_indices"])[0]


def _sort_grad(experts: int) -> Parts:
    def prepare(inputs: Inputs) -> Any:
        gradient = inputs["gradient"]
        _, pull = jax.vjp(lambda x: _sort(inputs, x), jnp.zeros_like(gradient))
        return pull, gradient

    return lambda prepared: prepared[0](prepared[1])[0], prepare


# By op, from the number of experts. `permute` alone has no counterpart: a dispatch makes its map.
OPS: dict[str, Callable[[int], Parts]] = {
    "unpermute": _unpermute,
    "permute_grad": _permute_grad,
    "unpermute_grad": _unpermute_grad,
    "sort_chunks": lambda experts: (lambda inputs: _sort(inputs, inputs["x"]), lambda i: i),
    "sort_chunks_grad": _sort_grad,
    "route": lambda experts: (_route, lambda inputs: _route_inputs(inputs, experts)),
    "route+grad": lambda experts: (
        _route_with_gradients,
        lambda inputs: _route_inputs(inputs, experts),
    ),
}
