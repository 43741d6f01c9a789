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
from tests.moe.case import Case, ModelSizes, Sized
from tests.moe.cases import SIZED
from triax import moe

Arrays = tuple[np.ndarray, ...]
Rng = np.random.Generator
BF16, F32 = "bfloat16", "float32"


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

ROUND, ODD = ModelSizes(64, 128, 64, 3, 2), ModelSizes(33, 20, 42, 3, 2)


def _frozen(w: Any, dtype: str, scale: str) -> Any:
    how = {"block": (1, 32, 1), "transposed": True, "scale_dtype": scale}
    return moe.quantize(jax.lax.stop_gradient(w), dtype, **how)


def _layer(recipe: Any = None, frozen: tuple[str, ...] = ()) -> Sized:
    """A layer with a recipe, or with weights of 4 bits, which have no gradients."""

    def made(path: Any, of: ModelSizes) -> Case:
        case = SIZED["feed_forward"](path, of._replace(hidden=128, width=128) if frozen else of)
        call = case.call.replace("implementation", "recipe=recipe, implementation")
        if frozen:
            call = call.replace("(w_gate_up, w_down,", "(frozen(w_gate_up), frozen(w_down),")
        names = {"recipe": recipe, "frozen": lambda w: _frozen(w, *frozen)}
        return dataclasses.replace(case, call=call, names=case.names | names)

    return made


OPS: dict[str, Sized] = {
    **{n: of for n, of in SIZED.items() if "," not in n or n.startswith(("ragged", "feed"))},
    "feed_forward, rows": _layer("rows"),
    "feed_forward, blocks": _layer("blocks"),
    "feed_forward, all in 8 bits": _layer(moe.Recipe(weight_gradient="rows", fast_sums=False)),
    "feed_forward, frozen int4": _layer(frozen=("int4", F32)),
    "feed_forward, frozen MXFP4": _layer(frozen=("float4_e2m1fn", "float8_e8m0fnu")),
}


@functools.cache
def call_of(name: str, is_round: bool) -> Call:
    """Of one shape or the other; ops take turns with dtypes."""
    if name in KERNELS:
        return KERNELS[name]
    dtype = F32 if [*OPS].index(name) % 2 else BF16
    made = functools.partial(OPS[name], of=(ROUND if is_round else ODD)._replace(dtype=dtype))
    case = made(None)
    arrays = {of: a for of, a in case.inputs(0).items() if of[:2] != "g_"}
    floats = {of for of, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    has_gradient = floats and not floats - {*case.gradients}

    def run(given: Any, implementation: Any) -> Any:
        results = made(implementation).forward(dict(zip(arrays, given, strict=True)))[1]
        return tuple(results.values())

    def draw(rng: Rng, is_round: bool) -> Arrays:
        drawn = case.normal(case.draw(rng), rng)
        finite = lambda of: np.where(np.isfinite(of.astype(F32)), of, of.dtype.type(0))
        return tuple(finite(drawn[of]) if of in floats else drawn[of] for of in arrays)

    return Call(run, draw, lacks=() if has_gradient else ("gradient",))
