"""Bounds, read-only operands, atomics: what a kernel may touch, and what an error says."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from triax.binding.launch import Result
from triax.errors import OutOfBounds, ReadOnlyOperand, UnsupportedError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@triton.jit
def load_all(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at % 8, tl.load(x_ptr + at))


@triton.jit
def store_all(o_ptr, start, BLOCK: tl.constexpr):
    tl.store(o_ptr + start + tl.arange(0, BLOCK), 1.0)


@triton.jit
def add_all(o_ptr, start, BLOCK: tl.constexpr):
    tl.atomic_add(o_ptr + start + tl.arange(0, BLOCK), 1.0)


@triton.jit
def swap(o_ptr, start):
    tl.atomic_cas(o_ptr + start, 0, 1)


@triton.jit
def load_from_tuple(xs, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(xs[1] + at))


@triton.jit
def write_operand(x_ptr, o_ptr, HOW: tl.constexpr):
    if HOW == "store":
        tl.store(x_ptr + 3, 1)
    elif HOW == "atomic max":
        tl.atomic_max(x_ptr + 3, 1)
    elif HOW == "atomic cas":
        tl.atomic_cas(x_ptr + 3, 0, 1)
    else:
        tl.store(x_ptr + 3, 1, mask=tl.program_id(0) > 5)
    tl.store(o_ptr, 0)


@triton.jit
def extrema(x_ptr, o_ptr):
    at = tl.arange(0, 4)
    tl.store(o_ptr + at, tl.atomic_min(x_ptr + at, -1.0))
    tl.store(o_ptr + 4 + at, tl.atomic_max(x_ptr + 4 + at, 2.0))


@triton.jit
def masked_anywhere(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    far = tl.where(at < n, at, 1 << 30)
    x = tl.load(x_ptr + far, mask=at < n, other=-2)
    tl.store(o_ptr + at, x)
    tl.store(x_ptr - far, 0, mask=at < 0)
    tl.atomic_add(x_ptr - far, 1, mask=at < 0)


@triton.jit
def either(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    pointers = tl.where(at % 2 == 0, x_ptr + at, y_ptr + at)
    value = tl.load(pointers, mask=at < n, other=0)
    tl.store(tl.where(at % 2 == 0, o_ptr + at, o_ptr + n + at), value, mask=at < n)


@triton.jit
def misaligned(x_ptr, o_ptr):
    bytes_ptr = x_ptr.to(tl.pointer_type(tl.int8)) + 2
    tl.store(o_ptr, tl.load(bytes_ptr.to(tl.pointer_type(tl.int32))))


@triton.jit
def reinterpreted(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(
        o_ptr + at, tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=at < n), mask=at < n
    )


@triton.jit
def leaky_descriptor(x_ptr, o_ptr):
    x = tl.make_tensor_descriptor(x_ptr, [8, 16], [16, 1], [8, 16])
    tl.store(o_ptr, tl.sum(tl.sum(x.load([0, 0]), 1), 0))


@triton.jit
def wander(x_ptr, y_ptr, o_ptr, far, HOW: tl.constexpr):
    value = 7
    if HOW == "load":
        value = tl.load(x_ptr + far)
    elif HOW == "twice":
        value = tl.load(x_ptr + far // 2 + far // 2)
    elif HOW == "masked":
        value = tl.load(x_ptr + far, mask=far == 0, other=7)
    elif HOW == "store":
        tl.store(o_ptr - far, 1)
    elif HOW == "block":
        value = tl.load(x_ptr + far + tl.arange(0, 4)).sum(0)
    tl.store(o_ptr, value)


@triton.jit
def through_integers(x_ptr, a_ptr, o_ptr, HOW: tl.constexpr):
    address = tl.load(a_ptr)
    if HOW == "own":
        address = x_ptr.to(tl.int64) + 8
    tl.store(o_ptr, tl.load(address.to(tl.pointer_type(tl.float32))))


@triton.jit
def wait_for(x_ptr, o_ptr, TIMEOUT: tl.constexpr):
    tl.store(o_ptr, tl.atomic_poll(x_ptr, 5, timeout_ns=TIMEOUT))


@triton.jit
def atomic_accesses(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_store(o_ptr + at, tl.atomic_load(x_ptr + at, mask=at < 3), mask=at < 5)


@triton.jit
def histogram(x_ptr, count_ptr, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    if OP == "add":
        tl.atomic_add(count_ptr + at % 7, x, mask=at < n)
    elif OP == "max":
        tl.atomic_max(count_ptr + at % 7, x, mask=at < n)
    elif OP == "min":
        tl.atomic_min(count_ptr + at % 7, x, mask=at < n)
    elif OP == "and":
        tl.atomic_and(count_ptr + at % 7, x, mask=at < n)
    elif OP == "or":
        tl.atomic_or(count_ptr + at % 7, x, mask=at < n)
    elif OP == "xor":
        tl.atomic_xor(count_ptr + at % 7, x, mask=at < n)


@triton.jit
def tickets(counter_ptr, o_ptr, last_ptr, BLOCK: tl.constexpr):
    old = tl.atomic_add(counter_ptr + tl.zeros([BLOCK], tl.int32), 1)
    tl.store(o_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), old)
    tl.store(last_ptr + tl.program_id(0), tl.atomic_xchg(counter_ptr + 1, tl.program_id(0)))


@triton.jit
def with_lock(lock_ptr, total_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 2)
    tl.atomic_xchg(lock_ptr, 0)


def message(raised):
    return str(raised.value)


def test_a_load_outside_is_named(interpret):
    x = np.zeros((2, 5), np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(0)}
    with pytest.raises(OutOfBounds) as raised:
        interpret(load_all, arguments, [((8,), np.float32)], grid=(2, 1, 1), BLOCK=8)
    assert message(raised) == (
        "Kernel `load_all`, program (1, 0, 0): load from `x_ptr` at element 10, outside its "
        "10 elements (shape (2, 5), float32); 6 of 8 active lanes are outside. "
        "Mask the access, or make the array or the grid fit."
    )


@pytest.mark.parametrize(
    ("kernel", "access"),
    [(store_all, "store to"), (add_all, "atomic add to")],
)
@pytest.mark.parametrize(
    ("start", "element"), [(7, 10), (-3, -3), (10**6, 10**6), (-(10**6), -(10**6))]
)
def test_writes_outside_are_named(interpret, kernel, access, start, element):
    arguments = {"o_ptr": Result(0), "start": start}
    text = f"{access} `o_ptr` at element {element}, outside its 10 elements (shape (10,), float32)"
    with pytest.raises(OutOfBounds, match=re.escape(text)):
        interpret(kernel, arguments, [((10,), np.float32)], BLOCK=8)
    (out,) = interpret(
        kernel, {**arguments, "start": 2}, [((10,), np.float32)], zeroed=(0,), BLOCK=8
    )
    np.testing.assert_array_equal(out, [0, 0] + [1] * 8)


def test_a_compare_and_swap_outside_is_named(interpret):
    arguments = {"o_ptr": Result(0), "start": 4}
    with pytest.raises(OutOfBounds, match="atomic cas to `o_ptr` at element 4, outside its 4 elem"):
        interpret(swap, arguments, [((4,), np.int32)])
    (out,) = interpret(swap, {**arguments, "start": 3}, [((4,), np.int32)], zeroed=(0,))
    np.testing.assert_array_equal(out, [0, 0, 0, 1])


def test_elements_of_tuples_are_named(interpret):
    xs = (np.zeros(8, np.float32), np.zeros(5, np.float32))
    with pytest.raises(
        OutOfBounds, match=r"load from `xs\[1\]` at element 5, outside its 5 elements"
    ):
        interpret(load_from_tuple, {"xs": xs, "o_ptr": Result(0)}, [((8,), np.float32)], BLOCK=8)


def test_empty_arrays_have_no_element(interpret):
    arguments = {"x_ptr": np.zeros((0, 3), np.float32), "o_ptr": Result(0)}
    with pytest.raises(OutOfBounds, match=r"element 0, outside its 0 elements \(shape \(0, 3\)"):
        interpret(load_all, arguments, [((8,), np.float32)], BLOCK=8)


@pytest.mark.parametrize("how", ["store", "atomic max", "atomic cas"])
def test_operands_are_read_only_without_an_alias(interpret, how):
    x = np.zeros(8, np.int32)
    arguments = {"x_ptr": x, "o_ptr": Result(0)}
    text = (
        f"Kernel `write_operand`, program (0, 0, 0): {how} to `x_ptr` at element 3, an operand "
        "that no output is aliased to."
    )
    with pytest.raises(ReadOnlyOperand, match=re.escape(text)):
        interpret(write_operand, arguments, [((1,), np.int32)], HOW=how)
    np.testing.assert_array_equal(x, np.zeros(8))
    outputs = [((1,), np.int32), ((8,), np.int32)]
    _, written = interpret(write_operand, arguments, outputs, aliases={0: 1}, HOW=how)
    np.testing.assert_array_equal(written, [0, 0, 0, 1, 0, 0, 0, 0])
    interpret(write_operand, arguments, outputs[:1], HOW="masked")


def test_masked_lanes_may_point_anywhere(interpret):
    x = np.arange(5, dtype=np.int32)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 5}
    (out,) = interpret(masked_anywhere, arguments, [((8,), np.int32)], BLOCK=8)
    np.testing.assert_array_equal(out, [0, 1, 2, 3, 4, -2, -2, -2])


def test_one_access_may_span_buffers(interpret):
    x, y = np.arange(10, dtype=np.int32), np.arange(100, 110, dtype=np.int32)
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0), "n": 10}
    (out,) = interpret(either, arguments, [((20,), np.int32)], BLOCK=16)
    np.testing.assert_array_equal(out[:10:2], x[::2])
    np.testing.assert_array_equal(out[11::2], y[1::2])
    with pytest.raises(OutOfBounds, match="load from `y_ptr` at element 9, outside its 9 elements"):
        interpret(either, {**arguments, "y_ptr": y[:9]}, [((20,), np.int32)], BLOCK=16)


def test_misaligned_access_is_refused(interpret):
    arguments = {"x_ptr": np.zeros(4, np.int32), "o_ptr": Result(0)}
    with pytest.raises(OutOfBounds, match="misaligned load from `x_ptr` at element 0: byte 2 of"):
        interpret(misaligned, arguments, [((1,), np.int32)])


def test_pointers_may_be_reinterpreted(interpret):
    x = np.linspace(0, 1, 5, dtype=np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 5}
    (out,) = interpret(reinterpreted, arguments, [((5,), np.int32)], BLOCK=8)
    np.testing.assert_array_equal(out, x.view(np.int32))
    halves = {"x_ptr": np.zeros(9, np.float16), "o_ptr": Result(0), "n": 5}
    with pytest.raises(OutOfBounds, match="at element 8, outside its 9 elements"):
        interpret(reinterpreted, halves, [((5,), np.int32)], BLOCK=8)


def test_descriptors_are_checked(interpret):
    arguments = {"x_ptr": np.zeros((7, 16), np.float32), "o_ptr": Result(0)}
    with pytest.raises(OutOfBounds, match="load from `x_ptr` at element 112, outside its 112"):
        interpret(leaky_descriptor, arguments, [((1,), np.float32)])


@pytest.mark.parametrize("bits", [34, 38, 40, 44, 50, 60])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("how", ["load", "twice", "store", "block"])
def test_a_pointer_stays_with_its_operand(interpret, bits, sign, how):
    """However far an offset goes, it reaches no other operand, and blames none."""
    x, y = np.zeros(4, np.float32), np.ones(4, np.float32)
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0), "far": sign << bits}
    name = "o_ptr" if how == "store" else "x_ptr"
    far = bits + 2 >= 47
    place = "more than 1e+14 bytes from its start" if far else "at element"
    with pytest.raises(OutOfBounds, match=rf"`{name}` {re.escape(place)}.*, outside its 4 elem"):
        interpret(wander, arguments, [((4,), np.float32)], HOW=how)
    (out,) = interpret(wander, arguments, [((4,), np.float32)], HOW="masked")
    assert out[0] == 7


def test_a_number_is_no_address(interpret):
    x = np.arange(4, dtype=np.float32)
    for address in (0, 8, 0x7F12_3456_7890, -1, 1 << 62):
        arguments = {"x_ptr": x, "a_ptr": np.array([address]), "o_ptr": Result(0)}
        text = (
            f"program (0, 0, 0): load at the address {address % 2**64:#x}, which belongs to no "
            "operand. The interpreter's addresses are virtual, so a number that is loaded"
        )
        with pytest.raises(OutOfBounds, match=re.escape(text)):
            interpret(through_integers, arguments, [((1,), np.float32)], HOW="loaded")
    (out,) = interpret(through_integers, arguments, [((1,), np.float32)], HOW="own")
    assert out[0] == 2


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no `tl.atomic_poll`")
def test_atomic_accesses(interpret):
    x = np.arange(1, 9, dtype=np.int32)
    arguments = {"x_ptr": x, "o_ptr": Result(0)}
    (out,) = interpret(atomic_accesses, arguments, [((8,), np.int32)], zeroed=(0,), BLOCK=8)
    np.testing.assert_array_equal(out, [1, 2, 3, 0, 0, 0, 0, 0])
    (out,) = interpret(wait_for, arguments, [((1,), np.int32)], TIMEOUT=10)
    assert out[0] == 0
    (out,) = interpret(wait_for, {**arguments, "x_ptr": x[4:]}, [((1,), np.int32)], TIMEOUT=None)
    assert out[0] == 1
    with pytest.raises(UnsupportedError, match="waits for a value that no earlier program wrote"):
        interpret(wait_for, arguments, [((1,), np.int32)], TIMEOUT=None)


ATOMICS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in ATOMICS for dtype in (np.int32, np.uint32, np.int64)]
    + [("add", np.float16), ("add", BFLOAT16)]
    + [(op, np.float32) for op in ("add", "max", "min")],
    ids=str,
)
def test_atomics(interpret, rng, op, dtype):
    integral = np.issubdtype(dtype, np.integer)
    n = 60
    low = 0 if np.dtype(dtype).kind == "u" else -9
    x, start = (rng.integers(low, 9, size).astype(dtype) for size in (n, 7))
    arguments = {"x_ptr": x, "count_ptr": start, "n": n}
    (out,) = interpret(
        histogram, arguments, [((7,), dtype)], aliases={1: 0}, grid=(2, 1, 1), BLOCK=32, OP=op
    )
    wide = np.int64 if integral else np.float64
    expected = start.astype(wide)
    ATOMICS[op].at(expected, np.arange(n) % 7, x.astype(wide))
    np.testing.assert_array_equal(out.astype(wide), expected)


def test_bfloat16_atomics_round_each_time(interpret):
    x = np.full(14, 2.0**-8, BFLOAT16)  # half a unit in the last place of 1
    arguments = {"x_ptr": x, "count_ptr": np.ones(7, BFLOAT16), "n": 14}
    (out,) = interpret(histogram, arguments, [((7,), BFLOAT16)], aliases={1: 0}, BLOCK=16, OP="add")
    np.testing.assert_array_equal(out.astype(np.float32), np.ones(7))


def test_float_extrema_return_what_was_there(agree):
    x = np.array([-2, -1, 0, 3, -0.5, -2, 1, 4], np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(1)}
    after, found = agree(extrema, arguments, [((8,), np.float32)] * 2, aliases={0: 0})
    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(after, [*np.minimum(x[:4], -1), *np.maximum(x[4:], 2)])


def test_atomics_return_what_was_there(interpret):
    arguments = {
        "counter_ptr": np.array([5, 77], np.int32),
        "o_ptr": Result(1),
        "last_ptr": Result(2),
    }
    outputs = [((2,), np.int32), ((32,), np.int32), ((2,), np.int32)]
    counter, numbers, last = interpret(
        tickets, arguments, outputs, aliases={0: 0}, grid=(2, 1, 1), BLOCK=16
    )
    np.testing.assert_array_equal(counter, [37, 1])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(5, 37))
    np.testing.assert_array_equal(last, [77, 0])


def test_a_lock(interpret):
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.float32)
    lock_out, total_out = interpret(
        with_lock,
        {"lock_ptr": lock, "total_ptr": total},
        [((1,), np.int32), ((1,), np.float32)],
        aliases={0: 0, 1: 1},
        grid=(2, 2, 2),
    )
    assert (lock_out[0], total_out[0]) == (0, 16)


@triton.jit
def masked_by_arithmetic_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = (offsets < n) & (tl.program_id(0) % 1 == 0)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


def test_a_mask_of_wide_integers_is_still_a_mask():
    """One-bit values that went through arithmetic are integers to NumPy, and no positions."""
    x = np.arange(9, dtype=np.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = triax.triton_call(
        x, n=7, BLOCK=16, kernel=masked_by_arithmetic_kernel, out_type=like, grid=1
    )
    np.testing.assert_array_equal(out[:7], x[:7])
    assert np.isnan(out[7:]).all()
