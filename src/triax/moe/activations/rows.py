"""Whether a function computes each row by itself, from its jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

_ROWS, _MIXED = "rows", "mixed"  # of an array: its first dimension is that of rows; rows are mixed
_OF_ONE = ("axes", "axis", "dimension", "dimensions")


def mixed_by(jaxpr: Any) -> str | None:
    """The first step that mixes rows of the arguments, if results use it; else None.

    A step that is not known here counts as one that does not.
    """
    steps: list[str] = []
    found = _states(jaxpr, [_ROWS] * len(jaxpr.invars), steps)
    return steps[0] if _MIXED in found else None


def _states(jaxpr: Any, given: Sequence[str | None], steps: list[str]) -> list[str | None]:
    states: dict[Any, str | None] = dict(zip(jaxpr.invars, given, strict=True))
    state_of = lambda var: None if isinstance(var, Literal) else states.get(var)
    for step in jaxpr.eqns:
        before = list(map(state_of, step.invars))
        inner = next((p for p in step.params.values() if isinstance(p, ClosedJaxpr)), None)
        if _MIXED in before:
            after: list[str | None] = [_MIXED] * len(step.outvars)
        elif _ROWS not in before:
            continue
        elif inner is not None and len(inner.jaxpr.invars) == len(before):
            after = _states(inner.jaxpr, before, steps)
        else:
            pairs = zip(step.invars, before, strict=True)
            operands = [var.aval.shape for var, state in pairs if state == _ROWS]
            if _mixes(step, operands[0], before):
                steps.append(step.primitive.name)
                after = [_MIXED] * len(step.outvars)
            else:
                after = [_after(step, operands[0], var.aval.shape) for var in step.outvars]
        states.update(zip(step.outvars, after, strict=False))
    return list(map(state_of, jaxpr.outvars))


def _mixes(step: Any, shape: tuple[int, ...], before: Sequence[str | None]) -> bool:
    name, params = step.primitive.name, step.params
    if name == "dot_general":
        summed = zip(params["dimension_numbers"][0], before, strict=True)
        return any(state == _ROWS and 0 in dimensions for dimensions, state in summed)
    if name == "slice":
        strides = params["strides"] or (1,)
        of_rows = params["start_indices"][0], params["limit_indices"][0], strides[0]
        return of_rows != (0, shape[0], 1)
    if not name.startswith(("reduce_", "arg", "cum", "sort", "rev", "split", "concatenate")):
        return False
    over = [params[key] for key in _OF_ONE if key in params]
    return any(0 in np.atleast_1d(value) for value in over)


def _after(step: Any, shape: tuple[int, ...], result: tuple[int, ...]) -> str | None:
    """The state of a result of an array with rows."""
    name, params = step.primitive.name, step.params
    if name == "broadcast_in_dim":
        kept = params["broadcast_dimensions"][:1] == (0,)
    elif name == "transpose":
        kept = params["permutation"][0] == 0
    elif name.startswith(("reduce_", "arg", "slice", "split", "reshape", "concatenate", "triax_")):
        kept = True
    else:
        kept = shape == result and "gather" not in name and name != "dot_general"
    return _ROWS if kept and result[:1] == shape[:1] else None
