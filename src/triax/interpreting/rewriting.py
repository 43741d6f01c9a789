"""Turns jitted functions into Python functions for the interpreter.

A kernel's rewritten code is executed in a separate namespace, so that the user's module and
function stay as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import triton
import triton.language as tl
from triton.runtime import JITFunction

from triax.binding.launch import rebuild
from triax.binding.sources import closed_over
from triax.compat import triton_interpreter as compat
from triax.errors import CompilationError
from triax.interpreting import aggregates, frames, inside, syntax


class Rewriter:
    """Makes the Python functions for one launch, each once.

    `replaced` has the stand-ins for functions of `triton.language` that a module imported by name;
    see `LanguagePatch`.
    """

    def __init__(self, semantic: Any, replaced: dict[int, tuple[Any, Any]]):
        self._semantic = semantic
        self._replaced = replaced
        # Keyed by identity: hashing a jitted function hashes its source and dependencies.
        self._functions: dict[int, tuple[JITFunction, Callable[..., Any]]] = {}
        # Globals that the compiler refuses are left out of functions' namespaces, and kept here for
        # the message. So only reading one is an error (a NameError): a branch that is not taken may
        # name any global, as for the compiler.
        self._refused: dict[str, Any] = {}

    def function(self, jitted: JITFunction) -> Callable[..., Any]:
        """Returns a Python function that interprets `jitted`, with its globals as they are now."""
        known = self._functions.get(id(jitted))
        if known is None:
            known = self._functions[id(jitted)] = (jitted, self._make(jitted))
        return known[1]

    def inside(self, value: Any) -> Any:
        """Converts a value from outside of a kernel, with stand-ins for Triton's functions."""
        value = inside.plain(value)
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        if isinstance(value, types.FunctionType) and tl.core.is_builtin(value):
            return aggregates.as_compiled(value, self._semantic)
        if isinstance(value, tuple):
            return rebuild(value, [self.inside(part) for part in value])
        return value

    def explained(self, error: Exception) -> Exception:
        """Turns a NameError for a refused global into an error that names the remedy."""
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
        code = syntax.code_of(jitted)
        namespace = {
            **inside.builtin_functions(self._semantic),
            **original.__globals__,
            **closed_over(original),
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
            **inside.NAMES,
            "interpreter_semantic": self._semantic,
            frames.MARK: True,
        }
        defaults = self.inside(original.__defaults__)
        function = types.FunctionType(code, namespace, original.__name__, defaults)
        keywords = original.__kwdefaults__ or {}
        function.__kwdefaults__ = {name: self.inside(value) for name, value in keywords.items()}
        return function


def _is_refused(name: str, value: Any) -> bool:
    """Whether Triton's compiler refuses to read a global of this kind; covers most kinds."""
    if name in compat.BUILTIN_NAMES:
        return False
    if isinstance(value, types.FunctionType):
        is_tritons = (value.__module__ or "").startswith("triton.")
        return not is_tritons and not hasattr(value, "__triton_builtin__")
    return isinstance(value, (int, float, str, tuple)) and not name.startswith("__")


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
