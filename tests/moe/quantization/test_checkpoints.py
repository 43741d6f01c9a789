"""The page of recipes for checkpoints, each against the checkpoint's own definition."""

from __future__ import annotations

import runpy

import numpy as np
import pytest

from tests.moe.quantization.oracle import exactly
from tests.test_docs import DOCS, PROGRAM

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of AWQ's columns in a word


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.py"
    text = (DOCS / "quantized-checkpoints.md").read_text(encoding="utf-8")
    path.write_text("\n".join(PROGRAM.findall(text)), encoding="utf-8")
    return runpy.run_path(str(path))


def number(words, *at, place):
    return words[at] >> 4 * place & 15


def by_definition(page, at, zero_at):
    """Each weight from its word, its scale and its zero."""
    wanted = np.empty((page["experts"], page["hidden"], page["width"]))
    for e, i, o in np.ndindex(*wanted.shape):
        scale = page["scales"][e, i // page["group"], o]
        wanted[e, i, o] = (at(e, i, o) - zero_at(e, i // page["group"], o)) * np.float64(scale)
    return wanted


@pytest.mark.parametrize("less", [0, 1])
def test_gptq(page, less):
    qweight, qzeros, _ = page["gptq"]
    wanted = by_definition(
        page,
        lambda e, i, o: number(qweight, e, i // 8, o, place=i % 8),
        lambda e, g, o: number(qzeros, e, g, o // 8, place=o % 8) + less,
    )
    found = page["from_gptq"](*page["gptq"], page["group"], less)
    np.testing.assert_array_equal(exactly(found), wanted)
    np.testing.assert_allclose(found.dequantize(), wanted, rtol=1e-6)


def test_awq(page):
    qweight, qzeros, _ = page["awq"]
    place = lambda o: ORDER.index(o % 8)
    wanted = by_definition(
        page,
        lambda e, i, o: number(qweight, e, i, o // 8, place=place(o)),
        lambda e, g, o: number(qzeros, e, g, o // 8, place=place(o)),
    )
    found = page["from_awq"](*page["awq"], page["group"])
    np.testing.assert_array_equal(exactly(found), wanted)


def test_pack_quantized(page):
    packed, _ = page["pack_quantized"]
    wanted = by_definition(
        page,
        lambda e, i, o: number(packed, e, o, i // 8, place=i % 8),
        lambda *_: 8,
    )
    found = page["from_pack_quantized"](*page["pack_quantized"], page["group"])
    np.testing.assert_array_equal(exactly(found), wanted)
