"""Guesses from a kernel's source which parameters are numbers, for error messages.

If a call forgets a number, its parameter becomes an output; then a message can name the number.
"""

from __future__ import annotations

import ast
import builtins
import re
import types
from collections.abc import Sequence
from typing import Any

from triax.compat.triton_patches import parse

_TAKE_ADDRESSES = re.compile(r"load|store|atomic_\w+|advance|\w*make_(block_ptr|tensor_descriptor)")


def numbers(function: Any, names: Sequence[str]) -> list[str]:
    """The parameters among `names` that a jitted function uses as numbers, not as addresses.

    A parameter is left out if the source does not show its use, as when only a helper uses it.
    """
    try:
        nodes = [*ast.walk(parse(function.src))]
    except SyntaxError:
        return []
    read, assigned, counted, addresses = set[str](), set[str](), set[str](), set[str]()
    flows: list[tuple[set[str], set[str]]] = []  # the names on both sides of an assignment
    for node in nodes:
        match node:
            case ast.Name(name, context):
                (assigned if isinstance(context, ast.Store) else read).add(name)
            case ast.BinOp(left, _, right) if _terms(node) == set():
                counted |= {side.id for side in (left, right) if isinstance(side, ast.Name)}
            case ast.Compare(left, [ast.Is() | ast.IsNot()], _):
                pass
            case ast.Compare(left, _, right):
                counted |= {side.id for side in (left, *right) if isinstance(side, ast.Name)}
            case ast.Call(called, args, keywords):
                passed = [*args, *(keyword.value for keyword in keywords)]
                if _TAKE_ADDRESSES.fullmatch(ast.unparse(called).rpartition(".")[2]):
                    # The address is the first argument, or the descriptor whose method this is.
                    passed = [*passed[:1], *([called.value] if hasattr(called, "value") else ())]
                elif _is_of_the_language(called, function.fn):
                    passed = [value for value in passed if isinstance(value, ast.Tuple | ast.List)]
                addresses |= _terms(*passed)
            case ast.Assign(targets, value):
                flows.append((_terms(*targets), _terms(value)))
            case ast.AnnAssign(target, _, value) | ast.AugAssign(target, _, value):
                flows.append((_terms(target), _terms(value)))
            case ast.NamedExpr(target, value) | ast.For(target, value):
                flows.append((_terms(target), _terms(value)))
    for to, terms in flows * len(flows):  # a value may pass through every assignment
        addresses |= terms if to & addresses else set()
    surely = counted - assigned  # an assigned name may be a pointer first, and later a loaded value
    return [n for n in names if n in surely or (n in read and n not in addresses)]


def _terms(*nodes: ast.AST | None) -> set[str]:
    """The names that can make an expression a pointer; a product or a comparison is never one."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Sub):
            continue
        elif node is not None and not isinstance(node, ast.Compare):
            names |= _terms(*ast.iter_child_nodes(node))
    return names


def _is_of_the_language(called: ast.expr, function: types.FunctionType) -> bool:
    """Whether a called function is Triton's or Python's, not a helper of the kernel's author."""
    while isinstance(called, ast.Attribute):
        called = called.value
    name = getattr(called, "id", "")
    value = function.__globals__.get(name, getattr(builtins, name, None))
    module = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
    return str(module).partition(".")[0] in ("triton", "builtins", "math")
