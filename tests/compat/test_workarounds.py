"""The comments that mark workarounds for faults in other projects: all of one form, and none for
versions that are past.

Such a comment is `Workaround: <project> <versions>[, <issue>]: <why>.`, where the versions are
"<3.7" (fixed in 3.7), "3.5 and 3.6", "all" and the like.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
BEGINS = re.compile(r"# Workaround\b")
FORM = re.compile(r"# Workaround: (jax|jaxlib|triton|xla|python) ([^:,]+)(?:, [^:]+)?:")
CODE = """\
# Workaround: triton <3.7, triton-lang/triton #12: it sleeps,
# as it says.
x = 1  # Workaround: python all: no end.
# Workaround for something: a rest
# Workaround: torch <2: not ours
"""


def find(text):
    """The workarounds in a file's text, as projects and versions, and the malformed comments."""
    comments = [line for line in text.splitlines() if BEGINS.search(line)]
    forms = [(comment, FORM.search(comment)) for comment in comments]
    return [form.groups() for _, form in forms if form], [c for c, form in forms if not form]


def has_passed(versions, oldest):
    """Whether no version from the oldest supported one on has the fault."""
    numbers = [Version(number) for number in re.findall(r"\d+(?:\.\d+)*", versions)]
    if not numbers or re.search(r">|\bon\b|\+", versions):
        return False
    if re.search(r"<(?!=)", versions):
        return oldest >= max(numbers)
    return oldest.release[: len(max(numbers).release)] > max(numbers).release


def test_all_have_the_form_and_are_needed_still():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["interpreter"]]
    specifiers = {of.name: of.specifier for of in map(Requirement, required)}
    specifiers["python"] = SpecifierSet(project["requires-python"])
    oldest = {name: Version(min(s.version for s in of)) for name, of in specifiers.items() if of}
    oldest |= {"xla": oldest["jax"], "jaxlib": oldest["jax"]}
    assert [str(oldest[name]) for name in ("python", "jax", "triton")] == ["3.11", "0.8.0", "3.5"]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    workarounds, malformed = find("\n".join(texts))
    assert malformed == []
    assert [w for w in workarounds if has_passed(w[1], oldest[w[0]])] == []
    assert len(workarounds) > 8


def test_comments_are_read():
    valid, malformed = find(CODE)
    assert valid == [("triton", "<3.7"), ("python", "all")]
    assert malformed == CODE.splitlines()[3:]


@pytest.mark.parametrize(
    ("versions", "passed"),
    [("<3.7", "3.7 3.8.1"), ("3.5 and 3.6", "3.7 3.8.1"), ("<=3.7", "3.8.1")]
    + [(endless, "") for endless in (">=3.5", "from 3.5 on", "all")],
)
def test_what_can_go(versions, passed):
    assert [
        v for v in ("3.5.0", "3.6", "3.7", "3.8.1") if has_passed(versions, Version(v))
    ] == passed.split()
