"""The pages whose snippets are said to run one after the other."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["moe", "router", "expert-parallel"])
def test_snippets_run(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    exec(compile(program, f"docs/{page}.md", "exec"), {})
