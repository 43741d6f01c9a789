"""The comments that mark workarounds: all of one form, and none for versions that are past."""

import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from triax import cli
from triax.compat import workarounds
from triax.compat.workarounds import Workaround

ROOT = Path(__file__).parents[2]


def floors():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return workarounds.floors(project["requires-python"], project["dependencies"])


def test_all_have_the_form_and_are_needed_still():
    found, malformed = workarounds.find(ROOT / "src")
    assert malformed == []
    assert len(found) > 8
    oldest = floors()
    assert [w.place for w in found if w.has_passed(oldest)] == []


def test_comments_are_read(tmp_path):
    (tmp_path / "code.py").write_text(
        "# Workaround: triton <3.7, triton-lang/triton #12: it sleeps,\n"
        "# as it says.\n"
        "x = 1  # Workaround: python all: no end.\n"
        "# Workaround for something: a rest\n"
        "# Workaround: torch <2: not ours\n"
    )
    found, malformed = workarounds.find(tmp_path)
    assert found == [
        Workaround(
            "code.py:1", "triton", "<3.7", "triton-lang/triton #12", "it sleeps, as it says."
        ),
        Workaround("code.py:3", "python", "all", "", "no end."),
    ]
    assert malformed == ["code.py:4", "code.py:5"]


@pytest.mark.parametrize(
    ("versions", "passed"),
    [
        ("<3.7", {"3.7", "3.8.1"}),
        ("3.5 and 3.6", {"3.7", "3.8.1"}),
        ("<=3.7", {"3.8.1"}),
        (">=3.5", set()),
        ("from 3.5 on", set()),
        ("all", set()),
    ],
)
def test_what_can_go(versions, passed):
    one = Workaround("code.py:1", "triton", versions, "", "it sleeps.")
    found = {v for v in ("3.5.0", "3.6", "3.7", "3.8.1") if one.has_passed({"triton": Version(v)})}
    assert found == passed
    assert not one.has_passed({"jax": Version("99")})


def test_floors():
    oldest = floors()
    assert oldest["xla"] == oldest["jaxlib"] == oldest["jax"] == Version("0.8.0")
    assert (oldest["python"], oldest["triton"]) == (Version("3.11"), Version("3.5"))


def test_doctor_lists_them(capsys):
    assert cli.main(["doctor", "--workarounds"]) == 0
    assert "compat/triton_lock.py:" in capsys.readouterr().out
