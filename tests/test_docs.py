"""Each page of the documentation is one program that runs, and prints what it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location(
    "site_pages", DOCS.parent / "tools" / "site_pages.py"
)
site_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site_pages)

BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^<!-- file: .*?^<!-- end of file -->", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^print\(.*\)\s+# ([\[(\d][^a-z:\n]*)", re.MULTILINE)  # `print(x)  # its value`
LINK = re.compile(r"\]\(([\w./-]+)(?:#[^)\s]*)?\)")
LOWERS = {"start/first-kernel", "tuning", "serving"}  # what is compiled for a GPU


def pages() -> list[object]:
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        if PROGRAM.search(path.read_text(encoding="utf-8")):
            name = path.relative_to(DOCS).with_suffix("").as_posix()
            marks = [pytest.mark.cuda_plugin] if name in LOWERS else []
            found.append(pytest.param(path, id=name, marks=marks))
    return found


def test_no_block_is_wider_than_the_site_shows():
    wide = [
        f"{path.relative_to(DOCS)}: {line}"
        for path in sorted(DOCS.rglob("*.md"))
        for block in BLOCK.findall(FILE.sub("", path.read_text(encoding="utf-8")))
        for line in block.splitlines()
        if len(line) > 88
    ]
    assert not wide


def test_links_lead_to_files():
    """In the repository; where the site has them elsewhere, its hook changes them."""
    root = DOCS.parent
    texts = [*root.glob("*.md"), *root.glob("benchmarks/*.md"), *sorted(DOCS.rglob("*.md"))]
    lost = [
        f"{path.relative_to(DOCS.parent)}: {link}"
        for path in texts
        for link in LINK.findall(BLOCK.sub("", path.read_text(encoding="utf-8")))
        if not (path.parent / link).exists()
    ]
    assert not lost


def test_each_page_has_a_description():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert set(site_pages.ABOUT) == pages, "each page has an entry in tools/site_pages.toml"


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        (None, "[a](b.md#c), x.py, [nb](../../quickstart.ipynb)"),
        (
            "https://h/t/",
            "[a](b.md#c), [x.py](https://h/t/blob/HEAD/x.py), [nb](../../quickstart.ipynb)",
        ),
    ],
)
def test_links_out_of_the_docs(repository, expected):
    text = "[a](b.md#c), [x.py](../../../x.py), [nb](../../../examples/quickstart.ipynb)"
    assert site_pages.linked(text, "guides/deep/page.md", repository) == expected
    assert site_pages.linked("[a](../b.md)", "guides/page.md", repository) == "[a](../b.md)"
    root = "[a](../../CONTRIBUTING.md#b)"
    assert site_pages.linked(root, "guides/page.md", repository) == "[a](../contributing.md#b)"


def test_entries_of_the_reference():
    """Their signatures are mkdocstrings' on the site, and the table has no files there."""
    text = """<!-- names -->
| Name | Is | Source |
| --- | --- | --- |
| [`t.f`](#t.f) | F \\| G. | [f.py](../../src/triax/f.py) |
<!-- end of names -->

| `f` | no | entry |

<!-- ::: t.f -->
## <a id="t.f"></a>`t.f`

F.
<!-- end of entry -->

<!-- ::: triax.g.g
    options:
      heading: triax.g
-->
## <a id="triax.g.g"></a>`triax.g`
<!-- end of entry -->
"""
    shown = [line for line in site_pages.entered(text).splitlines() if line]
    assert shown == [
        "| Name | Is |",
        "| --- | --- |",
        "| [`t.f`](#t.f) | F \\| G. |",
        "| `f` | no | entry |",
        "::: t.f",
        "::: triax.g.g",
        "    options:",
        "      heading: triax.g",
    ]


@pytest.mark.slow("what pages call has tests of its own")
@pytest.mark.parametrize("page", pages())
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(DOCS.parent / "examples"))
    blocks = PROGRAM.findall(page.read_text(encoding="utf-8"))
    # A file, because Triton reads a kernel's source.
    path = tmp_path / f"{page.stem.replace('-', '_')}.py"
    path.write_text("\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    printed = "".join(capsys.readouterr().out.split())
    for value in SHOWN.findall("\n".join(blocks)):
        before, found, printed = printed.partition("".join(value.strip(" ,").split()))
        assert found, f"{value!r} is not what is printed: {before!r}"


@pytest.mark.slow("what the page calls has tests of its own")
def test_sharded_page_runs_on_one_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    test_page_runs(DOCS / "sharding.md", tmp_path, monkeypatch, capsys)
