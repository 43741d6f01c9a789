"""Makes classes of `triton.aggregate` work in interpreted kernels.

The compiler passes constants and tuples to an aggregate's constructor as `tl.constexpr` and
`tl.tuple`, which the types of its fields demand, and its own state to functions that take
`_semantic`. While a kernel runs, the patched classes do the same. `run` binds jitted methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import triton
from triton.runtime import JITFunction

from triax.compat import triton_interpreter as compat
from triax.compat.triton_interpreter import Change
from triax.errors import UnsupportedError
from triax.interpreting.inside import AmbiguousTruth


def changes(semantic: Any) -> Iterator[Change]:
    """Yields the patches for all aggregates of this process."""
    for class_ in compat.aggregates():
        yield Change(class_, "__new__", _constructor(class_, semantic))
        yield Change(class_, "__bool__", _refuse_condition)
        for name, member in list(vars(class_).items()):
            if isinstance(member, JITFunction) and not compat.AGGREGATES_HAVE_OPERATORS:
                if name.startswith("__") and name != "__getitem__":
                    yield Change(class_, name, _between_aggregates(name, member))
            elif _asks_for_semantic(member):
                yield Change(class_, name, as_compiled(member, semantic))


def as_compiled(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """Wraps a function so that it gets its arguments as Triton's compiler would pass them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        hidden = ("_semantic", "_generator")
        kwargs = {n: compat.as_compiled(v) for n, v in kwargs.items() if n not in hidden}
        return function(*map(compat.as_compiled, args), _semantic=semantic, **kwargs)

    return call


def _constructor(class_: Any, semantic: Any) -> Callable[..., Any]:
    make = as_compiled(functools.partial(class_.__new__, class_), semantic)
    return lambda class_, *args, **fields: make(*args, **fields)


def _asks_for_semantic(member: Any) -> bool:
    if not inspect.isfunction(member):
        return False
    code = inspect.unwrap(member).__code__
    return "_semantic" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _refuse_condition(aggregate: Any) -> NoReturn:
    raise AmbiguousTruth(
        f"An aggregate such as `{type(aggregate).__name__}` cannot be a condition: use one of its "
        "fields."
    )


def _between_aggregates(name: str, method: JITFunction) -> Callable[..., Any]:
    def call(self: Any, *others: Any) -> Any:
        if others and all(map(compat.is_aggregate, others)):
            return method(self, *others)
        raise UnsupportedError(
            f"The installed Triton {triton.__version__} does not compile `{name}` of the aggregate "
            f"`{type(self).__name__}` with anything but an aggregate: write a method with another "
            "name."
        )

    return call
