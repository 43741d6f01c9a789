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

# A link out of `docs/`, and a directive of mkdocstrings, which is a comment in the repository.
OUTSIDE = re.compile(r"\[([^][]*)\]\(((?:\.\./)+)([\w./-]+)\)")
ENTRY = re.compile(r"<!-- (::: (\S+).*?)\s*-->", re.DOTALL)
HEADING = re.compile(r"^<!-- ::: (\S+)\n.*\n +heading: (\S+)", re.MULTILINE)
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
    """A page of the reference with its entries; the table of names has links to them, no files."""
    if found := ENTRY.search(markdown):
        module = found[2]
        hidden = {heading: name for name, heading in HEADING.findall(markdown)}  # by the heading
        whole = lambda name: name if name.startswith("triax.") else f"{module}.{name}"
        link = lambda name: hidden.get(name, whole(name))
        row = re.compile(r"^\| `([\w.]+)` \| (.*) \| \[.*src/triax/.* \|$", re.MULTILINE)
        markdown = row.sub(lambda of: f"| [`{of[1]}`](#{link(of[1])}) | {of[2]} |", markdown)
        markdown = markdown.replace(
            "| Name | Is | Source |\n| --- | --- | --- |", "| Name | Is |\n| --- | --- |"
        )
    return ENTRY.sub(r"\1", markdown)


def linked(markdown: str, uri: str, repository: str | None) -> str:
    """A page whose links out of `docs/` lead to the repository, or are text without one."""

    def link(found: re.Match[str]) -> str:
        text, up, path = found.groups()
        if up.count("/") <= uri.count("/"):
            return found[0]
        if path == NOTEBOOK:
            return f"[{text}]({'../' * uri.count('/')}{Path(path).name})"
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})" if repository else text

    return OUTSIDE.sub(link, markdown)
