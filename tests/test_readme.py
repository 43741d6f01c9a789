"""The README's program prints what its comments say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_an_index_shows_no_links_to_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        shown = re.sub(change["pattern"], change["replacement"], shown)
    assert set(re.findall(r"\]\((\w*)", shown)) == {"https"}
    assert "How it works explains how the code follows from that" in shown


def test_example(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = "\n".join(blocks)
    expected = re.findall(r"print\(.*\)  # (.*)", program)
    assert len(expected) == len(blocks) == 2
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == expected, done.stderr
