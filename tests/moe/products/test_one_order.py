"""Under `same_bits` the order of a sum follows from the shapes of weights alone.

A GPU shows that bits are the same (tests/gpu/test_batch_invariance.py). Here what decides about
the order is read from launches, just above and below every threshold of rows.
"""

from __future__ import annotations

import functools

import jax
import pytest

import triax
from tests.moe.launches import E4M3, array, in_tiles, product_of, scaled
from tests.moe.products.chosen import chosen
from triax import moe
from triax.moe.products import thresholds
from triax.moe.products.options import FAST_SUMS

pytestmark = pytest.mark.cuda_plugin
GROUPS, DEPTH, COLUMNS = 4, 512, 256
ROWS = sorted(
    {1} | {at + more for name, at in vars(thresholds).items() if name.isupper() for more in (0, 1)}
)


def weights(dtype, block, scales="float32"):
    how = {"transposed": True}
    if dtype in ("int4", "float4_e2m1fn"):
        values, how["packed"] = array(GROUPS, COLUMNS, DEPTH // 2, dtype="uint8"), dtype
    else:
        values = array(GROUPS, COLUMNS, DEPTH, dtype=dtype)
    return scaled(values, block, scales, **how)


def rows_in_8_bits(count, block):
    return scaled(array(count, DEPTH, dtype=E4M3), (1, block))


def order_of(launches):
    """What decides about the order of sums: instructions, parts of the depth, terms of a scale."""
    *first, arguments = launches
    kernel, get = arguments["kernel"].__name__.strip("_"), arguments.get
    for each in first:
        if each["name"] == "widen":
            is_exact = each["CODES"] == "float8_e8m0fnu" or each["operands"][1] is None
            return kernel, None if is_exact else "rounded"
    of_sums = get("SCALE_DEPTH") if get("CODES") is None else None
    if kernel == "very_few_rows_kernel":
        return "tiles", get("SPLIT"), of_sums and min(of_sums & -of_sums, 64)
    if kernel == "few_rows_kernel":
        block = get("BLOCK_DEPTH")
        return "tiles", 1, of_sums and (block // 2 if of_sums % block else block)
    if kernel == "ragged_dot_float32_sums_kernel":
        return "wgmma", get("BLOCK_DEPTH")
    if kernel == "ragged_dot_kernel":
        terms = get("BLOCK_DEPTH") if get("ROW_BLOCK") or get("WEIGHT_DEPTH") else get("IMPRECISE")
        return "wgmma" if get("BLOCK_ROWS") >= 64 else "mma", terms
    assert kernel == "ragged_dot_overlapped_kernel"
    return "wgmma", None


def orders(monkeypatch, of_rows, of_weights, tiled, how, card=90):
    """The orders of sums of all numbers of rows."""
    found = set()
    for count in ROWS:
        launches = []
        case = product_of(of_rows(count * GROUPS), of_weights, GROUPS, **how)
        chosen(monkeypatch, card, in_tiles(case) if tiled else case, launches)
        found.add(order_of(launches))
    return found


HALVES = lambda count: array(count, DEPTH)
CASES = {
    **{
        f"{name}{' in tiles' * tiled}": (HALVES, weights(*of), tiled, {})
        for tiled in (False, True)
        for name, of in {
            "int8": ("int8", (1, None, 1)),
            "float8": (E4M3, (1, None, 1)),
            "float8 in blocks": (E4M3, (1, 128, 128)),
        }.items()
    },
    **{
        f"{name} in tiles": (HALVES, weights(*of), True, {})
        for name, of in {
            "MXFP4": ("float4_e2m1fn", (1, 32, 1), "float8_e8m0fnu"),
            "NVFP4": ("float4_e2m1fn", (1, 16, 1), E4M3),
            "int4 by 32": ("int4", (1, 32, 1)),
            "int4 by 64": ("int4", (1, 64, 1)),
            "int4 by 128": ("int4", (1, 128, 1)),
        }.items()
    },
    **{
        name: (functools.partial(rows_in_8_bits, block=block), weights(E4M3, of), False, how)
        for name, block, of, how in (
            ("8 bits", None, (1, None, 1), {}),
            ("8 bits, fast sums", None, (1, None, 1), {"precision": FAST_SUMS}),
            ("8 bits, blocks", 128, (1, 128, 128), {}),
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_one_order_for_all_numbers_of_rows(monkeypatch, case):
    assert len(orders(monkeypatch, *CASES[case])) > 1
    with triax.same_bits():
        assert len(orders(monkeypatch, *CASES[case])) == 1


def test_few_rows_times_4_bits_have_a_kernel_of_their_own(monkeypatch):
    """Where its sums have the order of those of more rows."""
    names = {"MXFP4": True, "NVFP4": True, "int4 by 32": True, "int4 by 64": False}
    for name, both in names.items():
        _, of_weights, _, _ = CASES[f"{name} in tiles"]
        launches = []
        for rows in (1, 100):
            case = in_tiles(product_of(HALVES(rows * GROUPS), of_weights, GROUPS))
            with triax.same_bits():
                chosen(monkeypatch, 90, case, launches)
        kernels = {each["kernel"].__name__ for each in launches if "BLOCK_ROWS" in each}
        assert ("_very_few_rows_kernel" in kernels) == both
        assert "_few_rows_kernel" in kernels


@pytest.mark.parametrize("card", [80, 120])
@pytest.mark.parametrize("case", ["MXFP4 in tiles", "int4 by 64 in tiles", "int4 by 128 in tiles"])
def test_one_order_on_other_cards(monkeypatch, case, card):
    with triax.same_bits():
        assert len(orders(monkeypatch, *CASES[case], card=card)) == 1


def test_the_layer_and_its_gradient_keep_it(monkeypatch):
    """The gradient may be computed outside of the block."""
    x, logits = array(16, 256), array(16, 4, dtype="float32")
    w_gate_up, w_down = array(4, 256, 1024), array(4, 512, 256)

    def run(x, logits, w_gate_up, w_down, *, implementation, on):
        def layer(x):
            experts = moe.Experts(w_gate_up, w_down)
            how = {"recipe": "rows", "implementation": implementation}
            return moe.feed_forward(x, logits, experts, moe.Router(2), **how).tokens

        with triax.same_bits(on):
            out, pull = jax.vjp(layer, x)
        return pull(out)[0]

    for on, kind in ((False, "mma"), (True, "wgmma")):
        launches = []
        case = functools.partial(run, on=on), (x, logits, w_gate_up, w_down)
        chosen(monkeypatch, 90, case, launches)
        found = [order_of([each])[0] for each in launches if "IMPRECISE" in each]
        assert found == [kind] * 4  # two products, and the gradients of their rows


def test_explain_says_why_many_rows_are_not_dequantized(monkeypatch):
    case = product_of(HALVES(GROUPS * 257), weights(E4M3, (1, 128, 128)), GROUPS)
    with triax.same_bits():
        ((kernel, needs),) = chosen(monkeypatch, 90, case)
    assert kernel == "any_gpu"
    assert "`triax.same_bits` is on" in needs["dequantized"]


def test_explain_does_not_blame_it_for_rows_of_other_sizes(monkeypatch):
    """Only rows of 16 bits would be multiplied by dequantized weights without it."""
    weights_in_blocks = weights(E4M3, (1, 128, 128))
    for rows in (rows_in_8_bits(GROUPS * 257, 128), array(GROUPS * 257, DEPTH, dtype="float32")):
        with triax.same_bits():
            ((_, needs),) = chosen(monkeypatch, 90, product_of(rows, weights_in_blocks, GROUPS))
        assert "rows of 16 bits" in needs["dequantized"]
