"""Whether a function computes each row by itself, from its jaxprs for two numbers of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

_FREE, _BY_ROW, _MIXED = range(3)  # a value of no argument; of arguments, row by row; of many rows
_OVER = ("axes", "axis", "dimension", "dimensions")  # which dimensions a step goes over


def more_rows(arrays: Sequence[jax.Array], traced: ClosedJaxpr) -> tuple[list[Any], int]:
    """Stand-ins for arrays [rows, …], of so many times as many rows, and these times.

    They divide no dimension of the jaxpr for as many rows as there are, constants included. So
    with more rows they divide just those dimensions that the rows are in.
    """
    steps = list(_steps(traced.jaxpr))
    variables = [var for step in steps for var in (*step.invars, *step.outvars)]
    sizes = {size for var in variables for size in np.shape(var.aval)}
    times = next(n for n in itertools.count(101, 2) if all(size % n for size in sizes if size))
    avals = [jax.typeof(array) for array in arrays]
    return [aval.update(shape=(times * aval.shape[0], *aval.shape[1:])) for aval in avals], times


def differ(jaxpr: ClosedJaxpr, of_more: ClosedJaxpr) -> bool:
    """Whether jaxprs for two numbers of rows differ in more than the shapes of what they make."""
    found = []
    for each in (jaxpr, of_more):
        steps = [(step.primitive.name, _constants(step.invars)) for step in _steps(each.jaxpr)]
        shapes = [np.shape(array) for array in each.consts]
        found.append((steps, shapes, _constants(each.jaxpr.outvars)))
    return found[0] != found[1]


def _steps(jaxpr: Any) -> Iterator[Any]:
    for step in jaxpr.eqns:
        yield step
        for inner in jax.tree.leaves(list(step.params.values())):
            if isinstance(inner, ClosedJaxpr):
                yield from _steps(inner.jaxpr)


def _constants(variables: Sequence[Any]) -> list[str]:
    return [repr(var.val) if isinstance(var, Literal) else "" for var in variables]


def mixed_by(jaxpr: Any, times: int) -> str | None:
    """The first step that mixes rows of the arguments or numbers them, if results use it.

    A step that is not known here counts as one that does not.

    Args:
      jaxpr: of arguments as `more_rows` makes them.
      times: what divides just those dimensions that the rows are in.
    """
    steps: list[str] = []
    found = _states(jaxpr, [_BY_ROW] * len(jaxpr.invars), times, steps)
    return steps[0] if _MIXED in found else None


def _states(jaxpr: Any, given: Sequence[int], times: int, steps: list[str]) -> list[int]:
    states: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    state_of = lambda var: _FREE if isinstance(var, Literal) else states.get(var, _FREE)
    for step in jaxpr.eqns:
        before = list(map(state_of, step.invars))
        after = [max(before, default=_FREE)] * len(step.outvars)
        if after[:1] != [_MIXED]:
            if (inner := _of_inner(step, before, times, steps)) is not None:
                after = inner
            elif _mixes(step, before, times):
                steps.append(step.primitive.name)
                after = [_MIXED] * len(step.outvars)
        states.update(zip(step.outvars, after, strict=True))
    return list(map(state_of, jaxpr.outvars))


def _of_inner(step: Any, before: list[int], times: int, steps: list[str]) -> list[int] | None:
    """The states of a step's results if jaxprs make them; None of a loop over rows."""
    name, params = step.primitive.name, step.params
    if name == "cond":
        branches = [branch.jaxpr for branch in params["branches"]]
        each = [_states(branch, before[1:], times, steps) for branch in branches]
        return list(map(max, zip(*each, strict=True)))
    if name == "while":
        at = params["cond_nconsts"]
        start = at + params["body_nconsts"]
        body = params["body_jaxpr"].jaxpr
        once = lambda carry: _states(body, before[at:start] + carry, times, steps)
        carry = _settled(before[start:], once)
        go_on = _states(params["cond_jaxpr"].jaxpr, before[:at] + carry, times, steps)
        return [_MIXED] * len(carry) if _MIXED in go_on else carry
    if name == "scan":
        body = params["jaxpr"].jaxpr
        scanned = _with_one_more(step.invars, body.invars)
        if any(each and state == _BY_ROW for each, state in zip(scanned, before, strict=True)):
            return None
        end = len(before) - sum(scanned)
        start = end - _with_one_more(step.outvars, body.outvars).count(False)

        def every(carry: list[int]) -> list[int]:
            return _states(body, before[:start] + carry + before[end:], times, steps)

        return every(_settled(before[start:end], lambda carry: every(carry)[: len(carry)]))
    found = [p.jaxpr for p in params.values() if isinstance(p, ClosedJaxpr)]
    if found and len(found[0].invars) == len(before):
        return _states(found[0], before, times, steps)
    return None


def _settled(carry: list[int], once: Callable[[list[int]], list[int]]) -> list[int]:
    """The states of what a loop carries, after as many turns as change them."""
    while (after := list(map(max, carry, once(carry)))) != carry:
        carry = after
    return carry


def _with_one_more(of_scan: Sequence[Any], of_body: Sequence[Any]) -> list[bool]:
    """Which values a scan takes apart or puts together: its body sees them without a dimension.

    Its parameters say so too, under names that differ between versions of JAX.
    """
    return [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(of_scan, of_body, strict=True)]


def _mixes(step: Any, before: Sequence[int], times: int) -> bool:
    name, params = step.primitive.name, step.params
    shapes = [var.aval.shape for var in step.invars]

    def has_rows(shape: tuple[int, ...], at: int) -> bool:
        return shape[at] > 0 and shape[at] % times == 0

    if name == "iota":
        return has_rows(params["shape"], params["dimension"])
    if _BY_ROW not in before:
        return False
    if name == "scan":  # over rows: by themselves if nothing is handed on
        return not all(_with_one_more(step.outvars, params["jaxpr"].jaxpr.outvars))
    if name == "dot_general":
        (left, _right), _ = params["dimension_numbers"]
        return any(has_rows(shapes[0], at) for at in left)
    if name == "slice":
        ends = zip(params["start_indices"], params["limit_indices"], shapes[0], strict=True)
        strides = params["strides"] or (1,) * len(shapes[0])
        return any(
            has_rows(shapes[0], at) and (start, limit, strides[at]) != (0, size, 1)
            for at, (start, limit, size) in enumerate(ends)
        )
    if name == "dynamic_slice":
        sizes = enumerate(params["slice_sizes"])
        return any(has_rows(shapes[0], at) and size != shapes[0][at] for at, size in sizes)
    if name == "pad":
        changes = enumerate(params["padding_config"])
        return any(has_rows(shapes[0], at) and change != (0, 0, 0) for at, change in changes)
    if name == "gather":
        return any(has_rows(shapes[0], at) for at in params["dimension_numbers"].start_index_map)
    if name.startswith("scatter"):
        numbers, updates = params["dimension_numbers"], shapes[2]
        indexed = [at for at in range(len(updates)) if at not in numbers.update_window_dims]
        by_themselves = [has_rows(shapes[0], at) for at in numbers.operand_batching_dims]
        return any(has_rows(shapes[0], at) for at in numbers.scatter_dims_to_operand_dims) or sum(
            has_rows(updates, at) for at in indexed
        ) > sum(by_themselves)
    if not name.startswith(("reduce_", "arg", "cum", "sort", "rev", "split", "concatenate")):
        return False
    over = [at for key in _OVER if key in params for at in np.atleast_1d(params[key])]
    operands = [shape for shape, state in zip(shapes, before, strict=True) if state == _BY_ROW]
    return any(has_rows(shape, at) for shape in operands for at in over)
