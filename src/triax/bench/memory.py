"""How much memory a route takes, there and back with gradients, and what for.

Compiles the program and reads what XLA says of it: the bytes of arguments, outputs and temporary
buffers, and each buffer as large as the rows, [tokens * top_k, hidden], with what it is for.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp

from triax.bench.cases import Case
from triax.bench.competitors import competitors
from triax.bench.hlo import Array, Program
from triax.bench.presets import Preset
from triax.bridge.errors import ArgumentValueError

OP = "route+grad"
IMPLEMENTATIONS = ("triax", "argsort+take", "hand-written vjp", "hand-fused vjp")

_XLA_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def measure_memory(
    preset: Preset, tokens: int, dtype: str, implementation: str = "triax"
) -> dict[str, Any]:
    """The memory of plan, permute and weighted unpermute, forward and backward.

    Nothing is run and no array is made: the program is compiled for the default device.

    Args:
      preset: the model's shape.
      tokens: how many.
      dtype: of the tokens; weights are float32.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      The record: program, preset, tokens, dtype, implementation, argument_bytes, output_bytes,
      temporary_bytes, row_buffers (see `row_buffers`), and as `expected` those that the
      mathematics needs.

    Raises:
      ArgumentValueError: `implementation` is none of those.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentValueError(
            f"Argument `implementation` must be one of {', '.join(IMPLEMENTATIONS)}; got "
            f"{implementation!r}."
        )
    case = Case.routed(OP, preset, tokens, dtype, "uniform")
    inputs = {
        "x": jax.ShapeDtypeStruct((tokens, case.hidden), jnp.dtype(dtype)),
        "selected_experts": jax.ShapeDtypeStruct((tokens, case.top_k), jnp.int32),
        "weights": jax.ShapeDtypeStruct((tokens, case.top_k), jnp.float32),
        "gradient": jax.ShapeDtypeStruct((tokens, case.hidden), jnp.dtype(dtype)),
    }
    program = case.program if implementation == "triax" else competitors(case)[implementation]
    compiled: Any = jax.jit(program).lower(inputs).compile()
    stats = compiled.memory_analysis()
    return {
        "program": OP,
        "preset": preset.name,
        "tokens": tokens,
        "dtype": dtype,
        "implementation": implementation,
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "row_buffers": row_buffers(compiled.as_text(), tokens * case.top_k, case.hidden),
        "expected": expected_buffers(case),
    }


def row_buffers(text: str, num_rows: int, hidden: int) -> list[dict[str, Any]]:
    """The buffers of an optimised program that hold as many elements as the rows.

    Of any dtype, and in any shape that ends in `hidden`: rows by token and slot count too. The
    program's outputs are left out. Two buffers may lie in the same memory where they are not
    alive at the same time: this is what is written, `temporary_bytes` what is held.

    Args:
      text: of the program, as ``compiled.as_text()`` gives it.
      num_rows: tokens * top_k.
      hidden: elements of a row.

    Returns:
      For each shape and origin: shape ("bf16[131072,7168]"), bytes of one, count, and what, the
      kernel or operation that writes it.
    """
    found: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for instruction, array in Program(text).buffers():
        if array.elements == num_rows * hidden and array.sizes[-1:] == (hidden,):
            found[str(array), array.bytes, instruction.label] += 1
    return [
        {"shape": shape, "bytes": num_bytes, "count": count, "what": what}
        for (shape, num_bytes, what), count in found.items()
    ]


def expected_buffers(case: Case) -> list[dict[str, Any]]:
    """The buffers that no implementation can do without, in the form of `row_buffers`."""
    rows = Array(_XLA_NAMES[case.dtype], (case.tokens * case.top_k, case.hidden))
    purposes = (
        "rows, for the experts and for the gradient of the weights",
        "gradient of the rows, for the gradient of the experts",
    )
    return [
        {"shape": str(rows), "bytes": rows.bytes, "count": 1, "what": what} for what in purposes
    ]
