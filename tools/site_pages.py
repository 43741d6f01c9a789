"""A hook of MkDocs: pages of the site that are files of the repository's root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if (name := PAGES.get(page.file.src_uri)) is None:
        return markdown
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
