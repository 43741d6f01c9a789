"""All cases of all ops: those with names, and what draws them at random. This is the one list."""

from __future__ import annotations

from collections.abc import Callable

from tests.moe.activations import case as activations
from tests.moe.case import Case, Sized
from tests.moe.chunk_sort import case as chunk_sort
from tests.moe.draws import Rng
from tests.moe.layer import case as layer
from tests.moe.permutation import case as permutation
from tests.moe.plans import case as plans
from tests.moe.products import case as products
from tests.moe.products import glu_case, outer_case, scaled_case, widening_case
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
    **scaled_case.NAMED,
    **glu_case.NAMED,
    **outer_case.NAMED,
    **widening_case.NAMED,
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
    "ragged_dot, transposed",
    "ragged_dot, weights in tiles",
    "ragged_dot, 8 bits",
]
# Whose kernels take the interpreter long.
SLOW = {*layer.NAMED, *transformer_engine.NAMED} - {*layer.QUICK, *transformer_engine.QUICK}
SLOW |= {*scaled_case.SLOW, *widening_case.SLOW, "quantized_outer, many groups"}
# For a GPU: the interpreter would take too long.
LARGE: dict[str, Callable[..., Case]] = {
    **plans.LARGE,
    **permutation.LARGE,
    **chunk_sort.LARGE,
    **quantization.LARGE,
    **activations.LARGE,
    **products.LARGE,
    **scaled_case.LARGE,
    **glu_case.LARGE,
    **outer_case.LARGE,
    **router.LARGE,
    **layer.LARGE,
    **transformer_engine.LARGE,
}
RANDOM: tuple[Callable[[Rng, str], Case], ...] = (
    *products.RANDOM,
    *scaled_case.RANDOM,
    *outer_case.RANDOM,
    *plans.RANDOM,
    *permutation.RANDOM,
    *chunk_sort.RANDOM,
    *quantization.RANDOM,
    *activations.RANDOM,
    *layer.RANDOM,
    *router.RANDOM,
)


# Of the sizes of a layer.
SIZED: dict[str, Sized] = {
    **plans.SIZED,
    **permutation.SIZED,
    **chunk_sort.SIZED,
    **quantization.SIZED,
    **activations.SIZED,
    **products.SIZED,
    **scaled_case.SIZED,
    **router.SIZED,
    **transformer_engine.SIZED,
    **layer.SIZED,
}
