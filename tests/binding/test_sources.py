"""What a kernel is compiled from, and what it is not."""

import dataclasses
import importlib.machinery
import sys
import types
from typing import ClassVar

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.same_name import first, second
from triax.binding import sources
from triax.binding.sources import fingerprint

OUTER = types.ModuleType("outer")
OUTER.inner = types.ModuleType("outer.inner")
FACTOR = tl.constexpr(2)
x_ptr = np.zeros(3)  # the name of a kernel's own parameter


class Opaque:
    pass


def plain(scale):
    def function(x):
        return x * scale

    return function


def helper_times(factor):
    value = tl.constexpr(factor)

    @triton.jit
    def helper(x):
        return x * value

    return helper


class Holder:
    helper = first.helper


@dataclasses.dataclass(frozen=True)
class Shape:
    size: int
    scale: ClassVar[float] = 1.0

    @property
    def half(self):
        return self.size // HALF


HALF = 2
SHAPE = tl.constexpr(Shape(4))
one, other = helper_times(1), helper_times(2)


@triton.constexpr_function
def twice(x):
    return x * FACTOR


@triton.jit
def kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr)
    x = OUTER.inner.helper(Holder.helper(x)) + one(x) + other(x) * SHAPE.half
    sizes = [FACTOR + i for i in (1, 2)]
    tl.store(out_ptr, x + sizes[0] + twice(2))


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    monkeypatch.setattr(OUTER.inner, "helper", first.helper, raising=False)


def replace_globals(**values):
    return lambda patch: [patch.setitem(globals(), *pair) for pair in values.items()]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(OUTER.inner, "helper", second.helper),
        lambda patch: patch.setattr(Holder, "helper", second.helper),
        lambda patch: patch.setattr(first, "inner", second.inner),  # called by what is called
        lambda patch: patch.setattr(Shape, "half", property(lambda shape: shape.size // 3)),
        replace_globals(FACTOR=tl.constexpr(2.0)),  # in a list, and in a function of constants
        replace_globals(SHAPE=tl.constexpr(Shape(5))),
        replace_globals(HALF=3),  # read by a property of a constant
        lambda patch: patch.setattr(Shape, "scale", 2.0),
        replace_globals(one=other, other=one),
        replace_globals(other=helper_times(3)),
    ],
)
def test_it_is_another_one_if(change, monkeypatch):
    before = fingerprint(kernel)
    assert fingerprint(kernel) == before
    change(monkeypatch)
    assert fingerprint(kernel) != before


@pytest.mark.parametrize(
    "change",
    [
        replace_globals(x_ptr=np.ones(3)),
        replace_globals(helper_times=None),
        lambda patch: patch.setattr(OUTER.inner, "another", first.inner, raising=False),
    ],
)
def test_it_is_the_same_if(change, monkeypatch):
    before = fingerprint(kernel)
    change(monkeypatch)
    assert fingerprint(kernel) == before


def test_constants():
    values = [None, 0.0, -0.0, (1,), (1.0,), plain(2), plain(3), Shape(1), first.helper, Opaque]
    assert len({fingerprint(kernel, value) for value in values}) == len(values)
    assert fingerprint(kernel, plain(2)) == fingerprint(kernel, plain(2))
    assert fingerprint(kernel, (1, 2)) == fingerprint(kernel, (1, 2)) != fingerprint(kernel, 1, 2)


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: int

    @triton.constexpr_function
    def times(self, x):
        return x * self.factor


bound = Scaled(2).times


@triton.jit
def calls_bound(out_ptr):
    tl.store(out_ptr, bound(3))


def test_bound_functions_of_constants(monkeypatch):
    before = fingerprint(calls_bound), fingerprint(kernel, bound)
    assert (fingerprint(calls_bound), fingerprint(kernel, Scaled(2).times)) == before
    monkeypatch.setitem(globals(), "bound", Scaled(3).times)
    assert fingerprint(calls_bound) != before[0]
    assert fingerprint(kernel, bound) != before[1]


def test_modules_and_classes_as_constants():
    constants = [types.ModuleType("held"), type("Held", (), {})]
    for constant in constants:
        constant.lock = Opaque()  # of which nothing can be compiled
        constant.helper, constant.factor = first.helper, 3.0
        before = fingerprint(kernel, constant)
        constant.lock = Opaque()
        assert fingerprint(kernel, constant) == before
        for name, value in {"helper": second.helper, "factor": 5.0}.items():
            setattr(constant, name, value)
            assert fingerprint(kernel, constant) != before


def test_a_file_called_like_a_standard_module(monkeypatch):
    found = set()
    for factor in (3, 5):
        module = types.ModuleType("profile")
        module.__spec__ = importlib.machinery.ModuleSpec("profile", None, origin="/home/profile.py")
        monkeypatch.setitem(sys.modules, "profile", module)
        sources._is_library.cache_clear()
        helper = helper_times(factor)
        helper.fn.__module__ = helper.__module__ = "profile"
        monkeypatch.setitem(globals(), "one", helper)
        found.add(fingerprint(kernel))
    sources._is_library.cache_clear()
    assert len(found) == 2


def test_whose_code_is_a_library():
    """Modules that are built into Python or frozen are the standard library's, too."""
    names = {"sys": True, "abc": True, "json": True, "numpy.linalg": True, "triton.language": True}
    for name, expected in {**names, "tests.kernels": False, "scipy": False}.items():
        sources._is_library.cache_clear()
        assert sources._is_library(name) == expected, name


def test_the_number_of_an_object_is_never_anothers():
    opaque = Opaque()
    assert fingerprint(kernel, opaque) == fingerprint(kernel, opaque)
    found = {fingerprint(kernel, Opaque()) for _ in range(50)}
    assert len(found) == 50


MUTABLE = tl.constexpr(2)


@triton.jit
def reads_all_kinds(out_ptr):
    tl.store(out_ptr, first.inner(MUTABLE) + one(MUTABLE))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(MUTABLE, "value", 3),  # in place: the object stays the same
        replace_globals(MUTABLE=tl.constexpr(3)),
        lambda patch: patch.setattr(first, "inner", second.inner),
        lambda patch: patch.setattr(one, "noinline", True),
        lambda patch: patch.setattr(one.fn, "__defaults__", (1,)),
        lambda patch: patch.setattr(one, "_src", one.src + "\n"),
        lambda patch: patch.setattr(_cell_of(one), "cell_contents", tl.constexpr(5)),
    ],
)
def test_a_repeated_walk_is_only_left_out_where_nothing_has_changed(change, monkeypatch):
    before = fingerprint(reads_all_kinds)
    walk = sources._walks[id(reads_all_kinds)]
    assert fingerprint(reads_all_kinds) == before
    assert sources._walks[id(reads_all_kinds)] is walk
    change(monkeypatch)
    assert fingerprint(reads_all_kinds) != before


def _cell_of(helper):
    return helper.fn.__closure__[0]


def test_code_inside_of_code_counts_by_what_it_does():
    """Functions of two equal programs are the same, wherever their code objects lie."""
    text = "def outer(x):\n    return [(lambda y: y {} 2)(i) for i in x]"

    def made(sign):
        found = {}
        exec(text.format(sign), found)
        return found["outer"]

    assert fingerprint(kernel, made("+")) == fingerprint(kernel, made("+"))
    assert fingerprint(kernel, made("+")) != fingerprint(kernel, made("-"))


def test_a_variable_that_is_not_assigned_yet():
    def made(assigned):
        def function(x):
            return late

        if assigned:
            late = None
        return function

    assert fingerprint(kernel, made(False)) == fingerprint(kernel, made(False))
    assert fingerprint(kernel, made(False)) != fingerprint(kernel, made(True))


third = one


@triton.jit
def calls_three(out_ptr):
    tl.store(out_ptr, one(1) + other(2) * third(3))


def test_two_names_of_one_helper(monkeypatch):
    """Which of the helpers that are known already a name is for."""
    before = fingerprint(calls_three)
    monkeypatch.setitem(globals(), "third", other)
    assert fingerprint(calls_three) != before


def aggregate_that(doubles):
    factor = tl.constexpr(2 if doubles else 3)

    @tl.core._aggregate
    class Scale:
        by: tl.tensor

        @triton.constexpr_function
        def __init__(self, by):
            self.by = by

        @triton.jit
        def scaled(self, x):
            return x * self.by * factor

    return Scale


def test_methods_of_aggregates():
    assert fingerprint(aggregate_that(True)) == fingerprint(aggregate_that(True))
    assert fingerprint(aggregate_that(True)) != fingerprint(aggregate_that(False))
