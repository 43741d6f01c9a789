"""What a user sees of an error in an interpreted kernel: the sentence, and the line."""

import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

import triax
from triax.errors import OutOfBounds

HERE = Path(__file__)
LINES = HERE.read_text(encoding="utf-8").splitlines()


@triton.jit
def helper(x_ptr, at):
    return tl.load(x_ptr + at)  # fails here


@triton.jit
def calls_a_helper(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = helper(x_ptr, at)  # calls it
    tl.store(o_ptr + at, value)


@triton.jit
def misspelt(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(o_ptr + at, at.misspelt)  # fails there


@triton.jit
def in_triton(x_ptr, o_ptr, BLOCK: tl.constexpr):
    tl.store(o_ptr, tl.softmax(tl.program_id(0)))  # fails in Triton's own library


@triton.jit
def asserts(x_ptr, o_ptr, BLOCK: tl.constexpr):
    tl.device_assert(tl.program_id(0) < 0, "no such program")  # asserts


@triton.constexpr_function
def width_of(mode):
    try:
        return {"narrow": 1}[mode]
    except KeyError as error:
        raise ValueError("no such mode") from error


@triton.jit
def has_a_cause(x_ptr, o_ptr, BLOCK: tl.constexpr):
    tl.store(o_ptr, width_of("wide"))


def line_of(comment):
    (number,) = (n for n, line in enumerate(LINES, 1) if line.endswith("# " + comment))
    return number


def call(kernel):
    return triax.triton_call(
        jnp.zeros(5),
        kernel=kernel,
        grid=1,
        out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
        BLOCK=8,
    )


CASES = [
    (calls_a_helper, ["calls it", "fails here"], OutOfBounds, "Kernel `calls_a_helper`, program "),
    (misspelt, ["fails there"], AttributeError, ".*misspelt"),
    (in_triton, ["fails in Triton's own library"], ValueError, ".*axis"),
    (asserts, ["asserts"], AssertionError, "tl.device_assert: no such program"),
]


@pytest.mark.parametrize(("kernel", "places", "error", "text"), CASES)
def test_the_stack_shows_the_kernel_alone(kernel, places, error, text):
    with pytest.raises(error, match=text) as raised:
        call(kernel)
    entries = traceback.extract_tb(raised.value.__traceback__)
    ours = [i for i, entry in enumerate(entries) if entry.filename == str(HERE)]
    # The test, `call`, one frame of Triax, and the kernel's.
    assert len(entries) == 3 + len(places), traceback.format_exception(raised.value)
    assert [entries[i].lineno for i in ours[2:]] == [line_of(place) for place in places]
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count(f"ernel `{kernel.fn.__name__}`, program (0, 0, 0)") == 1


@pytest.mark.parametrize(("kernel", "places", "error", "text"), CASES)
def test_under_jit_the_sentence_comes_first(kernel, places, error, text):
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(jax.jit(lambda: call(kernel))())
    shown = str(raised.value).splitlines()
    name = "helper" if len(places) > 1 else kernel.fn.__name__
    assert shown[1] == f'  File "{HERE}", line {line_of(places[-1])}, in {name}'
    assert re.match(f"{error.__name__}: {text}", shown[2])
    for place in places:
        line = line_of(place)
        (at,) = (
            i for i, s in enumerate(shown[2:], 2) if s.startswith(f'  File "{HERE}", line {line},')
        )
        assert LINES[line - 1].startswith(shown[at + 1])
    files = [line for line in shown if line.startswith("  File ")]
    assert len(files) == 1 + len(places)
    assert sum(f"ernel `{kernel.fn.__name__}`, program (0, 0, 0)" in line for line in shown) == 1


def test_the_failing_part_of_an_indented_line_is_marked():
    if HERE.exists():

        @triton.jit
        def nested(x_ptr, o_ptr, BLOCK: tl.constexpr):
            tl.store(o_ptr, tl.load(x_ptr - 1))

    with pytest.raises(OutOfBounds) as raised:
        call(nested)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.name == "nested"
    assert last.line == "tl.store(o_ptr, tl.load(x_ptr - 1))"
    whole = LINES[last.lineno - 1]
    assert whole[last.colno : last.end_colno] == "tl.load(x_ptr - 1)"


def test_under_jit_a_cause_is_told():
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(jax.jit(lambda: call(has_a_cause))())
    shown = str(raised.value).splitlines()
    assert shown[2] == "ValueError: no such mode"
    assert "Because of KeyError: 'wide'" in shown


def test_other_errors_keep_their_stack():
    with pytest.raises(TypeError) as raised:
        triax.triton_call(kernel=misspelt, grid=1, out_type=())
    assert len(traceback.extract_tb(raised.value.__traceback__)) > 2
