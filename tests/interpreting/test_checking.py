"""Checked runs: races between programs, and reads of what nobody wrote."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
import triax.testing
from triax.binding.launch import Result
from triax.errors import DataRace, UninitializedRead
from triax.interpreting.run import run


@triton.jit
def overlap(o_ptr, STRIDE: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    value = pid if VALUE == "program" else 7
    tl.store(o_ptr + pid * STRIDE + tl.arange(0, BLOCK), value)


@triton.jit
def shift(x_ptr, n, STEP: tl.constexpr):
    pid = tl.program_id(0)
    value = tl.load(x_ptr + pid)
    tl.store(x_ptr + (pid + n + STEP) % n, value + 10)


@triton.jit
def in_place(x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2)


@triton.jit
def access(x_ptr, o_ptr, HOW: tl.constexpr):
    if "load" in HOW:
        tl.store(o_ptr, tl.load(x_ptr))
    if "volatile" in HOW:
        tl.store(o_ptr, tl.load(x_ptr, volatile=True))
    if "add" in HOW:
        tl.atomic_add(x_ptr, 3)
    if "store" in HOW:
        tl.store(x_ptr, 5)


@triton.jit
def first_then(x_ptr, o_ptr, FIRST: tl.constexpr, THEN: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        access(x_ptr, o_ptr, FIRST)
    else:
        access(x_ptr, o_ptr + 1, THEN)


@triton.jit
def three_values(o_ptr):
    pid = tl.program_id(0)
    tl.store(o_ptr, 1)
    tl.store(o_ptr, 1 + pid)


@triton.jit
def unwritten(o_ptr, HOW: tl.constexpr):
    tl.store(o_ptr + tl.arange(0, 4), 1)
    at = tl.arange(0, 8)
    if HOW == "load":
        tl.store(o_ptr + at, tl.load(o_ptr + at) + 1)
    elif HOW == "masked":
        tl.store(o_ptr + at, tl.load(o_ptr + at, mask=at < 4, other=0) + 1)
    elif HOW == "atomic add":
        tl.atomic_add(o_ptr + at, 1)
    elif HOW == "atomic xchg":
        tl.atomic_xchg(o_ptr + at, 1)
        tl.atomic_add(o_ptr + at, 1)
    elif HOW == "atomic cas":
        tl.atomic_cas(o_ptr + at, 0, 1)


@triton.jit
def duplicate(o_ptr, VALUE: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(o_ptr + at // 2, at // 2 if VALUE == "equal" else at)


@triton.jit
def locked(lock_ptr, total_ptr, o_ptr, SEM: tl.constexpr, LOCK: tl.constexpr):
    if LOCK:
        while tl.atomic_cas(lock_ptr, 0, 1, sem=SEM) == 1:
            pass
    total = tl.load(total_ptr) + tl.program_id(0)
    tl.store(total_ptr, total)
    if LOCK:
        tl.atomic_xchg(lock_ptr, 0, sem=SEM)


@triton.jit
def last_one_sums(x_ptr, parts_ptr, count_ptr, o_ptr, n, EARLY: tl.constexpr):
    pid = tl.program_id(0)
    if EARLY:
        tl.atomic_add(count_ptr + 1, 1)
    tl.store(parts_ptr + pid, tl.load(x_ptr + pid) * 2)
    done = tl.atomic_add(count_ptr + (1 if EARLY else 0), 0 if EARLY else 1)
    if EARLY:
        tl.store(parts_ptr + pid, tl.load(x_ptr + pid) * 3)
    if (pid if EARLY else done) == n - 1:
        at = tl.arange(0, 8)
        tl.store(o_ptr, tl.sum(tl.load(parts_ptr + at, mask=at < n, other=0)))


@triton.jit
def handed_on(x_ptr, flag_ptr, o_ptr, n, CHAIN: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(x_ptr, 42)
    elif CHAIN:
        tl.atomic_add(flag_ptr + pid - 1, 0)
    if pid == n - 1:
        tl.store(o_ptr, tl.load(x_ptr))
    tl.atomic_add(flag_ptr + pid, 1)


@triton.jit
def halves(o_ptr, WIDE: tl.constexpr):
    pid = tl.program_id(0)
    if WIDE:
        tl.store(o_ptr.to(tl.pointer_type(tl.int32)), pid)
    else:
        tl.store(o_ptr.to(tl.pointer_type(tl.int16)) + pid, pid.to(tl.int16))


@pytest.fixture
def check(launch_of):
    def check(*args, **kwargs):
        launch, operands = launch_of(*args, **kwargs)
        run(launch, operands)  # unchecked, nothing is said
        return run(launch, operands, checked=True)

    return check


I32 = np.int32


def test_programs_that_write_one_element_are_named(check):
    text = (
        "Kernel `overlap`, program (1, 0, 0): store to `o_ptr` at element 4, where program "
        "(0, 0, 0) stored another value: either may stay. On a GPU nothing orders the two programs"
    )
    arguments = {"o_ptr": Result(0)}
    with pytest.raises(DataRace, match=re.escape(text)):
        check(
            overlap, arguments, [((32,), I32)], grid=(4, 1, 1), STRIDE=4, VALUE="program", BLOCK=8
        )
    for stride, value in ((8, "program"), (4, "equal")):
        check(
            overlap, arguments, [((32,), I32)], grid=(4, 1, 1), STRIDE=stride, VALUE=value, BLOCK=8
        )


@triton.jit
def store_floats(o_ptr, FIRST: tl.constexpr, THEN: tl.constexpr):
    value = tl.where(tl.program_id(0) == 0, float(FIRST), float(THEN))
    tl.store(o_ptr, value)
    tl.store(o_ptr + 1 + tl.arange(0, 2) * 0, value)


@pytest.mark.parametrize(
    ("first", "then", "races"),
    [("nan", "nan", False), ("0.0", "-0.0", True), ("-0.0", "-0.0", False)],
)
def test_values_are_compared_by_their_bits(check, first, then, races):
    """NaN is stored twice without a race; zeros of different signs are two values."""
    expectation = pytest.raises(DataRace) if races else contextlib.nullcontext()
    with expectation:
        check(
            store_floats,
            {"o_ptr": Result(0)},
            [((3,), np.float32)],
            grid=(2, 1, 1),
            FIRST=first,
            THEN=then,
        )


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (1, "program (1, 0, 0): load from `x_ptr` at element 1, which program (0, 0, 0) stored"),
        (-1, "program (1, 0, 0): store to `x_ptr` at element 0, which program (0, 0, 0) loaded"),
    ],
)
def test_a_program_may_not_read_what_another_writes(check, step, text):
    x = np.arange(4, dtype=I32)
    with pytest.raises(DataRace, match=re.escape(text)):
        check(
            shift,
            {"x_ptr": x, "n": 4},
            [((4,), I32)],
            grid=(4, 1, 1),
            aliases={0: 0},
            STEP=step,
        )
    (out,) = check(
        shift, {"x_ptr": x, "n": 4}, [((4,), I32)], grid=(4, 1, 1), aliases={0: 0}, STEP=0
    )
    np.testing.assert_array_equal(out, x + 10)


def test_in_place_on_its_own_elements_is_fine(check):
    x = np.arange(32, dtype=np.float32)
    (out,) = check(
        in_place, {"x_ptr": x}, [((32,), np.float32)], grid=(4, 1, 1), aliases={0: 0}, BLOCK=8
    )
    np.testing.assert_array_equal(out, (x + 1) * 2)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "store, add",
            "atomic add to `x_ptr` at element 0, which program (0, 0, 0) stored without",
        ),
        ("store, load", "load from `x_ptr` at element 0, which program (0, 0, 0) stored: it"),
        ("add, store", "store to `x_ptr` at element 0, which program (0, 0, 0) updated with an"),
        ("add, load", "load from `x_ptr` at element 0, which program (0, 0, 0) updated with an"),
        ("load, add", "atomic add to `x_ptr` at element 0, which program (0, 0, 0) loaded without"),
        ("load, load+add", "atomic add to `x_ptr` at element 0, which program (0, 0, 0) loaded"),
        ("load, load+store", "store to `x_ptr` at element 0, which program (0, 0, 0) loaded: that"),
        ("volatile, volatile+store", "store to `x_ptr` at element 0, which program (0, 0, 0) load"),
        ("volatile, add", None),
        ("add, volatile", None),
        (
            "volatile, store",
            "store to `x_ptr` at element 0, which program (0, 0, 0) loaded as volatile",
        ),
        (
            "store, volatile",
            "volatile load from `x_ptr` at element 0, which program (0, 0, 0) stored",
        ),
        ("volatile, volatile", None),
        ("load, volatile", None),
        ("add, add", None),
    ],
)
def test_atomics_and_plain_accesses(check, how, text):
    first, then = how.split(", ")
    arguments = {"x_ptr": np.zeros(1, I32), "o_ptr": Result(1)}
    outputs = [((1,), I32), ((2,), I32)]
    keywords = {"grid": (2, 1, 1), "aliases": {0: 0}, "FIRST": first, "THEN": then}
    if text is None:
        check(first_then, arguments, outputs, **keywords)
        return
    with pytest.raises(DataRace, match=re.escape("program (1, 0, 0): " + text)):
        check(first_then, arguments, outputs, **keywords)


def test_an_equal_store_does_not_hide_a_later_one(check):
    with pytest.raises(DataRace, match="stored another value"):
        check(three_values, {"o_ptr": Result(0)}, [((1,), I32)], grid=(2, 1, 1))
    check(three_values, {"o_ptr": Result(0)}, [((1,), I32)])


@pytest.mark.parametrize("how", ["load", "atomic add", "atomic cas"])
def test_reads_of_what_nobody_wrote_are_named(check, how):
    arguments = {"o_ptr": Result(0)}
    text = rf"`unwritten`, program \(0, 0, 0\): {how} (from|to) `o_ptr` at element 4, which nothing"
    with pytest.raises(UninitializedRead, match=text):
        check(unwritten, arguments, [((8,), I32)], HOW=how)
    check(unwritten, arguments, [((8,), I32)], zeroed=(0,), HOW=how)
    check(unwritten, {"o_ptr": np.zeros(8, I32)}, [((8,), I32)], aliases={0: 0}, HOW=how)


@pytest.mark.parametrize("how", ["masked", "atomic xchg"])
def test_what_is_not_read_may_be_anything(check, how):
    check(unwritten, {"o_ptr": Result(0)}, [((8,), I32)], HOW=how)


def test_lanes_that_write_one_element(check):
    with pytest.raises(DataRace, match="one store writes different values to `o_ptr` at element 0"):
        check(duplicate, {"o_ptr": Result(0)}, [((4,), I32)], VALUE="lane")
    check(duplicate, {"o_ptr": Result(0)}, [((4,), I32)], VALUE="equal")


@pytest.mark.parametrize("sem", ["acq_rel", "relaxed"])
@pytest.mark.parametrize("lock", [True, False])
def test_a_lock_orders_programs(check, sem, lock):
    arguments = {
        "lock_ptr": np.zeros(1, I32),
        "total_ptr": np.zeros(1, np.float32),
        "o_ptr": Result(2),
    }
    keywords = {
        "outputs": [((1,), I32), ((1,), np.float32), ((1,), I32)],
        "grid": (5, 1, 1),
        "aliases": {0: 0, 1: 1},
        "SEM": sem,
        "LOCK": lock,
    }
    if sem == "acq_rel" and lock:
        assert check(locked, arguments, **keywords)[1][0] == 10
    else:
        with pytest.raises(DataRace, match="`total_ptr` at element 0, which program"):
            check(locked, arguments, **keywords)


def test_a_counter_orders_the_last_program_behind_all(check):
    x = np.arange(6, dtype=I32)
    arguments = {
        "x_ptr": x,
        "parts_ptr": Result(1),
        "count_ptr": np.zeros(2, I32),
        "o_ptr": Result(2),
        "n": 6,
    }
    keywords = {
        "outputs": [((2,), I32), ((6,), I32), ((1,), I32)],
        "grid": (6, 1, 1),
        "aliases": {1: 0},
    }
    _, _, total = check(last_one_sums, arguments, **keywords, EARLY=False)
    assert total[0] == 2 * x.sum()
    # What is stored after the release is not before anything.
    with pytest.raises(DataRace, match="load from `parts_ptr` at element"):
        check(last_one_sums, arguments, **keywords, EARLY=True)


def test_order_is_handed_on(check):
    arguments = {"x_ptr": Result(1), "flag_ptr": np.zeros(4, I32), "o_ptr": Result(2), "n": 4}
    keywords = {
        "outputs": [((4,), I32), ((1,), I32), ((1,), I32)],
        "grid": (4, 1, 1),
        "aliases": {0: 0},
    }
    assert check(handed_on, arguments, **keywords, CHAIN=True)[2][0] == 42
    with pytest.raises(
        DataRace, match=r"load from `x_ptr` at element 0, which program \(0, 0, 0\)"
    ):
        check(handed_on, arguments, **keywords, CHAIN=False)


def test_parts_of_an_element_are_told_apart(check):
    check(halves, {"o_ptr": Result(0)}, [((1,), I32)], grid=(2, 1, 1), WIDE=False)
    with pytest.raises(DataRace, match="`o_ptr` at element 0, where program"):
        check(halves, {"o_ptr": Result(0)}, [((4,), np.int16)], grid=(2, 1, 1), WIDE=True)


def race():
    return triax.triton_call(
        kernel=overlap,
        grid=4,
        out_type=jax.ShapeDtypeStruct((32,), jnp.int32),
        STRIDE=4,
        VALUE="program",
        BLOCK=8,
    )


def test_the_block_decides():
    race()
    with triax.testing.checked(), pytest.raises(DataRace):
        race()
    race()


def test_a_function_traced_outside_is_checked_inside():
    jitted = jax.jit(race)
    jax.block_until_ready(jitted())
    with triax.testing.checked(), pytest.raises(jax.errors.JaxRuntimeError, match="DataRace: Kern"):
        jax.block_until_ready(jitted())
    jax.block_until_ready(jitted())
