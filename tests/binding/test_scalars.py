"""Scalars whose type the kernel's annotation decides, not the value's."""

import contextlib
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from triax.binding import dtypes
from triax.emitting.reading import triton_calls
from triax.errors import ArgumentTypeError, ArgumentValueError

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]


def fill(before_ptr, out_ptr, value, after, BLOCK: tl.constexpr):
    """`value`, and what stands around it, in case it takes more room than it should."""
    offsets = tl.arange(0, BLOCK)
    total = tl.load(before_ptr + offsets) + after
    tl.store(out_ptr + offsets, total + value.to(tl.float32))


def annotated(dtype):
    """`fill` for a `value: dtype`."""
    function = types.FunctionType(fill.__code__, globals(), dtype.name)
    function.__annotations__ = {"value": dtype, "BLOCK": tl.constexpr}
    return triton.autotune(CONFIGS, key=[])(triton.jit(function))


# With values that are exact in float32 and use their type's whole width.
KERNELS = {
    annotated(tl.float16): [-3.140625, 7, True, 2.0**-14, 65504.0],
    annotated(tl.bfloat16): [-3.140625, 7, True, 2.0**-100],
    annotated(tl.float32): [2.5, 3, True, 1],
    annotated(tl.float64): [2.5, 3, True],
    annotated(tl.int8): [-128, 127, True, 3],
    annotated(tl.uint8): [0, 255, True],
    annotated(tl.int16): [-32768, 32767, 7],
    annotated(tl.uint16): [0, 65535, True],
    annotated(tl.int64): [-(2**40), 7, True],
}


def call(kernel, x, value, **options):
    return triax.triton_call(
        x,
        value=value,
        after=1000,
        kernel=kernel,
        out_type=x,
        grid=1,
        **options,
    )


def check(kernel, **options):
    x = np.arange(32, dtype=np.float32)
    for value in KERNELS[kernel]:
        actual = np.asarray(jax.jit(lambda x: call(kernel, x, value, **options))(x))  # noqa: B023
        expected = x + np.float32(1000) + np.float32(value)
        np.testing.assert_array_equal(actual[:16], expected[:16], err_msg=str(value))


@triton.jit
def add_number(x_ptr, out_ptr, number):
    tl.store(out_ptr, tl.load(x_ptr) + number)


def test_scalars_of_ml_dtypes_are_numbers():
    one = np.ones(1, np.float32)
    for number in (ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(1.5), ml_dtypes.int4(-3)):
        call = lambda x: triax.triton_call(x, number=number, kernel=add_number, out_type=x, grid=1)  # noqa: B023
        assert jax.jit(call)(one) == 1 + float(number)
        mine, plain = (
            jax.make_jaxpr(
                lambda x: triax.triton_call(x, number=n, kernel=add_number, out_type=x, grid=1)  # noqa: B023
            )(one)
            .eqns[0]
            .params["call"]
            for n in (number, number.item())
        )
        assert mine == plain


def name(kernel):
    return kernel.fn.__name__


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_on_the_cpu(kernel):
    check(kernel)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_lowers_for_cuda(kernel):
    for value in KERNELS[kernel]:
        traced = jax.jit(lambda x: call(kernel, x, value)).trace(jnp.zeros(32))  # noqa: B023
        assert len(triton_calls(traced.lower(lowering_platforms=("cuda",)))) == 1


@pytest.mark.parametrize(
    ("value", "type_name", "low_bytes"),
    [
        (-3.140625, "fp16", np.float16(-3.140625)),
        (1e-3, "fp16", np.float16(1e-3)),
        (float("nan"), "fp16", np.float16("nan")),
        (float("-inf"), "fp16", np.float16("-inf")),
        (7, "bf16", ml_dtypes.bfloat16(7)),
        (0.1, "bf16", ml_dtypes.bfloat16(0.1)),
        (-1, "i8", np.int8(-1)),
        (200, "u8", np.uint8(200)),
        (-32768, "i16", np.int16(-32768)),
        (True, "u16", np.uint16(1)),
    ],
)
def test_a_narrow_number_is_the_low_bytes_of_a_wider_one(value, type_name, low_bytes):
    wide, wide_type = dtypes.launch_scalar("n", value, type_name)
    assert wide_type == "u32"
    assert np.uint32(wide).tobytes().startswith(np.asarray(low_bytes).tobytes())


@pytest.mark.parametrize(
    ("value", "type_name", "expected"),
    [
        (3, "u1", (True, "i1")),
        (True, "i32", (1, "i32")),
        (-5, "i64", (-5, "i64")),
        (2**64 - 1, "u64", (2**64 - 1, "u64")),
        (2**31, "u32", (2**31, "u32")),
        (3, "fp32", (3.0, "fp32")),
        (True, "fp64", (1.0, "fp64")),
    ],
)
def test_a_wide_number_is_of_the_kind_its_type_says(value, type_name, expected):
    found = dtypes.launch_scalar("n", value, type_name)
    assert found == expected
    assert type(found[0]) is type(expected[0])


@pytest.mark.parametrize(
    ("value", "type_name", "kind"),
    [
        (70000.0, "fp16", ArgumentValueError),
        (1e39, "bf16", ArgumentValueError),
        (128, "i8", ArgumentValueError),
        (-1, "u16", ArgumentValueError),
        (2**31, "i32", ArgumentValueError),
        (-1, "u64", ArgumentValueError),
        (3.5, "i32", ArgumentTypeError),
        (3.0, "u8", ArgumentTypeError),
    ],
)
def test_a_value_that_its_type_does_not_have(value, type_name, kind):
    with pytest.raises(
        kind, match=rf"Argument `n` is .*, which its type in the kernel, {type_name}"
    ):
        dtypes.launch_scalar("n", value, type_name)


@triton.jit
def bounded(x_ptr, out_ptr, n: tl.int32, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


@pytest.mark.parametrize(
    ("n", "kind", "message"),
    [
        (np.int32(7) + np.zeros((), np.int32), None, None),
        (jnp.int32(7), ArgumentTypeError, r"`n` .* must be a number.*declares it as i32.*tl\.load"),
        (np.zeros(1, np.int32), ArgumentTypeError, r"`n` .* must be a number"),
        (2.7, ArgumentTypeError, r"`n` is 2\.7, which its type in the kernel, i32, cannot hold"),
        (2**31, ArgumentValueError, "i32, cannot hold"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "way", ["eager", "jit", pytest.param("cuda", marks=pytest.mark.cuda_plugin)]
)
def test_what_an_annotated_number_cannot_be(n, kind, message, way):
    """Of an array the kernel would take the address for the number, and write anywhere."""

    def f(x, n):
        return triax.triton_call(x, n=n, kernel=bounded, out_type=x, grid=1, BLOCK=16)

    x = jnp.arange(16, dtype=jnp.float32)
    jitted = jax.jit(f) if isinstance(n, jax.Array) else jax.jit(lambda x, _: f(x, n))
    arguments = (x, n if isinstance(n, jax.Array) else 0)
    with pytest.raises(kind, match=message) if kind else contextlib.nullcontext():
        if way == "eager":
            f(x, n)
        elif way == "jit":
            jitted(*arguments)
        else:
            jitted.trace(*arguments).lower(lowering_platforms=("cuda",))


def test_an_output_is_no_number_either():
    x = jnp.arange(16, dtype=jnp.float32)
    with pytest.raises(ArgumentTypeError, match=r"`n` .* must be a number"):
        triax.triton_call(x, kernel=bounded, out_type=(x, x), grid=1, BLOCK=16)
