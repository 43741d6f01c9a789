"""Compile-time values in kernels, as the compiler treats them.

In a compiled kernel every literal and every constant is a `tl.constexpr`; here they are plain
Python values. So ``N.value`` is ``N``, and what is assigned to a variable becomes a tensor however
it is assigned, unless it is annotated as `tl.constexpr`.
"""

from __future__ import annotations

import ast
import enum
import operator
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from triax.compat.triton_interpreter import Change
from triax.interpreting.conditions import call


def value(constant: Any) -> Any:
    """``constant.value``, which of a plain value is the value itself."""
    plain = isinstance(constant, enum.Enum) or not hasattr(constant, "value")
    return constant if plain else constant.value


def plain(constant: Any) -> Any:
    """What a `tl.constexpr` holds."""
    return constant.value if isinstance(constant, tl.constexpr) else constant


NAMES: dict[str, Any] = {"interpreter_value": value, "interpreter_plain": plain}


def changes() -> Iterator[Change]:
    """The operators that Triton left out of `tl.constexpr`: its left operand never is an `int`."""
    for name in ("mod", "and_", "or_", "xor", "lshift", "rshift"):
        operation = getattr(operator, name)
        yield Change(tl.constexpr, f"__r{name.rstrip('_')}__", _reflected(operation))


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], tl.constexpr]:
    return lambda self, other: tl.constexpr(operation(other, self.value))


class Constants(ast.NodeTransformer):
    """Rewrites a kernel so that its constants go through the functions of `NAMES`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "value" or not isinstance(node.ctx, ast.Load):
            return node
        return call("interpreter_value", node.value, at=node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            node.left, *node.comparators = (
                call("interpreter_plain", side, at=side) for side in (node.left, *node.comparators)
            )
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None or ast.unparse(node.annotation).split(".")[-1] == "constexpr":
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        new = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], new), node)
