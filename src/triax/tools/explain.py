"""`explain`: what was chosen for every Triton call of a program, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from triax import messages
from triax.emitting import reading
from triax.tuning import policy
from triax.tuning.store import Timing


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One Triton call of a program.

    `config` and `grid` hold one entry per config handed to XLA: one, unless tuning mode is
    "runtime". `source` says where the choice came from. `timings` has every candidate's
    median in milliseconds, if known: measured on a call that moved `measured_bytes` bytes. `key`
    names the choice's record in the store; it ends in the number of bytes that this call moves.
    `aliases` pairs operands and results of the custom call named `target`; `entry` is the
    kernel's name in profiles, and `ptx` its code, for each config.
    """

    kernel: str
    config: tuple[str, ...]
    source: str
    timings: tuple[Timing, ...]
    target: str
    grid: tuple[tuple[int, int, int], ...]
    aliases: tuple[tuple[int, int], ...]
    entry: tuple[str, ...]
    key: str = ""
    measured_bytes: int | None = None
    ptx: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {' | '.join(self.config)}  ({self.source})"]
        grids = " | ".join("×".join(map(str, grid)) for grid in self.grid)
        lines.append(f"  {self.target}, grid {grids}, aliases {list(self.aliases)}")
        if self.measured_bytes is not None and not self.key.endswith(f"-{self.measured_bytes}"):
            lines.append(f"  key {self.key}, measured on {self.measured_bytes} bytes")
        elif self.key:
            lines.append(f"  key {self.key}")
        for timing in self.timings:
            time = timing.error if timing.median_ms is None else f"{timing.median_ms:.4f} ms"
            lines.append(f"  {time or 'not timed':>12}  {timing.config}")
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Explanation]:
    """Shows how every Triton call of a function is lowered for CUDA: config, grid, aliases, PTX.

        for call in triax.explain(train_step, params, batch):
            print(call)

    The function is traced and lowered, but not run. In tuning mode "auto" on a GPU this measures
    configs that are not known yet. Without a GPU the architecture comes from ``TRIAX_CUDA_ARCH``.

    Args:
      function: the function to trace, as under `jax.jit`.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      One `Explanation` per call, in program order. A call in a loop's body is listed once.

    Raises:
      TriaxError: the function cannot be lowered.
    """
    messages.check_callable("function", function)
    # A new wrapper, because JAX caches traces by function, and an old trace may have another mode.
    fresh = jax.jit(lambda *args, **kwargs: function(*args, **kwargs))
    jitted = function if hasattr(function, "trace") else fresh
    lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    return [_explanation(call) for call in reading.triton_calls(lowered)]


def _explanation(call: reading.TritonCall) -> Explanation:
    decision = policy.decision(call.key or call.entries[0])
    return Explanation(
        kernel=call.kernel,
        config=call.config,
        source=decision.source if decision else "unknown",
        timings=decision.timings if decision else (),
        target=call.target,
        grid=call.grid,
        aliases=call.aliases,
        entry=call.entries,
        key=call.key,
        measured_bytes=decision.measured_bytes if decision else None,
        ptx=tuple(launch.ptx for launch in call.payload.calls),
    )
