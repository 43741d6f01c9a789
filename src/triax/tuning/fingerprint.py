"""Identifies a kernel by its code, wherever in its file that is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triax.compat import triton_private


def fingerprint(function: Any) -> str:
    """A hash of a kernel's source and of all jitted functions and constants it can reach.

    Unlike Triton's own hash, it does not depend on the kernel's position in its file.
    """
    texts: dict[str, str] = {}
    pending = [function]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        texts[f"{current.fn.__module__}.{current.fn.__qualname__}"] = str(current.src)
        for name, value in _names_reached(current.fn):
            if triton_private.is_jit_function(value):
                pending.append(value)
            elif isinstance(value, (int, float, str)) or type(value).__name__ == "constexpr":
                texts[f"{current.fn.__qualname__}:{name}"] = repr(getattr(value, "value", value))
    parts = sorted(texts.items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _names_reached(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals and closure variables a function names, and attributes of modules it may use."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    namespace = {**function.__globals__, **{n: c.cell_contents for n, c in cells}}
    for name in (*code.co_names, *code.co_freevars):
        if name not in namespace:
            continue
        value = namespace[name]
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] == "triton":
                continue  # Triton's version is part of every key
            for attribute in code.co_names:
                if hasattr(value, attribute):
                    yield f"{name}.{attribute}", getattr(value, attribute)
        else:
            yield name, value
