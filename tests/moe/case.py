"""A case: a call of an op, how to draw its arrays, and what its results and gradients must be.

What a fixed test runs under a name, and the fuzzer draws at random, is the same value: it is
compiled once and run on many inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.forms.forms import FORMS
from tests.moe.bounds import Array, Numbers, fault
from tests.moe.draws import Rng
from triax import moe, testing

Arrays = dict[str, Array]


def widths(arrays: Arrays) -> Any:
    """A context in which JAX keeps what is 64 bits wide."""
    return jax.enable_x64(any(array.dtype.itemsize == 8 for array in arrays.values()))


class ModelSizes(NamedTuple):
    """Sizes of a layer, of which a case takes those that it has, and the dtype of its arrays."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


Sized = Callable[[Any, ModelSizes], "Case"]
"""A function of a path and of sizes."""


class _Placed:
    """A module of ops, whose results are put somewhere."""

    def __init__(self, module: Any, place: Callable[[Any], Any]):
        self._module, self._place = module, place

    def __getattr__(self, name: str) -> Any:
        of = getattr(self._module, name)
        if isinstance(of, type):
            return of
        return lambda *args, **options: self._place(of(*args, **options))


@dataclasses.dataclass
class Case:
    """An op's call as Python source, and what its results and gradients must be.

    Attributes:
      op: the name that it is counted under.
      path: "triton", "xla" or "interpret"; `how` in the source.
      call: an expression of the arrays' names; its leaves are `results`, in order.
      draw: the arrays of a run. The cotangent of a result is the array "g_" and its name.
      expect: the results and gradients ("d_" and the array's name) that there must be, given the
        arrays and what was found.
      gradients: the arrays to differentiate by.
      names: what the source needs beside `moe`, `jnp` and `how`.
      widest: the widest float that its kernels take.
      kernels: those of it and its gradients on a GPU, for few pairs.
      within: a context to run in, which may change how the kernels divide the work.
      is_checked: whether kernels must be free of races in the interpreter.
      is_derivative: whether its gradients are derivatives: not those of inputs that are wrong.
      moved: the arrays whose bits the results have.
      columns: the arrays whose last dimension is that of results, and nothing else.
      form: of `tests.forms`, that all runs of a batch go through together; "" is `jit` alone.
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
    widest: str = "float64"
    kernels: tuple[str, ...] = ()
    within: Callable[[], Any] = contextlib.nullcontext
    is_checked: bool = True
    is_derivative: bool = True
    moved: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    form: str = ""
    seed: int = 0
    index: int = 0

    def __post_init__(self) -> None:
        self._code = compile(self.call, "<fuzz>", "eval")
        self.jitted = jax.jit(self.everything)

    def inputs(self, case: int) -> Arrays:
        """The arrays of a case."""
        return self.draw(np.random.default_rng([self.seed, self.index, case]))

    def normal(self, arrays: Arrays, rng: Rng, dtype: Any = None) -> Arrays:
        """The arrays, with small numbers in those that it is differentiated by."""
        draw: Any = lambda of: (rng.standard_normal(of.shape) / 4).astype(dtype or of.dtype)
        return arrays | {name: draw(arrays[name]) for name in self.gradients}

    def forward(self, arrays: Any, place: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The results that have cotangents, and the others; `place` is called with the results of
        each op."""
        names = {"moe": moe, "how": self.path, **self.names}
        if place is not None:
            placed = {n: _Placed(of, place) for n, of in names.items() if inspect.ismodule(of)}
            names |= placed
        names |= {"jnp": jnp, "place": place}
        leaves = jax.tree.leaves(eval(self._code, names | arrays))
        named = dict(zip(self.results, leaves, strict=True))
        pulled = {name: named.pop(name) for name in self.results if f"g_{name}" in arrays}
        return pulled, named

    def everything(self, arrays: Any) -> dict[str, Any]:
        if not self.gradients:
            return dict(zip(("pulled", "rest"), self.forward(arrays), strict=True))
        found: dict[str, Any] = {}
        forward = lambda moving: self.forward(arrays | moving)
        moving = {name: jnp.asarray(arrays[name]) for name in self.gradients}
        found["pulled"], pull, found["rest"] = jax.vjp(forward, moving, has_aux=True)
        (pulled,) = pull({name: jnp.asarray(arrays[f"g_{name}"]) for name in found["pulled"]})
        found["gradients"] = {f"d_{name}": of for name, of in pulled.items()}
        return found

    def run(self, batch: Sequence[Arrays]) -> list[Arrays]:
        """The results of each case. All are on their way before the first is waited for."""
        is_checked = self.is_checked and self.path == "interpret"
        checked = testing.checked if is_checked else contextlib.nullcontext
        with checked(), widths(batch[0]), self.within():
            running = self._formed(batch) if self.form else [self.jitted(each) for each in batch]
            return [
                {n: a for part in found.values() for n, a in part.items()}
                for found in jax.device_get(running)
            ]

    def _formed(self, batch: Sequence[Arrays]) -> list[Any]:
        names = [*batch[0]]
        stacked = tuple(jnp.asarray(np.stack([case[name] for case in batch])) for name in names)
        function = lambda arrays: self.everything(dict(zip(names, arrays, strict=True)))
        found = jax.device_get(FORMS[self.form].run(function, stacked))
        return [jax.tree.map(lambda of: of[i], found) for i in range(len(batch))]  # noqa: B023

    def wanted(self, arrays: Arrays, found: Arrays) -> dict[str, Any]:
        """What is expected of the results of a case; large cases take seconds."""
        with np.errstate(all="ignore"):
            return self.expect(arrays, found)

    def judge(self, arrays: Arrays, found: Arrays, wanted: Any = None) -> str | None:
        """What is wrong with the results of a case, if anything is."""
        wanted = self.wanted(arrays, found) if wanted is None else wanted
        if missing := {*found} ^ {*wanted}:
            return f"no one expects {sorted(missing)}"
        if self.form:  # whose own `concatenate` and `cond` change the bits of such NaNs on a CPU
            wanted = wanted | {
                name: Numbers(of)
                for name, of in wanted.items()
                if isinstance(of, np.ndarray) and of.dtype.name.startswith("float8")
            }
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
