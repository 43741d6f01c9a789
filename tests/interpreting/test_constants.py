"""Compile-time values: what the compiler makes of them. These kernels compile for CUDA."""

import collections
import types

import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from triax.binding.launch import Result
from triax.compat import triton_interpreter as compat
from triax.errors import CompilationError

SIXTEEN = tl.constexpr(16)
NOTHING = tl.constexpr(None)
FUNCTIONS = tl.constexpr((tl.exp2, tl.abs))
PLAIN = (tl.exp2, tl.abs)
elsewhere = types.ModuleType("elsewhere")
elsewhere.NOTHING = NOTHING
Pair = collections.namedtuple("Pair", "first second")
FLOAT, INT = [((8,), np.float32)], [((8,), np.int64)]


@triton.jit
def global_constants(o_ptr, B: tl.constexpr):
    tl.store(o_ptr, B % SIXTEEN)
    tl.store(o_ptr + 1, (1 << SIXTEEN) | (B & SIXTEEN) ^ 5)
    tl.store(o_ptr + 2, SIXTEEN.value // B.value)
    tl.store(o_ptr + 3, 1 if NOTHING is None else 2)
    tl.store(o_ptr + 4, 100 % tl.arange(0, 8).shape[0])
    tl.store(o_ptr + 5, 1 if elsewhere.NOTHING is None else 2)


@triton.jit
def assignments(o_ptr, N: tl.constexpr):
    pid, start = tl.program_id(0), 0
    tl.store(o_ptr, start.to(tl.int64) + pid)
    pair = (3, -5)
    three, five = pair
    tl.store(o_ptr + 1, three.to(tl.int64) + five // 2)
    N -= 8  # is a tensor from here on, and rounds toward zero
    tl.store(o_ptr + 2, N.to(tl.int64) // 2)
    seven: tl.int32 = -7
    tl.store(o_ptr + 3, seven // 2)
    fixed: tl.constexpr = -7
    tl.store(o_ptr + 4, fixed // 2)
    tl.store(o_ptr + 5, ((-7 if pid == 0 else 1) // 2).to(tl.int64))
    fixed_too: tl.constexpr = -7 if N is None else -9
    tl.store(o_ptr + 6, fixed_too // 2)


@triton.jit
def nested_tuples(o_ptr):
    pair = (3, Pair(4, -5))
    three, (four, five) = pair
    tl.store(o_ptr, three.to(tl.int64) + four.to(tl.int64) + five // 2)


@triton.jit
def one(n, o_ptr):
    tl.store(o_ptr, (n - 4) // 2)


@triton.jit(do_not_specialize=["n"])
def not_one(n, o_ptr):
    tl.store(o_ptr, (n - 4) // 2)


@triton.jit
def scaled(x, dtype: tl.constexpr):
    return inner(x, dtype)


@triton.jit
def inner(x, dtype: tl.constexpr):
    if dtype.value.is_floating():
        return x * 2
    else:
        return x * 3


@triton.jit
def helpers(o_ptr):
    tl.store(o_ptr, scaled(5, tl.float32))
    tl.store(o_ptr + 1, scaled(5, tl.int32))


@triton.jit
def plus_one(x):
    return x + 1.0


@triton.jit
def of_each(x, F: tl.constexpr = tl.exp2):
    return F(x)


@triton.jit
def functions(o_ptr, F: tl.constexpr, FS: tl.constexpr, G: tl.constexpr = tl.exp2):
    three = tl.program_id(0) + 3.0
    tl.store(o_ptr, F(three))
    tl.store(o_ptr + 1, FS[0](three) + FS[1](-three))
    tl.store(o_ptr + 2, G(three))
    tl.store(o_ptr + 3, FUNCTIONS[0](three) + FUNCTIONS[1](-three))
    f: tl.constexpr = FS[1]
    tl.store(o_ptr + 4, f(-three))


@triton.jit
def default_function(o_ptr):
    tl.store(o_ptr, of_each(tl.program_id(0) + 3.0))


@triton.jit
def plain_tuple(o_ptr):
    tl.store(o_ptr, PLAIN[0](1.0))


@triton.jit
def sign(x):
    if x > 0:
        return 1
    elif x < 0:
        return -1
    return 0


@triton.jit
def eight(FLAG: tl.constexpr):
    if FLAG:
        return 8
    else:
        return 4


@triton.jit
def returns(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.program_id(0))
    tl.store(o_ptr + tl.program_id(0), sign(x) // 2 + sign(x).to(tl.int64))
    tl.store(o_ptr + 4, (eight(False) - 7) // 2)


@triton.jit
def counters(n_ptr, o_ptr):
    n = tl.load(n_ptr)
    for i in range(n):
        tl.store(o_ptr + i, (i - 1) // 2)


@triton.jit
def asserts(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    assert x > 0, "x is not positive"
    tl.store(o_ptr, 1)


def test_global_constants_with_constexpr_parameters(agree):
    (out,) = agree(global_constants, {"o_ptr": Result(0)}, INT, B=21)
    assert out[:6].tolist() == [5, 1 << 16 | 16 ^ 5, 0, 1, 4, 1]


def test_what_is_assigned_is_a_tensor(agree):
    (out,) = agree(assignments, {"o_ptr": Result(0)}, INT, N=5)
    assert out[:7].tolist() == [0, 3 - 2, -1, -3, -4, -3, -5]


def test_nested_tuples(interpret):
    # Compiles from Triton 3.8 on.
    assert interpret(nested_tuples, {"o_ptr": Result(0)}, INT)[0][0] == 3 + 4 - 2


@pytest.mark.parametrize(("kernel", "expected"), [(one, -2), (not_one, -1)])
def test_an_argument_of_one_is_a_constant(agree, kernel, expected):
    (out,) = agree(kernel, {"n": 1, "o_ptr": Result(0)}, INT)
    assert out[0] == expected  # constants round down, tensors toward zero


def test_a_constant_argument_has_no_methods(interpret, launch_of):
    @triton.jit
    def kernel(n, o_ptr):
        tl.store(o_ptr, n.to(tl.int64))

    assert interpret(kernel, {"n": 2, "o_ptr": Result(0)}, INT)[0][0] == 2
    hint = "argument equal to 1 as a constant, which is not a tensor: `n`. Annotate the parameter"
    with pytest.raises(AttributeError) as raised:
        interpret(kernel, {"n": 1, "o_ptr": Result(0)}, INT)
    assert hint in raised.value.__notes__[0]
    launch, _ = launch_of(kernel, {"n": 1, "o_ptr": Result(0)}, INT)
    with pytest.raises(triax.errors.CompilationError) as raised:
        triax.compiling.compiler.compile_launch(launch, 90)
    assert hint in triax.binding.diagnostics.failure(launch, raised.value)


def test_arguments_of_nested_helpers(agree):
    (out,) = agree(helpers, {"o_ptr": Result(0)}, INT)
    assert out[:2].tolist() == [10, 15]


@pytest.mark.parametrize("f", [tl.exp2, plus_one])
def test_functions_as_values(agree, f):
    (out,) = agree(functions, {"o_ptr": Result(0)}, FLOAT, F=f, FS=(f, tl.abs))
    eight_or_four = 8 if f is tl.exp2 else 4
    assert out[:5].tolist() == [eight_or_four, eight_or_four + 3, 8, 11, 3]


def test_a_function_as_the_default_of_a_helper(interpret):
    # Compiles from Triton 3.8 on.
    assert interpret(default_function, {"o_ptr": Result(0)}, FLOAT)[0][0] == 8


def test_a_plain_tuple_from_outside_is_refused_as_by_the_compiler(interpret):
    text = r"`PLAIN`, which is defined outside of it as a Python tuple.*`PLAIN = tl.constexpr"
    with pytest.raises(CompilationError, match=text):
        interpret(plain_tuple, {"o_ptr": Result(0)}, FLOAT)


def test_numbers_that_functions_return(agree):
    x = np.array([5, -5, 0], np.int32)
    (out,) = agree(returns, {"x_ptr": x, "o_ptr": Result(0)}, INT, grid=(3, 1, 1))
    # Which one is returned is known when a program runs; only then is the number a tensor, ...
    assert out[:3].tolist() == [1, -1, 0]
    # ... and before Triton 3.7 always.
    assert out[4] == (-1 if compat.NUMBERS_DECAY else -2)


@pytest.mark.parametrize(
    ("dtype", "first"), [(np.int8, 0), (np.int32, 0), (np.uint32, 2**31 - 1), (np.int64, 0)]
)
def test_counters_have_the_type_of_their_bounds(agree, dtype, first):
    (out,) = agree(counters, {"n_ptr": np.array([3], dtype), "o_ptr": Result(0)}, INT)
    assert out[:3].tolist() == [first, 0, 0]


def test_assert_looks_at_every_element(agree):
    x = np.array([1, 2, 3, 4], np.int32)
    agree(asserts, {"x_ptr": x, "o_ptr": Result(0)}, INT)
    with pytest.raises(AssertionError, match="x is not positive"):
        agree(asserts, {"x_ptr": x - 1, "o_ptr": Result(0)}, INT)
