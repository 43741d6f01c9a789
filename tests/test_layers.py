"""The rules of the house, read off the source by its syntax tree.

Three of them: a file imports only lower floors; a kernel file imports only Triton;
private symbols and version numbers of JAX, jaxlib and Triton stand in
`bridge/compat` alone. `problems` is the checker; it is tested on small snippets
first, so that it is known to fail.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
COMPAT = "triax.bridge.compat"

# Room → (floor, rank). A file may import what stands strictly lower, and its own room: the file
# or folder named here. Two rooms of equal floor and rank know nothing of each other; an import for
# type checkers counts as any other.
ROOMS: dict[str, tuple[int, int]] = {
    "triax.version": (0, 0),
    "triax.bridge.errors": (0, 0),
    "triax.bridge.settings": (0, 1),
    "triax.bridge.compat": (0, 2),
    "triax.bridge.dtypes": (0, 3),
    "triax.bridge.devices": (0, 3),
    "triax.bridge.exclusion": (1, 0),
    "triax.bridge.frames": (1, 0),
    "triax.bridge.workers": (1, 0),
    "triax.bridge.descriptor": (1, 0),
    "triax.bridge.values": (1, 0),
    "triax.bridge.kernel": (1, 1),
    "triax.bridge.launch": (1, 2),
    "triax.bridge.grid": (1, 3),
    "triax.bridge.hints": (1, 3),
    "triax.bridge.hooks": (1, 3),
    "triax.bridge.writes": (1, 3),
    "triax.bridge.candidates": (1, 4),
    "triax.bridge.arguments": (1, 5),
    "triax.bridge.output": (2, 0),
    "triax.bridge.compiler": (2, 1),
    "triax.bridge.custom_call": (2, 0),
    "triax.bridge.interpreter": (2, 0),
    "triax.bridge.inspect": (2, 0),
    "triax.bridge.export": (2, 0),
    "triax.bridge.emit": (2, 1),
    "triax.bridge.ahead": (2, 2),
    "triax.tuning": (3, 0),
    "triax.bridge.lowering": (4, 0),
    "triax.bridge.primitive": (5, 0),
    "triax.bridge.target": (5, 0),
    "triax.bridge.call": (6, 0),
    "triax.moe": (7, 0),
    "triax.testing": (7, 0),
    "triax.tools": (7, 1),
    "triax.bench": (8, 0),
    "triax.cli": (8, 1),
    "triax.__main__": (8, 2),
}
# Packages that only hold others: their `__init__` is not the room of what is inside.
HALLS: dict[str, tuple[int, int]] = {"triax.bridge": (6, 1), "triax": (9, 0)}

FOREIGN = re.compile(r"(jax|jaxlib|triton|jax_cuda\d+_plugin)(\.|$)")
NEVER_IMPORTED = re.compile(r"(jaxlib|jax_cuda\w*_plugin)(\.|$)")
VERSION = re.compile(r"(?<![\w.])v?\d+\.\d+\.\d+|^v?\d+\.\d+(\.?(dev|rc|a|b)\d+)?$")


class Import(NamedTuple):
    """`from module import name as bound`, or `import module as bound` where name is None."""

    line: int
    module: str
    name: str | None
    bound: str


def room_of(module: str) -> str | None:
    """The room a module stands in, or None where it has none yet."""
    if module in HALLS:
        return module
    return next((room for room in ROOMS if _is_inside(module, room)), None)


def problems(module: str, source: str, modules: frozenset[str]) -> list[str]:
    """What the source of `module` does that the rules forbid, as "line: what" strings.

    Args:
      module: its dotted name.
      source: its text.
      modules: all modules of the package, to tell `from a import module` from `from a import name`.
    """
    tree = ast.parse(source)
    found = [*_wrong_floor(module, tree, modules), *_impure_kernels(module, tree)]
    if not _is_inside(module, COMPAT):
        found += [*_private_symbols(tree), *_version_numbers(tree)]
    return [f"{line}: {what}" for line, what in sorted(set(found))]


def _is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, those in functions and by a literal `import_module` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield Import(node.lineno, alias.name, None, bound)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(node.lineno, source, alias.name, alias.asname or alias.name)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            target = node.args[0]
            if called in ("import_module", "__import__") and _is_text(target):
                yield Import(node.lineno, target.value, None, "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _wrong_floor(
    module: str, tree: ast.Module, modules: frozenset[str]
) -> Iterator[tuple[int, str]]:
    positions = ROOMS | HALLS
    room = room_of(module)
    if room is None:
        yield 0, f"{module} stands on no floor: give it one in ROOMS"
        return
    for found in _imports(tree):
        if found.module.startswith("."):
            yield found.line, f"relative import of {found.module}"
            continue
        if not _is_inside(found.module, "triax"):
            continue
        full = f"{found.module}.{found.name}"
        target = full if full in modules else found.module
        other = room_of(target)
        if other is None:
            yield found.line, f"imports {target}, which stands on no floor"
            continue
        (floor, rank), (other_floor, other_rank) = positions[room], positions[other]
        lower = (other_floor, other_rank) < (floor, rank)
        if not (other == room or lower):
            yield found.line, f"imports {target} of floor {other_floor} from floor {floor}"


def _impure_kernels(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not re.fullmatch(r"triax\.moe\.\w+\.kernels", module):
        return
    for found in _imports(tree):
        if not _is_inside(found.module, "triton"):
            yield found.line, f"a kernel file imports {found.module}: only triton may be"


def _private_symbols(tree: ast.Module) -> Iterator[tuple[int, str]]:
    roots = set()
    for found in _imports(tree):
        path = f"{found.module}.{found.name}" if found.name else found.module
        if not FOREIGN.match(path):
            continue
        roots.add(found.bound)
        if NEVER_IMPORTED.match(path) or any(map(_is_private, path.split("."))):
            yield found.line, f"imports {path}: only {COMPAT} may"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _root(node) in roots:
                yield node.lineno, f"names {ast.unparse(node)}: only {COMPAT} may"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            subject, *rest = node.args
            if (
                rest
                and _root(subject) in roots
                and _is_text(rest[0])
                and _is_private(rest[0].value)
            ):
                yield node.lineno, f"names {ast.unparse(node)}: only {COMPAT} may"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _version_numbers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    own = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    }
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if _is_text(node) and id(node) not in own | prose and VERSION.search(node.value):
            yield node.lineno, f"holds the version {node.value!r}: only {COMPAT} may"
        elif isinstance(node, ast.Compare):
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and part.attr.startswith("__version"):
                    yield node.lineno, f"compares {ast.unparse(part)}: only {COMPAT} may"


@functools.cache
def package_modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = {}
    for path in sorted((SOURCE / "triax").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


SNIPPET_MODULES = frozenset({*ROOMS, *HALLS, "triax.moe.chunks.kernels", "triax.moe.chunks.api"})

BAD = {
    "higher floor": ("triax.bridge.launch", "import triax.bridge.call", "of floor 6 from floor 1"),
    "higher floor, by from": ("triax.bridge.launch", "from triax.bridge import call", "floor 6"),
    "higher floor, a name": ("triax.bridge.dtypes", "from triax.bridge.call import f", "floor 6"),
    "higher floor, in a function": (
        "triax.bridge.lowering",
        "def f():\n    from triax.moe.chunks import api",
        "floor 7",
    ),
    "higher floor, by name": (
        "triax.tuning.policy",
        "importlib.import_module('triax.bridge.lowering')",
        "floor 4",
    ),
    "higher floor, for types": (
        "triax.bridge.launch",
        "if TYPE_CHECKING:\n    from triax.bridge.compiler import x",
        "floor 2",
    ),
    "the package itself": ("triax.moe.chunks.api", "import triax", "floor 9"),
    "within floor 0": ("triax.bridge.errors", "from triax.bridge.settings import x", "floor 0"),
    "across floor 1": ("triax.bridge.kernel", "from triax.bridge.launch import Launch", "floor 1"),
    "across floor 1, for types": (
        "triax.bridge.kernel",
        "if TYPE_CHECKING:\n    from triax.bridge.launch import Launch",
        "floor 1",
    ),
    "across floor 2": ("triax.bridge.custom_call", "import triax.bridge.compiler", "floor 2"),
    "across floor 7": ("triax.moe.chunks.api", "import triax.testing", "floor 7"),
    "no floor": ("triax.attic", "", "stands on no floor"),
    "imports no floor": ("triax.cli", "import triax.attic", "stands on no floor"),
    "relative": ("triax.bridge.call", "from .errors import TriaxError", "relative import"),
    "kernel imports jax": ("triax.moe.chunks.kernels", "import jax", "only triton may be"),
    "kernel imports triax": (
        "triax.moe.chunks.kernels",
        "from triax.bridge import errors",
        "only triton may be",
    ),
    "private module": ("triax.bridge.call", "import jax._src.core", "imports jax._src.core"),
    "private name": ("triax.bridge.call", "from jax import _src", "imports jax._src"),
    "private in Triton": ("triax.bridge.kernel", "from triton._C import libtriton", "triton._C"),
    "jaxlib": ("triax.bridge.custom_call", "import jaxlib.mlir.ir", "imports jaxlib.mlir.ir"),
    "the plugin": (
        "triax.bridge.custom_call",
        "import_module('jax_cuda13_plugin')",
        "imports jax_cuda13_plugin",
    ),
    "private attribute": ("triax.bridge.call", "import jax\njax._src.x()", "names jax._src"),
    "private attribute, aliased": (
        "triax.bridge.call",
        "import jax.numpy as jnp\nx = jnp.array._y.z",
        "names jnp.array._y",
    ),
    "private attribute, probed": (
        "triax.bridge.kernel",
        "import triton as t\nhasattr(t.runtime, '_x')",
        "names hasattr",
    ),
    "version": ("triax.bridge.call", "ok = v >= parse('0.10.1')", "holds the version '0.10.1'"),
    "version, short": ("triax.bridge.call", "ok = v >= parse('3.5')", "holds the version '3.5'"),
    "version, nightly": ("triax.bridge.call", "f('0.9.2.dev20260317')", "holds the version"),
    "version, in a sentence": (
        "triax.bridge.call",
        "f('needs 0.9.1 or later')",
        "holds the version",
    ),
    "version, as numbers": (
        "triax.bridge.call",
        "import jax\nif jax.__version_info__ >= (0, 9): pass",
        "compares jax.__version_info__",
    ),
}

GOOD = {
    "lower floors": (
        "triax.bridge.lowering",
        "import triax.tuning\nfrom triax.bridge import launch",
    ),
    "own folder": ("triax.moe.chunks.api", "from triax.moe.chunks import kernels"),
    "within floor 0": ("triax.bridge.settings", "from triax.bridge.errors import SettingError"),
    "kernel": ("triax.moe.chunks.kernels", "import triton\nimport triton.language as tl"),
    "compat": (
        "triax.bridge.compat.symbols",
        "import jax._src.core\nimport jaxlib\nok = v >= '0.10.1'",
    ),
    "own private name": ("triax.bridge.call", "import jax\nself._x = jax.Array\njax.__version__"),
    "prose": (
        "triax.bridge.call",
        '"""Since 0.10.1."""\nx: int\n"""Since 0.9.2."""\n# 0.9.1',
    ),
    "numbers": ("triax.bridge.call", "f('9.0 or sm_90', f'{x:10.3f}', 0.5)"),
    "own version": ("triax", "__version__ = '0.1.0'"),
}


@pytest.mark.parametrize(("module", "source", "expected"), BAD.values(), ids=BAD.keys())
def test_checker_finds(module, source, expected):
    assert expected in "\n".join(problems(module, source, SNIPPET_MODULES))


@pytest.mark.parametrize(("module", "source"), GOOD.values(), ids=GOOD.keys())
def test_checker_accepts(module, source):
    assert problems(module, source, SNIPPET_MODULES) == []


@pytest.mark.parametrize("module", package_modules())
def test_source_keeps_the_rules(module):
    path = package_modules()[module]
    modules = frozenset(package_modules())
    found = problems(module, path.read_text(encoding="utf-8"), modules)
    assert not found, "\n".join(f"{path}:{line}" for line in found)
