"""Writes into the pages of `docs/` what stands elsewhere, so that they read where they are.

    python tools/pages.py            # writes it
    python tools/pages.py --check    # says which pages are out of date, and exits with 1

A file of the repository stands in a block of code between `<!-- file: PATH -->` and `<!-- end of
file -->`. A page of the reference has a table of its entries between `<!-- names -->` and `<!-- end
of names -->`. An entry is a directive of mkdocstrings in a comment, `<!-- ::: NAME -->`, and below
it, up to `<!-- end of entry -->`, signatures, first sentences and arguments. On the site the
directive stands in their place (`tools/site_pages.py`).
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FILE = re.compile(r"(<!-- file: (\S+) -->\n```.*?\n).*?(^```\n<!-- end of file -->)", re.S | re.M)
NAMES = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.S)
ENTRY = re.compile(r"^<!-- ::: (\S+)(?:\n(?: +.*\n)*? +heading: (\S+)\n)?", re.M)
SIGNATURES = re.compile(r"(^<!-- ::: [^>]*-->\n).*?(^<!-- end of entry -->)", re.S | re.M)
WIDTH = 80  # of a line, as on the site


def filled(page: Path) -> str:
    """The text of a page, with what stands elsewhere as it is now."""
    text = page.read_text("utf-8")
    kinds = ("file", "file", FILE), ("names", "names", NAMES), (":::", "entry", SIGNATURES)
    for begin, end, pattern in kinds:
        marks = text.count(f"<!-- {begin}"), text.count(f"<!-- end of {end} -->")
        if set(marks) != {len(pattern.findall(text))}:
            raise ValueError(
                f"{page}: a block of `<!-- {begin}` has no end, or is not as it must be"
            )
    text = FILE.sub(lambda found: found[1] + _file(found[2]) + found[3], text)
    text = SIGNATURES.sub(lambda found: found[1] + signatures(found[1]) + found[2], text)
    return NAMES.sub(lambda found: found[1] + names(text) + found[2], text)


def _file(path: str) -> str:
    return (ROOT / path).read_text("utf-8").rstrip("\n") + "\n"


def names(page: str) -> str:
    """A table of a page's entries: the name, the first sentence, the file."""
    lines = ["| Name | Is | Source |", "| --- | --- | --- |"]
    for shown, name, value, module in _entries(page):
        source = Path(inspect.getfile(module)).relative_to(ROOT).as_posix()
        link = f"[{source.removeprefix('src/triax/')}](../../{source})"
        sentence = _first_sentence(name, value, module).replace("|", "\\|")
        lines.append(f"| [`{shown}`](#{name}) | {sentence} | {link} |")
    return "\n".join(lines) + "\n"


def signatures(page: str) -> str:
    """Headings, signatures, first sentences and arguments of a page's entries and their methods."""
    parts = []
    for shown, name, value, module in _entries(page):
        parts.append(f'## <a id="{name}"></a>`{shown}`')
        of_class = _members(value) if inspect.isclass(value) else ()
        for called, found in ((name.rpartition(".")[2], value), *of_class):
            parts.append(f"```py\n{signature(called, found, module)}\n```")
            parts.append(_first_sentence(called, found, module))
            parts += filter(None, [_arguments(found)])
    return "\n\n".join(parts) + "\n"


def _entries(page: str) -> Iterator[tuple[str, str, Any, ModuleType]]:
    """What a page shows: a heading, a full name, a value, and its module."""
    for entry, heading in ENTRY.findall(page):
        for name, value, module in _values(entry):
            yield heading or name.removeprefix(f"{entry}."), name, value, module


def _values(entry: str) -> list[tuple[str, Any, ModuleType]]:
    """What an entry shows, with its module: a name, or the public names of a module."""
    value = pkgutil.resolve_name(entry)
    if isinstance(value, ModuleType):
        own = getattr(value, "__all__", None) or [
            name for name, of in vars(value).items() if inspect.isclass(of)
        ]
        return [found for name in own for found in _values(f"{entry}.{name}")]
    module = inspect.getmodule(value) or importlib.import_module(entry.rpartition(".")[0])
    return [(entry, value, module)]


def _members(of: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that have a docstring."""
    for name, raw in vars(of).items():
        shows = inspect.isroutine(raw) or isinstance(raw, property)
        if shows and raw.__doc__ and not name.startswith("_"):
            # Bound to any object, methods are without `self`.
            value = raw if isinstance(raw, property) else raw.__get__(0, of)
            yield f"{of.__name__}.{name}", value


def signature(name: str, value: Any, module: ModuleType) -> str:
    """A signature in the layout of mkdocstrings; of a value, the line that sets it."""
    if isinstance(value, property):
        return f"{name}: {_annotation(inspect.signature(value.fget).return_annotation)}"
    if inspect.isclass(value) and issubclass(value, (BaseException, enum.Enum)):
        return f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    if not callable(value):
        return _setting(name, module)[0]
    taken = inspect.signature(value)
    given = [*taken.parameters.values()]
    parts, kinds = [*map(_parameter, given)], [of.kind for of in given]
    of = inspect.Parameter
    if of.KEYWORD_ONLY in kinds and of.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(of.KEYWORD_ONLY), "*")
    if of.POSITIONAL_ONLY in kinds:
        parts.insert(kinds.count(of.POSITIONAL_ONLY), "/")
    has_result = not inspect.isclass(value) and taken.return_annotation is not taken.empty
    end = f") -> {_annotation(taken.return_annotation)}" if has_result else ")"
    line = ", ".join(parts)
    if len(whole := f"{name}({line}{end}") <= WIDTH:
        return whole
    lines = [line] if len(line) + 4 <= WIDTH else [f"{part}," for part in parts]
    return "\n".join([f"{name}(", *(f"    {line}" for line in lines), end])


def _parameter(given: inspect.Parameter) -> str:
    stars = {given.VAR_POSITIONAL: "*", given.VAR_KEYWORD: "**"}.get(given.kind, "")
    text = f"{stars}{given.name}: {_annotation(given.annotation)}"
    if given.default is given.empty:
        return text
    of, default = given.default, repr(given.default).replace("'", '"')
    return f"{text} = {f'{type(of).__name__}.{of.name}' if isinstance(of, enum.Enum) else default}"


def _annotation(of: Any) -> str:
    """An annotation as the source has it, where annotations are strings, without our modules."""
    text = str(getattr(of, "__forward_arg__", of)).replace("'", '"')
    return re.sub(r"\b(?:candidates|settings)\.", "", text)


def _first_sentence(name: str, value: Any, module: ModuleType) -> str:
    text = value.__doc__
    if not (callable(value) or isinstance(value, property)):  # its text stands below it
        _, text = _setting(name.rpartition(".")[2], module)
    if not text:
        raise ValueError(f"{name} has no docstring")
    first = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s(?=[A-Z`])", first)[0].removesuffix(":").replace("``", "`")


def _arguments(value: Any) -> str:
    """The arguments or attributes that a docstring describes, as a list."""
    if not (callable(value) or isinstance(value, property)):
        return ""
    lines = inspect.cleandoc(value.__doc__).splitlines()
    items: list[str] = []
    is_inside = False
    for line in lines:
        if not line.startswith(" "):
            is_inside = line in ("Args:", "Attributes:") or (is_inside and not line)
        elif is_inside and re.match(r"  \S", line):
            names, _, text = line.strip().partition(": ")
            items.append(f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {text}")
        elif is_inside:
            items[-1] += f" {line.strip()}"
    return "\n".join(items).replace("``", "`")


def _setting(name: str, module: ModuleType) -> tuple[str, str]:
    """The lines of a module that set a value, and the text below them."""
    source = inspect.getsource(module)
    for node, below in itertools.pairwise(ast.parse(source).body):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            text = below.value.value if isinstance(below, ast.Expr) else ""
            return ast.get_source_segment(source, node), text
    return "", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = [page for page in sorted(DOCS.rglob("*.md")) if filled(page) != page.read_text("utf-8")]
    for page in old:
        if not check:
            page.write_text(filled(page), "utf-8")
        print(f"{page} {'is out of date' if check else 'is written'}", file=sys.stderr)
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
