"""Reads the Triton calls back from a lowered program."""

from __future__ import annotations

import dataclasses
from typing import Any

from triax.compat import jax_modules, triton_proto, versions


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """One Triton call in a lowered program.

    `config` and `grid` hold one entry per config passed to XLA: one, unless the tuning mode is
    "runtime". `key` names the record of the config, "" if there was no choice. `aliases` pairs
    operands and results of the custom call; `saved` are the buffers that jaxlib restores after
    timing. `fenced` says that barriers keep XLA from fusing the call with slices and updates of its
    arrays, as docs/internals.md has it. `opaque` are the payload's bytes.
    """

    kernel: str
    target: str
    config: tuple[str, ...]
    key: str
    grid: tuple[tuple[int, int, int], ...]
    entries: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    fenced: bool
    opaque: bytes = dataclasses.field(repr=False)
    payload: triton_proto.Opaque = dataclasses.field(repr=False)

    @property
    def saved(self) -> tuple[tuple[int, int, int], ...]:
        return self.payload.saved


def triton_calls(lowered: Any) -> list[TritonCall]:
    """Finds the Triton calls in a `jax.stages.Lowered`, in program order.

    lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    for call in triton_calls(lowered):
        print(call.kernel, call.target, call.config, call.grid)
    """
    targets = (versions.LEGACY_TARGET, versions.NEW_TARGET)
    found = []
    for op in jax_modules.custom_calls(lowered.compiler_ir("stablehlo")):
        if op.target not in targets or op.opaque is None:
            continue
        payload = triton_proto.decode(op.opaque)
        found.append(
            TritonCall(
                payload.name,
                op.target,
                tuple(op.attributes.get("triax.config", "").split(" | ")),
                op.attributes.get("triax.key", ""),
                tuple(call.grid for call in payload.calls),
                tuple(call.entry for call in payload.calls),
                *(op.aliases, op.operands, op.results, op.fenced, op.opaque, payload),
            )
        )
    return found


def count_calls(lowered: Any, target: str) -> int:
    """Returns how many custom calls of a `jax.stages.Lowered` have a target."""
    calls = jax_modules.custom_calls(lowered.compiler_ir("stablehlo"))
    return sum(op.target == target for op in calls)
