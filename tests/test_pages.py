"""What stands elsewhere is in the pages as it is there."""

from __future__ import annotations

import enum
import importlib.util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from triax import settings

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


def test_pages_are_current():
    changed = [page for page in pages.DOCS.rglob("*.md") if pages.filled(page) != page.read_text()]
    assert not changed, "run python tools/pages.py"


def test_pages_include_no_files_in_another_way():
    """The site has no extension for `--8<--`, and would show it as it is."""
    assert not [page for page in pages.DOCS.rglob("*.md") if "--8<--" in page.read_text()]


def test_a_file(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- file: LICENSE -->\n```text\nold\n```\n<!-- end of file -->\nmore\n")
    license = (ROOT / "LICENSE").read_text().rstrip("\n")
    block = f"<!-- file: LICENSE -->\n```text\n{license}\n```\n<!-- end of file -->\nmore\n"
    assert pages.filled(page) == block


@pytest.mark.parametrize(
    "text",
    [
        "<!-- file: LICENSE -->\n```text\nold\n",
        "<!-- file: LICENSE -->\n```text\nold\n<!-- end of file -->\n",
        "<!-- file: LICENSE -->\n```text\nold\n```\n<!-- end of names -->\n",
        "<!-- ::: triax.tune -->\n\n<!-- ::: triax.explain -->\n<!-- end of entry -->\n",
    ],
)
def test_a_block_without_an_end(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
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
    found = {name.strip(): rest for _, name, *rest, _ in (row.split("|") for row in rows)}
    link = lambda name: f" [{name}](../../src/triax/{name}) "
    assert found["[`triax.tuning_mode`](#triax.tuning_mode)"][1] == link("settings.py")
    assert found["[`CompilationTimeout`](#triax.errors.CompilationTimeout)"] == [
        " Compiling a kernel took too long. ",
        link("errors.py"),
    ]
    tolerances = " The tolerance of each dtype of floats, by its name. "
    assert found["[`triax.testing.TOLERANCES`](#triax.testing.TOLERANCES)"] == [
        tolerances,
        link("testing.py"),
    ]
    assert found["[`triax.benchmark`](#triax.benchmark.benchmark)"][1] == link("benchmark.py")


class Kind(enum.IntEnum):
    A = 1


def short(a: np.ndarray, /, *b: Any, kind: Kind = Kind.A, **c: Literal["a"]) -> settings.Mode: ...


def middle(these_values: int, mapping: dict[str, int], *, sizes: tuple[int, ...] = ()): ...


def long(first_of_many: int | None, *, named: str = "x", second_of_many: int, last: int = 3): ...


class Both(NamedTuple):
    a: int
    b: str | None = None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            short,
            'short(a: np.ndarray, /, *b: Any, kind: Kind = Kind.A, **c: Literal["a"]) -> Mode',
        ),
        (
            middle,
            "middle(\n    these_values: int, mapping: dict[str, int], *, "
            "sizes: tuple[int, ...] = ()\n)",
        ),
        (
            long,
            'long(\n    first_of_many: int | None,\n    *,\n    named: str = "x",\n'
            "    second_of_many: int,\n    last: int = 3,\n)",
        ),
        (Both, "Both(a: int, b: str | None = None)"),
        (Kind, "class Kind(IntEnum)"),
    ],
)
def test_signatures(value, expected):
    assert pages.signature(value.__name__, value, None) == expected


def test_an_entry():
    """A heading to link to, and what a class and its methods take."""
    entry = "<!-- ::: triax.moe.ScaledArray\n    options:\n      heading: Scaled\n-->\n"
    lines = pages.signatures(entry).splitlines()
    assert lines[:4] == [
        '## <a id="triax.moe.ScaledArray"></a>`Scaled`',
        "",
        "```py",
        "ScaledArray(",
    ]
    first = lines.index("ScaledArray.astype(dtype: Any) -> jax.Array")
    assert lines[first - 2 : first + 2] == ["", "```py", lines[first], "```"]


def test_arguments_are_listed():
    """Names that share a line, text of several lines, and nothing of other sections."""

    def function():
        """What it does.

        Args:
          a, b: two, in ``a[b]``,
            and more: here.
          *c: the rest.

        Returns:
          x: not an argument.
        """

    listed = "- `a`, `b`: two, in `a[b]`, and more: here.\n- `*c`: the rest."
    assert pages._arguments(function) == listed
    found = pages.signatures("<!-- ::: triax.moe.FeedForward -->\n")
    assert "\n\n- `tokens`: [tokens, hidden], in the dtype of `x`.\n- `group_counts`: " in found


def test_entries_of_values_and_properties():
    found = pages.signatures("<!-- ::: triax.testing.TOLERANCES -->\n")
    assert '```py\nTOLERANCES: dict[str, float] = {\n    "float64": 1e-14,\n' in found
    found = pages.signatures("<!-- ::: triax.moe.ScaledArray -->\n")
    assert "```py\nScaledArray.shape: tuple[int, ...]\n```\n\nThe shape of the array" in found
    assert "```py\nScaledArray.astype(dtype: Any) -> jax.Array\n```\n" in found
