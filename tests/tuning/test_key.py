"""What a tuned config's key says of the kernel's source and of its arrays."""

import importlib
import sys

import jax
import numpy as np
import pytest
import triton
import triton.language as tl

from tests.cases import blockwise
from tests.kernels import copy_kernel
from tests.same_name import first, second
from tests.tuning.conftest import DEVICE
from triax.binding.launch import ArrayType
from triax.tuning.key import make_key

X = np.zeros(100, np.float32)
OFFSET = tl.constexpr(1)


@triton.jit
def helper(x):
    return x + OFFSET


def source(closed_over=1):
    scale = tl.constexpr(closed_over)

    @triton.jit
    def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        value = helper(tl.load(x_ptr)) * first.FACTOR * scale
        first.scale_kernel(x_ptr, out_ptr, n, BLOCK)
        tl.store(out_ptr, value)

    return hash_of(kernel)


def hash_of(kernel):
    return key_of(kernel).source


def key_of(kernel, out_type=X):
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    tuned = triton.autotune(configs, key=[])(kernel)
    (equation,) = jax.make_jaxpr(lambda x: blockwise(tuned, x, out_type=out_type))(X).eqns
    operand, result = (ArrayType(array.shape, array.dtype) for array in (X, out_type))
    call = equation.params["call"]
    return make_key(call, call.launches((operand,), (result,)), 90, DEVICE)


def test_it_has_the_dtypes_of_outputs_too():
    found = key_of(copy_kernel, X.astype(np.float16)).dtypes
    assert found == {"x_ptr.0": "float32", "out_ptr.0": "float16"}


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (None, "OFFSET", tl.constexpr(2)),
        (None, "helper", second.scale_kernel),
        (first, "FACTOR", tl.constexpr(99)),
        (first, "scale_kernel", second.scale_kernel),
    ],
)
def test_it_covers_helpers_and_constants_of_other_modules_too(monkeypatch, holder, name, value):
    before = source()
    assert source() == before
    if holder is None:
        monkeypatch.setitem(globals(), name, value)
    else:
        monkeypatch.setattr(holder, name, value)
    assert source() != before


def test_it_covers_closures():
    assert source(1) == source(1) != source(2)


HELPER = """
import triton, triton.language as tl
STEP = tl.constexpr({step})
@triton.jit
def helper(x):
    return x {operator} STEP
"""
KERNEL = """
import triton, triton.language as tl
import lab_of_keys.one, lab_of_keys.two as two
@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr, lab_of_keys.one.helper(tl.load(x_ptr)) + two.helper(1).to(x_ptr.dtype))
"""


@pytest.fixture
def of(tmp_path, monkeypatch):
    """The source's hash of a kernel with two helpers of one name, by (operator, step) of each."""

    def of(one, two, module="kernels", **globals_of_kernel):
        place = tmp_path / str(len(list(tmp_path.iterdir()))) / "lab_of_keys"
        place.mkdir(parents=True)
        for name, (operator, step) in (("one", one), ("two", two)):
            (place / f"{name}.py").write_text(HELPER.format(operator=operator, step=step))
        (place / f"{module}.py").write_text(KERNEL)
        monkeypatch.syspath_prepend(str(place.parent))
        for name in [name for name in sys.modules if name.startswith("lab_of_keys")]:
            del sys.modules[name]
        loaded = importlib.import_module(f"lab_of_keys.{module}")
        vars(loaded).update(globals_of_kernel)
        return hash_of(loaded.kernel)

    return of


def test_helpers_of_one_name_all_count(of):
    plus, times = ("+", 1), ("*", 2)
    cases = [
        (plus, times),
        (times, plus),
        (("-", 1), times),
        (("+", 3), times),
        (plus, ("-", 2)),
        (plus, ("*", 3)),
    ]
    assert len({of(*case) for case in cases}) == len(cases)


def test_names_of_modules_and_of_attributes_do_not_count(of):
    """A script has globals that the same file lacks if it is imported."""
    helpers = ("+", 1), ("*", 2)
    before = of(*helpers)
    assert of(*helpers, module="renamed") == before
    assert of(*helpers, dtype="float32", load=3) == before
