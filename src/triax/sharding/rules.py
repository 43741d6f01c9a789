"""Parses the rule of `triax.sharded`, and checks it against `cut`, `reduce` and the arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError

Rule = tuple[list[list[str]], list[list[str]]]


def parse(rule: Any) -> Rule:
    if not isinstance(rule, str):
        raise ArgumentTypeError(
            f"Argument `rule` must be a string such as 't h, h -> t h'; got {messages.shown(rule)}."
        )
    sides = rule.split("->")
    if len(sides) != 2:
        raise ArgumentValueError(
            f"Argument `rule` must have arguments, one '->' and results, as 't h, h -> t h'; got "
            f"{rule!r}."
        )
    parsed: list[list[list[str]]] = []
    for side in sides:
        parsed.append([names.split() for names in side.split(",")])
        for names in parsed[-1]:
            for name in names:
                if not re.fullmatch(r"[A-Za-z_]\w*", name):
                    raise ArgumentValueError(
                        f"Argument `rule` must have names of letters, digits and '_', with blanks "
                        f"between them; got {name!r} in {rule!r}."
                    )
                if names.count(name) > 1:
                    raise ArgumentValueError(
                        f"Argument `rule` must name each dimension of an array differently; got "
                        f"{name!r} twice in {' '.join(names)!r}."
                    )
    return parsed[0], parsed[1]


def names(argument: str, value: Any) -> tuple[str, ...]:
    names: Any = value.split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"Argument `{argument}` must be names from `rule`, such as 't' or 'b t'; got "
            f"{messages.shown(value)}."
        )
    return tuple(dict.fromkeys(names))


def check_cut(rule: str, parsed: Rule, cut: tuple[str, ...], reduce: tuple[str, ...]) -> None:
    of_arguments = {name for names in parsed[0] for name in names}
    if not cut and not reduce:
        raise ArgumentTypeError(
            "Argument `cut` is missing: the names of the dimensions in `rule` that may be "
            "sharded. The function must compute each element along them alike and independently, "
            "as a norm over h computes each t in 't h, h -> t h'."
        )
    for argument, names in (("cut", cut), ("reduce", reduce)):
        for name in names:
            if name not in of_arguments:
                hint = messages.near_misses(name, of_arguments)
                if within := [n for n in sorted(of_arguments) if len(name) == 1 and name in n]:
                    apart = " ".join(within[0])
                    hint = f" Separate names by blanks: {apart!r}, not {within[0]!r}."
                raise ArgumentValueError(
                    f"Argument `{argument}` must have names of arguments in `rule`, {rule!r}; got "
                    f"{name!r}.{hint}"
                )
    for name in cut:
        if name in reduce:
            which = "`reduce`" if all(name in named for named in parsed[1]) else "`cut`"
            raise ArgumentValueError(
                f"Argument `reduce` has {name!r}, and so has `cut`. Names in `reduce` are sharded "
                f"too, even in results that have them: leave the name out of {which}."
            )
        for index, named in enumerate(parsed[1]):
            if name not in named:
                raise ArgumentValueError(
                    f"Argument `cut` has {name!r}, which result {index} of {rule!r} lacks. If the "
                    f"results of the parts are to be summed, pass reduce={name!r}; if not, leave "
                    "the name out, and the dimension is never sharded."
                )
    for name in reduce:
        if all(name in names for names in parsed[1]):
            raise ArgumentValueError(
                f"Argument `reduce` has {name!r}, which every result of {rule!r} has, so there is "
                f"nothing to sum. Pass cut={name!r}."
            )


def check_arguments(label: str, leaves: Sequence[Any], options: dict[str, Any]) -> None:
    for index, leaf in enumerate(leaves):
        if not jax_private.is_array(leaf):
            raise ArgumentTypeError(
                f"{label}: argument {index} must be an array; got {messages.shown(leaf)}. Pass "
                "options by keyword."
            )
    for name, value in options.items():
        if any(map(jax_private.is_array, jax.tree.leaves(value))):
            raise ArgumentTypeError(
                f"{label}: argument `{name}` is an array, so it must be passed by position, and "
                "have its place in `rule`."
            )


def check_sizes(
    label: str,
    what: str,
    declared: Sequence[Sequence[str]],
    arrays: Sequence[Any],
    sizes: dict[str, int] | None = None,
) -> dict[str, int]:
    """Checks arrays against `rule` and the known `sizes`; returns the size of each name."""
    sizes = {} if sizes is None else sizes
    if len(declared) != len(arrays):
        raise ArgumentValueError(
            f"{label}: `rule` has {messages.counted(len(declared), what)}, and the function has "
            f"{len(arrays)}: {messages.short([messages.short(a) for a in arrays])}."
        )
    for index, (names, array) in enumerate(zip(declared, arrays, strict=True)):
        if len(names) != len(array.shape):
            raise ArgumentValueError(
                f"{label}: `rule` names {messages.counted(len(names), 'dimension')} of {what} "
                f"{index}, {' '.join(names)!r}; got {messages.short(array)}."
            )
        for name, size in zip(names, array.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise ArgumentValueError(
                    f"{label}: {name!r} is {sizes[name]}, and {size} in {what} {index}, "
                    f"{' '.join(names)!r}; got {messages.short(array)}."
                )
    return sizes


def check_sums(
    label: str, declared: Sequence[Sequence[str]], reduce: Sequence[str], results: Sequence[Any]
) -> None:
    for index, (names, result) in enumerate(zip(declared, results, strict=True)):
        summed = [name for name in reduce if name not in names]
        if summed and result.dtype == bool:
            raise ArgumentValueError(
                f"{label}: result {index} is summed over parts of {summed[0]!r}, so it must not be "
                "boolean. Return a count instead: `any` is whether the count is above 0."
            )


_SMALL = 128


def check_constants(label: str, jaxpr: Any, sizes: set[int]) -> None:
    """Refuses closed-over arrays: every part would get them whole, but may need only a part.

    Small tables made with NumPy, which some of JAX's own functions have, are allowed if no
    dimension has the size of a dimension that is sharded.
    """
    for value in constants(jaxpr):
        shape = jnp.shape(value)
        # A table at least as long as a sharded dimension may be indexed along it, and each part
        # would read the table's first rows instead of its own.
        long = sizes and math.prod(shape) >= _SMALL and max(shape) >= min(sizes)
        own = isinstance(value, jax.Array) or sizes & {*shape} or long
        if isinstance(value, jax.core.Tracer) or (shape and own):
            raise ArgumentValueError(
                f"{label}: the function closes over an array, {messages.short(value)}, or makes it "
                "with NumPy. Make it an argument, so that `rule` says how it is sharded."
            )


def constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the constants of a jaxpr and of all jaxprs nested in it, literals included."""
    # Before JAX 0.12 the jaxpr of `jax.checkpoint` is open: it has no constants of its own.
    yield from getattr(jaxpr, "consts", ())
    for step in jaxpr.eqns:
        # With `jax_use_simplified_jaxpr_constants` arrays are literals.
        yield from (of.val for of in step.invars if isinstance(of, Literal))
        for parameter in step.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from constants(inner)
