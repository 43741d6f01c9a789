"""The notebook runs, cell by cell, and prints the outputs that are kept in it."""

import json
import sys
import types

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tests.examples.test_moe_layer import EXAMPLES


@pytest.mark.slow("Triton and IPython are the same")
@pytest.mark.cuda_plugin
def test_notebook_prints_its_outputs(tmp_path, monkeypatch, capsys):
    # IPython puts the module into `sys.modules`: by default as `__main__`, which would be pytest's.
    module = types.ModuleType("quickstart")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shell = InteractiveShell(
        ipython_dir=str(tmp_path),
        config=Config({"HistoryManager": {"enabled": False}}),  # no database, no thread
        user_module=module,
    )
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()
            kept = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out == kept
