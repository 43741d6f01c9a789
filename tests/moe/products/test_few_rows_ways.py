"""Products take the ways that docs/quantized-checkpoints.md says, and warn where it says so."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.moe.launches import array, product_of, scaled
from triax import moe
from triax.compat import jax_private
from triax.errors import ArgumentTypeError
from triax.moe.shared import launching

pytestmark = pytest.mark.cuda_plugin
PAGE = (Path(__file__).parents[3] / "docs" / "quantized-checkpoints.md").read_text()
E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
INT4, E2M1 = "int4", "float4_e2m1fn"
GROUPS, COLUMNS, DEPTH = 4, 128, 192
FEW, MANY = 256 * GROUPS, 257 * GROUPS  # rows
# The columns of the table: each card, and the rows.
CASES = [(90, FEW)], [(89, FEW)], [(90, MANY), (89, MANY)]


def eight(dtype, deep=None, wide=1, columns=COLUMNS, depth=DEPTH, transposed=True):
    shape = (columns, depth) if transposed else (depth, columns)
    how = {"transposed": True} if transposed else {}
    return scaled(array(GROUPS, *shape, dtype=dtype), (1, deep, wide), **how)


def four(dtype, deep=None, scales="float32", zeros=None, wide=1, depth=DEPTH, transposed=True):
    shape = (COLUMNS, depth // 2) if transposed else (depth, COLUMNS // 2)
    how = {"transposed": True} if transposed else {}
    values = array(GROUPS, *shape, dtype="uint8")
    weights = scaled(values, (1, deep, wide), scales, packed=dtype, **how)
    if zeros is None:
        return weights
    return dataclasses.replace(weights, zeros=array(*weights.scales.shape, dtype=zeros))


def nvfp4(deep=16, wide=1):
    weights = four(E2M1, deep, E4M3, wide=wide)
    of_all = array(*weights.scales.shape[:-1], 1, dtype="float32")
    return dataclasses.replace(weights, global_scales=of_all)


def in_tiles(all_weights):
    return [jax.eval_shape(moe.ScaledArray.tile, weights) for weights in all_weights]


# For blocks of the depth, or columns; some with zeros.
SUITABLE = [
    four(INT4, 32, zeros="int8"),
    four(E2M1, 32, E8M0),
    four(INT4),
    four(INT4, 32, wide=64),
    four(INT4, 96),
    four(INT4, 128, zeros="int8"),
    four(INT4, 32, E8M0, "int8"),
    four(E2M1, 32),
    nvfp4(),
    nvfp4(48),
    eight(E4M3, 32),
    eight("int8"),
    eight(E4M3, 128, 128),
    eight("int8", 64),
    eight(E4M3, None, COLUMNS),
]
OTHERS = [
    four(INT4, 16),
    four(INT4, 32, zeros="float32"),
    four(INT4, 32, transposed=False),
    four(E2M1, 16, E8M0),
    nvfp4(8),
    nvfp4(wide=64),
    eight(E4M3, 32, transposed=False),
]
ANY_4 = [SUITABLE[0], SUITABLE[1], OTHERS[0]]
ANY_8 = [eight(E4M3, 32), eight("int8"), eight(E4M3, 128, 128), eight("int8", depth=200)]
ANY_8 += [eight(E4M3, transposed=False), eight(E5M2), eight(E5M2, 32)]
# Tiles of 8 bits take no float16 if blocks share scales.
ANY_TILES = in_tiles([*ANY_4, eight("int8"), eight(E4M3, None, COLUMNS)])
# Each line of the table: rows, and their dtypes; weights likewise.
LINES = [
    ("bfloat16", ["bfloat16"], "tiles, suitable", in_tiles(SUITABLE)),
    ("bfloat16", ["bfloat16"], "tiles, others", in_tiles(OTHERS)),
    ("float16, float32", ["float16", "float32"], "tiles", ANY_TILES),
    ("floats", ["bfloat16", "float16", "float32"], "4 bits", ANY_4 + SUITABLE[:10]),
    ("bfloat16, float16", ["bfloat16", "float16"], "8 bits", ANY_8),
    ("float32", ["float32"], "8 bits", ANY_8),
    ("8-bit floats, by `quantize`", [E4M3, E5M2], "8-bit floats", [eight(E4M3), eight(E5M2, 64)]),
    ("int8, by `quantize`", ["int8"], "int8", [eight("int8")]),
    ("8 bits, by `quantize`", [E4M3, "int8"], "4 bits, tiles", ANY_4 + ANY_TILES),
]


def of_page():
    """The lines of the page's table."""
    section = PAGE.partition("## What multiplies them")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.fixture
def way(monkeypatch):
    """The way of a product that is lowered for a card, and the warnings; nothing is compiled."""
    monkeypatch.setattr(jax_private, "supports_tensor_maps", lambda: True)

    def way(card, num_rows, dtype, weights):
        rows = array(num_rows, weights.shape[1], dtype=dtype)
        if rows.dtype.itemsize == 1:
            rows = scaled(rows, (1, None))
        launches = []

        def noted(*operands, name, out_type, **_):
            if name not in ("ragged_dot_schedule", "widen"):
                launches.append((name, getattr(operands[1], "base", operands[1]).dtype))
            return jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), out_type)

        function, arrays = product_of(rows, weights, GROUPS)
        monkeypatch.setenv("TRIAX_CUDA_ARCH", str(card))
        with (
            mock.patch.object(launching, "triton_call", noted),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            try:
                jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
            except ArgumentTypeError:
                return "refused", []
        texts = [str(each.message) for each in told]
        if not launches:
            return "plain JAX", texts
        ((name, stored),) = launches
        if name in ("few_rows", "very_few_rows"):
            return "in registers", texts
        if rows.dtype.itemsize == 1:
            return "8-bit products", texts
        return "as they are loaded" if stored.itemsize == 1 else "in memory", texts

    return way


@pytest.mark.sampled(1, None)
@pytest.mark.parametrize("index", range(len(LINES)))
def test_the_table_is_the_codes(way, index):
    rows, dtypes, weights, all_weights = LINES[index]
    cells = [rows, weights]
    for cases in CASES:
        found = {}
        for case, dtype, given in itertools.product(cases, dtypes, all_weights):
            which, told = way(*case, dtype, given)
            found[which + ", warns" * bool(told)] = case, dtype, given
        assert len(found) == 1, found
        cells += found
    assert of_page()[index] == f"| {' | '.join(cells)} |"


def test_the_table_has_no_other_lines():
    assert len(of_page()) == len(LINES)


@pytest.mark.parametrize(
    ("card", "dtype", "weights", "needs"),
    [
        (90, "bfloat16", OTHERS[0], "scales for a multiple of 32 along the depth; got 16"),
        (90, "bfloat16", OTHERS[1], "zeros of int8; got float32"),
        (90, "bfloat16", OTHERS[2], "weights that are stored with their depth innermost"),
        (90, "bfloat16", nvfp4(8), "scales for a multiple of 16 along the depth; got 8"),
        (90, "bfloat16", nvfp4(wide=64), "scales of float8_e4m3fn for each column and part of the"),
        (90, "bfloat16", nvfp4(), "weights in tiles (`weights.tile()`). If"),
        (90, "float16", SUITABLE[0], "rows of bfloat16; got float16"),
        (90, "bfloat16", SUITABLE[0], "weights in tiles (`weights.tile()`). If"),
        (80, "bfloat16", SUITABLE[0], "weights in tiles (`weights.tile()`). If"),
    ],
)
def test_a_warning_says_what_keeps_weights_in_memory(way, card, dtype, weights, needs):
    which, (told,) = way(card, FEW, dtype, weights)
    assert which == "in memory"
    shape = f"{weights.dtype}[4,192,128] with scales for blocks {weights.block}"
    assert f"ragged_dot dequantizes its weights, {shape}, in memory in every call" in told
    assert f"registers need {needs}" in told
    assert f"`weights.dequantize(jnp.{dtype})`" in told


@pytest.mark.parametrize("weights", [0, 1, 8], ids=["int4", "mxfp4", "nvfp4"])
def test_tiles_need_no_tma(way, weights):
    """Nor a GPU that has float8_e4m3fn, for scales."""
    (tiled,) = in_tiles([SUITABLE[weights]])
    assert way(80, 64 * GROUPS, "bfloat16", tiled) == ("in registers", [])
    which, (told,) = way(80, 65 * GROUPS, "bfloat16", tiled)
    assert which == "in memory"
    assert (
        "registers need TMA, from Hopper on, or at most 64 rows for each group on average. If"
        in told
    )
    assert way(90, 65 * GROUPS, "bfloat16", tiled) == ("in registers", [])


def test_tiles_of_8_bits_are_undone_where_that_helps(way):
    """Without TMA, and with more rows than the kernel for very few takes."""
    (tiled,) = in_tiles([eight("int8")])
    assert way(80, 64 * GROUPS, "bfloat16", tiled) == ("in registers", [])
    which, (told,) = way(80, 65 * GROUPS, "bfloat16", tiled)
    assert which == "in memory"
    assert "at most 64 rows for each group on average; 8 bits that are not in tiles" in told
    assert way(80, 65 * GROUPS, "bfloat16", eight("int8")) == ("as they are loaded", [])


def test_old_jaxlibs_are_named(way, monkeypatch):
    monkeypatch.setattr(jax_private, "supports_tensor_maps", lambda: False)
    _, (told,) = way(90, FEW, "bfloat16", *in_tiles([SUITABLE[1]]))
    assert "registers need JAX 0.11.1 or later, or at most 8 rows for each group" in told


def test_cards_without_a_type_warn(way):
    which, (told,) = way(80, FEW, "bfloat16", eight(E4M3, 32))
    assert which == "plain JAX"
    assert re.match(r"ragged_dot runs in plain JAX, .* compute capability 80 have no such", told)
    assert way(80, FEW, "bfloat16", eight("int8")) == ("as they are loaded", [])
