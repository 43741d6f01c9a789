"""The mutants of a source: one small change each.

Left out is what no test should pin: annotations, docstrings, messages, and what goes to a log.
"""

from __future__ import annotations

import ast
import collections
import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_UNTOUCHED = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Global, ast.Nonlocal)
_READERS = ("get", "pop", "setdefault", "getattr", "hasattr", "setattr", "getenv")


class Mutant(NamedTuple):
    """One change: bytes `start` to `end` of a file become `text`."""

    file: str
    line: int
    function: str  # empty outside of functions
    code: str  # the line's text
    change: str
    start: int
    end: int
    text: str
    key: str  # stays the same when other code of the file changes


def mutants(file: Path, root: Path) -> list[Mutant]:
    """All mutants of a file, in the order of its lines; `root` is what names are relative to."""
    source = file.read_bytes()
    name, lines = file.relative_to(root).as_posix(), source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    found, seen = [], collections.Counter[tuple[str, ...]]()
    for function, node, new in _changes(ast.parse(source), "", False):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        if isinstance(new, ast.expr):
            text = f"({text})"
        if text.encode() == source[start:end]:
            continue
        line = lines[node.lineno - 1].decode().strip()
        what = name, function, line, _shown(node, new)
        seen[what] += 1
        key = hashlib.sha256(repr((*what, seen[what])).encode()).hexdigest()[:16]
        found.append(Mutant(name, node.lineno, *what[1:], start, end, text, key))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.start, mutant.change))


def _shown(node: ast.AST, new: ast.AST) -> str:
    if isinstance(new, ast.Call) and isinstance(node, ast.Call):
        (dropped,) = {*node.keywords} - {*new.keywords}
        return f"{ast.unparse(node.func)}(…) without {dropped.arg}="
    before, after = (" ".join(ast.unparse(of).split()) for of in (node, new))
    before = before if len(before) < 100 else f"{before[:100]}…"
    return f"{before} removed" if after == "pass" else f"{before} → {after}"


def _changes(node: ast.AST, function: str, key: bool) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """The enclosing function, a node and what may stand for it; `key`: strings are names here."""
    if isinstance(node, _UNTOUCHED) or _is_about_types(node) or _is_logged(node):
        return
    for new in _instead(node, key):
        yield function, node, new
    if isinstance(node, ast.Raise):
        return  # what it raises is mostly a message
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
        return
    within = f"{function}.{node.name}" if isinstance(node, _SCOPES) else function
    if isinstance(node, (ast.If, ast.IfExp)):
        for value in (True, False):
            yield function, node.test, ast.Constant(value)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield function, test, ast.Constant(True)
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        if name in ("annotation", "returns", "type_comment", "format_spec", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_docstring(child):
                yield from _changes(child, within.lstrip("."), _are_keys(node, name, child, key))


_SCOPES = (ast.FunctionDef, ast.ClassDef)


def _instead(node: ast.AST, key: bool) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                swapped = [*ops[:i], _SWAPPED[type(op)](), *ops[i + 1 :]]
                yield _with(node, ops=swapped)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + (1 if isinstance(value, int) else max(1, abs(value))))
        case ast.Constant(value=str(value)) if key:
            yield ast.Constant(f"not {value}")
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield _with(node, value=ast.Constant(None))
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                if keyword.arg not in (None, "strict"):  # of `zip`, which is an assertion
                    yield _with(node, keywords=[k for k in keywords if k is not keyword])
    if isinstance(node, (ast.Raise, ast.Delete, ast.Assert, ast.AugAssign)) or _is_effect(node):
        yield ast.Pass()


def _is_effect(node: ast.AST) -> bool:
    """A statement that can go without leaving a name undefined."""
    if isinstance(node, ast.Assign):
        return all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
        isinstance(node, ast.Return) and node.value is None
    )


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_about_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    if isinstance(node, ast.FunctionDef):
        return any(ast.unparse(of).endswith("overload") for of in node.decorator_list)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "logger") or (
            isinstance(node.value, ast.Subscript) and ast.unparse(node.targets[0])[0].isupper()
        )
    return False


def _is_logged(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _are_keys(node: ast.AST, field: str, child: ast.AST, key: bool) -> bool:
    """Whether strings there are names of something, not text for people."""
    if isinstance(child, ast.Constant):
        match node:
            case ast.Subscript() | ast.Compare() | ast.keyword() | ast.MatchValue():
                return True
            case ast.Dict():
                return field == "keys"
            case ast.Call(func=func, args=args):
                name = ast.unparse(func).rpartition(".")[2]
                return name in _READERS and child in args[:2]
    holds = isinstance(node, (ast.Tuple, ast.List, ast.Set))
    return (holds and key) or isinstance(node, ast.Compare)
