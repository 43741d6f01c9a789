"""Kernels with `*args`: which operands they take, and what is no way to call them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from tests.cases import VARIADIC, cuda_call
from tests.kernels import variadic_kernel
from tests.primitives import own
from triax import testing
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

X = jnp.arange(4.0)
Y, Z = X * 10, X * 100
OUT = jax.ShapeDtypeStruct((4,), jnp.float32)
needs_variadic = pytest.mark.skipif(not VARIADIC, reason="this Triton does not compile them")


@triton.jit
def weighted(weight, BLOCK: tl.constexpr, *xs, out_ptr):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(xs)):
        total += tl.load(xs[i] + offsets)
    tl.store(out_ptr + offsets, total * weight)


@triton.jit
def constants(out_ptr, *numbers: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 4), numbers[0] + len(numbers))


@triton.jit
def rest(*xs):
    return xs[0] + xs[-1]


@triton.jit
def passes_on(out_ptr, *xs):
    offsets = tl.arange(0, 4)
    loaded = (tl.load(xs[0] + offsets), tl.load(xs[1] + offsets))
    tl.store(out_ptr + offsets, rest(*loaded) + rest(1.0, 2.0))


TUNED = triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 16})], key=["n"])(
    variadic_kernel
)

WAYS = {
    "outputs and names are passed over": (lambda c: c(X, Y, Z, n=4), X + Y + Z),
    "a tuple by name": (lambda c: c(n=4, xs=(X, Y, Z)), X + Y + Z),
    "a number among them": (lambda c: c(n=4, xs=(X, 3, Y)), 3 * X + Y),
    "as in Python, with an alias": (
        lambda c: c(X, 4, X, Y, input_output_aliases={"out_ptr": 0}),
        X + Y,
    ),
    "an output in the place of an operand": (
        lambda c: c(X, Y, n=4, out_ptr=Z, input_output_aliases={"out_ptr": 0}),
        X + Y,
    ),
    "none": (lambda c: c(n=4), 0 * X),
    "a constexpr by name": (lambda c: c(X, Y, n=4, BLOCK=16), X + Y),
    "a grid that counts them": (lambda c: c(X, Y, n=4, grid=lambda m: len(m["xs"]) - 1), X + Y),
    "a kernel with configs": (lambda c: c(X, Y, n=4, kernel=TUNED), X + Y),
    "outputs behind, as in Python": (lambda c: c(2, 4, X, Y, kernel=weighted), 2 * (X + Y)),
    "outputs behind, and names": (
        lambda c: c(X, Y, weight=2, BLOCK=4, kernel=weighted),
        2 * (X + Y),
    ),
    "constants": (lambda c: c(3, 4.0, kernel=constants), 5 + 0 * X),
    "handed on to helpers": (lambda c: c(X, Y, kernel=passes_on), X + Y + 3),
}


def call(*operands, **changes):
    arguments = {"kernel": variadic_kernel, "out_type": OUT, "grid": 1, "compute_capability": 90}
    return triax.triton_call(*operands, **arguments | changes)


@needs_variadic
@pytest.mark.parametrize(("way", "expected"), WAYS.values(), ids=WAYS.keys())
def test_ways_to_call(way, expected):
    testing.assert_same_bits(way(call), np.asarray(expected))


@needs_variadic
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("way", "expected"), WAYS.values(), ids=WAYS.keys())
def test_ways_to_call_compile(way, expected):
    assert cuda_call(lambda: way(call)).kernel in (
        "variadic_kernel",
        "weighted",
        "constants",
        "passes_on",
    )


@needs_variadic
@pytest.mark.parametrize(
    ("way", "message"),
    [
        (lambda: call(X, n=4, xs=(X,)), "0 parameters without a value beside `xs`, and got 1 pos"),
        (lambda: call(n=4, xs=[X]), r"`xs` .* must be a tuple, the operands of `\*xs`; got \["),
        (lambda: call(n=4, xs=X), r"`xs` .* must be a tuple, .* of type jax.Array"),
        (lambda: call(4, X, Y), "1 output not aliased .* 0 parameters not supplied"),
    ],
)
def test_mistakes(way, message):
    with pytest.raises(ArgumentTypeError, match=message):
        way()


@pytest.mark.skipif(VARIADIC, reason="this Triton compiles them")
@pytest.mark.parametrize("way", [lambda: call(X, n=4), lambda: call(n=4, xs=(X,))])
def test_where_triton_does_not_compile_them(way):
    with pytest.raises(
        UnsupportedError,
        match=r"The parameter `\*xs` of 'variadic_kernel' needs Triton 3\.8\.0 or later; 3\.\d\.\d "
        r"is installed\. Take the star away, and pass a tuple by name: `xs=\(…\)`\.",
    ):
        way()


@triton.jit
def calls_rest(x_ptr, out_ptr):
    tl.store(out_ptr, rest(tl.load(x_ptr), 1.0))


@pytest.mark.skipif(VARIADIC, reason="this Triton compiles them")
def test_helpers_where_triton_does_not_compile_them():
    with pytest.raises(UnsupportedError, match=r"The parameter `\*xs` of 'rest' needs Triton"):
        call(X, kernel=calls_rest)


def sums(**arguments):
    """The output of a primitive of the user's own, which adds up its inputs."""

    def rule(ctx, *operands):
        return triax.triton_call_lowering(ctx, variadic_out_last, *operands, grid=1, **arguments)

    function = own(rule, lambda *_: [jax.core.ShapedArray(OUT.shape, OUT.dtype)])
    return lambda *operands: function(*operands)[0]


@triton.jit
def variadic_out_last(*xs, out_ptr, n):
    offsets = tl.arange(0, 4)
    total = tl.zeros([4], tl.float32)
    for i in tl.static_range(len(xs)):
        total += tl.load(xs[i] + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, total, mask=offsets < n)


@needs_variadic
@pytest.mark.parametrize("operands", [(X,), (X, Y), (X, Y, Z)])
def test_own_primitives(operands):
    total = sums(constexprs={"n": 4})
    testing.assert_same_bits(jax.jit(total)(*operands), np.asarray(sum(operands)))


@needs_variadic
@pytest.mark.cuda_plugin
def test_own_primitives_compile():
    call = cuda_call(sums(constexprs={"n": 4}), X, Y, Z)
    assert len(call.operands) == 3


@needs_variadic
def test_an_alias_of_an_own_primitive():
    total = sums(constexprs={"n": 4}, input_output_aliases={1: 0})
    testing.assert_same_bits(jax.jit(total)(X, Y), np.asarray(X + Y))


@needs_variadic
def test_an_own_primitive_without_pointers_enough():
    with pytest.raises(ArgumentValueError, match=r"3 parameters besides `constexprs` \(xs, out_p"):
        jax.jit(sums(constexprs={}))()


@triton.jit
def scaled_copy(factor, out, *xs):
    out.store([0, 0], xs[0].load([0, 0]) * factor)


@triton.jit
def copy_and_count(desc, first_ptr, out, *xs):
    tl.store(first_ptr, len(xs))
    out.store([0, 0], desc.load([0, 0]))


def test_outputs_with_a_descriptor_before_the_rest():
    x = jnp.arange(32.0).reshape(8, 4)
    of = lambda array: triax.TensorDescriptor.from_array(array, (8, 4))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = triax.triton_call(3.0, of(x), out=of(out), kernel=scaled_copy, out_type=out, grid=1)
    testing.assert_same_bits(found, 3 * x)
    number = jax.ShapeDtypeStruct((1,), jnp.int32)
    keywords = {"desc": of(x), "out": of(out), "kernel": copy_and_count, "grid": 1}
    count, copy = triax.triton_call(X, Y, out_type=(number, out), **keywords)
    assert count[0] == 2
    testing.assert_same_bits(copy, x)
