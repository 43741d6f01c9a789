"""Which kernel a product takes, and what those before it need."""

from __future__ import annotations

import jax
import pytest

import triax
from tests.moe.launches import E4M3, array, in_tiles, product, product_of, scaled
from tests.moe.products.chosen import chosen, without
from triax import moe
from triax.moe.products import choose

pytestmark = pytest.mark.cuda_plugin
FLOATS_ALONE = "weights of float8_e4m3fn, int8 or 4 bits"
HALVES = {
    "very_few_rows": FLOATS_ALONE,
    "few_rows": FLOATS_ALONE,
    "dequantized": "weights of 4 bits, in tiles, or of 8 bits and more than 256 rows of 16 bits",
}


@pytest.mark.parametrize(
    ("card", "case", "kernel", "needs"),
    [
        (90, product(4000, 512, 1024), "sm90_16_bits", "rows and weights of 8-bit floats"),
        (90, product(4000, 512, 128), "any_gpu", "more than 128 columns"),
        (90, product(320, 512, 256), "any_gpu", "more than 64 rows for each group on average"),
        (90, product(4000, 512, 256, "float32"), "any_gpu", "a result of one dtype of 16 bits"),
        (90, product(4000, 508, 256), "any_gpu", "begin at multiples of 16 bytes"),
        (80, product(4000, 512, 1024), "any_gpu", "Hopper (compute capability 9.0)"),
    ],
)
def test_products_of_floats(monkeypatch, card, case, kernel, needs):
    ((found, reasons),) = chosen(monkeypatch, card, case)
    assert found == kernel
    assert list(reasons) == [each.name for each in choose.RAGGED_DOT][: len(reasons)]
    assert HALVES.items() <= reasons.items()
    assert needs in [*reasons.values()][-1]


def test_weights_are_dequantized_and_then_multiplied(monkeypatch):
    weights = scaled(array(5, 256, 512, dtype=E4M3), (1, 128, 128), transposed=True)
    for each, needed in (
        (in_tiles, "at most 256 rows for each group on average"),
        (lambda case: case, "weights in tiles (`weights.tile()`)"),
    ):
        many = each(product_of(array(5 * 257, 512), weights))
        first, second = chosen(monkeypatch, 90, many)
        assert first[0] == "dequantized"
        assert first[1]["few_rows"] == needed
        assert second[0] == "sm90_16_bits"


def test_few_rows_are_multiplied_by_tiles(monkeypatch):
    weights = scaled(array(5, 256, 512, dtype=E4M3), (1, 128, 128), transposed=True)
    case = product_of(array(5 * 256, 512), weights)
    ((kernel, needs),) = chosen(monkeypatch, 90, in_tiles(case))
    assert kernel == "few_rows"
    assert needs.keys() == {"very_few_rows"}
    ((kernel, needs),) = chosen(monkeypatch, 90, case)
    assert kernel == "any_gpu"
    assert needs["few_rows"] == needs["very_few_rows"] == "weights in tiles (`weights.tile()`)"


@pytest.mark.filterwarnings("ignore:ragged_dot dequantizes its weights")
def test_fewer_rows_than_groups_where_tensor_cores_lack_bfloat16(monkeypatch):
    weights = scaled(array(5, 256, 512, dtype=E4M3), (1, 128, 128), transposed=True)
    case = in_tiles(product_of(array(4, 512), weights))
    (kernel, needs), *_ = chosen(monkeypatch, 75, case)
    assert kernel == "dequantized"
    assert needs["very_few_rows"] == "tensor cores that multiply bfloat16, from Ampere on"


def test_the_weights_gradient(monkeypatch):
    function, arrays = product(4000, 512, 1024)

    def gradient(rows, weights, sizes, **how):
        return jax.grad(lambda w: function(rows, w, sizes, **how).sum())(weights)

    for name, kernel in (("", "sm90_16_bits"), ("sm90_16_bits", "any_gpu")):
        context = without(name) if name else without("few_rows")
        with context:
            *_, (found, _) = chosen(monkeypatch, 90, (gradient, arrays))
        assert found == kernel


def test_explain_says_why(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    _, arrays = product(4000, 512, 1024)
    found = triax.explain(moe.ragged_dot, *arrays)
    assert repr(found).splitlines()[-6:] == [
        "ragged_dot of bfloat16[4000, 512] × bfloat16[5, 512, 1024]: any_gpu",
        f"  not very_few_rows, which needs {FLOATS_ALONE}",
        f"  not few_rows, which needs {FLOATS_ALONE}",
        f"  not dequantized, which needs {HALVES['dequantized']}",
        "  not sm90_8_bits, which needs Hopper (compute capability 9.0)",
        "  not sm90_16_bits, which needs Hopper (compute capability 9.0)",
    ]
    assert found.products[0].kernel == "any_gpu"
