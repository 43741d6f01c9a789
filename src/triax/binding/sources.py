"""What a kernel is compiled from: its source, and all that this names now.

A kernel finds its helpers and constants by name, as Python does, so they can change while the
kernel stays the same object. Triton looks only once, when it first compiles it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from triax.binding import exact
from triax.compat.triton_patches import parse

_LIBRARIES = sys.stdlib_module_names | {"triton", "numpy", "ml_dtypes", "jax", "jaxlib"}

Name: TypeAlias = tuple[str, ...]
"""A dotted name: ("module", "helper")."""

_names: weakref.WeakKeyDictionary[Callable[..., Any], tuple[str, tuple[Name, ...]]]
_names = weakref.WeakKeyDictionary()
_serial_numbers: dict[int, tuple[Any, str]] = {}


def fingerprint(function: Any, *constants: Any) -> str:
    """A hash of a jitted function, of all that it reaches, and of constants it is compiled with.

    It is equal in all processes, unless something is reached that equals only itself, and does not
    depend on the module that a function is in: run as a script or imported, a kernel is the same.
    Of a function that is not jitted it covers the code, not what that calls; of a library's only
    the name.
    """
    walk = _Walk()
    for value in (function, *constants):
        walk.visit(value)
    return hashlib.sha256("\n".join(walk.parts).encode()).hexdigest()[:20]


class _Walk:
    """Collects texts in `parts`: each object once, later by the number that it has."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._met: dict[int, tuple[int, Any]] = {}  # holds the objects, so that ids stay theirs

    def visit(self, value: Any) -> None:
        if not (isinstance(value, exact.NAMED) or exact.is_jitted(value)):
            others: list[Any] = []
            self.parts.append(exact.spell(value, others))
            for other in others:
                if isinstance(other, exact.NAMED) or exact.is_jitted(other):
                    self.visit(other)
                else:
                    self.parts.append(_serial_number(other))
            return
        is_new = id(value) not in self._met
        number, _ = self._met.setdefault(id(value), (len(self._met), value))
        module, name = _module(value), getattr(getattr(value, "fn", value), "__qualname__", "")
        is_library = _is_library(module)
        self.parts.append(f"{number} {module}.{name}" if is_library else str(number))
        if is_new and not is_library:
            for member in _members(value):
                self.visit(member)


def _module(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return str(getattr(getattr(value, "fn", value), "__module__", ""))


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _members(value: Any) -> Iterator[Any]:
    """What a class or a function is made of, names first."""
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
        return
    if isinstance(value, type):
        for owner in value.__mro__:
            members = {} if _is_library(_module(owner)) else dict(vars(owner))
            for name, found in members.items():
                member = getattr(found, "fget", getattr(found, "__func__", found))
                if isinstance(member, types.FunctionType) or exact.is_jitted(member):
                    yield name
                    yield member
    elif isinstance(value, types.FunctionType):
        yield _code(value.__code__)
        yield value.__defaults__, value.__kwdefaults__, *_closure(value).values()
    elif hasattr(value, "__func__"):  # a bound `constexpr_function`
        yield value.__func__
        yield value.__self__
    else:
        function = value.fn
        yield value.src
        yield getattr(value, "noinline", None)
        yield function.__kwdefaults__
        yield from function.__defaults__ or ()
        closure = _closure(function)
        for first, *attributes in _dotted_names(function, value.src):
            holder: Any = closure if first in closure else function.__globals__
            found = holder.get(first, _MISSING)
            for attribute in attributes:  # of other objects than these all members count
                follow = isinstance(found, (type, types.ModuleType))
                follow = follow and not _is_library(_module(found))
                found = getattr(found, attribute, _MISSING) if follow else _MISSING
            if found is not _MISSING:
                yield ".".join((first, *attributes))
                yield found


_MISSING = object()


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # assigned later in the enclosing function
            found[name] = cell.cell_contents
    return found


def _dotted_names(function: types.FunctionType, source: str) -> tuple[Name, ...]:
    """The names in a jitted function's source that are not its own variables, with attributes."""
    known = _names.get(function)
    if known is None or known[0] != source:
        # `co_names` has attributes too, which may be called like a local variable.
        outer = {*_outer_names(function.__code__)} - {*function.__code__.co_varnames}
        found: dict[Name, None] = {}
        for node in ast.walk(parse(source)):
            attributes: list[str] = []
            while isinstance(node, ast.Attribute):
                attributes.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in outer:
                found[node.id, *attributes] = None
        known = _names[function] = (source, tuple(found))
    return known[1]


def _outer_names(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _outer_names(constant)


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """What code does, without where it stands."""
    constants = (_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *constants


def _serial_number(value: Any) -> str:
    """A name for an object that no other has, also once it is gone; the id may be used again."""
    key = id(value)
    if key not in _serial_numbers:
        try:
            held = weakref.ref(value, lambda _: _serial_numbers.pop(key, None))
        except TypeError:
            held = value  # it lives as long as its number
        _serial_numbers[key] = held, uuid.uuid4().hex
    return _serial_numbers[key][1]
