"""Conditions in kernels, `assert`, `and`, `or` and `not`, as the compiler understands them.

Triton's interpreter leaves these to Python, for which every block is true: ``a and b`` is then
silently ``b``, and ``if`` on a block always taken. Here all but conditions work element by element,
without short circuit between tensors, as in compiled code; a condition must be a scalar.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from triax.compat.triton_interpreter import NUMBERS_DECAY
from triax.errors import UnsupportedError


class AmbiguousTruth(UnsupportedError):
    """A block of several elements was used as a condition."""


def scalar(value: Any) -> Any:
    """`value`, unless it is a block of several elements."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise AmbiguousTruth(
            f"A block of shape {value.handle.data.shape} cannot be a condition: use `tl.where`, "
            "or reduce the block to a scalar."
        )
    return value


def choice(
    condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any], semantic: Any
) -> Any:
    """``then if condition else otherwise``, a tensor where the condition is one."""
    value = then() if scalar(condition) else otherwise()
    return semantic.to_tensor(value, False) if isinstance(condition, tl.tensor) else value


def branch(condition: Any, branches: list[Any]) -> Any:
    """The condition of an `if` with a `return`, noted in `branches` unless it is constant."""
    if isinstance(condition, tl.tensor):
        branches.append(condition)
    return scalar(condition)


def returned(value: Any, branches: list[Any], semantic: Any) -> Any:
    """What ``return value`` returns, of numbers tensors where another branch may return others."""
    if isinstance(value, tuple):
        parts = [returned(part, branches, semantic) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    is_number = isinstance(value, (int, float))
    return semantic.to_tensor(value) if is_number and (branches or NUMBERS_DECAY) else value


def assertion(condition: Any, message: Any = "") -> None:
    """``assert condition, message``, which is a `tl.device_assert`."""
    if not np.all(condition.handle.data if isinstance(condition, tl.tensor) else condition):
        raise AssertionError(message)


def conjunction(*values: Callable[[], Any]) -> Any:
    """``a and b``."""
    return _combine(values, False, lambda a, b: a.logical_and(b))


def disjunction(*values: Callable[[], Any]) -> Any:
    """``a or b``."""
    return _combine(values, True, lambda a, b: a.logical_or(b))


def negation(value: Any) -> Any:
    """``not a``."""
    return value.__not__() if isinstance(value, tl.tensor) else not value


def message(evaluate: Callable[[], Any]) -> Any:
    """That of a `static_assert`, of which the compiler forgives every error."""
    try:
        return evaluate()
    except Exception as error:
        return f"<its message failed: {error!r}>"


def _combine(
    values: tuple[Callable[[], Any], ...], deciding: bool, combine: Callable[..., Any]
) -> Any:
    """Folds lazy operands; only a compile-time value equal to `deciding` ends the fold."""
    result = None
    for evaluate in values:
        value = evaluate()
        if isinstance(value, tl.tensor):
            result = value if result is None else combine(result, value)
        elif bool(value) is deciding:
            return value
        else:
            last = value
    return last if result is None else result


NAMES: dict[str, Any] = {
    "interpreter_scalar": scalar,
    "interpreter_branch": branch,
    "interpreter_returned": returned,
    "interpreter_choice": choice,
    "interpreter_assert": assertion,
    "interpreter_and": conjunction,
    "interpreter_or": disjunction,
    "interpreter_not": negation,
    "interpreter_message": message,
}


_SEMANTIC, _BRANCHES = "interpreter_semantic", "interpreter_branches"


class Conditions(ast.NodeTransformer):
    """Rewrites a kernel so that its conditions go through the functions of `NAMES`."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        name = "interpreter_and" if isinstance(node.op, ast.And) else "interpreter_or"
        return call(name, *(_lazy(value) for value in node.values), at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return call("interpreter_not", node.operand, at=node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "static_assert" and len(node.args) > 1:
            node.args[1] = call("interpreter_message", _lazy(node.args[1]), at=node.args[1])
        return node

    def _visit_test(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = call("interpreter_scalar", node.test, at=node.test)
        return node

    visit_While = _visit_test

    def visit_If(self, node: ast.If) -> ast.AST:
        if not any(isinstance(part, ast.Return) for part in ast.walk(node)):
            return self._visit_test(node)
        self.generic_visit(node)
        node.test = call("interpreter_branch", node.test, _name(_BRANCHES), at=node.test)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            arguments = (node.value, _name(_BRANCHES), _name(_SEMANTIC))
            node.value = call("interpreter_returned", *arguments, at=node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        # Annotated, so that Triton's transformation leaves it alone.
        begin = f"{_BRANCHES}: list = []"
        node.body.insert(0, ast.copy_location(ast.parse(begin).body[0], node.body[0]))
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        sides = (_lazy(node.body), _lazy(node.orelse))
        return call("interpreter_choice", node.test, *sides, _name(_SEMANTIC), at=node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        arguments = [node.test, *filter(None, [node.msg])]
        return ast.copy_location(ast.Expr(call("interpreter_assert", *arguments, at=node)), node)


def _lazy(value: ast.expr) -> ast.expr:
    empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(args=empty, body=value), value)


def _name(name: str) -> ast.expr:
    return ast.Name(id=name, ctx=ast.Load())


def call(name: str, *arguments: ast.expr, at: ast.AST) -> ast.expr:
    """The expression ``name(*arguments)``, in the place of `at`."""
    return ast.copy_location(ast.Call(func=_name(name), args=list(arguments), keywords=[]), at)
