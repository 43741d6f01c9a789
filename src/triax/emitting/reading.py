"""Reads the Triton calls back from a lowered program."""

from __future__ import annotations

import dataclasses
from typing import Any

from triax.compat import jax_modules, triton_proto, versions


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """One Triton call in a lowered program: its attributes, and its payload decoded.

    `tools.explain.Explanation` says what each one is.
    """

    kernel: str
    target: str
    config: tuple[str, ...]
    key: str
    grid: tuple[tuple[int, int, int], ...]
    entries: tuple[str, ...]
    ptx: tuple[str, ...] = dataclasses.field(repr=False)
    zeroed_bytes: tuple[tuple[int, ...], ...]
    shared_bytes: tuple[int, ...]
    num_warps: tuple[int, ...]
    saved: tuple[tuple[int, int, int], ...]
    aliases: tuple[tuple[int, int], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    fenced: bool
    opaque: bytes = dataclasses.field(repr=False)


def triton_calls(lowered: Any) -> list[TritonCall]:
    """Finds the Triton calls in a `jax.stages.Lowered`, in program order.

    lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    for call in triton_calls(lowered):
        print(call.kernel, call.target, call.config, call.grid)
    """
    targets = (versions.LEGACY_TARGET, versions.NEW_TARGET)
    calls = []
    for op in jax_modules.custom_calls(lowered.compiler_ir("stablehlo"), targets):
        if (opaque := jax_modules.opaque(op)) is None:
            continue
        attributes = jax_modules.frontend_attributes(op)
        calls.append(
            TritonCall(
                target=jax_modules.target(op),
                config=tuple(attributes.get("triax.config", "").split(" | ")),
                key=attributes.get("triax.key", ""),
                aliases=jax_modules.aliases(op),
                operands=tuple(str(value.type) for value in op.operands),
                results=tuple(str(value.type) for value in op.results),
                fenced=jax_modules.is_fenced(op),
                opaque=opaque,
                **triton_proto.decode(opaque),
            )
        )
    return calls
