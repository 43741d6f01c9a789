"""What a kernel is given and what comes back: dtypes, shapes, aliases, scalars, tuples."""

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.experimental import gluon

from triax.binding.launch import Result
from triax.errors import ArgumentValueError, UnsupportedError
from triax.interpreting.run import run

DTYPES = (
    np.bool_,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


@triton.jit
def copy(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def store_scalar(o_ptr, value):
    tl.store(o_ptr, value)


@triton.jit
def increment(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def increment_in_place(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def first_half(o_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(o_ptr + at, 7, mask=at < n // 2)


@triton.jit
def sum_of_tuple(xs, scale, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(xs)):
        total += tl.load(xs[i] + at, mask=at < n)
    if scale[1] is not None:
        total *= scale[1]
    tl.store(o_ptr + at, total * scale[0], mask=at < n)


@triton.jit
def program_ids(count_ptr, o_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    at = x + nx * (y + ny * z)
    tl.device_assert(tl.atomic_add(count_ptr, 1) == at)  # programs run in this order
    tl.store(o_ptr + at, x + 10 * y + 100 * z + 1000 * nz)


@triton.jit
def use_constants(o_ptr, MODE: tl.constexpr, DTYPE: tl.constexpr, NOTHING: tl.constexpr,
                  PAIR: tl.constexpr, FLAG: tl.constexpr, FUNCTION: tl.constexpr):  # fmt: skip
    value = 0.0
    if MODE == "sum":
        value = 1.5
    if NOTHING is None:
        value += PAIR[0] * PAIR[1]
    if FLAG:
        value = FUNCTION(value)
    tl.store(o_ptr, tl.full([], value, tl.float32).to(DTYPE))


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def annotated(o_ptr, a: tl.int64, b: "i16", c: tl.float64):  # noqa: F821
    tl.store(o_ptr, a.dtype.primitive_bitwidth)
    tl.store(o_ptr + 1, b.dtype.primitive_bitwidth)
    tl.store(o_ptr + 2, c.dtype.primitive_bitwidth)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_copies_every_dtype_bit_for_bit(interpret, rng, dtype):
    bits = rng.integers(0, 256, 100 * np.dtype(dtype).itemsize, np.uint8)
    x = bits.view(dtype) if dtype is not np.bool_ else bits > 127
    (out,) = interpret(
        copy,
        {"x_ptr": x, "o_ptr": Result(0), "n": 100},
        [((100,), dtype)],
        grid=(2, 1, 1),
        BLOCK=64,
    )
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out.view(np.uint8), x.view(np.uint8))


def test_takes_any_layout_and_leaves_operands_alone(interpret, rng):
    base = rng.normal(size=(7, 6)).astype(np.float32)
    for x in (base.T, base[::2, ::-1], np.broadcast_to(base[0], (3, 6))):
        x.setflags(write=False)
        before = x.copy()
        (out,) = interpret(
            increment,
            {"x_ptr": x, "o_ptr": Result(0), "n": x.size},
            [(x.shape, np.float32)],
            BLOCK=64,
        )
        np.testing.assert_array_equal(out, before + 1)
        np.testing.assert_array_equal(x, before)


def test_scalars_and_empty_arrays(interpret):
    arguments = {"x_ptr": np.array(3.0, np.float32), "o_ptr": Result(0), "n": 1}
    (out,) = interpret(increment, arguments, [((), np.float32)], BLOCK=4)
    assert out.shape == ()
    assert out == 4.0
    arguments = {"x_ptr": np.zeros((0, 5), np.float32), "o_ptr": Result(0), "n": 0}
    (out,) = interpret(increment, arguments, [((0, 5), np.float32)], BLOCK=4)
    assert out.shape == (0, 5)


def test_what_is_not_written_shows(interpret):
    arguments = {"o_ptr": Result(0), "n": 10}
    (floats,) = interpret(first_half, arguments, [((10,), np.float32)], BLOCK=16)
    np.testing.assert_array_equal(floats, [7] * 5 + [np.nan] * 5)
    (ints,) = interpret(first_half, arguments, [((10,), np.int32)], BLOCK=16)
    np.testing.assert_array_equal(ints.view(np.uint32), [7] * 5 + [0xA5A5A5A5] * 5)
    (out,) = interpret(first_half, arguments, [((10,), np.float32)], BLOCK=16, zeroed=(0,))
    np.testing.assert_array_equal(out, [7] * 5 + [0] * 5)


def test_an_empty_grid_runs_nothing(interpret):
    arguments = {"o_ptr": Result(0), "n": 10}
    (out,) = interpret(first_half, arguments, [((10,), np.float32)], grid=(0, 1, 1), BLOCK=16)
    np.testing.assert_array_equal(out, np.zeros(10))


def test_an_alias_is_one_private_buffer(interpret):
    x = np.arange(10, dtype=np.float32)
    arguments = {"x_ptr": x, "n": 10}
    (out,) = interpret(
        increment_in_place, arguments, [((10,), np.float32)], aliases={0: 0}, BLOCK=16
    )
    np.testing.assert_array_equal(out, x + 1)
    np.testing.assert_array_equal(x, np.arange(10))
    (out,) = interpret(
        increment,
        {"x_ptr": x, "o_ptr": Result(0), "n": 10},
        [((2, 5), np.float32)],
        aliases={0: 0},
        grid=(3, 1, 1),
        BLOCK=16,
    )
    # All three programs of the first block's kernel see the same memory.
    np.testing.assert_array_equal(out, (x + 1).reshape(2, 5))
    (out,) = interpret(
        increment_in_place, arguments, [((10,), np.float32)], aliases={0: 0}, zeroed=(0,), BLOCK=16
    )
    np.testing.assert_array_equal(out, np.ones(10))


def test_results_keep_their_order_around_an_alias(interpret):
    x = np.arange(4, dtype=np.float32)
    outputs = [((4,), np.float32), ((4,), np.float32)]
    first, second = interpret(
        increment, {"x_ptr": x, "o_ptr": Result(0), "n": 4}, outputs, aliases={0: 1}, BLOCK=4
    )
    np.testing.assert_array_equal(first, x + 1)
    np.testing.assert_array_equal(second, x)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, np.bool_),
        (-5, np.int32),
        (2**31, np.int64),
        (-(2**40), np.int64),
        (2**63, np.uint64),
        (1.1, np.float32),
        (float("nan"), np.float32),
    ],
)
def test_scalars_by_value(interpret, value, dtype):
    (out,) = interpret(store_scalar, {"o_ptr": Result(0), "value": value}, [((1,), dtype)])
    np.testing.assert_array_equal(out, np.array([value], dtype))


def test_scalars_follow_annotations(interpret):
    arguments = {"o_ptr": Result(0), "a": 1, "b": 2, "c": 3.0}
    (out,) = interpret(annotated, arguments, [((3,), np.int32)])
    np.testing.assert_array_equal(out, [64, 16, 64])


def test_tuples_and_none(interpret, rng):
    xs = tuple(rng.normal(size=50).astype(np.float32) for _ in range(3))
    for factor, expected in ((None, 0.5), (4.0, 2.0)):
        arguments = {"xs": xs, "scale": (0.5, factor), "o_ptr": Result(0), "n": 50}
        (out,) = interpret(sum_of_tuple, arguments, [((50,), np.float32)], BLOCK=64)
        np.testing.assert_allclose(out, sum(xs) * expected, rtol=1e-6, atol=1e-6)


def test_every_program_runs_once_with_its_ids(interpret):
    arguments = {"count_ptr": np.zeros(1, np.int32), "o_ptr": Result(1)}
    outputs = [((1,), np.int32), ((2, 3, 5), np.int32)]
    _, out = interpret(program_ids, arguments, outputs, aliases={0: 0}, grid=(5, 3, 2))
    z, y, x = np.indices((2, 3, 5))
    np.testing.assert_array_equal(out, x + 10 * y + 100 * z + 2000)


def test_constants_of_every_kind(interpret):
    constants = {"MODE": "sum", "DTYPE": tl.float16, "NOTHING": None, "PAIR": (2, 3)}
    for flag, expected in ((False, 7.5), (True, 15.0)):
        (out,) = interpret(
            use_constants,
            {"o_ptr": Result(0)},
            [((1,), np.float16)],
            FLAG=flag,
            FUNCTION=twice,
            **constants,
        )
        assert out == expected


def test_wrong_operands_are_refused(launch_of):
    launch, (x,) = launch_of(
        copy, {"x_ptr": np.zeros(4, np.float32), "o_ptr": Result(0), "n": 4}, [((4,), np.float32)],
        BLOCK=4,
    )  # fmt: skip
    with pytest.raises(
        ArgumentValueError, match=r"Operand 0 of kernel `copy` must be float32\(4,\)"
    ):
        run(launch, [x.astype(np.float64)])
    with pytest.raises(ArgumentValueError, match=r"Kernel `copy` takes 1 operands, got 2"):
        run(launch, [x, x])


def test_gluon_is_refused(launch_of):
    launch, operands = launch_of(gluon.jit(copy.fn), {"o_ptr": Result(0)}, [((4,), np.float32)])
    with pytest.raises(UnsupportedError, match=r"Kernel `copy` is written in Gluon"):
        run(launch, operands)
