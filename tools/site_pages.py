"""A hook of MkDocs: what a page of the repository needs to be a page of the site.

Pages that are files of the repository's root, links to files outside of `docs/`, the entries of the
reference, and each page's description and words to search by (`site_pages.toml`).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

ABOUT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

# A link out of `docs/`; and a directive of mkdocstrings, which is a comment in the repository, with
# the signatures below it that mkdocstrings writes itself.
OUTSIDE = re.compile(r"\[([^][]*)\]\(((?:\.\./)+)([\w./-]+)\)")
ENTRY = re.compile(r"^<!-- (::: [^>]*?)\s*-->\n.*?^<!-- end of entry -->", re.DOTALL | re.MULTILINE)
NAMES = re.compile(r"^<!-- names -->\n(.*?)^<!-- end of names -->", re.DOTALL | re.MULTILINE)
NOTEBOOK = "examples/quickstart.ipynb"


def on_files(files: Any, *, config: Any, **_: Any) -> None:
    from mkdocs.structure.files import File

    notebook = ROOT / NOTEBOOK
    files.append(File.generated(config, notebook.name, abs_src_path=str(notebook)))


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    uri = page.file.src_uri
    about = ABOUT.get(uri.removesuffix(".md"), {})
    if "words" in about:
        page.meta["tags"] = about["words"].split(", ")
    page.meta["description"] = about.get("description")
    if name := PAGES.get(uri):
        page.meta["search"] = {"boost": 0.1}
        markdown = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    return linked(entered(markdown), uri, config.repo_url)


def entered(markdown: str) -> str:
    """A page of the reference with its entries; its table of names has no column of files."""
    cut = lambda found: re.sub(r"[^|\n]*\|$", "", found[1], flags=re.MULTILINE)
    return ENTRY.sub(r"\1", NAMES.sub(cut, markdown))


def linked(markdown: str, uri: str, repository: str | None) -> str:
    """A page whose links out of `docs/` lead to the repository, or are text without one.

    Links to files of the root that are pages of the site lead to these.
    """
    up = "../" * uri.count("/")
    for page, path in PAGES.items():
        markdown = markdown.replace(f"](../{up}{path}", f"]({up}{page}")

    def link(found: re.Match[str]) -> str:
        text, up, path = found.groups()
        if up.count("/") <= uri.count("/"):
            return found[0]
        if path == NOTEBOOK:
            return f"[{text}]({'../' * uri.count('/')}{Path(path).name})"
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})" if repository else text

    return OUTSIDE.sub(link, markdown)
