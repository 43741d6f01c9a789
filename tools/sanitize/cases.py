"""The calls of the MoE ops whose kernels are sanitized: the tests' cases, and few rows in bfloat16.

They run op by op in the interpreter, whose target is a GPU of compute capability 9.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from tests.moe.case import widths
from tests.moe.cases import NAMED
from tests.moe.quantization.oracle import nvfp4

from triax import moe

HOW = {"implementation": "interpret"}
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 37, 72, 40, 5, 3


def draw(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def with_gradients(function: Callable, *args: jax.Array) -> None:
    out, pull = jax.vjp(function, *args)
    jax.block_until_ready(pull(jax.tree.map(jnp.ones_like, out)))


def layer(recipe: str | moe.Recipe) -> None:
    given = (
        draw(TOKENS, HIDDEN),
        draw(TOKENS, EXPERTS, dtype="float32"),
        draw(EXPERTS, HIDDEN, 2 * WIDTH),
        draw(EXPERTS, WIDTH, HIDDEN),
    )

    def run(x: jax.Array, logits: jax.Array, *weights: jax.Array) -> jax.Array:
        experts, router = moe.Experts(*weights), moe.Router(TOP_K)
        return moe.feed_forward(x, logits, experts, router, recipe=recipe, **HOW).tokens

    with_gradients(run, *given)


def weights_alone(dtype: str, rows_per_group: int, **options) -> None:
    rows = draw(EXPERTS * rows_per_group, 128)
    sizes = jnp.full(EXPERTS, rows_per_group, jnp.int32).at[1].set(2 * rows_per_group)
    block = options.pop("block", (1, None, 1))
    weights = draw(EXPERTS, 128, 192, dtype="float32")
    tiled = options.pop("tiled", False)
    if dtype == "NVFP4":
        weights = nvfp4(weights.shape)
    else:
        weights = moe.quantize(weights, dtype, block=block, transposed=True, **options)
    weights = weights.tile() if tiled else weights
    jax.block_until_ready(moe.ragged_dot(rows, weights, sizes, **HOW))


def named(name: str) -> None:
    """One of the tests' cases, with its gradients."""
    case = NAMED[name]("interpret")
    arrays = case.inputs(0)
    with widths(arrays), case.within():
        jax.block_until_ready(case.everything(arrays))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Names, and functions that run the ops."""
    of = functools.partial
    for name in NAMED:
        if NAMED[name]("interpret").is_checked:
            yield name, of(named, name)
    yield "layer, 8 bits", of(layer, moe.Recipe(weight_gradient="rows"))
    yield "layer, blocks", of(layer, "blocks")
    for dtype in ("int8", "float8_e4m3fn"):
        yield f"weights of {dtype}", of(weights_alone, dtype, 20)
        for rows in (3, 20):
            name = f"weights of {dtype}, {rows} rows, tiles"
            yield name, of(weights_alone, dtype, rows, tiled=True)
    blocks = {"block": (1, 32, 1)}
    for kind, dtype, options in (
        ("int4", "int4", {}),
        ("int4, 32 deep", "int4", blocks),
        ("MXFP4", "float4_e2m1fn", blocks | {"scale_dtype": "float8_e8m0fnu"}),
        ("NVFP4", "NVFP4", {}),
    ):
        yield f"weights of {kind}", of(weights_alone, dtype, 20, **options)
        for rows in (3, 20, 50):
            name = f"weights of {kind}, {rows} rows, tiles"
            yield name, of(weights_alone, dtype, rows, tiled=True, **options)
