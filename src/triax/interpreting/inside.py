"""Functions that rewritten kernels call: conditions and constants, as the compiler treats them.

Triton's interpreter leaves conditions to Python, for which every block is true: ``a and b`` is then
silently ``b``, and ``if`` on a block always taken. Here ``and``, ``or`` and ``not`` work element by
element, without short circuit between tensors, as in compiled code; a condition must be a scalar.

In a compiled kernel every literal and every constant is a `tl.constexpr`; here they are plain
Python values, so that ``N.value`` is ``N``.
"""

from __future__ import annotations

import builtins
import enum
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl

from triax.binding.launch import rebuild
from triax.compat import triton_interpreter as compat
from triax.compat.triton_interpreter import Change
from triax.errors import UnsupportedError


class AmbiguousTruth(UnsupportedError):
    """A block of several elements was used as a condition."""


def plain(constant: Any) -> Any:
    """Unwraps a `tl.constexpr`; returns any other value as it is."""
    return constant.value if isinstance(constant, tl.constexpr) else constant


def scalar(value: Any) -> Any:
    """Returns `value`, or raises `AmbiguousTruth` if it is a block of several elements."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise AmbiguousTruth(
            f"A block of shape {value.handle.data.shape} cannot be a condition: use `tl.where`, "
            "or reduce the block to a scalar."
        )
    return value


def _value(constant: Any) -> Any:
    """Returns ``constant.value``, or a plain value itself."""
    is_plain = isinstance(constant, enum.Enum) or not hasattr(constant, "value")
    return constant if is_plain else constant.value


def _choice(
    condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any], semantic: Any
) -> Any:
    """Returns ``then if condition else otherwise``, as a tensor if the condition is a tensor."""
    value = then() if scalar(condition) else otherwise()
    return semantic.to_tensor(value, False) if isinstance(condition, tl.tensor) else value


def _branch(condition: Any, branches: list[Any]) -> Any:
    """Returns the condition of an `if` with a `return`; adds it to `branches` if it is a tensor."""
    if isinstance(condition, tl.tensor):
        branches.append(condition)
    return scalar(condition)


def _returned(value: Any, branches: list[Any], semantic: Any) -> Any:
    """Turns returned numbers into tensors if a tensor decided which ``return`` is reached."""
    if isinstance(value, tuple):
        return rebuild(value, [_returned(part, branches, semantic) for part in value])
    is_number = isinstance(value, (int, float))
    decays = is_number and (branches or compat.NUMBERS_DECAY)
    return semantic.to_tensor(value) if decays else value


def _assert(condition: Any, message: Any = "") -> None:
    """Runs ``assert condition, message``, which the compiler makes a `tl.device_assert`."""
    if not np.all(condition.handle.data if isinstance(condition, tl.tensor) else condition):
        raise AssertionError(message)


def _combined(deciding: bool, method: str, *values: Callable[[], Any]) -> Any:
    """Runs ``a and b`` or ``a or b``; only a constant equal to `deciding` skips later values."""
    result = None
    for evaluate in values:
        value = evaluate()
        if isinstance(value, tl.tensor):
            result = value if result is None else getattr(result, method)(value)
        elif bool(value) is deciding:
            return value
        else:
            last = value
    return last if result is None else result


def _not(value: Any) -> Any:
    return value.__not__() if hasattr(type(value), "__not__") else not value


def _message(evaluate: Callable[[], Any]) -> Any:
    """Returns a `static_assert`'s message; if that fails, the error: the compiler forgives it."""
    try:
        return evaluate()
    except Exception as error:
        return f"<its message failed: {error!r}>"


NAMES: dict[str, Any] = {
    "interpreter_plain": plain,
    "interpreter_value": _value,
    "interpreter_scalar": scalar,
    "interpreter_branch": _branch,
    "interpreter_returned": _returned,
    "interpreter_choice": _choice,
    "interpreter_assert": _assert,
    "interpreter_and": functools.partial(_combined, False, "logical_and"),
    "interpreter_or": functools.partial(_combined, True, "logical_or"),
    "interpreter_not": _not,
    "interpreter_message": _message,
}
"""The functions by the names that `triax.interpreting.syntax` puts into a kernel."""


def _extremum(of_numbers: Callable[..., Any], name: str) -> Callable[..., Any]:
    def extremum(*values: Any) -> Any:
        if any(isinstance(value, tl.tensor) for value in values):
            return functools.reduce(getattr(tl, name), values)
        return of_numbers(*values)

    return extremum


def number(value: Any, dtype: tl.dtype) -> tl.tensor:
    """Makes a scalar tensor."""
    return compat.tensor(np.array(value, compat.numpy_dtype(dtype)), dtype)


def tensor_range(semantic: Any) -> Callable[..., Iterator[tl.tensor]]:
    """Returns a kernel's `range`, whose counters are tensors of the type of the bounds."""

    def counters(*bounds: Any, **hints: Any) -> Iterator[tl.tensor]:
        bounds += tuple(hints[n] for n in ("arg1", "arg2", "step") if hints.get(n) is not None)
        bounds = tuple(plain(b) for b in bounds if b is not None)
        types = (semantic.to_tensor(bound).dtype for bound in bounds)
        dtype = functools.reduce(semantic.integer_promote_impl, types, tl.int32)
        for counter in builtins.range(*bounds):
            yield number(counter, dtype)

    return counters


def builtin_functions(semantic: Any) -> dict[str, Any]:
    """Returns replacements for Python's functions that mean something else in a kernel."""
    return {
        "range": tensor_range(semantic),
        "min": _extremum(builtins.min, "minimum"),
        "max": _extremum(builtins.max, "maximum"),
    }


def constexpr_operators() -> Iterator[Change]:
    """Yields patches for the operators that `tl.constexpr` lacks for an `int` on the left."""
    # Workaround: triton >=3.5: in compiled code a left operand is always a `tl.constexpr`.
    for name in ("mod", "and_", "or_", "xor", "lshift", "rshift"):
        reflected = functools.partialmethod(_reflected, getattr(operator, name))
        yield Change(tl.constexpr, f"__r{name.rstrip('_')}__", reflected)


def _reflected(self: Any, operation: Callable[[Any, Any], Any], other: Any) -> tl.constexpr:
    return tl.constexpr(operation(other, self.value))
