"""Compile-time values that Python calls equal and a kernel tells apart."""

import collections
import dataclasses
import enum
import gc

import jax
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from tests import kernels
from tests.cases import cuda_calls
from triax.binding.values import Static
from triax.compiling import compiler
from triax.errors import ArgumentValueError

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Options:
    x: object
    hidden: object = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class OtherOptions:
    x: object
    hidden: object = None


class Loose:
    """Equal to all of its kind, with a member in a slot."""

    __slots__ = ("__x",)

    def __init__(self, x):
        self.__x = x

    def __eq__(self, other):
        return isinstance(other, Loose)

    def __hash__(self):
        return 0

    def __repr__(self):
        return "Loose"


class Level(enum.IntEnum):
    ONE = 1


class Name(str):
    pass


class Quiet(str):
    def __repr__(self):
        return "Quiet"


class Tagged(int):
    def __init__(self, _):
        self.tag = "x"


class Numbered:
    """Equal by its member; its text is never the same."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x

    def __hash__(self):
        return 0

    def __repr__(self):
        return f"Numbered at {id(self)}"


class Opaque:
    pass


class Endless:
    def __init__(self):
        self.me = self


OPAQUE = Opaque()


def opaque(**members):
    found = Opaque()
    vars(found).update(members)
    return found


NAN = float("nan")
ARRAY = np.arange(3000.0)


def changed(array):
    array = array.copy()
    array[1500] += 1
    return array


DIFFERENT = [
    (3, 3.0),
    (True, 1),
    (0.0, -0.0),
    (1, Level.ONE),
    ("a", Name("a")),
    ("1", 1),
    (b"a", "a"),
    (0j, -0j),
    ((1, 2), (1, 2.0)),
    ((1, 2), [1, 2]),
    ((1, 2), Pair(1, 2)),
    (((0.0,),), ((-0.0,),)),
    (frozenset([3]), frozenset([3.0])),
    (frozenset([3]), {3}),
    ({"a": 3}, {"a": 3.0}),
    (Options(3), Options(3.0)),
    (Options(3), Options(True)),
    (Options(3), OtherOptions(3)),
    (Options(Options(0.0)), Options(Options(-0.0))),
    (Options(Pair(1, {2: 0.0})), Options(Pair(1, {2: -0.0}))),
    (Options(0, 1), Options(0, 2)),
    (Options(0, ARRAY), Options(0, changed(ARRAY))),
    (Options(np.float32(0)), Options(-np.float32(0))),
    (Options(np.float32(1)), Options(np.float64(1))),
    (Options(ml_dtypes.bfloat16(1)), Options(ml_dtypes.float8_e5m2(1))),
    (Loose(3), Loose(4)),
    (Opaque(), Opaque()),
    (opaque(x=1), opaque(x=1)),
    (tl.float32, tl.float16),
    (np.dtype("float32"), np.dtype("float16")),
    (np.dtype("float32"), np.float32),
    (kernels.add_kernel, kernels.copy_kernel),
    (range(0, 3, 2), range(0, 4, 2)),
    (Quiet("a"), Quiet("b")),
    (Tagged(1), Tagged(2)),
]
SAME = [
    lambda: 3,
    lambda: float("nan"),
    lambda: -float("nan"),
    lambda: (1, (NAN, "a"), Pair(1, 2)),
    lambda: frozenset(["a", "b", 3, None, (1, 2)]),
    lambda: Options(Options(frozenset([1])), {"a": [np.arange(3), np.float32(1), NAN]}),
    lambda: Loose((1, 2)),
    lambda: Level.ONE,
    lambda: OPAQUE,
    lambda: [Numbered(i) for i in range(3)],
    lambda: tl.pointer_type(tl.float32),
    lambda: kernels.add_kernel,
    lambda: np.dtype([("a", "i4"), ("b", "f4")]),  # which has a text, and no members
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different(one, other):
    assert Static(one) != Static(other)
    assert Static((one, "in a tuple")) != Static((other, "in a tuple"))


@pytest.mark.parametrize("make", SAME)
def test_the_same(make):
    assert Static(make()) == Static(make())
    assert hash(Static(make())) == hash(Static(make()))


def test_what_is_in_itself_has_an_end():
    endless = Endless()
    assert Static(endless) == Static(endless) != Static(Endless())


def test_a_changed_object_is_another_value():
    config = Opaque()
    config.x = 3
    before = Static(config)
    config.x = 3.0
    assert Static(config) != before


def test_an_id_that_is_used_again_is_no_match():
    """While a value is in a key it lives, so no other object can get its id."""
    statics = {Static(Options(0, Opaque())) for _ in range(100)}
    gc.collect()
    assert len(statics) == 100
    assert not any(Static(Options(0, Opaque())) in statics for _ in range(100))


@triton.jit
def half_kernel(out_ptr, OPTIONS: tl.constexpr):
    if OPTIONS.hidden is None:
        tl.store(out_ptr, OPTIONS.x / 2 if isinstance(OPTIONS.x, float) else -OPTIONS.x)
    else:
        tl.store(out_ptr, OPTIONS.x + OPTIONS.hidden)


def halves(values):
    output = jax.ShapeDtypeStruct((), np.float32)
    return [
        triax.triton_call(OPTIONS=value, kernel=half_kernel, out_type=output, grid=1)
        for value in values
    ]


def test_each_has_its_own_kernel_in_one_program():
    values = [Options(7), Options(7.0), Options(1, 2), Options(1, 3)]
    found = np.stack(jax.jit(lambda: halves(values))())
    np.testing.assert_array_equal(found, [-7, 3.5, 3, 4])


@pytest.mark.cuda_plugin
def test_tritons_disk_cache_finds_the_right_one():
    """It knows constants by their text, which does not show every member."""
    compiler.clear_cache()
    values = [Options(1, 2), Options(1, 3), Options(1, 2)]
    one, two, three = [call.entries for call in cuda_calls(lambda: halves(values))]
    assert one == three != two


def configs(*values):
    found = [triton.Config({"OPTIONS": value}) for value in values]
    return triton.autotune(found, key=[])(half_kernel)


def test_configs_that_look_the_same_have_names_of_their_own():
    kernel = configs(Options(1, 2), Options(1, 3), Options(1, 2))
    output = jax.ShapeDtypeStruct((), np.float32)
    jaxpr = jax.make_jaxpr(lambda: triax.triton_call(kernel=kernel, out_type=output, grid=1))()
    one, two = (str(c.config) for c in jaxpr.eqns[0].params["call"].candidates)
    assert two == f"{one} (2)"


def test_a_config_agrees_with_a_value_only_if_it_is_the_same():
    kernel = configs(Options(3), Options(4))
    output = jax.ShapeDtypeStruct((), np.float32)
    call = lambda x: triax.triton_call(OPTIONS=Options(x), kernel=kernel, out_type=output, grid=1)
    assert call(4) == -4
    with pytest.raises(ArgumentValueError, match="No config of kernel 'half_kernel' agrees"):
        call(4.0)
