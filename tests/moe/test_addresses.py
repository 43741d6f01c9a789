"""Offsets are 64-bit wherever rows × width can pass 2**31, which a CPU has no memory to try."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest

from tests.moe.case import ModelSizes
from tests.moe.cases import SIZED
from triax import moe
from triax.interpreting.builder import Builder
from triax.moe.plans.configs import FewPairsConfig
from triax.moe.products.quantized_outer_ops import outer_in_8_bits
from triax.moe.shared import launching

# More than any row, column, group or masked lane here, and less than the elements of an array.
LARGEST = 4096
ROWS, WIDTH = 90, 99
OTHERS = (  # that other code computes offsets for
    *("ragged_dot, a bias", "ragged_dot, 8 bits", "permute, capacity", "permute, 8 bits"),
    *("glu, clamped and interleaved", "glu, two", "glu, no gate", "quantize, columns"),
    *("route, softmax", "route, groups", "unpermute, no weights", "chunks, no probs"),
)
PLANS = ("place_few_pairs", "select_experts")  # which need more pairs than that
SLOW = ("feed_forward", "ragged_dot")
SIZES = ModelSizes(tokens=90, hidden=99, width=50, experts=60, top_k=2)
RUN = {"implementation": "interpret"}


def draw(*shape):
    return np.random.default_rng(0).random(shape, np.float32)


def pairs(num_experts):
    """With more pairs than one program looks at."""
    ids = np.random.default_rng(0).integers(0, num_experts, (256, 4))
    with mock.patch.object(FewPairsConfig, "max_pairs", 0):
        moe.make_plan(ids, num_experts, **RUN)


def masks(num_tokens, num_experts, top_k):
    moe.make_plan_from_mask(draw(num_tokens, num_experts) < 0.5, top_k, **RUN)


def sized(made):
    case = made("interpret", SIZES)
    case.everything(case.inputs(0))


def eight_bits():
    for block, transposed in ((None, False), (16, False), (128, False), (None, True), (128, True)):
        # A block for rows or parts of rows, for columns, or a tile.
        blocks = {"block": (1, 128, block) if block == 128 else (1, 1, block)}
        if block is None and transposed:
            blocks = {"block": (1, None, 1)}
        moe.quantize(draw(3, ROWS, WIDTH), transposed=transposed, **blocks, **RUN)
    # Whose scales are more than LARGEST, too.
    for deep, (count, depth, columns) in ((32, (4, 2048, 40)), (None, (8, 16, 600))):
        rows = moe.quantize(draw(ROWS, depth), block=(1, deep))
        weights = moe.quantize(draw(count, depth, columns), block=(1, deep, 1), transposed=True)
        moe.ragged_dot(rows, weights, np.full(count, ROWS // count), **RUN)
    how = {"dtypes": ("float8_e4m3fn",) * 2, "result_dtype": "float32", "fast_sums": True}
    sizes = np.array([40, 0, 45], np.int32)
    outer_in_8_bits(draw(ROWS, WIDTH), draw(ROWS, 21), sizes, **how, **RUN)


CASES = {
    "pairs": functools.partial(pairs, 600),
    "masks of which some experts are kept": functools.partial(masks, 40, 120, 2),
    "masks of which all are": functools.partial(masks, 130, 40, 40),
    "eight bits": eight_bits,
    **{
        name: functools.partial(sized, made)
        for name, made in SIZED.items()
        if name in OTHERS or ("," not in name and {*made("interpret", SIZES).kernels} - {*PLANS})
    },
}


@pytest.fixture
def check_offsets(monkeypatch):
    """Runs something, and asserts that no offset that passes 32 bits has as many."""
    add, wide, narrow = Builder.create_addptr, 0, set()

    def create_addptr(self, ptr, offset):
        nonlocal wide
        if np.max(np.abs(offset.data), initial=0) > LARGEST:
            if offset.dtype.scalar.primitive_bitwidth < 64:
                narrow.add(str(ptr.dtype))
            wide += 1
        return add(self, ptr, offset)

    def check(run):
        run()
        assert wide, "the arrays are too small for this test"
        assert not narrow

    monkeypatch.setattr(Builder, "create_addptr", create_addptr)
    return check


def marked(name):
    return pytest.param(name, marks=[pytest.mark.slow("its parts")] * (name in SLOW))


@pytest.mark.parametrize("name", [*map(marked, CASES)])
def test_offsets_that_pass_32_bits_have_64(name, check_offsets):
    check_offsets(CASES[name])


@pytest.mark.parametrize(
    ("kernel", "tiled", "deep", "dtype"),
    [
        ("few_rows", True, 64, "bfloat16"),
        ("very_few_rows", True, 32, "bfloat16"),
        ("widen", True, 64, "float16"),
        ("widen", False, 64, "bfloat16"),
    ],
)
def test_offsets_with_weights_of_4_bits(kernel, tiled, deep, dtype, check_offsets):
    weights = moe.quantize(draw(3, 256, 384), "int4", block=(1, deep, 1), transposed=True)
    weights = weights.tile() if tiled else weights
    rows, sizes = draw(ROWS, 256).astype(dtype), np.array([40, 0, 45])
    with mock.patch.object(launching, "triton_call", wraps=launching.triton_call) as call:
        check_offsets(lambda: moe.ragged_dot(rows, weights, sizes, **RUN))
    assert kernel in [each.kwargs["name"] for each in call.call_args_list]
