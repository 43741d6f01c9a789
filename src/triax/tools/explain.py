"""`explain`: what was chosen for every Triton call of a program, and why."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax

from triax import messages
from triax.compat import jax_modules, ptxas, triton_private
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

    Of some attributes there is one entry per config handed to XLA: one, unless the tuning mode is
    "runtime".

    Attributes:
      kernel: its name, or the call's `name`.
      target: of the custom call.
      config, grid, entries, ptx: per config: its parameters, its grid, and the kernel's name in
        profiles and its code.
      key: names the choice's record in the store, and ends in the number of bytes that this call
        moves; "" if there was nothing to choose.
      shared_bytes, num_warps: per config: the shared memory and the warps of a program.
      zeroed_bytes: per config: how many bytes of each array parameter are zeroed before.
      saved: the buffers that jaxlib restores after it has timed a config.
      aliases: pairs of an operand and the result that has its memory.
      operands, results: their types.
      fenced: whether barriers keep XLA from fusing the call with slices and updates of its arrays.
      opaque: what is handed to jaxlib, in its own format.
      source: where the choice came from, such as "only config" or "user store".
      timings: every candidate's `config` and `median_ms`, or its `error`, if known.
      measured_bytes: how many bytes the call moved that was measured; None if none was.
    """

    source: str
    timings: tuple[Timing, ...]
    measured_bytes: int | None

    def resources(self) -> tuple[Resources, ...]:
        """Returns `registers`, `spilled_bytes`, `shared_bytes` and `warps` of each entry of `ptx`.

        The first two are of a thread, the others of a program. Mode "runtime" has an entry for
        every config, other modes for the chosen one.

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
        types = (", ".join(map(_short, arrays)) for arrays in (self.operands, self.results))
        lines.append("  " + " → ".join(types))
        if self.key:
            size = self.measured_bytes
            is_own = size is None or self.key.endswith(f"-{size}")
            lines.append(f"  key {self.key}" + ("" if is_own else f", measured on {size} bytes"))
        for t in self.timings:
            time = (t.error or "not timed") if t.median_ms is None else f"{t.median_ms:.4f} ms"
            lines.append(f"  {time:>12}  {t.config}")
        return "\n".join(lines)


def _short(type_: str) -> str:
    return type_.removeprefix("tensor<").removesuffix(">")


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
    module = lowered.compiler_ir("stablehlo")
    if partitioned := jax_modules.custom_calls(module, ("CustomSPMDPartitioning",)):
        warnings.warn(
            f"{len(partitioned)} functions are partitioned over devices when XLA compiles the "
            "program, and their kernels are not listed. Pass arrays as large as one device's "
            "parts, without a sharding, to see them.",
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
