"""What the ops launch, as text: each kernel with its grid, constants, operands and results.

    python -m tests.moe.launches > tests/moe/launches.txt

Programs are traced for the interpreter's target and for a GPU without TMA, and not run.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tests.moe.case import Case
from tests.moe.plans.case import Sizes, make_plan, make_plan_from_mask
from tests.moe.router.case import Spec, route
from triax import TensorDescriptor, moe
from triax.call import triton_call
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import launching, target

OLD = target.Target(compute_capability=80, multiprocessors=108, tensor_maps=False)
E4M3, HALF, WIDE = "float8_e4m3fn", "bfloat16", "float32"
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


def array(*shape: int, dtype: str = HALF) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def scaled(values: Any, block: tuple[int | None, ...], kind: str = WIDE, **how: Any) -> Any:
    numbers = (*values.shape[:-1], values.shape[-1] * (2 if "packed" in how else 1))
    stored = (block[0], *block[:0:-1]) if "transposed" in how else block
    scales = [1 if of is None else -(-n // of) for n, of in zip(numbers, stored, strict=True)]
    return ScaledArray(values, array(*scales, dtype=kind), block, **how)


def with_gradient(function: Any) -> Any:
    def run(*args: Any, implementation: str) -> Any:
        moving = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]
        held = list(args)

        def of(*some: Any) -> Any:
            for i, a in zip(moving, some, strict=True):
                held[i] = a
            found = jax.tree.leaves(function(*held, implementation=implementation))
            return [a for a in found if jnp.issubdtype(a.dtype, jnp.floating)]

        out, pull = jax.vjp(of, *(args[i] for i in moving))
        return pull([jnp.ones_like(a) for a in out])

    return run


def product(
    rows: int, depth: int, columns: int, dtype: str = HALF, groups: int = 5, **how: Any
) -> Any:
    shape = (groups, columns, depth) if how.get("transpose_weights") else (groups, depth, columns)
    arrays = array(rows, depth, dtype=dtype), array(*shape, dtype=dtype)
    return functools.partial(moe.ragged_dot, **how), (*arrays, array(groups, dtype="int32"))


def product_of(rows: Any, weights: Any, groups: int = 5, **how: Any) -> Any:
    return functools.partial(moe.ragged_dot, **how), (rows, weights, array(groups, dtype="int32"))


def biased(rows: int) -> Any:
    def run(x: Any, w: Any, sizes: Any, bias: Any, each: Any, **how: Any) -> Any:
        return moe.ragged_dot(x, w, sizes, bias=bias, bias_weights=each, **how)

    _, arrays = product(rows, 64, 48)
    return with_gradient(run), (*arrays, array(5, 48), array(rows, dtype=WIDE))


def in_tiles(case: Any) -> Any:
    run, (rows, weights, sizes) = case
    return run, (rows, jax.eval_shape(ScaledArray.tile, weights), sizes)


def of_case(made: Callable[..., Case], **settings: Any) -> Any:
    """A case with its gradients; `settings` are those of a function of a path."""
    made = functools.partial(made, **settings)

    def run(arrays: Any, *, implementation: Any) -> Any:
        return made(implementation).everything(arrays)

    return run, (jax.eval_shape(lambda: made(None).inputs(0)),)


def plan(tokens: int, top_k: int, experts: int, **how: Any) -> Any:
    return of_case(make_plan, sizes=Sizes(tokens, top_k, experts)._replace(**how))


def mask(tokens: int, top_k: int, experts: int, **how: Any) -> Any:
    return of_case(make_plan_from_mask, sizes=Sizes(tokens, top_k, experts)._replace(**how))


def router(tokens: int, experts: int, top_k: int, dtype: str = WIDE, **how: Any) -> Any:
    return of_case(route, spec=Spec(experts, top_k, **how), tokens=tokens, dtype=dtype)


def gradient(case: Any) -> Any:
    return with_gradient(case[0]), case[1]


def eight(rows: int, block: Any, dtype: str = E4M3) -> Any:
    weights = scaled(array(5, 256, 512, dtype=dtype), block, transposed=True)
    return product_of(array(rows, 512), weights)


def packed(
    rows: int, kind: str, block: int, numbers: str, zeros: bool = False, columns: int = 96
) -> Any:
    values = array(5, columns, 64, dtype="uint8")
    weights = scaled(values, (1, block, 1), kind, transposed=True, packed=numbers)
    if zeros:
        of = array(*weights.scales.shape, dtype="int8")
        weights = dataclasses.replace(weights, zeros=of)
    return product_of(array(rows, 128), weights)


def nvfp4(rows: int) -> Any:
    run, (x, weights, sizes) = packed(rows, E4M3, 16, "float4_e2m1fn", columns=128)
    weights = dataclasses.replace(weights, global_scales=array(5, 128, 1, dtype=WIDE))
    return in_tiles((run, (x, weights, sizes)))


CASES: dict[str, Any] = {
    "ragged_dot of few rows, and gradients": gradient(product(40, 512, 1024)),
    "ragged_dot of many rows, and gradients": gradient(product(4000, 512, 1024)),
    "ragged_dot of odd sizes, and gradients": gradient(product(300, 33, 21)),
    "ragged_dot of float32, and gradients": gradient(product(300, 512, 256, WIDE)),
    "ragged_dot of TF32, and gradients": gradient(
        product(300, 512, 256, WIDE, precision="tensorfloat32")
    ),
    "ragged_dot transposed, and gradients": gradient(
        product(4000, 512, 1024, transpose_weights=True)
    ),
    "ragged_dot with a bias, and gradients": biased(300),
    "ragged_dot of some groups": (
        functools.partial(moe.ragged_dot, group_offset=3),
        (array(4000, 512), array(5, 512, 256), array(20, dtype="int32")),
    ),
    "ragged_dot of 8 bits": product(4000, 512, 256, E4M3, preferred_element_type=WIDE),
    "ragged_dot of 8 bits, fast": product(4000, 512, 256, E4M3, precision=FAST),
    "ragged_dot of blocks": product_of(
        scaled(array(4000, 512, dtype=E4M3), (1, 128)),
        scaled(array(5, 256, 512, dtype=E4M3), (1, 128, 128), transposed=True),
    ),
    "ragged_dot of scaled rows and columns": product_of(
        scaled(array(400, 512, dtype=E4M3), (1, None)),
        scaled(array(5, 256, 512, dtype=E4M3), (1, None, 1), transposed=True),
    ),
    "ragged_dot of 8-bit weights, few rows": eight(40, (1, None, 1)),
    "ragged_dot of 8-bit weights, blocks": eight(40, (1, 128, 128)),
    "ragged_dot of 8-bit weights, many rows": eight(4000, (1, None, 1)),
    "ragged_dot of 8-bit weights, blocks, many rows": eight(4000, (1, 128, 128)),
    "ragged_dot of 8-bit weights in tiles": in_tiles(eight(40, (1, None, 1))),
    "ragged_dot of 8-bit weights in tiles, blocks": in_tiles(eight(40, (1, 128, 128))),
    "ragged_dot of int8 in tiles, 60 rows a group": in_tiles(eight(300, (1, None, 1), "int8")),
    "ragged_dot of 8-bit weights in tiles, many rows": in_tiles(eight(4000, (1, None, 1))),
    "ragged_dot of 4-bit weights": packed(40, WIDE, 32, "int4"),
    "ragged_dot of 4-bit weights with zeros": packed(40, WIDE, 32, "int4", zeros=True),
    "ragged_dot of 4-bit weights, bfloat16 scales": packed(40, HALF, 32, "int4"),
    "ragged_dot of 4-bit weights, whole depth": packed(40, WIDE, 128, "int4"),
    "ragged_dot of MXFP4": packed(40, "float8_e8m0fnu", 32, "float4_e2m1fn"),
    "ragged_dot of MXFP4, many rows": packed(4000, "float8_e8m0fnu", 32, "float4_e2m1fn"),
    "ragged_dot of MXFP4 in tiles": in_tiles(
        packed(40, "float8_e8m0fnu", 32, "float4_e2m1fn", columns=128)
    ),
    "ragged_dot of MXFP4 in tiles, 2 rows a group": in_tiles(
        packed(10, "float8_e8m0fnu", 32, "float4_e2m1fn", columns=128)
    ),
    "ragged_dot of MXFP4 in tiles, 20 rows a group": in_tiles(
        packed(100, "float8_e8m0fnu", 32, "float4_e2m1fn", columns=128)
    ),
    "ragged_dot of MXFP4 in tiles, 60 rows a group": in_tiles(
        packed(300, "float8_e8m0fnu", 32, "float4_e2m1fn", columns=128)
    ),
    "ragged_dot of NVFP4 in tiles": nvfp4(40),
    "ragged_dot of NVFP4 in tiles, 60 rows a group": nvfp4(300),
    "ragged_dot of NVFP4 in tiles, many rows": nvfp4(4000),
    "ragged_dot of 4-bit weights in tiles, 60 rows a group": in_tiles(
        packed(300, WIDE, 32, "int4", True, columns=128)
    ),
    "ragged_dot of 4-bit weights in tiles, many rows": in_tiles(
        packed(4000, WIDE, 32, "int4", True, columns=128)
    ),
    "plan of few pairs": plan(100, 8, 64),
    "plan of many pairs": plan(5000, 8, 300, align=16, capacity=100),
    "plan of very many pairs": plan(50000, 8, 64),
    "plan of a mask": mask(1000, 2, 64),
    "plan of a mask, all experts": mask(1000, 64, 64, num_rows=4096, align=8, capacity=7),
    "plan of a mask, few experts": mask(1000, 16, 16),
    "plan of a mask, an expert more": mask(1000, 17, 17),
    "route, softmax": router(1000, 64, 6),
    "route, softmax of the chosen, bfloat16": router(1000, 128, 8, HALF, normalize=True),
    "route, in groups, with a bias": router(
        1000, 256, 8, biased=True, score="sigmoid", normalize=True, groups=(8, 4, "top2")
    ),
    "route, in groups by their best": router(1000, 160, 6, groups=(8, 3, "max"), scale=16.0),
    "route, in two groups": router(1000, 256, 8, groups=(2, 1, "top2")),
    "route, float16": router(1000, 16, 2, "float16"),
    "route, no score": router(10, 33, 4, score="none"),
}


def _shown(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        of = f"{value.shape} by {value.strides} in {value.block_shape}".replace(" ", "")
        return f"{_shown(value.base)} as {of}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    if hasattr(value, "shape"):
        return f"{np.dtype(value.dtype).name}{list(value.shape)}".replace(" ", "")
    return str(value)


def _noted(
    launches: dict[str, None], *operands: Any, kernel: Any, name: str, grid: Any, **keywords: Any
) -> Any:
    assert keywords["implementation"] == "interpret"
    given = [
        f"{key}={_shown(value)}"
        for key, value in sorted(keywords.items())
        if value is not None and key not in ("implementation", "vmap_method")
    ]
    shown = f"  {name} {grid}\n    {_shown(operands)}\n    {', '.join(given)}"
    launches[shown.replace("bfloat16", "bf16").replace("float32", "f32")] = None
    return triton_call(*operands, kernel=kernel, name=name, grid=grid, **keywords)


def text(name: str) -> str:
    """The launches of a case: each once, in order; for the second target only where they differ."""
    function, arrays = CASES[name]
    found = []
    for gpu in (target.INTERPRETER, OLD):
        launches: dict[str, None] = {}
        noted = functools.partial(_noted, launches)
        with (
            mock.patch.object(target, "INTERPRETER", gpu),
            mock.patch.object(launching, "triton_call", noted),
            jax.default_matmul_precision(None),
        ):
            jax.make_jaxpr(functools.partial(function, implementation="interpret"))(*arrays)
        found.append("\n".join(launches))
    other = "" if found[0] == found[1] else f"\n where there is no TMA:\n{found[1]}"
    return f"{name}:\n{found[0]}{other}\n"


if __name__ == "__main__":
    sys.stdout.write("\n".join(map(text, CASES)))
