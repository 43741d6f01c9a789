"""Rewrites a jitted function's source for the interpreter.

Conditions and constants go through the functions of `triax.interpreting.inside`. Every kind of
assignment turns its value into a tensor, unless the variable is annotated as `tl.constexpr`.
"""

from __future__ import annotations

import ast
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from triton.runtime import JITFunction

from triax.compat import triton_interpreter as compat
from triax.compat import triton_private
from triax.errors import UnsupportedError

_codes: weakref.WeakKeyDictionary[Callable[..., Any], tuple[str, types.CodeType]]
_codes = weakref.WeakKeyDictionary()
_SEMANTIC, _BRANCHES = "interpreter_semantic", "interpreter_branches"


def code_of(jitted: JITFunction) -> types.CodeType:
    """Returns the rewritten code of a jitted function, kept for as long as the function lives."""
    source = jitted.src
    known = _codes.get(jitted.fn)
    if known is None or known[0] != source:
        known = _codes[jitted.fn] = (source, _compile(jitted, source))
    return known[1]


def _compile(jitted: JITFunction, source: str) -> types.CodeType:
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    # Annotations and defaults may use names that only exist where the function was defined, where
    # they have been evaluated already.
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    rest = [arguments.vararg] if arguments.vararg else []
    for argument in (*arguments.posonlyargs, *arguments.args, *rest, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = []
    arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
    _check(definition, jitted)
    tree = compat.transform(_Rewriting().visit(tree))
    # Errors show the line number in the kernel's file.
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
    """Refuses syntax that the installed Triton does not compile and would interpret wrongly."""
    if definition.args.vararg:
        triton_private.check_variadic(jitted.fn.__name__, definition.args.vararg.arg)
    for node in ast.walk(definition):
        if isinstance(node, ast.Compare) and len(node.ops) > 1 and not compat.CHAINED_COMPARISONS:
            raise UnsupportedError(
                f"`{jitted.fn.__name__}` has the chained comparison `{ast.unparse(node)}`, which "
                "the installed Triton does not support: write two comparisons and `&`."
            )
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            raise UnsupportedError(
                f"`{jitted.fn.__name__}` assigns to `{ast.unparse(node)}`, which Triton does not "
                "compile: make a new aggregate."
            )


class _Rewriting(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        rewrite = getattr(self, f"visit_{type(node).__name__}", None)
        return rewrite(node) if rewrite else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr != "value" or not isinstance(node.ctx, ast.Load):
            return node
        return _call("value", node.value, at=node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            sides = (node.left, *node.comparators)
            node.left, *node.comparators = (_call("plain", side, at=side) for side in sides)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None or ast.unparse(node.annotation).split(".")[-1] == "constexpr":
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        old = ast.copy_location(_name(node.target.id), node.target)
        new = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], new), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        name = "and" if isinstance(node.op, ast.And) else "or"
        return _call(name, *map(_lazy, node.values), at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        return _call("not", node.operand, at=node) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return _call("choice", node.test, _lazy(node.body), _lazy(node.orelse), _SEMANTIC, at=node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "static_assert" and len(node.args) > 1:
            node.args[1] = _call("message", _lazy(node.args[1]), at=node.args[1])
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        arguments = [node.test, *filter(None, [node.msg])]
        return ast.copy_location(ast.Expr(_call("assert", *arguments, at=node)), node)

    def visit_While(self, node: ast.While) -> ast.AST:
        node.test = _call("scalar", node.test, at=node.test)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if any(isinstance(part, ast.Return) for part in ast.walk(node)):
            node.test = _call("branch", node.test, _BRANCHES, at=node.test)
        else:
            node.test = _call("scalar", node.test, at=node.test)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is not None:
            node.value = _call("returned", node.value, _BRANCHES, _SEMANTIC, at=node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Triton's transformation does not change an assignment with an annotation.
        begin = ast.parse(f"{_BRANCHES}: list = []").body[0]
        node.body.insert(0, ast.copy_location(begin, node.body[0]))
        return node


def _name(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Load())


def _lazy(value: ast.expr) -> ast.expr:
    empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(args=empty, body=value), value)


def _call(name: str, *arguments: ast.expr | str, at: ast.AST) -> ast.expr:
    """Returns a call of a function in `inside.NAMES`, with the source position of `at`."""
    nodes = [_name(a) if isinstance(a, str) else a for a in arguments]
    return ast.copy_location(ast.Call(_name(f"interpreter_{name}"), nodes, keywords=[]), at)
