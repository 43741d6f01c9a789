"""What SECURITY.md promises: each promise names tests that exist; and what no other test holds."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuning.records import key, record
from triax.tuning.store import Store

ROOT = Path(__file__).resolve().parents[1]
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
RUNS |= {"runpy.run_path", "builtins.eval", "builtins.exec"}


def code_of_data(source: str) -> Iterator[str]:
    """What in a module makes code of data, or may: unpickling, `eval`, a shell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from (name for name in names if name.partition(".")[0] in UNPICKLES)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in RUNS:
                yield name
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("shell", "allow_pickle") and not is_false:
                    yield f"{name}({keyword.arg}=…)"


def test_no_code_is_made_of_data():
    paths = [*(ROOT / "src").rglob("*.py")]
    assert len(paths) > 100
    assert [(path, what) for path in paths for what in code_of_data(path.read_text())] == []


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from pickle import loads", "import pickle.x as y"),
        *("eval(text)", "os.system(text)", "subprocess.run(text, shell=True)"),
        "np.load(file, allow_pickle=flag)",
    ],
)
def test_such_code_is_found(line):
    assert len([*code_of_data(line)]) == 1
    assert not [*code_of_data("subprocess.run(words, shell=False)")]


def test_a_config_that_is_no_candidate_is_not_used(tmp_path):
    """Not even if the record says that it is one: its key is then another."""
    place, config = Store(tmp_path, "test"), "BLOCK=1"
    more = dataclasses.replace(key(0), candidates=(*key(0).candidates, config))
    place.put(record(0))
    assert place.find(key(0)) == record(0)
    poisoned = dataclasses.replace(record(0), key=more, config=config)
    place.path(key(0)).write_text(poisoned.to_json())
    assert place.read(place.path(key(0))) == poisoned
    assert place.find(key(0)) is None


def test_each_promise_names_tests_that_exist():
    _, *promises = re.split(r"^- \*\*", (ROOT / "SECURITY.md").read_text(), flags=re.MULTILINE)
    assert len(promises) > 5
    for promise in promises:
        parts = re.split(r"`(tests/\S+\.py)`", promise)[1:]
        assert parts, promise
        for path, named in zip(parts[::2], parts[1::2], strict=True):
            known = {
                node.name
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            tests = re.findall(r"`(test_\w+)`", named)
            assert tests, promise
            assert set(tests) <= known, path
