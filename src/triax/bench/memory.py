"""How much memory a route takes, there and back with gradients, as XLA tells of its program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.bench.cases import Case
from triax.bench.competitors import competitors
from triax.bench.presets import Preset

OP = "route+grad"
IMPLEMENTATIONS = ("triax", "argsort+take", "hand-written vjp", "hand-fused vjp")


def measure_memory(
    preset: Preset, tokens: int, dtype: str, implementation: str = "triax"
) -> dict[str, Any]:
    """The bytes of plan, permute and weighted unpermute, forward and backward, as a record.

    Nothing is run and no array is made: the program is compiled for the default device.
    """
    case = Case.routed(OP, preset, tokens, dtype, "uniform")
    inputs = {
        "x": jax.ShapeDtypeStruct((tokens, case.hidden), jnp.dtype(dtype)),
        "selected_experts": jax.ShapeDtypeStruct((tokens, case.top_k), jnp.int32),
        "weights": jax.ShapeDtypeStruct((tokens, case.top_k), jnp.float32),
        "gradient": jax.ShapeDtypeStruct((tokens, case.hidden), jnp.dtype(dtype)),
    }
    program = case.program if implementation == "triax" else competitors(case)[implementation]
    stats: Any = jax.jit(program).lower(inputs).compile().memory_analysis()
    return {
        "program": OP,
        "preset": preset.name,
        "tokens": tokens,
        "dtype": dtype,
        "implementation": implementation,
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
    }
