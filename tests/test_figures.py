"""Figures in README and docs are those of the committed records."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
figures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(figures)


@pytest.mark.parametrize("page", figures.PAGES)
def test_tables_are_those_of_the_records(page):
    text = (ROOT / page).read_text()
    assert figures.BLOCK.search(text), "no table of figures"
    assert figures.filled(text) == text, "run python tools/figures.py"


def test_a_changed_figure_is_found():
    text = (ROOT / "README.md").read_text()
    changed = re.sub(r"\d+\.\d%", "12.3%", text, count=1)
    assert changed != text
    assert figures.filled(changed) == text


def test_every_table_is_on_a_page():
    shown = {
        match[2]
        for page in figures.PAGES
        for match in figures.BLOCK.finditer((ROOT / page).read_text())
    }
    assert shown == set(figures.TABLES)
