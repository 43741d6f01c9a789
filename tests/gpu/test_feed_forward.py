"""The whole layer on a GPU, against its dense form in float64."""

from __future__ import annotations

import pytest

from tests.moe.layer.test_feed_forward import CASES, check_against_dense, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_layer_is_its_dense_form(case, dtype):
    offsets, options = CASES[case]
    check_against_dense(draw(0, dtype, offsets=offsets), implementation="triton", **options)
