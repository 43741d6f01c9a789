"""A product and the activation of its result, by one kernel where there is one."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.moe import draws
from tests.moe.activations.case import ACTIVATIONS, Activation, apart, glu_of
from tests.moe.bounds import exact, rounded
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng
from tests.moe.products.case import Shape, ragged_dot
from triax.moe.activations.options import resolve
from triax.moe.products import ops
from triax.moe.products.options import Groups, Options


def product_and_glu(
    rows: Any,
    weights: Any,
    sizes: Any,
    bias: Any,
    row_weights: Any,
    activation: Any,
    interleaved: bool,
    transposed: bool,
    implementation: Any,
) -> Any:
    spec, _ = resolve(activation, interleaved)
    options: dict[str, Any] = {"transposed": transposed, "options": Options(rows.dtype, None)}
    options["keep_product"] = True
    operands = rows, weights, Groups(sizes), bias, row_weights
    return ops.ragged_dot_glu(*operands, spec=spec, implementation=implementation, **options)


def with_glu(
    path: str,
    shape: Shape,
    kind: Activation = ACTIVATIONS[0],
    *,
    interleaved: bool = False,
    transposed: bool = False,
    weighted: bool = False,
    bias: Any = "",
    **settings: Any,
) -> Case:
    """Of gate and up there are gradients; what the activation makes of them has none."""
    one = ragged_dot(path, shape, "bfloat16", transposed=transposed, bias=bias, **settings)
    extra = "bias" if bias else None, "row_weights" if weighted else None
    call = f"product_and_glu(rows, weights, sizes, {', '.join(map(str, extra))}, {kind.source}, "
    call += f"{interleaved}, {transposed}, how)"

    def draw(rng: Rng) -> Arrays:
        arrays = one.draw(rng)
        arrays["g_gate_up"] = arrays.pop("g_out")
        if weighted:
            arrays["row_weights"] = draws.values(rng, (shape[0],), np.float32)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        wanted = one.expect(arrays | {"g_out": arrays["g_gate_up"]}, found)
        gate, up = apart(exact(found["gate_up"]), kind, interleaved)
        weights = exact(arrays["row_weights"]) if weighted else None
        out, *_ = glu_of(gate, up, weights, kind, exact(np.ones_like(gate.value)))
        return wanted | {"gate_up": wanted.pop("out"), "out": rounded(out, jnp.bfloat16)}

    names = {"product_and_glu": product_and_glu}
    results = "gate_up", "out"
    return Case("ragged_dot and glu", path, call, results, draw, expect, one.gradients, names)


_GIVEN: dict[str, Any] = {"given": ((7, 0, 9),)}
_CASES = {
    "interleaved": functools.partial(
        with_glu, shape=(20, 16, 12, 3), interleaved=True, weighted=True, **_GIVEN
    ),
    "transposed, a bias": functools.partial(
        with_glu, shape=(20, 16, 12, 3), kind=ACTIVATIONS[3], transposed=True, bias="bfloat16"
    ),
    "no gate": functools.partial(
        with_glu, shape=(20, 16, 12, 3), kind=ACTIVATIONS[8], weighted=True, bias="float32"
    ),
    "a bias alone": functools.partial(
        with_glu, shape=(20, 16, 12, 3), bias="bfloat16", by=("bias",), **_GIVEN
    ),
}
NAMED = {f"ragged_dot and glu, {name}": case for name, case in _CASES.items()}
LARGE: dict[str, functools.partial[Case]] = {
    f"ragged_dot and glu, {columns} columns, {kind.source}": functools.partial(
        with_glu,
        shape=(3072, 256, columns, 8),
        kind=kind,
        interleaved=kind.gated and columns > 400,
        weighted=True,
        bias="bfloat16" * (columns == 512),
        given=((0, 1, 700, 63, 64, 65, 1500, 300),),
    )
    for columns, kind in ((400, ACTIVATIONS[0]), (512, ACTIVATIONS[3]), (1024, ACTIVATIONS[8]))
}
