"""Turns jitted functions into Python functions for the interpreter.

A kernel's source is parsed again, transformed as Triton's interpreter wants it,
and executed in a namespace of its own, so that the user's module and function stay
as they are. The code is kept for as long as the jitted function lives.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import JITFunction

from triax.compat import triton_interpreter as compat
from triax.errors import CompilationError, UnsupportedError
from triax.interpreting import conditions, constants, frames

_codes: weakref.WeakKeyDictionary[Callable[..., Any], tuple[str, types.CodeType]]
_codes = weakref.WeakKeyDictionary()


class Rewriter:
    """The Python functions for one launch.

    `replaced` gives the stand-ins for functions of `triton.language` that a module
    imported by name; see `LanguagePatch`.
    """

    def __init__(self, semantic: Any, replaced: dict[int, tuple[Any, Any]]):
        self._semantic = semantic
        self._replaced = replaced
        # Keyed by identity: hashing a jitted function hashes its source and dependencies.
        self._functions: dict[int, tuple[JITFunction, Callable[..., Any]]] = {}
        # What was left out of the namespaces of functions, so that reading it is a NameError, as
        # where Triton compiles: a branch that is not taken may read any number.
        self._refused: dict[str, Any] = {}

    def function(self, jitted: JITFunction) -> Callable[..., Any]:
        """A Python function that interprets `jitted`, with its globals as they are now."""
        known = self._functions.get(id(jitted))
        if known is None:
            known = self._functions[id(jitted)] = (jitted, self._make(jitted))
        return known[1]

    def inside(self, value: Any) -> Any:
        """A value from outside of a kernel, with the stand-ins for functions of the language."""
        value = constants.plain(value)
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        if isinstance(value, tuple):
            parts = map(self.inside, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def explained(self, error: Exception) -> Exception:
        """The error, or for what was left out one that names the remedy."""
        if not isinstance(error, NameError) or error.name not in self._refused:
            return error
        name, value = error.name, self._refused[error.name]
        remedy = f"write `{name} = tl.constexpr(…)`, or make it a `tl.constexpr` parameter"
        if isinstance(value, types.FunctionType):
            remedy = "decorate it with `@triton.jit`"
        explained = CompilationError(
            f"The kernel reads `{name}`, which is defined outside of it as a Python "
            f"{type(value).__name__}: that does not compile for a GPU. Remedy: {remedy}."
        )
        return explained.with_traceback(error.__traceback__)

    def _make(self, jitted: JITFunction) -> Callable[..., Any]:
        original = jitted.fn
        code = _code(jitted)
        namespace = {
            "range": tensor_range(self._semantic),
            "min": _minimum,
            "max": _maximum,
            **original.__globals__,
            **_captured(original),
        }
        all_allowed = triton.knobs.compilation.allow_non_constexpr_globals
        for name in set(_global_names(code)) & namespace.keys():
            value = namespace[name]
            namespace[name] = self.inside(value)
            replaced = id(value) in self._replaced
            if not replaced and not all_allowed and _is_refused(name, value):
                self._refused[name] = namespace.pop(name)
        namespace |= {
            **compat.TRANSFORM_NAMES,
            **conditions.NAMES,
            **constants.NAMES,
            "interpreter_semantic": self._semantic,
            frames.MARK: True,
        }
        defaults = self.inside(original.__defaults__)
        function = types.FunctionType(code, namespace, original.__name__, defaults)
        keywords = original.__kwdefaults__ or {}
        function.__kwdefaults__ = {name: self.inside(value) for name, value in keywords.items()}
        return function


def _is_refused(name: str, value: Any) -> bool:
    """Whether Triton's compiler refuses to read this from outside of a kernel: most of it."""
    if name in compat.BUILTIN_NAMES:
        return False
    if isinstance(value, types.FunctionType):
        is_tritons = (value.__module__ or "").startswith("triton.")
        return not is_tritons and not hasattr(value, "__triton_builtin__")
    return isinstance(value, (int, float, str, tuple)) and not name.startswith("__")


def _code(jitted: JITFunction) -> types.CodeType:
    source = jitted.src
    known = _codes.get(jitted.fn)
    if known is None or known[0] != source:
        known = _codes[jitted.fn] = (source, _compile(jitted, source))
    return known[1]


def _compile(jitted: JITFunction, source: str) -> types.CodeType:
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    # Annotations and defaults were evaluated where the function was defined, and may
    # name what only exists there.
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = []
    arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
    _check(definition, jitted)
    constants.Constants().visit(tree)
    conditions.Conditions().visit(tree)
    tree = compat.transform(tree)
    # Errors show the line as it stands in its file.
    lines = (i for i, line in enumerate(jitted.raw_src) if line.lstrip().startswith("def "))
    first = next(lines, 0)
    ast.increment_lineno(tree, jitted.starting_line_number + first - 1)
    indent = len(jitted.raw_src[first]) - len(jitted.raw_src[first].lstrip())
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)):
            node.col_offset += indent
            node.end_col_offset = (node.end_col_offset or 0) + indent
    module = compile(tree, inspect.getfile(jitted.fn), "exec", dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, types.CodeType))


def _check(definition: ast.FunctionDef, jitted: JITFunction) -> None:
    """Refuses what this Triton does not compile and would interpret wrongly."""
    if compat.CHAINED_COMPARISONS:
        return
    for node in ast.walk(definition):
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise UnsupportedError(
                f"`{jitted.fn.__name__}` has the chained comparison `{ast.unparse(node)}`, which "
                "the installed Triton does not support: write two comparisons and `&`."
            )


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    captured = {}
    for name, cell in zip(names, cells, strict=True):
        try:
            captured[name] = cell.cell_contents
        except ValueError:  # assigned later in the enclosing function
            continue
    return captured


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def tensor_range(semantic: Any) -> Callable[..., Iterator[tl.tensor]]:
    """`range` and `tl.range` in a kernel: the counter is a tensor of the type of the bounds."""

    def counters(*bounds: Any, **hints: Any) -> Iterator[tl.tensor]:
        bounds += tuple(hints[n] for n in ("arg1", "arg2", "step") if hints.get(n) is not None)
        bounds = tuple(constants.plain(b) for b in bounds if b is not None)
        types = (semantic.to_tensor(bound).dtype for bound in bounds)
        dtype = functools.reduce(semantic.integer_promote_impl, types, tl.int32)
        for counter in builtins.range(*bounds):
            yield compat.tensor(np.array(counter, compat.numpy_dtype(dtype)), dtype)

    return counters


def _minimum(*values: Any) -> Any:
    return _fold(builtins.min, tl.minimum, values)


def _maximum(*values: Any) -> Any:
    return _fold(builtins.max, tl.maximum, values)


def _fold(plain: Callable[..., Any], tensors: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    if not any(isinstance(value, tl.tensor) for value in values):
        return plain(*values)
    result, *others = values
    for other in others:
        result = tensors(result, other)
    return result
