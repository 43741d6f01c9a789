"""What stands elsewhere is in the pages as it is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


def test_pages_are_current():
    changed = [page for page in pages.DOCS.rglob("*.md") if pages.filled(page) != page.read_text()]
    assert not changed, "run python tools/pages.py"


def test_a_file(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- file: LICENSE -->\n```text\nold\n```\n<!-- end of file -->\nmore\n")
    license = (ROOT / "LICENSE").read_text().rstrip("\n")
    block = f"<!-- file: LICENSE -->\n```text\n{license}\n```\n<!-- end of file -->\nmore\n"
    assert pages.filled(page) == block


@pytest.mark.parametrize("end", ["", "<!-- end of file -->", "```\n<!-- end of names -->"])
def test_a_block_without_an_end(tmp_path, end):
    page = tmp_path / "page.md"
    page.write_text(f"<!-- file: LICENSE -->\n```text\nold\n{end}\n")
    with pytest.raises(ValueError, match="has no end"):
        pages.filled(page)


def test_names():
    """Of functions, of a module, of a value with its text below it, and under another heading."""
    rows = pages.names(
        """<!-- ::: triax.tuning_mode -->
<!-- ::: triax.errors
    options:
      show_root_heading: false
-->
<!-- ::: triax.testing.TOLERANCES -->
<!-- ::: triax.benchmark.benchmark
    options:
      heading: triax.benchmark
-->
"""
    ).splitlines()
    found = {name.strip(" `"): rest for _, name, *rest, _ in (row.split("|") for row in rows)}
    link = lambda name: f" [{name}](../../src/triax/{name}) "
    assert found["triax.tuning_mode"][1] == link("settings.py")
    assert found["CompilationTimeout"] == [" Compiling a kernel took too long. ", link("errors.py")]
    tolerances = " The tolerance of each dtype of floats, by its name. "
    assert found["triax.testing.TOLERANCES"] == [tolerances, link("testing.py")]
    assert found["triax.benchmark"][1] == link("benchmark.py")
