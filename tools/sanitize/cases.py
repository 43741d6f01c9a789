"""The calls of the MoE ops whose kernels are sanitized: sizes that fit no block, hostile groups.

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
# Rows by group; the last ones go past all rows, or come before and after the groups.
SIZES = {
    "uneven": [0, 70, 3, 1, 37],
    "short": [5, 0, 40, 0, 9],
    "wrong": [-4, 20, 2**31 - 1, 6, 7],
}


def draw(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def with_gradients(function: Callable, *args: jax.Array) -> None:
    out, pull = jax.vjp(function, *args)
    jax.block_until_ready(pull(jax.tree.map(jnp.ones_like, out)))


def product(dtype: str, sizes: str, columns: int = WIDTH, bias: bool = False, **options) -> None:
    rows = draw(111, HIDDEN, dtype=dtype)
    shape = (columns, HIDDEN) if options.get("transpose_weights") else (HIDDEN, columns)
    weights = draw(EXPERTS, *shape, dtype=dtype, seed=1)
    group_sizes = jnp.array(SIZES[sizes], jnp.int32)
    run = functools.partial(moe.ragged_dot, group_sizes=group_sizes, **options, **HOW)
    if not bias:
        return with_gradients(run, rows, weights)
    given = rows, weights, draw(EXPERTS, columns, dtype=dtype), draw(111, dtype="float32")
    with_gradients(lambda x, w, b, s: run(x, w, bias=b, bias_weights=s), *given)


def some_groups() -> None:
    sizes = jnp.array([9, 40, *SIZES["uneven"], 3], jnp.int32)
    offset = jnp.int32(2)
    rows, weights = draw(111, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)
    run = functools.partial(moe.ragged_dot, group_sizes=sizes, group_offset=offset, **HOW)
    with_gradients(run, rows, weights)


def activation(name: object, dtype: str, interleaved: bool = False) -> None:
    run = functools.partial(moe.glu, activation=name, interleaved=interleaved, **HOW)
    columns = 2 * 37 if name not in ("relu2", "gelu_exact") else 37
    with_gradients(run, draw(53, columns, dtype=dtype), draw(53, dtype="float32"))


def layer(dtype: str, interleaved: bool = False, **options) -> None:
    given = (
        draw(TOKENS, HIDDEN, dtype=dtype),
        draw(TOKENS, EXPERTS, dtype="float32"),
        draw(EXPERTS, HIDDEN, 2 * WIDTH, dtype=dtype),
        draw(EXPERTS, WIDTH, HIDDEN, dtype=dtype),
    )
    router, options = moe.Router(TOP_K), options | HOW

    def run(x: jax.Array, logits: jax.Array, *weights: jax.Array) -> jax.Array:
        experts = moe.Experts(*weights, interleaved=interleaved)
        return moe.feed_forward(x, logits, experts, router, **options).tokens

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


def eight_bits(rows_block: tuple, weights_block: tuple, precision: str | None) -> None:
    rows = moe.quantize(draw(111, 256), block=rows_block, **HOW)
    weights = draw(EXPERTS, 256, WIDTH)
    weights = moe.quantize(weights, block=weights_block, transposed=True, **HOW)
    sizes = jnp.array(SIZES["uneven"], jnp.int32)
    jax.block_until_ready(moe.ragged_dot(rows, weights, sizes, precision=precision, **HOW))


def named(name: str) -> None:
    """One of the tests' cases, with its gradients."""
    case = NAMED[name]("interpret")
    arrays = case.inputs(0)
    with widths(arrays), case.within():
        jax.block_until_ready(case.everything(arrays))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Names, and functions that run the ops."""
    of = functools.partial
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        router = moe.Router(TOP_K, score=score, normalize=True)
        run = lambda x, router=router: moe.route(x, router, **HOW).weights
        yield f"route, {score}", of(with_gradients, run, draw(TOKENS, 130, dtype="float32"))
    for name in NAMED:
        if NAMED[name]("interpret").is_checked:
            yield name, of(named, name)
    for dtype in ("bfloat16", "float16", "float32"):
        for sizes in SIZES:
            yield f"product, {dtype}, {sizes}", of(product, dtype, sizes)
    yield "product, no descriptors", of(product, "bfloat16", "uneven", columns=37)
    yield "product, transposed", of(product, "bfloat16", "short", transpose_weights=True)
    yield "product, bias", of(product, "bfloat16", "uneven", bias=True)
    yield "product, bias, no descriptors", of(product, "float32", "short", columns=37, bias=True)
    yield "product, some groups", some_groups
    for name in ("swiglu", moe.Swiglu(1.7, 1.0, 1.0), "gelu_exact", "relu2"):
        yield f"activation, {name}", of(activation, name, "bfloat16")
    yield "activation, interleaved", of(activation, "geglu", "float32", interleaved=True)
    yield "layer", of(layer, "bfloat16")
    yield "layer, interleaved", of(layer, "bfloat16", interleaved=True, capacity=7)
    yield "layer, 8 bits", of(layer, "bfloat16", recipe=moe.Recipe(weight_gradient="rows"))
    yield "layer, blocks", of(layer, "bfloat16", recipe="blocks")
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
    fast = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
    yield "8 bits, rows", of(eight_bits, (1, None), (1, None, 1), fast)
    yield "8 bits, float32 sums", of(eight_bits, (1, None), (1, None, 1), None)
    yield "8 bits, blocks", of(eight_bits, (1, 128), (1, 128, 128), None)
