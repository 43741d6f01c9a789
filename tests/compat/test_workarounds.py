"""The comments that mark workarounds: all of one form, and none for versions that are past."""

import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from triax import cli
from triax.compat import workarounds
from triax.compat.workarounds import Workaround

ROOT = Path(__file__).parents[2]
CODE = """\
# Workaround: triton <3.7, triton-lang/triton #12: it sleeps,
# as it says.
x = 1  # Workaround: python all: no end.
# Workaround for something: a rest
# Workaround: torch <2: not ours
"""


def test_all_have_the_form_and_are_needed_still(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (triton,) = project["optional-dependencies"]["interpreter"]
    # The extra's requirement as an installed package's metadata has it.
    requirements = [*project["dependencies"], f"{triton} and extra == 'interpreter'"]
    oldest = workarounds.floors(project["requires-python"], requirements)
    assert oldest["xla"] == oldest["jaxlib"] == oldest["jax"] == Version("0.8.0")
    assert (oldest["python"], oldest["triton"]) == (Version("3.11"), Version("3.5"))
    found, malformed = workarounds.find(ROOT / "src")
    assert malformed == []
    assert [w.place for w in found if w.has_passed(oldest)] == []
    assert cli.main(["doctor", "--workarounds"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(found) > 8


def test_comments_are_read(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    found, malformed = workarounds.find(tmp_path)
    issue, why = "triton-lang/triton #12", "it sleeps, as it says."
    first = Workaround("code.py:1", "triton", "<3.7", issue, why)
    assert found == [first, Workaround("code.py:3", "python", "all", "", "no end.")]
    assert malformed == ["code.py:4", "code.py:5"]


@pytest.mark.parametrize(
    ("versions", "passed"),
    [("<3.7", "3.7 3.8.1"), ("3.5 and 3.6", "3.7 3.8.1"), ("<=3.7", "3.8.1")]
    + [(endless, "") for endless in (">=3.5", "from 3.5 on", "all")],
)
def test_what_can_go(versions, passed):
    one = Workaround("code.py:1", "triton", versions, "", "it sleeps.")
    found = [v for v in ("3.5.0", "3.6", "3.7", "3.8.1") if one.has_passed({"triton": Version(v)})]
    assert found == passed.split()
    assert not one.has_passed({"jax": Version("99")})
