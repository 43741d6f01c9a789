"""Fingerprints the code of a kernel: its source, and everything that the source names now.

A kernel finds its helpers and constants by name, as Python does, so they can change while the
kernel stays the same object. Triton looks them up only once, when it first compiles the kernel.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from triax.binding import exact
from triax.compat.triton_patches import parse
from triax.compat.triton_private import aggregate_members

_LIBRARIES = {"triton", "numpy", "ml_dtypes", "jax", "jaxlib"}

_STANDARD = sysconfig.get_path("stdlib")

Name: TypeAlias = tuple[str, ...]
"""A dotted name: ("module", "helper")."""

_names: weakref.WeakKeyDictionary[Callable[..., Any], tuple[str, tuple[Name, ...]]]
_names = weakref.WeakKeyDictionary()
_serial_numbers: dict[int, tuple[Any, str]] = {}
_walks: dict[int, _Walk] = {}  # by the function's id
_MOST_WALKS = 1024
_MISSING = object()


def fingerprint(function: Any, *constants: Any) -> str:
    """Hashes a jitted function, everything it reaches, and its constants.

    The hash is equal in all processes, unless the function reaches an object that is compared by
    identity. It is also equal whether the module of a kernel is imported or run as a script.
    Functions and classes of libraries are hashed by name only.
    """
    walk = _walks.get(id(function))
    if walk is None or not walk.is_current(function):
        if len(_walks) >= _MOST_WALKS:
            _walks.clear()
        walk = _walks[id(function)] = _Walk(function)
    texts = [repr(c) if type(c) in exact.PLAIN else _Walk(c).text for c in constants]
    return hashlib.sha256("\n".join([walk.text, *texts]).encode()).hexdigest()[:20]


@dataclasses.dataclass
class _Walk:
    """The text of everything reachable from a value, and the look-ups that the text depends on.

    `reads` are the look-ups with their results: `get(holder, name, _MISSING)`. `spelt` are the
    values that can change in place, with their texts. While `reads` and `spelt` are unchanged, so
    is `text`, provided that the walk `is_lasting`: it met nothing that must be read anew each time.
    """

    root: Any
    text: str = ""
    is_lasting: bool = True
    reads: list[tuple[Callable[..., Any], Any, str, Any]] = dataclasses.field(default_factory=list)
    spelt: list[tuple[Any, str, list[Any]]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        parts: list[str] = []
        met: dict[int, tuple[int, Any]] = {}  # holds the objects, so that no id is reused
        left: list[tuple[Any, bool]] = [(self.root, False)]  # `True`: a member of a spelt value
        while left:
            value, is_member = left.pop()
            if type(value) in exact.PLAIN:
                parts.append(repr(value))
            elif isinstance(value, exact.NAMED) or exact.is_jitted(value):
                is_new = id(value) not in met
                number, _ = met.setdefault(id(value), (len(met), value))
                module = _module(value)
                if _is_library(module):
                    parts.append(f"{number} {module}.{getattr(value, '__qualname__', '')}")
                    continue
                parts.append(str(number))
                members = self._members(value) if is_new else []
                left += [(member, False) for member in reversed(members)]
            elif is_member:
                parts.append(_serial_number(value))
            else:
                others: list[Any] = []
                parts.append(exact.spell(value, others))
                self.spelt.append((value, parts[-1], others))
                left += [(other, True) for other in reversed(others)]
        self.text = "\n".join(parts)

    def is_current(self, root: Any) -> bool:
        """Whether a new walk from `root` would give the same text."""
        if not self.is_lasting or self.root is not root:
            return False
        if not all(get(holder, name, _MISSING) is was for get, holder, name, was in self.reads):
            return False
        for value, text, others in self.spelt:
            objects: list[Any] = []
            if exact.spell(value, objects) != text or [*map(id, objects)] != [*map(id, others)]:
                return False
        return True

    def _members(self, value: Any) -> list[Any]:
        """The parts of a class, function or module that compiled code can depend on."""
        if exact.is_jitted(value) and not hasattr(value, "__func__"):
            return self._members_of_jitted(value)
        if isinstance(value, types.BuiltinFunctionType):
            return []
        self.is_lasting = False
        if isinstance(value, types.FunctionType):
            held = (value.__defaults__, value.__kwdefaults__, *closed_over(value).values())
            read = {n: value.__globals__.get(n, _MISSING) for n in value.__code__.co_names}
            return [_code(value.__code__), held, *_held(read)]
        if isinstance(value, types.ModuleType):
            return _held(dict(vars(value)))
        if not isinstance(value, type):  # a bound `constexpr_function`
            return [value.__func__, value.__self__]
        owners = [owner for owner in value.__mro__ if not _is_library(_module(owner))]
        # Aggregates have their own list, because the interpreter patches them while a kernel runs.
        lists = (aggregate_members(owner) or _held(dict(vars(owner))) for owner in owners)
        return [member for members in lists for member in members]

    def _members_of_jitted(self, jitted: Any) -> list[Any]:
        function = jitted.fn
        own: list[Any] = []
        for holder, name in [
            (jitted, "src"),
            (jitted, "noinline"),
            (function, "__kwdefaults__"),
            (function, "__defaults__"),
        ]:
            own.append(getattr(holder, name, None))
            self.reads.append((getattr, holder, name, getattr(holder, name, _MISSING)))
        *members, defaults = own
        members += defaults or ()
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for first, *attributes in _dotted_names(function, jitted.src):
            get = _contents if first in cells else dict.get
            holder = cells if first in cells else function.__globals__
            value = get(holder, first, _MISSING)
            self.reads.append((get, holder, first, value))
            for attribute in attributes:  # any other object counts as a whole, by its own name
                is_module = isinstance(value, types.ModuleType)
                module = value.__name__ if is_module else _module(value)
                if not (is_module or isinstance(value, type)) or _is_library(module):
                    value = _MISSING
                    break
                holder, value = value, getattr(value, attribute, _MISSING)
                self.reads.append((getattr, holder, attribute, value))
            # A module counts only by the attributes that are named.
            if value is not _MISSING and not isinstance(value, types.ModuleType):
                members += [".".join((first, *attributes)), value]
        return members


def _module(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    function = getattr(value, "__func__", value)  # of a bound `constexpr_function`
    return str(getattr(function, "__module__", ""))


@functools.cache
def _is_library(module: str) -> bool:
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in _LIBRARIES
    # A user's file may have the name of a standard-library module.
    origin = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
    return origin in (None, "built-in", "frozen") or origin.startswith(_STANDARD)


def _held(members: dict[str, Any]) -> list[Any]:
    """The members of a class or module, or globals of a function, that compiled code can use.

    An object compared by identity, such as a lock, counts only by its type: it is no constant.
    """
    held: list[Any] = []
    for name, member in members.items():
        member = getattr(member, "fget", getattr(member, "__func__", member))
        is_named = isinstance(member, exact.NAMED) or exact.is_jitted(member)
        if is_named and not isinstance(member, types.ModuleType):
            held += [name, member]
        elif not is_named and member is not _MISSING and not name.startswith("__"):
            others: list[Any] = []
            held += [name, exact.spell(member, others)]
            held += [o for o in others if isinstance(o, exact.NAMED) or exact.is_jitted(o)]
    return held


def _contents(cells: dict[str, types.CellType], name: str, default: Any) -> Any:
    try:
        return cells[name].cell_contents
    except ValueError:  # assigned later in the enclosing function
        return default


def closed_over(function: Any) -> dict[str, Any]:
    """What a function closes over, by name, without variables that are not assigned yet."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {name: _contents(cells, name, _MISSING) for name in cells}
    return {name: value for name, value in values.items() if value is not _MISSING}


def _dotted_names(function: types.FunctionType, source: str) -> tuple[Name, ...]:
    """The non-local names in a jitted function's source, with the attributes read from them."""
    known = _names.get(function)
    if known is None or known[0] != source:
        # `co_names` has attributes too, which may have the name of a local variable.
        outer = _outer_names(function.__code__) - {*function.__code__.co_varnames}
        names: dict[Name, None] = {}
        for node in ast.walk(parse(source)):
            attributes: list[str] = []
            while isinstance(node, ast.Attribute):
                attributes.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in outer:
                names[node.id, *attributes] = None
        known = _names[function] = (source, tuple(names))
    return known[1]


def _outer_names(code: types.CodeType) -> set[str]:
    inner = (_outer_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """A code object's instructions, names and constants, without its place in the source."""
    constants = (_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *constants


def _serial_number(value: Any) -> str:
    """A name for an object that is never reused, unlike its `id`."""
    key = id(value)
    if key not in _serial_numbers:
        try:
            held = weakref.ref(value, lambda _: _serial_numbers.pop(key, None))
        except TypeError:
            held = value  # not weakly referenceable, so kept alive
        _serial_numbers[key] = held, uuid.uuid4().hex
    return _serial_numbers[key][1]
