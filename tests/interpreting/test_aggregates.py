"""Classes of `triton.aggregate`: methods, fields and operators, as where they are compiled."""

from typing import NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl

from triax.binding.launch import Result
from triax.binding.sources import fingerprint
from triax.compat import triton_interpreter as compat
from triax.compiling.compiler import compile_launch
from triax.errors import CompilationError, UnsupportedError
from triax.interpreting.inside import AmbiguousTruth

aggregate = getattr(triton, "aggregate", None) or tl.core._aggregate
X = np.array([-2, -1, 3, 4], np.float32)
LOW, HIGH = np.float32(0.25), np.float32(2.5)


class Bounds(NamedTuple):
    low: object
    high: object


@tl.core.builtin
def at_least(x, least, _semantic=None):
    return tl.core.maximum(x, tl.constexpr(least.value + 1), _semantic=_semantic)


@triton.jit
def doubled(x):
    return x * 2


@aggregate
class Clip:
    low: tl.tensor
    high: tl.tensor

    @triton.constexpr_function
    def __init__(self, low, high):
        self.low = low
        self.high = high

    @triton.jit
    def clip(self, v):
        return tl.minimum(tl.maximum(v, self.low), self.high)

    @triton.jit
    def above(self, v, floor=0.0):
        return tl.maximum(v, floor)

    @triton.jit
    def both(self, v):
        return self.clip(v) + self.above(v, -100.0)

    @triton.constexpr_function
    def times(self, k):
        return k * 2

    @tl.core.builtin
    def shifted(self, v, k, _semantic=None):
        total = tl.core.add(v, k.value * 10, _semantic=_semantic)
        return tl.core.add(total, self.low, _semantic=_semantic)

    @triton.jit
    def __getitem__(self, index):
        return self.high * index

    @staticmethod
    @triton.jit
    def tripled(v):
        return v * 3


@aggregate
class Config:
    clip: Clip
    pair: tl.tuple
    n: tl.constexpr
    function: tl.constexpr

    @tl.core.builtin
    def __init__(self, clip, pair, n, function, _semantic=None):
        self.clip = clip
        self.pair = pair
        self.n = tl.constexpr(n.value + 1)
        self.function = function

    @triton.jit
    def looped(self, v):
        for _ in range(self.n):
            v += 1.0
        for _ in tl.static_range(self.n):
            v += self.n
        for i in tl.static_range(len(self.pair)):
            v += self.pair[i]
        return v

    @triton.jit
    def parts(self):
        return self, self.pair


@triton.jit
def use(clip, v):
    return clip.clip(v) + clip.above(v, -100.0)


@triton.jit
def make(low, high):
    return Clip(low, high)


@triton.jit
def kernel(x_ptr, o_ptr, low, high, bounds, FN: tl.constexpr, KIND: tl.constexpr,
           WHAT: tl.constexpr):  # fmt: skip
    at = tl.arange(0, 4)
    v = tl.load(x_ptr + at)
    c = Clip(low, high)
    config = Config(c, (low, high), 2, FN)
    if WHAT == "method":
        r = c.clip(v)
    elif WHAT == "keyword":
        r = c.clip(v=v)
    elif WHAT == "default":
        r = c.above(v)
    elif WHAT == "not the default":
        r = c.above(v, -100.0)
    elif WHAT == "method of a method":
        r = c.both(v)
    elif WHAT == "constexpr function":
        r = v * c.times(3)
    elif WHAT == "builtin":
        r = c.shifted(v, 2)
    elif WHAT == "builtin function":
        r = at_least(v, 2)
    elif WHAT == "item":
        r = v + c[2]
    elif WHAT == "static method of the class":
        r = Clip.tripled(v)
    elif WHAT == "method of the class":
        r = Clip.clip(c, v)
    elif WHAT == "argument":
        r = use(c, v)
    elif WHAT == "result":
        r = make(low, high).clip(v)
    elif WHAT == "in a tuple":
        both = (c, v)
        r = both[0].clip(both[1])
    elif WHAT == "nested":
        r = config.clip.clip(v)
    elif WHAT == "of a constant":
        r = KIND(low, high).clip(v)
    elif WHAT == "carried by a loop":
        for _ in range(3):
            c = Clip(c.low + 1, c.high + 1)
        r = c.clip(v)
    elif WHAT == "constants":
        r = config.looped(v)
    elif WHAT == "a function in a field":
        r = config.function(v)
    elif WHAT == "a constant as condition":
        r = v
        if config.n == 3:
            r = v + 1
        if not config.n:
            r = v
    elif WHAT == "unpacked":
        same, pair = config.parts()
        a, b = pair
        r = same.clip.clip(v) + a * 10 + b
    elif WHAT == "names of a tuple":
        pair = Config(c, bounds, 2, FN).pair
        r = v + pair.low * 10 + pair.high
    elif WHAT == "condition":
        if c:
            r = v
        else:
            r = v
    elif WHAT == "static method":
        r = c.tripled(v)
    tl.store(o_ptr + at, r)


CLIPPED = np.clip(X, LOW, HIGH)


ARGUMENTS = {"x_ptr": X, "o_ptr": Result(0), "low": 0.25, "high": 2.5}
OUT = [((4,), np.float32)]
WITH_BOUNDS = ARGUMENTS | {"bounds": Bounds(0.25, 2.5)}
CONSTANTS = {"FN": doubled, "KIND": Clip}


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "method": CLIPPED,
        "keyword": CLIPPED,
        "default": np.maximum(X, 0),
        "not the default": X,
        "method of a method": CLIPPED + X,
        "constexpr function": X * 6,
        "builtin": X + 20 + LOW,
        "builtin function": np.maximum(X, 3),
        "item": X + 2 * HIGH,
        "static method of the class": X * 3,
        "method of the class": CLIPPED,
        "argument": CLIPPED + X,
        "result": CLIPPED,
        "in a tuple": CLIPPED,
        "nested": CLIPPED,
        "of a constant": CLIPPED,
        "carried by a loop": np.clip(X, LOW + 3, HIGH + 3),
        "constants": X + 3 + 9 + LOW + HIGH,
        "a function in a field": X * 2,
        "a constant as condition": X + 1,
        "unpacked": CLIPPED + 10 * LOW + HIGH,
        "names of a tuple": X + 10 * LOW + HIGH,
    }.items(),
)
def test_aggregates(agree, what, expected):
    (out,) = agree(kernel, WITH_BOUNDS, OUT, WHAT=what, **CONSTANTS)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("condition", AmbiguousTruth, "An aggregate such as `Clip` cannot be a condition"),
        ("static method", TypeError, "positional argument"),  # they bind as well
    ],
)
def test_what_does_not_compile(interpret, launch_of, what, error, words):
    with pytest.raises(error, match=words):
        interpret(kernel, WITH_BOUNDS, OUT, WHAT=what, **CONSTANTS)
    launch, _ = launch_of(kernel, WITH_BOUNDS, OUT, WHAT=what, **CONSTANTS)
    with pytest.raises(CompilationError):
        compile_launch(launch, 90)


@aggregate
class Wide:
    by: tl.tensor

    @triton.constexpr_function
    def __init__(self, by):
        self.by = by

    @triton.jit
    def __sub__(self, other):
        return self.by - number_of(other)

    @triton.jit
    def __rsub__(self, other):
        return number_of(other) - self.by * 2

    @triton.jit
    def __lt__(self, other):
        return self.by < other

    @triton.jit
    def __gt__(self, other):
        return self.by > other

    @triton.jit
    def __neg__(self):
        return -self.by

    @triton.jit
    def __not__(self):
        return self.by * 3


@triton.jit
def number_of(other):
    return other.by if isinstance(other, Wide) else other


@triton.jit
def operators(x_ptr, o_ptr, low, high, WHAT: tl.constexpr):
    at = tl.arange(0, 4)
    v = tl.load(x_ptr + at)
    w = Wide(low)
    if WHAT == "aggregates":
        r = v + (w - Wide(high))
    elif WHAT == "left":
        r = w - v
    elif WHAT == "right":
        r = v - w
    elif WHAT == "number":
        r = v + (w - 1.0)
    elif WHAT == "number on the left":
        r = v + (1.0 - w)
    elif WHAT == "in place":
        w -= v
        r = w
    elif WHAT == "less":
        r = tl.where(w < v, 1.0, 0.0)
    elif WHAT == "less, on the right":
        r = tl.where(v < w, 1.0, 0.0)
    elif WHAT == "unary":
        r = v + -w
    elif WHAT == "not":
        r = v + (not w)
    tl.store(o_ptr + at, r)


def test_operators_of_aggregates(agree):
    (out,) = agree(operators, ARGUMENTS, OUT, WHAT="aggregates")
    np.testing.assert_array_equal(out, X + LOW - HIGH)


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "left": LOW - X,
        "right": X - 2 * LOW,
        "number": X + LOW - 1,
        "number on the left": X + 1 - 2 * LOW,
        "in place": LOW - X,
        "less": LOW < X,
        "less, on the right": X < LOW,
        "unary": X - LOW,
        "not": X + 3 * LOW,
    }.items(),
)
def test_operators_with_tensors_and_numbers(interpret, launch_of, what, expected):
    launch, _ = launch_of(operators, ARGUMENTS, OUT, WHAT=what)
    if compat.AGGREGATES_HAVE_OPERATORS:
        compile_launch(launch, 90)
        (out,) = interpret(operators, ARGUMENTS, OUT, WHAT=what)
        np.testing.assert_array_equal(out, expected)
        return
    with pytest.raises(CompilationError):
        compile_launch(launch, 90)
    with pytest.raises(UnsupportedError, match="of the aggregate `Wide` with anything but"):
        interpret(operators, ARGUMENTS, OUT, WHAT=what)


if hasattr(tl, "aggregate_replace"):  # this Triton makes constructors, and knows inheritance

    @aggregate
    class Base:
        by: tl.tensor
        n: tl.constexpr = 2

        @triton.jit
        def scaled(self, v):
            return v * self.by * self.n

    @aggregate
    class Derived(Base):
        more: tl.tuple = (1.0, 2.0)

        @triton.jit
        def total(self, v):
            return self.scaled(v) + self.more[1]

    @triton.jit
    def inherited(x_ptr, o_ptr, low, high):
        at = tl.arange(0, 4)
        first = Derived(low, n=3)
        second = tl.aggregate_replace(first, by=high, n=4, more=(low, high))
        v = tl.load(x_ptr + at)
        tl.store(o_ptr + at, first.total(v) + second.total(v))

    def test_inheritance_and_constructors_of_triton(agree):
        (out,) = agree(inherited, ARGUMENTS, OUT)
        np.testing.assert_array_equal(out, X * LOW * 3 + 2 + X * HIGH * 4 + HIGH)


@triton.jit
def assigns(o_ptr, low, high):
    c = Clip(low, high)
    c.low = high
    tl.store(o_ptr, c.low)


def test_a_field_cannot_be_assigned(interpret):
    with pytest.raises(UnsupportedError, match=r"assigns to `c\.low`, which Triton does not"):
        interpret(assigns, {"o_ptr": Result(0), "low": 0.25, "high": 2.5}, [((1,), np.float32)])


KERNELS = [kernel, operators, inherited] if hasattr(tl, "aggregate_replace") else [kernel]
meanwhile = []


@triton.constexpr_function
def note():
    meanwhile.extend(map(fingerprint, KERNELS))
    return 0


@triton.jit
def takes_note(o_ptr):
    tl.store(o_ptr, note())


def test_a_kernel_has_the_same_code_while_another_is_interpreted(interpret):
    interpret(takes_note, {"o_ptr": Result(0)}, [((1,), np.float32)])
    assert meanwhile == [*map(fingerprint, KERNELS)]
