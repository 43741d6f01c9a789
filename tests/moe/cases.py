"""All cases of all ops: those with names, and what draws them at random. This is the one list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz import products, quantizing, scaled
from tests.moe.activations import case as activations
from tests.moe.case import Case, ModelSizes, Sized
from tests.moe.chunk_sort import case as chunk_sort
from tests.moe.draws import Rng
from tests.moe.layer import case as layer
from tests.moe.permutation import case as permutation
from tests.moe.plans import case as plans
from tests.moe.quantization import case as quantization
from tests.moe.router import case as router
from tests.moe.transformer_engine import case as transformer_engine

NAMED: dict[str, Callable[..., Case]] = {
    **plans.NAMED,
    **permutation.NAMED,
    **chunk_sort.NAMED,
    **quantization.NAMED,
    **activations.NAMED,
    **products.NAMED,
    **router.NAMED,
    **layer.NAMED,
    **transformer_engine.NAMED,
}
ORDINARY = [name for name in NAMED if "," not in name]
# Those that take other ways through the rules for transformations.
UNUSUAL = [
    "plan, int64",
    "plan, several parts, kernels for many",
    "permute, no weights, no scales",
    "permute, scales in powers of two",
    "permute, int8",
    "permute, bfloat16",
    "permute, a wide map",
    "permute, no width",
    "unpermute, no weights",
    "unpermute, bfloat16",
    "unpermute, a wide map",
    "chunks, no probs",
    "chunks, int8",
    "chunks, float64",
    "chunks, wrong, 6 chunks in int32",
    "quantized_glu, no gate",
    "quantize, columns, float8_e5m2",
    "quantize, blocks of columns, int4",
    "feed_forward, gpt-oss",
    "feed_forward, Gemma 4",
    "feed_forward, two arrays",
    "feed_forward, activations are kept",
    "TransformerEngine's dispatch, 32 experts, any number",
    "TransformerEngine's combine, 32 experts, any number",
    "TransformerEngine's selected experts, 2",
    "TransformerEngine's ids, padding",
    "TransformerEngine's ids, rolled",
    "TransformerEngine's router, sigmoid, bias",
    "TransformerEngine's chunks, 3-D",
    "TransformerEngine's dense, biased",
]
# Whose kernels take the interpreter long.
SLOW = {*layer.NAMED, *transformer_engine.NAMED} - {*layer.QUICK, *transformer_engine.QUICK}
# For a GPU: the interpreter would take too long.
LARGE: dict[str, Callable[..., Case]] = {
    **plans.LARGE,
    **permutation.LARGE,
    **chunk_sort.LARGE,
    **quantization.LARGE,
    **activations.LARGE,
    **router.LARGE,
    **layer.LARGE,
    **transformer_engine.LARGE,
}
RANDOM: tuple[Callable[[Rng, str], Case], ...] = (
    *products.OPS,
    *scaled.OPS,
    *plans.RANDOM,
    *permutation.RANDOM,
    *chunk_sort.RANDOM,
    *quantization.RANDOM,
    *activations.RANDOM,
    *layer.RANDOM,
    *router.RANDOM,
    *quantizing.OPS,
)


def _product(**settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        shape = (of.rows, of.hidden, of.width, of.experts)
        return products.dense(path, shape, np.dtype(of.dtype), **settings)

    return made


def _scaled(kind: str, row_kind: str | None = None, **settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        deep = of.hidden + -of.hidden % 64 if "block" in settings else of.hidden
        wide = of.width + -of.width % 64 if settings.get("tiled") else of.width
        shape = (of.rows, deep, wide, of.experts)
        dtype = np.dtype(of.dtype)
        return scaled.scaled_of(path, shape, kind, row_kind=row_kind, dtype=dtype, **settings)

    return made


# Of the sizes of a layer.
SIZED: dict[str, Sized] = {
    **plans.SIZED,
    **permutation.SIZED,
    **chunk_sort.SIZED,
    **quantization.SIZED,
    **activations.SIZED,
    **router.SIZED,
    **transformer_engine.SIZED,
    "ragged_dot": _product(),
    "ragged_dot, transposed": _product(transposed=True),
    "ragged_dot, a bias": _product(biased=True, weighted=True),
    "ragged_dot, float32": _product(result=np.dtype("float32")),
    "ragged_dot, 8 bits": _scaled("float8_e4m3fn", "float8_e4m3fn"),
    "ragged_dot, 8-bit weights": _scaled("float8_e4m3fn"),
    "ragged_dot, int4": _scaled("int4", block=(32, 1), with_zeros=True),
    "ragged_dot, MXFP4 in tiles": _scaled(
        "float4_e2m1fn", block=(32, 1), scale_dtype="float8_e8m0fnu", tiled=True
    ),
    "ragged_dot, NVFP4 in tiles": _scaled(
        "float4_e2m1fn",
        block=(16, 1),
        scale_dtype="float8_e4m3fn",
        with_global_scales=True,
        tiled=True,
    ),
    **layer.SIZED,
}
