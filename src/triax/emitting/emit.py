"""Emits compiled launches into the program being lowered, and placeholders for exporting it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from triax.binding.launch import BoundCall, CompiledKernel, Launch, Operand
from triax.compat import jax_modules, versions
from triax.emitting import custom_call

INTERPRETED = "triax_interpreted_kernel_cannot_be_exported_for_cpu"
"""Target of the call that stands for an interpreted kernel in an exported program."""

NO_CODE = "triax_kernel_has_no_code_for_this_platform"
"""Target of the call that stands for a kernel in a program exported for another platform."""


def compiled(
    ctx: Any,
    operands: Sequence[Any],
    call: BoundCall,
    launches: Sequence[Launch],
    kernels: Sequence[CompiledKernel],
    key: str,
) -> Sequence[Any]:
    """Emits the custom call of compiled launches.

    `key` is the name under which the config was looked up, "" if there was no choice.
    """
    for launch, kernel in zip(launches, kernels, strict=True):
        custom_call.check_writes(launch, kernel)
    target = custom_call.choose_target(call, launches)
    needed = zip(*map(custom_call.scratch_bytes, launches, kernels), strict=True)
    scratches = [nbytes for nbytes in map(max, needed) if nbytes]
    buffers = custom_call.order_buffers(launches[0], scratches=len(scratches))
    opaque = custom_call.payload(call, launches, kernels, buffers)
    updated = {operand for operand, _ in buffers.aliases}
    allocate = jax.ffi.ffi_lowering(
        "AllocateBuffer", api_version=1, skip_ffi_layout_processing=True
    )
    values, avals = [], []
    for position, leaf in enumerate(buffers.operands):
        if isinstance(leaf, Operand):
            value = operands[leaf.index]
            values.append(jax_modules.fence(value) if position in updated else value)
            avals.append(ctx.avals_in[leaf.index])
        else:  # an uninitialised buffer, for an output that precedes an operand
            avals.append(ctx.avals_out[leaf.index])
            values += allocate(ctx.replace(avals_in=[], avals_out=avals[-1:]))
    of_scratch = (jax.core.ShapedArray((nbytes,), np.dtype(np.uint8)) for nbytes in scratches)
    avals_out = [next(of_scratch) if i is None else ctx.avals_out[i] for i in buffers.results]
    inner = ctx.replace(avals_in=avals, avals_out=avals_out)
    attributes: dict[str, Any] = {"opaque": opaque}
    cost_json = custom_call.cost_estimate(call, target, versions.gated_version())
    if cost_json is not None:
        attributes["cost_estimate_json"] = cost_json
    typed = target.api_version >= 4
    rule = jax.ffi.ffi_lowering(
        target.name,
        operand_output_aliases=dict(buffers.aliases),
        has_side_effect=call.has_side_effect,
        api_version=target.api_version,
        **({} if typed else {"backend_config": opaque}),  # type: ignore[arg-type]
    )
    results = rule(inner, *values, **(attributes if typed else {}))
    # For readers of the program.
    grids = ("x".join(map(str, launch.candidate.grid)) for launch in launches)
    described = {
        **({"triax.key": key} if key else {}),
        "triax.kernel": call.display_name,
        "triax.config": " | ".join(str(launch.candidate) for launch in launches),
        "triax.grid": " | ".join(grids),
    }
    jax_modules.annotate(results, described)
    by_output = dict(zip(buffers.results, results, strict=True))
    return [jax_modules.fence(by_output[index]) for index in range(len(ctx.avals_out))]


def nothing(ctx: Any, operands: Sequence[Any], call: BoundCall) -> Sequence[Any]:
    """Emits the outputs of an empty grid: aliased outputs are their operands, others are zeros."""
    source = {alias.result: alias.operand for alias in call.aliases}

    def outputs(*arrays: jax.Array) -> list[jax.Array]:
        return [
            arrays[source[i]] if i in source else jnp.zeros(aval.shape, aval.dtype)
            for i, aval in enumerate(ctx.avals_out)
        ]

    results: Sequence[Any] = mlir.lower_fun(outputs, multiple_results=True)(ctx, *operands)
    return results


def placeholder(ctx: Any, operands: Sequence[Any], target: str) -> Sequence[Any]:
    """Emits a call of a target that does not exist: it can be exported, but fails when it runs."""
    return jax.ffi.ffi_lowering(target, api_version=4)(ctx, *operands)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks to disable for exporting a program with Triton calls.

        jax.export.export(jax.jit(f), platforms=["cuda"],
                          disabled_checks=triax.export_checks())

    JAX only exports custom calls whose targets it promises to keep, and Triton's are not among
    them. The exported program needs a JAX that still has the target. On the CPU an interpreted
    kernel is a host callback, which cannot be exported: exporting for "cpu" too succeeds, but
    running there fails with a target named `triax_interpreted_kernel_cannot_be_exported_for_cpu`.
    Ops with a pure XLA rule for the CPU, like those of `triax.moe`, export and run on both.
    """
    targets = (versions.LEGACY_TARGET, versions.NEW_TARGET, "AllocateBuffer", INTERPRETED, NO_CODE)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
