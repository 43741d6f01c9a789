"""The checks of the built site find what they are for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("check_site", ROOT / "tools" / "check_site.py")
check_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_site)

COLORS = ["--md-hue: 232", "--md-default-bg-color: #fff", "--md-code-bg-color: var(--paper)"]

DESCRIBED = f"<meta name=description content='{'what it says ' * 6}'>"
PAGE = "<h1>A</h1><h2>B</h2><img src=a.svg alt=A>"


def write(site, *, page=PAGE, grey="#767676", paper="#fff"):
    colors = [name for pair in check_site.READ for name in pair]
    colors = [f"{name}: {grey}" for name in dict.fromkeys(colors) if "bg-color" not in name]
    colors += ["--md-primary-bg-color: hsla(var(--md-hue), 15%, 100%, 1)", *COLORS]
    text = "; ".join(colors).replace("var(--paper)", paper)
    (site / "styles").mkdir()
    (site / "styles" / "extra.css").write_text(f"/* all */ :root, .x {{ {text} }}")
    (site / "index.html").write_text(DESCRIBED + page)


def wrong(site):
    return [*check_site.pages(site), *check_site.contrast(site)]


def test_nothing_is_wrong(tmp_path):
    write(tmp_path)
    assert wrong(tmp_path) == []


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<h2>B</h2><h1>A</h1>", "its first heading, and no other"),
        ("<h1>A</h1><h1>B</h1>", "its first heading, and no other"),
        ("<h1>A</h1><h3>B</h3>", "a heading of level 3 follows one of level 1"),
        ("<h1>A</h1><img src=a.svg>", "the picture a.svg has no text"),
        ("<h1>A</h1><p>one\n- <strong>two</strong></p>", "'two' begins no item of a list"),
    ],
)
def test_pages(tmp_path, page, expected):
    write(tmp_path, page=page)
    assert expected in wrong(tmp_path)[0]


@pytest.mark.parametrize("content", ["", "short", "long " * 33])
def test_descriptions(tmp_path, content):
    write(tmp_path)
    (tmp_path / "index.html").write_text(f"<meta name=description content='{content}'>{PAGE}")
    (found,) = wrong(tmp_path)
    assert "its description must have 50 to 160 characters" in found


def test_every_description_is_another(tmp_path):
    write(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "index.html").write_text(DESCRIBED + PAGE)
    (found,) = wrong(tmp_path)
    assert "its description is that of" in found


@pytest.mark.parametrize("colors", [{"grey": "#777777"}, {"paper": "#f5f5f5"}])
def test_contrast(tmp_path, colors):
    write(tmp_path, **colors)
    assert {line.split()[0] for line in wrong(tmp_path)} == {"contrast:"}


def test_search(tmp_path, monkeypatch):
    monkeypatch.setattr(check_site.shutil, "which", lambda name: name)
    found = {word: [f"{pages.split()[0]}/#part"] for word, pages in check_site.WORDS.items()}
    found["fp8"] = ["gallery/"]
    done = check_site.subprocess.CompletedProcess([], 0, stdout=json.dumps(found))
    monkeypatch.setattr(check_site.subprocess, "run", lambda *_, **__: done)
    assert [*check_site.search(tmp_path)] == ["search: 'fp8' finds ['gallery'], not eight-bits"]
