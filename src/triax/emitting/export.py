"""The settings `jax.export` needs for Triton calls."""

from __future__ import annotations

import jax.export

from triax.compat import versions

INTERPRETED = "triax_interpreted_kernel_cannot_be_exported_for_cpu"
"""Target of the call that stands for an interpreted kernel in an exported program."""

NO_CODE = "triax_kernel_has_no_code_for_this_platform"
"""Target of the call that stands for a kernel in a program exported for another platform."""


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
    targets = (
        versions.LEGACY_TARGET,
        versions.NEW_TARGET,
        "AllocateBuffer",
        INTERPRETED,
        NO_CODE,
    )
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
