"""Cases: one op at one shape, its inputs, its program, and the bytes it cannot do without.

A case draws its inputs outside of what is timed, runs as a pure JAX function of them, and says
which streams of the same bytes its time is compared with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from triax.bench.inputs import MAKERS, Inputs
from triax.bench.presets import Chunks, Preset
from triax.bench.programs import OPS

ROUTINGS = ("uniform", "skewed")
DTYPES = ("bfloat16", "float16", "float32")

# What a pass over memory reads and writes at least, each once: arrays like the tokens and like
# the rows, integers or weights by (token, slot), integers by expert or chunk.
_READS: dict[str, tuple[str, ...]] = {
    "plan": ("pairs",),
    "permute": ("tokens", "pairs", "groups", "groups"),
    "unpermute": ("rows", "pairs", "pairs"),
    "permute_grad": ("rows", "pairs"),
    "unpermute_grad": ("rows", "tokens", "pairs", "pairs", "groups", "groups"),
    "sort_chunks": ("tokens", "groups", "groups"),
}
_WRITES: dict[str, tuple[str, ...]] = {
    "plan": ("pairs", "pairs", "groups", "groups", "groups"),
    "permute": ("rows",),
    "unpermute": ("tokens",),
    "permute_grad": ("tokens",),
    "unpermute_grad": ("rows", "pairs"),
    "sort_chunks": ("tokens",),
}


@dataclasses.dataclass(frozen=True)
class Stream:
    """A sequential pass over memory: `reads` units in for `writes` units out, of `unit_bytes`."""

    reads: int
    writes: int
    unit_bytes: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    A chunk sort has no preset and no routing; its `experts` are the chunks, its `top_k` is 1.
    """

    op: str
    preset: Preset | None
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str
    routing: str | None

    @classmethod
    def routed(cls, op: str, preset: Preset, tokens: int, dtype: str, routing: str) -> Case:
        """A case of a model's shape."""
        return cls(op, preset, tokens, preset.hidden, preset.experts, preset.top_k, dtype, routing)

    @classmethod
    def chunked(cls, op: str, chunks: Chunks, dtype: str) -> Case:
        """A case of a chunk sort."""
        return cls(op, None, chunks.tokens, chunks.hidden, chunks.count, 1, dtype, None)

    @property
    def label(self) -> str:
        """What the case is called while it runs."""
        shape = f"T={self.tokens} H={self.hidden}"
        return " ".join(
            part
            for part in (self.op, self.preset and self.preset.name, shape, self.dtype, self.routing)
            if part
        )

    def make_inputs(self, seed: int = 0, pool: Inputs | None = None) -> Inputs:
        """The arrays that the op reads, on the default device.

        Args:
          seed: the same seed gives the same inputs.
          pool: inputs made before, for cases that differ in nothing but their op; those that are
            missing are put into it.
        """
        pool = {} if pool is None else pool
        for name in OPS[self.op].inputs:
            if name not in pool:
                pool[name] = MAKERS[name](self, seed)
        return {name: pool[name] for name in OPS[self.op].inputs}

    def program(self, inputs: Inputs, implementation: str | None = None) -> Any:
        """Runs the op, on `implementation` as its functions take it; returns all that it makes."""
        return OPS[self.op].program(inputs, self.experts, implementation)

    def compiled(self, implementation: str | None = None) -> Any:
        """`program` under `jax.jit`: one function for all cases that can share it."""
        return _compiled(self.op, self.experts, implementation)

    @property
    def chain(self) -> Callable[[Inputs, Any], Inputs] | None:
        """The inputs of a next run from the outputs of one, or None where shapes do not allow it.

        Something that the run computed last goes into the next, so that both can stand in one
        program and neither be left out. Values may run away over many runs.
        """
        op = OPS[self.op]
        return op.chain if op.chains_always or self.top_k == 1 else None

    @property
    def reads_bytes(self) -> int:
        """Every input of every pass over the rows, once."""
        return sum(self._bytes(name) for part in OPS[self.op].passes for name in _READS[part])

    @property
    def writes_bytes(self) -> int:
        """Every output of every pass over the rows, once."""
        return sum(self._bytes(name) for part in OPS[self.op].passes for name in _WRITES[part])

    @property
    def num_bytes(self) -> int:
        return self.reads_bytes + self.writes_bytes

    @property
    def streams(self) -> tuple[tuple[Stream, int], ...]:
        """The streams that take as long as the op ideally does; none where no rows are moved.

        One for each pass over the rows, with the bytes of that pass: a little more than those of
        the stream, which stands for all passes of the same ratio. A plan has none: what it reads
        and writes is small, and where it is a part of the op its time counts against the op.
        """
        unit = self._bytes("tokens")
        return tuple(
            (
                Stream(self._units(_READS[part]), self._units(_WRITES[part]), unit),
                sum(self._bytes(name) for name in (*_READS[part], *_WRITES[part])),
            )
            for part in OPS[self.op].passes
            if part != "plan"
        )

    def _units(self, names: tuple[str, ...]) -> int:
        """How many arrays like the tokens these are, small ones left aside."""
        return names.count("tokens") + self.top_k * names.count("rows")

    @property
    def memory_bytes(self) -> int:
        """About how much device memory a run takes, inputs, temporaries and outputs together."""
        arrays = OPS[self.op].arrays
        return sum(self._bytes(name) * count for name, count in arrays.items())

    def _bytes(self, name: str) -> int:
        itemsize = jnp.dtype(self.dtype).itemsize
        return {
            "tokens": self.tokens * self.hidden * itemsize,
            "rows": self.tokens * self.top_k * self.hidden * itemsize,
            "pairs": self.tokens * self.top_k * 4,  # int32 or float32
            "groups": self.experts * 4,
        }[name]


@functools.cache
def _compiled(op: str, experts: int, implementation: str | None) -> Any:
    return jax.jit(lambda inputs: OPS[op].program(inputs, experts, implementation))
