"""What FILE:FUNCTION and package.module:FUNCTION find, and the remedy that Triax prints, tried."""

import importlib
import re
import runpy
import shlex
import sys

import pytest

from tests.tuning.conftest import DEVICE, replace_measurer
from triax import cli
from triax.errors import TuningError
from triax.tools import tune
from triax.tuning import policy

PROGRAM = """
import jax, numpy as np, triton, triton.language as tl, triax
from lab.helpers import FACTOR, twice

@triton.jit
def minus(x):
    return -x

@triton.autotune([triton.Config({"BLOCK": b, "LAST": minus}) for b in (64, 128)], key=["LAST"])
@triton.jit
def scale_kernel(x_ptr, out_ptr, n, LAST: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = LAST(twice(tl.load(x_ptr + offsets, mask=offsets < n)) * FACTOR)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=offsets < n)

def scale(x):
    return triax.triton_call(
        x, n=x.size, kernel=scale_kernel, out_type=x,
        grid=lambda meta: triton.cdiv(x.size, meta["BLOCK"]),
    )

def main():
    return scale(np.ones(100, np.float32))

def train():
    x = jax.ShapeDtypeStruct((100,), np.float32)
    jax.jit(scale).trace(x).lower(lowering_platforms=("cuda",))

if __name__ == "__main__":
    dtype = "float32"  # the kernel has an attribute of that name
    train()
"""
HELPERS = """
import triton, triton.language as tl

FACTOR = tl.constexpr(3)
SIZE = 100

@triton.jit
def twice(x):
    return 2 * x

def needy(x):
    return x
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The working directory, with a package in it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    for name, text in (("__init__", ""), ("exp", PROGRAM), ("helpers", HELPERS)):
        (tmp_path / "lab" / f"{name}.py").write_text(text)
    yield tmp_path
    for name in ("exp", "lab", "lab.exp", "lab.helpers"):
        sys.modules.pop(name, None)


@pytest.fixture
def measurer(monkeypatch):
    monkeypatch.setattr("triax.devices.for_tuning", lambda *_: DEVICE)
    monkeypatch.setattr(tune, "_device", lambda call, operands: (DEVICE, 90))
    policy.forget()
    yield replace_measurer(monkeypatch)
    policy.forget()


RUNS = {
    "as a script": lambda: runpy.run_path("lab/exp.py", run_name="__main__"),
    "as a module": lambda: importlib.import_module("lab.exp").train(),
}


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("form", [0, 1], ids=["FILE", "module"])
@pytest.mark.parametrize("run", RUNS)
def test_the_remedy_that_is_printed_works(lab, measurer, monkeypatch, form, run):
    """The command from the error, with this program's names in it; then the program, either way."""
    monkeypatch.syspath_prepend(str(lab))
    monkeypatch.setenv("TRIAX_AUTOTUNE", "strict")
    with pytest.raises(TuningError) as caught:
        RUNS[run]()
    command = re.findall(r"`(triax tune [^`]*)`", str(caught.value))[form]
    names = {"FILE": "lab/exp.py", "package.module": "lab.exp", "FUNCTION": "main"}
    for placeholder, name in names.items():
        command = command.replace(placeholder, name)
    assert cli.main(shlex.split(command)[1:]) == 0
    for again in RUNS.values():
        policy.forget()
        again()
    assert len(measurer.jobs) == 1


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("", "needs FILE:FUNCTION or package.module:FUNCTION; got '', and there is no file ''."),
        (":", "got ':', and there is no file ''."),
        ("\0:main", r"and there is no file '\x00'."),
        ("nothing.py:main", "there is no file 'nothing.py', and no module of that name in {cwd}"),
        ("lab.nothing:main", "there is no file 'lab.nothing', and no module of that name in {cwd}"),
        ("lab/helpers.py", "names no function. Add one that takes no arguments, as in `triax tune"),
        ("lab/helpers.py:f", "finds no function 'f' in {cwd}/lab/helpers.py. Known: needy."),
        ("lab.helpers:nedy", "'nedy' in {cwd}/lab/helpers.py. Did you mean `needy`?"),
        ("lab.helpers:SIZE", "finds no function 'SIZE'"),
        ("lab.helpers:needy", "calls 'needy' of {cwd}/lab/helpers.py without arguments: missing"),
        ("lab/relative.py:f", "Name it as package.module:FUNCTION, in the folder that the package"),
        ("lab.broken:f", "triax: {cwd}/lab/broken.py:1: ModuleNotFoundError: No module named 'no"),
    ],
)
def test_what_is_wrong_and_what_to_do(lab, capsys, target, expected):
    (lab / "lab" / "relative.py").write_text("from .helpers import twice\n")
    (lab / "lab" / "broken.py").write_text("import no_such_thing\n")
    assert cli.main(["tune", target]) == 1
    said = capsys.readouterr().err
    assert expected.replace("{cwd}", str(lab)) in said
    assert said.count("\n") == 1


def test_a_file_does_not_replace_the_module_of_its_name(lab, capsys):
    (lab / "types.py").write_text("def main():\n    return 1\n")
    known = sys.modules["types"]
    assert cli.main(["tune", "types.py:main"]) == 0
    assert sys.modules["types"] is known
