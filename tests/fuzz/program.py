"""A program: one op with its options and shapes, compiled once and run on many random inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.forms.forms import FORMS
from tests.fuzz.bounds import Array, fault
from tests.fuzz.draws import Rng
from triax import moe, testing

Arrays = dict[str, Array]


@dataclasses.dataclass
class Program:
    """An op's call as Python source, and what its results and gradients must be.

    Attributes:
      op: the name that its cases are counted under.
      path: "triton", "xla" or "interpret"; `how` in the source.
      call: an expression of the arrays' names; its leaves are `results`, in order.
      draw: one case's arrays. The cotangent of a result is the array "g_" and its name.
      expect: the results and gradients ("d_" and the array's name) that there must be, given the
        arrays and what was found.
      gradients: the arrays to differentiate by.
      names: what the source needs beside `moe`, `jnp` and `how`.
      form: of `tests.forms`, that all cases of a batch go through together; "" is `jit` alone.
      seed, index: what it was drawn from.
    """

    op: str
    path: str
    call: str
    results: tuple[str, ...]
    draw: Callable[[Rng], Arrays]
    expect: Callable[[Arrays, Arrays], dict[str, Any]]
    gradients: tuple[str, ...] = ()
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    form: str = ""
    seed: int = 0
    index: int = 0

    def __post_init__(self) -> None:
        self._code = compile(self.call, "<fuzz>", "eval")
        self.jitted = jax.jit(self._run)

    def inputs(self, case: int) -> Arrays:
        """The arrays of a case."""
        return self.draw(np.random.default_rng([self.seed, self.index, case]))

    def _run(self, arrays: Any) -> dict[str, Any]:
        names = {"moe": moe, "jnp": jnp, "how": self.path, **self.names}
        found: dict[str, Any] = {}

        def forward(moving: Any) -> Any:
            leaves = jax.tree.leaves(eval(self._code, names | arrays | moving))
            named = dict(zip(self.results, leaves, strict=True))
            pulled = {name: named.pop(name) for name in self.results if f"g_{name}" in arrays}
            return pulled, named

        if not self.gradients:
            return dict(zip(("pulled", "rest"), forward({}), strict=True))
        moving = {name: jnp.asarray(arrays[name]) for name in self.gradients}
        found["pulled"], pull, found["rest"] = jax.vjp(forward, moving, has_aux=True)
        (pulled,) = pull({name: jnp.asarray(arrays[f"g_{name}"]) for name in found["pulled"]})
        found["gradients"] = {f"d_{name}": of for name, of in pulled.items()}
        return found

    def run(self, batch: Sequence[Arrays]) -> list[Arrays]:
        """The results of each case. All are on their way before the first is waited for."""
        checked = testing.checked if self.path == "interpret" else contextlib.nullcontext
        with checked():
            running = self._formed(batch) if self.form else [self.jitted(each) for each in batch]
            return [
                {n: a for part in found.values() for n, a in part.items()}
                for found in jax.device_get(running)
            ]

    def _formed(self, batch: Sequence[Arrays]) -> list[Any]:
        names = [*batch[0]]
        stacked = tuple(jnp.asarray(np.stack([case[name] for case in batch])) for name in names)
        function = lambda arrays: self._run(dict(zip(names, arrays, strict=True)))
        found = jax.device_get(FORMS[self.form].run(function, stacked))
        return [jax.tree.map(lambda of: of[i], found) for i in range(len(batch))]  # noqa: B023

    def judge(self, arrays: Arrays, found: Arrays) -> str | None:
        """What is wrong with the results of a case, if anything is."""
        with np.errstate(all="ignore"):
            wanted = self.expect(arrays, found)
        if missing := {*found} ^ {*wanted}:
            return f"no one expects {sorted(missing)}"
        faults = (fault(name, found[name], want) for name, want in wanted.items())
        return next(filter(None, faults), None)

    @property
    def key(self) -> str:
        """What tells programs apart: the call, the shapes and the dtypes."""
        arrays = self.inputs(0)
        types = [f"{name}:{array.dtype}{array.shape}" for name, array in sorted(arrays.items())]
        text = " ".join([self.path, self.form, self.call, *self.gradients, *types])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def reproduction(self, case: int, batch: range, found: str) -> str:
        """A program that shows a fault: in a form, a case goes through with those of its batch."""
        batch = batch if self.form else range(case, case + 1)
        arrays = self.inputs(case)
        types = ", ".join(
            f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()
        )
        few = [
            f"#   {n} = {a.tolist()}"
            for n, a in arrays.items()
            if a.dtype.kind in "iu" and a.size < 40
        ]
        by = f", and its gradients by {', '.join(self.gradients)}" if self.gradients else ""
        lines = [
            f"# {self.op}: {found}",
            "from tests.fuzz import programs",
            f'program = programs.program({self.seed}, {self.index}, "{self.path}")',
            f"# It runs {self.call}{by}{f' in the form {self.form!r}' * bool(self.form)}, of",
            f"#   {types}",
            *few,
            f"batch = [program.inputs(case) for case in {batch}]",
            "results = program.run(batch)",
            f"print(program.judge(batch[{case - batch.start}], results[{case - batch.start}]))",
        ]
        return "\n".join(lines)
