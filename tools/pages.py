"""Writes into the pages of `docs/` what stands elsewhere, so that they read where they are.

    python tools/pages.py            # writes it
    python tools/pages.py --check    # says which pages are out of date, and exits with 1

A file of the repository stands in a block of code between `<!-- file: PATH -->` and `<!-- end of
file -->`. A page of the reference has, between `<!-- names -->` and `<!-- end of names -->`, the
first sentence of each of its entries; an entry is a directive of mkdocstrings in a comment, which
`tools/site_pages.py` opens for the site.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FILE = re.compile(r"(<!-- file: (\S+) -->\n```.*?\n).*?(^```\n<!-- end of file -->)", re.S | re.M)
NAMES = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.S)
ENTRY = re.compile(r"^<!-- ::: (\S+)(?:\n(?: +.*\n)*? +heading: (\S+)\n)?", re.M)


def filled(page: Path) -> str:
    """The text of a page, with what stands elsewhere as it is now."""
    text = page.read_text("utf-8")
    for kind, pattern in (("file", FILE), ("names", NAMES)):
        marks = text.count(f"<!-- {kind}"), text.count(f"<!-- end of {kind} -->")
        if set(marks) != {len(pattern.findall(text))}:
            raise ValueError(
                f"{page}: a block of `<!-- {kind}` has no end, or is not as it must be"
            )
    text = FILE.sub(lambda found: found[1] + _file(found[2]) + found[3], text)
    return NAMES.sub(lambda found: found[1] + names(text) + found[2], text)


def _file(path: str) -> str:
    return (ROOT / path).read_text("utf-8").rstrip("\n") + "\n"


def names(page: str) -> str:
    """A table of a page's entries: the name, the first sentence, the file."""
    lines = ["| Name | Is | Source |", "| --- | --- | --- |"]
    for entry, heading in ENTRY.findall(page):
        for name, value, module in _values(entry):
            source = Path(inspect.getfile(module)).relative_to(ROOT).as_posix()
            link = f"[{source.removeprefix('src/triax/')}](../../{source})"
            sentence = _first_sentence(name, value, module).replace("|", "\\|")
            shown = heading or name.removeprefix(f"{entry}.")
            lines.append(f"| `{shown}` | {sentence} | {link} |")
    return "\n".join(lines) + "\n"


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


def _first_sentence(name: str, value: Any, module: ModuleType) -> str:
    text = value.__doc__
    if not (inspect.isclass(value) or callable(value)):  # its text stands below it
        text = _text_below(name.rpartition(".")[2], module)
    if not text:
        raise ValueError(f"{name} has no docstring")
    first = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s(?=[A-Z`])", first)[0].removesuffix(":").replace("``", "`")


def _text_below(name: str, module: ModuleType) -> str | None:
    body = ast.parse(inspect.getsource(module)).body
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return below.value.value if isinstance(below, ast.Expr) else None
    return None


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
