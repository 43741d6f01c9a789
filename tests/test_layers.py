"""The layers of the source, read off it by its syntax tree.

A file imports only lower layers, and no files import each other in a circle; a kernel file imports
only Triton and other kernel files; private symbols and version numbers of JAX, jaxlib and Triton
stand in `compat` alone.
`problems` is the checker; it is tested on small snippets first, so that it is known to fail.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
COMPAT = "triax.compat"

# Each imports what stands left of a "<", and itself. Those in braces do not know of each other.
RULE = """
    errors, messages, settings, architectures, compat, devices < binding
    < {tuning, compiling, emitting, interpreting} < lowering < primitive < call < sharding < moe
    < testing, tools, benchmark_kernels, benchmark < cli
"""
GROUPS = [group.strip() for group in RULE.split("<")]
LAYER = {
    name.strip(): position
    for position, group in enumerate(GROUPS)
    for name in group.strip("{}").split(",")
}

KERNELS = re.compile(r"triax\.moe\.\w+\.(\w+_)?kernels")
FOREIGN = re.compile(r"(jax|jaxlib|triton|jax_cuda\d+_plugin)(\.|$)")
TOP = ("triax", "triax.__main__")  # what imports anything, and is imported by nothing
NEVER_IMPORTED = re.compile(r"(jaxlib|jax_cuda\w*_plugin)(\.|$)")
VERSION = re.compile(r"(?<![\w.])v?\d+\.\d+\.\d+|^v?\d+\.\d+(\.?(dev|rc|a|b)\d+)?$")


class Import(NamedTuple):
    """`from module import name as bound`, or `import module as bound` where name is None."""

    line: int
    module: str
    name: str | None
    bound: str


def problems(module: str, source: str, modules: frozenset[str]) -> list[str]:
    """What the source of `module` does that the rules forbid, as "line: what" strings.

    Args:
      module: its dotted name.
      source: its text.
      modules: all modules of the package, to tell `from a import module` from `from a import name`.
    """
    tree = ast.parse(source)
    found = [*_wrong_layer(module, tree, modules), *_impure_kernels(module, tree)]
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


def _wrong_layer(
    module: str, tree: ast.Module, modules: frozenset[str]
) -> Iterator[tuple[int, str]]:
    layer = _layer(module)
    if layer not in LAYER and module not in TOP:
        yield 0, f"{module} stands in no layer: give it one in RULE"
        return
    for line, target in _own_imports(tree, modules):
        other = _layer(target)
        if target.startswith("."):
            yield line, f"relative import of {target}"
        elif module in TOP or other == layer:
            continue
        elif other not in LAYER:
            yield line, f"imports {target}, which stands in no layer"
        elif LAYER[other] == LAYER[layer] and not GROUPS[LAYER[layer]].startswith("{"):
            continue  # a circle is found elsewhere
        elif LAYER[other] >= LAYER[layer]:
            yield line, f"imports {target}: {layer} may not know of {other}"


def _layer(module: str) -> str:
    """The layer of a module: the file or folder of the package that it stands in."""
    return [*module.split("."), ""][1]


def _own_imports(tree: ast.Module, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The modules of the package, and relative ones, that a file imports anywhere in it."""
    for found in _imports(tree):
        full = f"{found.module}.{found.name}"
        target = full if full in modules else found.module
        if _is_inside(target, "triax") or target.startswith("."):
            yield found.line, target


def _impure_kernels(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not KERNELS.fullmatch(module):
        return
    for found in _imports(tree):
        if not _is_inside(found.module, "triton") and not KERNELS.fullmatch(found.module):
            yield (
                found.line,
                f"a kernel file imports {found.module}: only triton or kernels may be",
            )


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


SNIPPET_MODULES = frozenset(
    {*(f"triax.{name}" for name in LAYER), "triax.moe.chunk_sort.kernels", "triax.tuning.policy"}
)

BAD = {
    "a higher layer": ("triax.binding.launch", "import triax.call", "binding may not know of call"),
    "by from": ("triax.binding.launch", "from triax import call", "may not know of call"),
    "a name": ("triax.binding.dtypes", "from triax.call import f", "may not know of call"),
    "in a function": (
        "triax.lowering",
        "def f():\n    from triax.moe.chunk_sort import kernels",
        "may not know of moe",
    ),
    "by name": (
        "triax.tuning.policy",
        "importlib.import_module('triax.lowering')",
        "may not know of lowering",
    ),
    "for types": (
        "triax.binding.launch",
        "if TYPE_CHECKING:\n    from triax.compiling.compiler import x",
        "may not know of compiling",
    ),
    "in braces": (
        "triax.tuning.policy",
        "from triax.compiling import compiler",
        "tuning may not know of compiling",
    ),
    "the package itself": ("triax.moe.layer", "import triax", "in no layer"),
    "no layer": ("triax.attic", "", "stands in no layer"),
    "imports no layer": ("triax.cli", "import triax.attic", "stands in no layer"),
    "relative": ("triax.call", "from .errors import TriaxError", "relative import"),
    "kernel imports jax": (
        "triax.moe.chunk_sort.kernels",
        "import jax",
        "only triton or kernels may be",
    ),
    "kernel imports triax": (
        "triax.moe.chunk_sort.kernels",
        "from triax import errors",
        "only triton or kernels may be",
    ),
    "private module": ("triax.call", "import jax._src.core", "imports jax._src.core"),
    "private name": ("triax.call", "from jax import _src", "imports jax._src"),
    "private in Triton": ("triax.binding.kernel", "from triton._C import libtriton", "triton._C"),
    "jaxlib": ("triax.emitting.custom_call", "import jaxlib.mlir.ir", "imports jaxlib.mlir.ir"),
    "the plugin": (
        "triax.emitting.custom_call",
        "import_module('jax_cuda13_plugin')",
        "imports jax_cuda13_plugin",
    ),
    "private attribute": ("triax.call", "import jax\njax._src.x()", "names jax._src"),
    "private attribute, aliased": (
        "triax.call",
        "import jax.numpy as jnp\nx = jnp.array._y.z",
        "names jnp.array._y",
    ),
    "private attribute, probed": (
        "triax.binding.kernel",
        "import triton as t\nhasattr(t.runtime, '_x')",
        "names hasattr",
    ),
    "version": ("triax.call", "ok = v >= parse('0.10.1')", "holds the version '0.10.1'"),
    "version, short": ("triax.call", "ok = v >= parse('3.5')", "holds the version '3.5'"),
    "version, nightly": ("triax.call", "f('0.9.2.dev20260317')", "holds the version"),
    "version, in a sentence": (
        "triax.call",
        "f('needs 0.9.1 or later')",
        "holds the version",
    ),
    "version, as numbers": (
        "triax.call",
        "import jax\nif jax.__version_info__ >= (0, 9): pass",
        "compares jax.__version_info__",
    ),
}

GOOD = {
    "lower layers": ("triax.lowering", "import triax.tuning\nfrom triax.binding import launch"),
    "own layer": ("triax.moe.layer", "from triax.moe.chunk_sort import kernels"),
    "beside it": ("triax.settings", "from triax.errors import SettingError"),
    "the public names": ("triax", "from triax import moe\nimport triax.cli"),
    "kernel": ("triax.moe.chunk_sort.kernels", "import triton\nimport triton.language as tl"),
    "kernel of another op": (
        "triax.moe.plans.kernels",
        "from triax.moe.chunk_sort.kernels import _f",
    ),
    "compat": (
        "triax.compat.symbols",
        "import jax._src.core\nimport jaxlib\nok = v >= '0.10.1'",
    ),
    "own private name": ("triax.call", "import jax\nself._x = jax.Array\njax.__version__"),
    "prose": (
        "triax.call",
        '"""Since 0.10.1."""\nx: int\n"""Since 0.9.2."""\n# 0.9.1',
    ),
    "numbers": ("triax.call", "f('9.0 or sm_90', f'{x:10.3f}', 0.5)"),
    "own version": ("triax", "__version__ = '0.3.0.dev0'"),
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


def test_no_circles():
    """Imports for types and in functions count, because they tie files together all the same."""
    paths = package_modules()
    imports = {
        module: {
            target
            for _, target in _own_imports(ast.parse(path.read_text("utf-8")), frozenset(paths))
            if target != module
        }
        for module, path in paths.items()
    }
    graphlib.TopologicalSorter(imports).prepare()


# What is filled while something is walked, bound or measured, and is no key of anything.
MUTABLE = {"Flattened", "_Branch", "_Walk"}


@pytest.mark.parametrize("package", ["binding", "emitting", "tuning", "moe"])
def test_data_that_is_a_key_is_frozen(package):
    """Kernels, calls and options are keys of caches for as long as the process runs."""
    pytest.importorskip("triton")
    changed = set()
    for name in package_modules():
        if name.startswith(f"triax.{package}."):
            module = importlib.import_module(name)
            found = [of for of in vars(module).values() if isinstance(of, type)]
            own = [of for of in found if of.__module__ == name and dataclasses.is_dataclass(of)]
            changed |= {of.__name__ for of in own if not of.__dataclass_params__.frozen}
    assert changed <= MUTABLE


# What puts the public functions of `moe` together.
MOE_PUBLIC = "triax.moe", "triax.moe.transformer_engine"


def public_calls(module: str, source: str, public: frozenset[str]) -> list[str]:
    """What a file inside `moe` imports of the public functions: they check what is checked already.

    Args:
      public: public functions as "module.name", and the modules that hold nothing else.
    """
    inside = module.startswith("triax.moe.") and module not in MOE_PUBLIC
    targets = [(i.line, i.module, f"{i.module}.{i.name}") for i in _imports(ast.parse(source))]
    return [
        f"{line}: imports {full}"
        for line, of, full in targets
        if inside and (full in public or of in public)
    ]


PUBLIC_SNIPPET = frozenset({"triax.moe.permutation.api.permute", "triax.moe.permutation.api"})


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("triax.moe.layer.parts", "from triax.moe.permutation.api import permute", 1),
        ("triax.moe.layer.parts", "from triax.moe.permutation import api as moves", 1),
        ("triax.moe.layer.parts", "from triax.moe.permutation.api import routes_of", 1),
        ("triax.moe.layer.parts", "from triax.moe.permutation.ops import permute", 0),
        ("triax.moe", "from triax.moe.permutation.api import permute as permute", 0),
        ("triax.tools.doctor", "from triax.moe.permutation.api import permute", 0),
    ],
)
def test_checker_of_public_calls(module, source, count):
    assert len(public_calls(module, source, PUBLIC_SNIPPET)) == count


def test_nothing_inside_calls_a_public_function():
    """They check their arguments, under the names that the user wrote, and call ops."""
    pytest.importorskip("triton")
    packages = [importlib.import_module(name) for name in MOE_PUBLIC]
    functions = [getattr(package, name) for package in packages for name in package.__all__]
    functions = [of for of in functions if isinstance(of, types.FunctionType)]
    assert len(functions) > 20
    names = {f"{of.__module__}.{of.__name__}" for of in functions}
    apis = {name for name in package_modules() if name.endswith(".api") and ".moe." in name}
    for module, path in package_modules().items():
        found = public_calls(module, path.read_text("utf-8"), frozenset(names | apis))
        assert not found, "\n".join(f"{path}:{line}" for line in found)
