"""The thresholds of rows name sections of the log of what was measured."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from triax.moe.products import thresholds

LOG = Path(__file__).parents[3] / "benchmarks" / "what-was-tried.md"


def test_the_sections_are_there():
    source = Path(thresholds.__file__).read_text()
    texts = [
        node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    assert len(texts) == 1 + sum(name.isupper() for name in vars(thresholds))
    titles = {title for text in texts for title in re.findall('"(.+?)"', " ".join(text.split()))}
    sections = re.findall(r"^\*\*(.+?)\.\*\*", LOG.read_text(), re.M)
    assert len(titles) > 4
    assert titles <= {*sections}
