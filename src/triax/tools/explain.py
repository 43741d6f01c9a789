"""`explain`: what was chosen for every Triton call of a program, and why."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax

from triax import messages
from triax.compat import ptxas, triton_private
from triax.compat.ptxas import Resources
from triax.emitting import reading
from triax.emitting.reading import TritonCall
from triax.moe.products import choose
from triax.moe.products.choose import ProductChoice
from triax.tuning import policy
from triax.tuning.store import Timing


@dataclasses.dataclass(frozen=True)
class Explanation(TritonCall):
    """One Triton call of a program.

    `config`, `grid`, `entries` and others hold one entry per config handed to XLA: one, unless
    tuning mode is "runtime". `source` says where the choice came from. `timings` has every
    candidate's median in milliseconds, if known: measured on a call that moved `measured_bytes`
    bytes. `key` names the choice's record in the store; it ends in the number of bytes that this
    call moves. `aliases` pairs operands and results of the custom call named `target`; `entries`
    are the kernels' names in profiles, and `ptx` their code, with `shared_bytes` of shared memory
    and `num_warps` of a program.
    """

    source: str
    timings: tuple[Timing, ...]
    measured_bytes: int | None

    def resources(self) -> tuple[Resources, ...]:
        """Returns what each config's kernel uses: registers, spills, shared memory, warps.

        The assembler that comes with Triton counts them; it needs no GPU. XLA's own, which runs
        when the program is compiled, may be of another version, and differ by a few registers.

        Raises:
          CompilationError: the assembler refuses the kernel.
          MissingDependencyError: Triton has no assembler for the GPU.
        """
        kernels = zip(self.ptx, self.shared_bytes, self.num_warps, strict=True)
        return tuple(ptxas.resources(*kernel) for kernel in kernels)

    def __str__(self) -> str:
        grids = " | ".join("×".join(map(str, grid)) for grid in self.grid)
        lines = [f"{self.kernel}: {' | '.join(self.config)}  ({self.source})"]
        lines.append(f"  {self.target}, grid {grids}, aliases {[*self.aliases]}")
        if self.key:
            size = self.measured_bytes
            is_own = size is None or self.key.endswith(f"-{size}")
            lines.append(f"  key {self.key}" + ("" if is_own else f", measured on {size} bytes"))
        for t in self.timings:
            time = (t.error or "not timed") if t.median_ms is None else f"{t.median_ms:.4f} ms"
            lines.append(f"  {time:>12}  {t.config}")
        return "\n".join(lines)


class Explanations(list[Explanation]):
    """A list that shows as text.

    `products` has the kernel that was chosen for each matmul of `triax.moe`, and what those that
    come before it need.
    """

    products: tuple[ProductChoice, ...] = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, [*self, *self.products])) or "no Triton calls"


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanations:
    """Shows how every Triton call of a function is lowered for CUDA: config, grid, aliases, PTX.

        for call in triax.explain(train_step, params, batch):
            print(call)

    The function is traced and lowered, but not run. In tuning mode "auto" on a GPU this measures
    configs that are not known yet. Without a GPU the architecture comes from ``TRIAX_CUDA_ARCH``.

    Args:
      function: the function to trace, as under `jax.jit`.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      One `Explanation` per call, in program order, as a list that shows as text. A call in a loop's
      body is listed once. Functions that XLA partitions over devices while it compiles the program
      are not looked into: a warning says how many there are. The attribute `products` has the
      kernel that was chosen for each matmul of `triax.moe`, and what those before it need.

    Raises:
      MissingDependencyError: Triton is not installed, and so there are no calls.
      TriaxError: the function cannot be lowered.
    """
    messages.check_callable("function", function)
    # A new wrapper, because JAX caches traces by function, and an old trace may have another mode.
    fresh = jax.jit(lambda *args, **kwargs: function(*args, **kwargs))
    jitted = function if hasattr(function, "trace") else fresh
    with choose.noted() as products:
        lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    if partitioned := reading.count_calls(lowered, "CustomSPMDPartitioning"):
        warnings.warn(
            f"{partitioned} functions are partitioned over devices when XLA compiles the program, "
            "and their kernels are not listed. Pass arrays as large as one device's parts, without "
            "a sharding, to see them.",
            UserWarning,
            stacklevel=2,
        )
    explanations = Explanations(map(_explanation, reading.triton_calls(lowered)))
    explanations.products = tuple(products)
    if not explanations:
        triton_private.triton()  # without it `triax.moe` has no Triton calls, as on other platforms
    return explanations


def _explanation(call: TritonCall) -> Explanation:
    decision = policy.decision(call.key or call.entries[0])
    return Explanation(
        **vars(call),
        source=decision.source if decision else "unknown",
        timings=decision.timings if decision else (),
        measured_bytes=decision.measured_bytes if decision else None,
    )
