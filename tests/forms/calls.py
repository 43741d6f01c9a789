"""What the forms are run with: each op of the package, and each kind of user's kernel.

A call draws its arrays in round shapes, whose slices are multiples of 128 bytes, as XLA:GPU's
fusion of calls with slices wants them, and in odd ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton

import triax
from tests import descriptors, kernels, primitives
from triax import moe

Arrays = tuple[np.ndarray, ...]
Rng = np.random.Generator
BF16, F32 = "bfloat16", "float32"
EXPERTS = 3


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of a tuple of arrays.

    Attributes:
      run: ``run(arrays, implementation)``.
      draw: ``draw(rng, is_round)``.
      expect: the results by NumPy, where that is one line; ops have their oracles elsewhere.
      lacks: of what a form may need, what the function is not; "gradient" if it has none.
      is_kernel: a user's kernel, which has no path in plain JAX.
      needs_tma: it takes a TMA descriptor made on the host.
    """

    run: Callable[[Any, Any], Any]
    draw: Callable[[Rng, bool], Arrays]
    expect: Callable[..., Any] | None = None
    lacks: tuple[str, ...] = ()
    is_kernel: bool = False
    needs_tma: bool = False


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _normal(rng: Rng, *shapes: tuple[int, ...], dtype: Any = F32) -> Arrays:
    return tuple(np.asarray(rng.standard_normal(s, np.float32), jnp.dtype(dtype)) for s in shapes)


# --- users' kernels ---------------------------------------------------------------------------


def _vectors(count: int) -> Callable[[Rng, bool], Arrays]:
    return lambda rng, is_round: _normal(rng, *[(1024 if is_round else 1003,)] * count)


def _blocks(kernel: Any, *arrays: Any, **options: Any) -> Any:
    x = arrays[0]
    grid = lambda meta: triton.cdiv(x.size, meta["BLOCK"])
    how = {"n": x.size, "grid": grid, "out_type": _like(x), "vmap_method": "sequential"}
    if not hasattr(kernel, "configs"):
        how["BLOCK"] = 128
    return triax.triton_call(*arrays, kernel=kernel, **how | options)


def _kernel(run: Any, count: int, expect: Any, **options: Any) -> Call:
    lacks = ("gradient", "export", *options.pop("lacks", ()))
    call = lambda arrays, implementation: run(*arrays, implementation=implementation)
    draw = options.pop("draw", _vectors(count))
    return Call(call, draw, expect, lacks, is_kernel=True, **options)


def _outputs_first(x: Any, y: Any, **how: Any) -> Any:
    by_name = {"x_ptr": x, "y_ptr": y, "out_type": (_like(x), _like(x))}
    return triax.triton_call(
        kernel=kernels.outputs_first_kernel,
        n=x.size,
        BLOCK=128,
        grid=triton.cdiv(x.size, 128),
        vmap_method="sequential",
        **by_name,
        **how,
    )


def _histogram(x: Any, **how: Any) -> Any:
    out_type = jax.ShapeDtypeStruct((32,), jnp.int32)
    return _blocks(
        kernels.histogram_kernel, x, bins=32, out_type=out_type, zeroed_outputs=(0,), **how
    )


def _into_ref(x: Any, y: Any, **how: Any) -> Any:
    ref = jax.new_ref(y)
    _blocks(kernels.accumulate_kernel, x, ref, out_type=(), **how)
    return ref[...]


def _tuned(x: Any, y: Any, mode: str, **how: Any) -> Any:
    aliases = {"y_ptr": 0}
    kernel = kernels.autotuned_accumulate_kernel
    return _blocks(kernel, x, y, input_output_aliases=aliases, tuning=mode, **how)


def _described(kind: str) -> Call:
    def run(x: Any, **how: Any) -> Any:
        return descriptors.call(kind, x, vmap_method="sequential", **how)

    draw = lambda rng, is_round: _normal(rng, (32, 64) if is_round else (35, 44))
    is_host = kind != "device"
    expect = (lambda x: 2 * x) if kind != "host" else None
    return _kernel(run, 1, expect, draw=draw, needs_tma=is_host)


def _own(function: Any) -> Any:
    """A primitive of a user's own, which has no implementations to choose from."""
    return lambda *arrays, implementation: function(*arrays)


def _sharded_add(x: Any, y: Any, **how: Any) -> Any:
    add = lambda x, y: _blocks(kernels.add_kernel, x, y, **how)
    return triax.sharded(add, "t, t -> t", cut="t")(x, y)


def _drawn_ints(rng: Rng, is_round: bool) -> Arrays:
    return (rng.integers(-1, 32, 1024 if is_round else 1003).astype(np.int32),)


_added = lambda x, y: y + x
KERNELS = {
    "kernel": _kernel(functools.partial(_blocks, kernels.add_kernel), 2, _added),
    "kernel, aliased": _kernel(
        functools.partial(_blocks, kernels.accumulate_kernel, input_output_aliases={1: 0}),
        2,
        _added,
    ),
    "kernel, outputs first": _kernel(_outputs_first, 2, lambda x, y: (x + y, x - y)),
    "kernel, zeroed output": _kernel(
        _histogram,
        1,
        lambda x: np.bincount(x[x >= 0], minlength=32).astype(np.int32),
        draw=_drawn_ints,
    ),
    "kernel, Ref": _kernel(_into_ref, 2, _added, lacks=("batching", "types")),
    **{
        f"kernel, autotuned, {mode}": _kernel(functools.partial(_tuned, mode=mode), 2, _added)
        for mode in ("auto", "cached", "off", "runtime")
    },
    "kernel, host TMA": _described("host"),
    "kernel, host TMA of an output": _described("output"),
    "kernel, device TMA": _described("device"),
    "primitive with an alias": _kernel(
        _own(primitives.accumulate), 2, _added, lacks=("batching", "types")
    ),
    "primitive, outputs aliased and not": _kernel(
        _own(lambda x, y: tuple(primitives.sum_and_accumulate(x, y))),
        2,
        lambda x, y: (x + y, y + 2 * x),
        lacks=("batching", "types"),
    ),
    "sharded": _kernel(_sharded_add, 2, _added),
}


# --- ops --------------------------------------------------------------------------------------


def _op(run: Any, draw: Any, **options: Any) -> Call:
    call = lambda arrays, implementation: run(*arrays, implementation=implementation)
    return Call(call, draw, **options)


def _ids(rng: Rng, tokens: int, top_k: int = 2) -> np.ndarray:
    return rng.integers(0, EXPERTS, (tokens, top_k)).astype(np.int32)


def _tokens(dtype: str) -> Callable[[Rng, bool], Arrays]:
    def draw(rng: Rng, is_round: bool) -> Arrays:
        tokens, hidden = (64, 64) if is_round else (33, 20)
        x = _normal(rng, (tokens, hidden), dtype=dtype)
        return *x, *_normal(rng, (tokens, 2)), _ids(rng, tokens)

    return draw


def _moved(x: Any, weights: Any, ids: Any, **how: Any) -> Any:
    plan = moe.make_plan(ids, EXPERTS, align_size=8, **how)
    moved = moe.permute(x, plan, weights=weights, **how)
    back = moe.unpermute(moved.rows, plan, weights, **how)
    return moved.rows, moved.weights, back, plan.group_counts


def _chunks(x: Any, probs: Any, sizes: Any, order: Any, **how: Any) -> Any:
    found = moe.sort_chunks_by_index(x, sizes, order, probs, **how)
    return found.rows, found.probs


def _drawn_chunks(rng: Rng, is_round: bool) -> Arrays:
    rows, width = (64, 64) if is_round else (33, 20)
    sizes = rng.multinomial(rows - 1, np.full(4, 0.25)).astype(np.int32)
    return *_normal(rng, (rows, width), (rows,)), sizes, rng.permutation(4).astype(np.int32)


def _product(dtype: str, transposed: bool = False) -> Call:
    def draw(rng: Rng, is_round: bool) -> Arrays:
        rows, depth, columns = (64, 64, 64) if is_round else (45, 24, 40)
        shape = (EXPERTS, columns, depth) if transposed else (EXPERTS, depth, columns)
        sizes = rng.multinomial(rows - 3, np.full(EXPERTS, 1 / EXPERTS)).astype(np.int32)
        return *_normal(rng, (rows, depth), shape, dtype=dtype), sizes

    return _op(functools.partial(moe.ragged_dot, transpose_weights=transposed), draw)


def _stored_product(dtype: str, block: Any, scale: str = F32, tile: bool = False) -> Call:
    """Rows times weights in 8 or 4 bits, which are made here: their layout is the op's own."""

    def run(rows: Any, weights: Any, sizes: Any, implementation: Any) -> Any:
        stored = moe.quantize(weights, dtype, block=block, transposed=True, scale_dtype=scale)
        stored = stored.tile() if tile else stored
        return moe.ragged_dot(rows, stored, sizes, implementation=implementation)

    def draw(rng: Rng, is_round: bool) -> Arrays:
        shapes = (32, 128), (EXPERTS, 128, 128 if is_round else 64)
        sizes = rng.multinomial(29, np.full(EXPERTS, 1 / EXPERTS)).astype(np.int32)
        return *_normal(rng, *shapes, dtype=BF16), sizes

    return _op(run, draw, lacks=("gradient",))


def _glu(gate_up: Any, weights: Any, **how: Any) -> Any:
    return moe.glu(gate_up, weights, **how)


def _drawn_glu(rng: Rng, is_round: bool) -> Arrays:
    rows, width = (64, 128) if is_round else (33, 42)
    return *_normal(rng, (rows, width), dtype=BF16), *_normal(rng, (rows,))


def _route(logits: Any, bias: Any, **how: Any) -> Any:
    router = moe.Router(2, score="sigmoid", normalize=True)
    return tuple(moe.route(logits, router, bias=bias, **how))


def _drawn_logits(rng: Rng, is_round: bool) -> Arrays:
    return _normal(rng, (64, 32) if is_round else (33, 7), (32 if is_round else 7,))


def _quantized(x: Any, **how: Any) -> Any:
    found = moe.quantize(x, "float8_e4m3fn", block=(1, 32), **how)
    return found.values, found.scales


def _layer(dtype: str, **options: Any) -> Call:
    def run(x: Any, logits: Any, w_gate_up: Any, w_down: Any, implementation: Any) -> Any:
        experts = moe.Experts(w_gate_up, w_down)
        how = {"implementation": implementation, **options}
        out = moe.feed_forward(x, logits, experts, moe.Router(2), **how)
        return out.tokens, out.group_counts

    return _op(run, _drawn_layer(dtype))


def _drawn_layer(dtype: str) -> Callable[[Rng, bool], Arrays]:
    def draw(rng: Rng, is_round: bool) -> Arrays:
        tokens, hidden, width = (64, 128, 128) if is_round else (33, 48, 80)
        shapes = (EXPERTS, hidden, 2 * width), (EXPERTS, width, hidden)
        x, w_gate_up, w_down = _normal(rng, (tokens, hidden), *shapes, dtype=dtype)
        return x, *_normal(rng, (tokens, EXPERTS)), w_gate_up / 8, w_down / 8

    return draw


def _frozen_layer(dtype: str, block: int, scale: str) -> Call:
    """A layer with frozen weights of 4 bits: gradients reach the tokens and logits alone."""

    def run(x: Any, logits: Any, w_gate_up: Any, w_down: Any, implementation: Any) -> Any:
        kept = [
            moe.quantize(
                jax.lax.stop_gradient(w),
                dtype,
                block=(1, block, 1),
                transposed=True,
                scale_dtype=scale,
            )
            for w in (w_gate_up, w_down)
        ]
        experts = moe.Experts(*kept)
        how = {"implementation": implementation}
        return moe.feed_forward(x, logits, experts, moe.Router(2), **how).tokens

    def draw(rng: Rng, is_round: bool) -> Arrays:
        x, w_gate_up, w_down = _normal(
            rng, (64 if is_round else 33, 128), (EXPERTS, 128, 256), (EXPERTS, 128, 128), dtype=BF16
        )
        return x, *_normal(rng, (len(x), EXPERTS)), w_gate_up / 8, w_down / 8

    return _op(run, draw)


OPS = {
    "moves, float32": _op(_moved, _tokens(F32)),
    "moves, bfloat16": _op(_moved, _tokens(BF16)),
    "sort_chunks_by_index": _op(_chunks, _drawn_chunks),
    "ragged_dot, bfloat16": _product(BF16),
    "ragged_dot, float32": _product(F32),
    "ragged_dot, transposed": _product(BF16, transposed=True),
    "ragged_dot, 8-bit weights": _stored_product("float8_e4m3fn", (1, None, 1)),
    "ragged_dot, int4": _stored_product("int4", (1, 32, 1)),
    "ragged_dot, MXFP4 in tiles": _stored_product(
        "float4_e2m1fn", (1, 32, 1), "float8_e8m0fnu", tile=True
    ),
    "glu": _op(_glu, _drawn_glu),
    "route": _op(_route, _drawn_logits),
    "quantize": _op(
        _quantized, lambda rng, is_round: _normal(rng, (64, 64), dtype=BF16), lacks=("gradient",)
    ),
    "feed_forward, bfloat16": _layer(BF16),
    "feed_forward, float32": _layer(F32),
    "feed_forward, rows": _layer(BF16, recipe="rows"),
    "feed_forward, blocks": _layer(BF16, recipe="blocks"),
    "feed_forward, all in 8 bits": _layer(
        BF16, recipe=moe.Recipe(weight_gradient="rows", fast_sums=False)
    ),
    "feed_forward, frozen int4": _frozen_layer("int4", 32, F32),
    "feed_forward, frozen MXFP4": _frozen_layer("float4_e2m1fn", 32, "float8_e8m0fnu"),
}
CALLS = KERNELS | OPS
