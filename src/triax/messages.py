"""Helpers for messages: showing values, suggesting names, tables, and checks that modules share."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError


class _Short(reprlib.Repr):
    """A short text for any value; for an array its dtype and shape, never its contents."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4
        self.maxstring = self.maxother = 80

    def repr1(self, x: Any, level: int) -> str:
        is_value = isinstance(x, (type, np.generic))
        if not is_value and hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple):
            return f"{x.dtype}[{','.join(map(str, x.shape))}]"
        if isinstance(x, type):
            return super().repr1(x, level)
        if dataclasses.is_dataclass(x) or hasattr(x, "_fields"):  # their repr may show arrays
            return f"{type(x).__name__}(...)"
        return super().repr1(x, level)


short = _Short().repr


def shown(value: Any) -> str:
    """A value and its type, as in "got 3 of type int" and "got float32[8,4] of type jax.Array"."""
    type_name = "jax.Array" if isinstance(value, jax.Array) else type(value).__name__
    traced = "traced " if isinstance(value, jax.core.Tracer) else ""
    return f"{traced}{short(value)} of type {type_name}"


def remedy(argument: str, value: object, otherwise: str) -> str:
    """What to do with a value that is no array; for what is no variable of flax.nnx `otherwise`."""
    if any(base.__module__.startswith("flax.nnx") for base in type(value).__mro__):
        return f"Use `nnx.as_pure({argument.partition('.')[0]})`."
    return otherwise


def fields(value: Any) -> str:
    """The `repr` of a dataclass that may hold arrays: each field as `short` shows it."""
    shown = (f"{f.name}={short(getattr(value, f.name))}" for f in dataclasses.fields(value))
    return f"{type(value).__name__}({', '.join(shown)})"


def counted(number: int, what: str) -> str:
    """ "1 output", "2 outputs"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_callable(argument: str, value: object) -> None:
    """Raises `ArgumentTypeError` unless `value` is callable."""
    if not callable(value):
        raise ArgumentTypeError(f"Argument `{argument}` must be a function; got {shown(value)}.")


def call(function: Callable[..., Any], where: str, takes: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a user's function; adds `where` it comes from to the exceptions it raises.

    Raises:
      ArgumentTypeError: the function does not accept these arguments, which `takes` describes.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if isinstance(error, TypeError) and (mismatch := _mismatch(function, args, kwargs)):
            raise ArgumentTypeError(
                f"{where[0].upper()}{where[1:]} is called with {takes}; got {short(function)}, "
                f"which cannot be: {mismatch}."
            ) from None
        if where[1:] not in str(error):
            error.add_note(f"Raised by {where}.")
        raise


def _mismatch(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Says why a function does not accept these arguments; "" if it does or has no signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def check_bool(**arguments: object) -> None:
    """Raises `ArgumentTypeError` unless all are bools or ints. (To Python even "no" is true.)"""
    for argument, value in arguments.items():
        if not isinstance(value, (int, np.bool_)):
            raise ArgumentTypeError(f"Argument `{argument}` must be a bool; got {shown(value)}.")


def check_sizes_known(argument: str, shape: Sequence[Any], remedy: str = "") -> None:
    """Raises `UnsupportedError` if a size is symbolic, as `jax.export` allows.

    A kernel's grid and scalars, and the number of rows of a plan, are constants of the program.
    """
    if any(map(jax.export.is_symbolic_dim, shape)):
        raise UnsupportedError(
            f"Argument `{argument}` must have concrete sizes; got the symbolic "
            f"[{', '.join(map(str, shape))}]. Export once for each size{remedy}."
        )


def near_misses(name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """A sentence that suggests the names closest to a misspelt one, or lists all `known` names."""
    known = sorted(known)
    in_lower_case = {n.lower(): n for n in [*known, *also]}
    if close := difflib.get_close_matches(name.lower(), in_lower_case):
        return f" Did you mean {' or '.join(f'`{in_lower_case[n]}`' for n in close)}?"
    return f" Known: {', '.join(known)}." if known else ""


def check_choice(argument: str, value: Any, choices: Collection[Any], remedy: str = "") -> None:
    """Raises `ArgumentValueError` unless `value` is one of `choices`."""
    # The type is compared first, because == of arrays gives no bool.
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise ArgumentValueError(
            f"Argument `{argument}` must be one of {', '.join(map(repr, choices))}; got "
            f"{short(value)}.{remedy}"
        )
