"""Every op placed at random: its arrays, what is between two ops, results, cotangents, gradients.

A case is an op with its arguments, a mesh and a transformation, all drawn from (seed, index). Each
array of its program is cut by a spec of its own, and the results and gradients must be those of
the op on one device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

from tests import conftest  # noqa: F401  # asks for eight devices, before JAX starts

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe import case as cases
from tests.moe.placements.ops import EXCHANGED, OPS, SIZES
from triax import testing

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2)] * 3 + [(2, 2, 2), (4,), (2, 2), (2,), (1,)]
TYPES = [[AUTO]] * 2 + [[EXPLICIT], [AUTO, EXPLICIT]]
BATCHES = ["none"] * 3 + ["vmap"] * 2 + ["scan"] + ["shard_map"] * 2
KEPT = jax.checkpoint_policies.save_only_these_names("triax_plan", "triax_permuted_rows")
Arrays = dict[str, Any]


# --- what is computed ------------------------------------------------------------------------


def is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1


def results_of(case: cases.Case, place: Any, arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Those that have gradients first."""
    results = case.forward(arrays, place)[1]
    floats = {name: value for name, value in results.items() if is_float(value)}
    return floats, {name: results[name] for name in results.keys() - floats.keys()}


def with_gradients(
    function: Any, by: tuple[str, ...], arrays: Arrays, given: Arrays, targets: bool = False
) -> Any:
    """Results, and gradients for given cotangents, or of the squared distance to given targets."""
    moving = {name: arrays[name] for name in by}
    results, pull, others = jax.vjp(lambda moving: function(arrays | moving), moving, has_aux=True)
    cotangents = {name: like(given[name], result) for name, result in results.items()}
    if targets:
        cotangents = jax.tree.map(jnp.subtract, results, cotangents)
    gradients = {f"d_{name}": value for name, value in pull(cotangents)[0].items()}
    return results | others | gradients


def like(array: Any, other: Any) -> Any:
    """The array, cut over explicit axes as the other one is: their types must be equal."""
    sharding = jax.typeof(other).sharding
    if EXPLICIT not in sharding.mesh.axis_types:
        return array
    return jax.sharding.reshard(array, sharding)


class Uncut:
    """A case on one device; compiled once."""

    mesh = None

    def __init__(self, name: str, sizes: cases.ModelSizes):
        self.sizes, self.case = sizes, OPS[name](None, sizes)
        self.function = functools.partial(results_of, self.case, self)

    def __call__(self, between: Any) -> Any:
        return between

    @functools.cache  # noqa: B019
    def program(self, targets: bool) -> Any:
        by = self.case.gradients
        return jax.jit(functools.partial(with_gradients, self.function, by, targets=targets))

    def results(self, arrays: Arrays) -> Arrays:
        """The types of those that have gradients."""
        return jax.eval_shape(self.function, arrays)[0]

    def exact(self, arrays: Arrays, given: Arrays, results: Arrays) -> set[str]:
        """The results and gradients that are moved, as the oracle says."""
        cotangents = {f"g_{name}": array for name, array in given.items()}
        with np.errstate(all="ignore"):
            wanted = self.case.expect(arrays | cotangents, jax.device_get(results))
        return {name for name, of in wanted.items() if isinstance(of, np.ndarray)}

    def draw(self, rng: np.random.Generator) -> Arrays:
        """Its arrays: of a move whatever floats there are, else small ones."""
        arrays = {name: a for name, a in self.case.draw(rng).items() if name[:2] != "g_"}
        arrays = self.case.normal(arrays, rng)
        for name in self.case.moved:
            # Where XLA reshards by a sum, which it does, -0.0 becomes 0.0.
            of = arrays[name]
            arrays[name] = testing.hostile_values(rng, of.shape, of.dtype) + np.zeros((), of.dtype)
        return arrays


uncut = functools.cache(Uncut)


def compare(
    name: str, found: Any, wanted: Any, exact: bool = False, dtype: Any = None, terms: int = 64
) -> None:
    """`dtype` is the least that was rounded to on the way, if it is less than that of `found`."""
    found = np.asarray(found)
    if exact or not is_float(found):
        # XLA moves some arrays by adding zeros to them, and a zero then has no sign.
        both = (np.where(of == 0, np.zeros_like(of), of) for of in (found, np.asarray(wanted)))
        testing.assert_same_bits(*both, err_msg=name)
    else:
        found = found.astype(dtype or found.dtype)
        testing.assert_close(found, wanted, terms=terms, err_msg=name)


class Wrong(AssertionError):
    """A result is not that of the uncut program."""


class Placement:
    """A random program. `lines` tells what it is, as far as it has been traced."""

    def __init__(self, seed: int, index: int):
        # Two cases are placements of one op, which is compiled uncut for both.
        self.rng = np.random.default_rng([seed, index // 2])
        order = np.random.default_rng(seed).permutation([*OPS])
        self.name = name = str(order[index // 2 % len(OPS)])
        exchanged = name.startswith("exchange")
        sizes = self.one_of(EXCHANGED if exchanged else SIZES)
        dtype = self.one_of(["float32", "float32", "bfloat16"])
        targets = self.one_of([False, True])
        self.rng = rng = np.random.default_rng([seed, index, 1])

        shape, types = self.one_of(MESHES), self.one_of(TYPES)
        kinds = [self.one_of(types) for _ in shape]
        devices = rng.permutation(np.array(jax.devices()))[: math.prod(shape)].reshape(shape)
        self.mesh = Mesh(devices, tuple("abc"[: len(shape)]), axis_types=tuple(kinds))
        self.kinds = dict(zip(self.mesh.axis_names, kinds, strict=True))
        self.is_set, self.check_vma = (rng.random(2) < 0.6).tolist()
        self.exchange_axes = self.draw_exchange_axes() if exchanged else ((), ())

        self.batch = self.one_of(BATCHES[:-2] if exchanged else BATCHES)
        self.is_set |= self.batch == "scan"  # else JAX 0.12 loses the type of a gradient
        self.batch_axes, self.spmd_axis_name = self.draw_batch_axes()
        if len(shape) > 1 and (self.batch == "shard_map" or exchanged):
            dtype = "float32"  # JAX's sum of bfloat16 over some of the axes ends XLA on a CPU
        self.dtype = jnp.dtype(dtype)
        self.terms = 512 if exchanged else 64
        self.uncut = uncut(name, sizes._replace(dtype=dtype))
        self.case = self.uncut.case
        taken = {*self.batch_axes, self.spmd_axis_name} - {None}
        self.each = 2 if self.batch in ("vmap", "scan") else int(rng.integers(1, 3))
        self.count = 1 if self.batch == "none" else self.parts(taken) * self.each
        self.taken: set[str] = set()  # axes that nothing is to be cut over just now
        self.members = [self.uncut.draw(rng) for _ in range(self.count)]
        self.axes = self.draw_dimensions()
        self.remat = self.one_of([None, None, {}, {"policy": KEPT}])
        self.gradients_inside = self.batch in ("vmap", "scan") and rng.random() < 0.4
        self.targets = targets and not self.case.moved
        self.given = [
            {n: self.draw(t.shape, t.dtype) for n, t in self.uncut.results(member).items()}
            for member in self.members
        ]
        self.lines = [
            f"{name}: {self.case.call}",
            f"{self.uncut.sizes}, {'targets' if self.targets else 'cotangents'}",
            f"mesh {dict(self.mesh.shape)}, {[k.name for k in kinds]}, set: {self.is_set}, "
            f"devices {[d.id for d in devices.flat]}",
            f"batch: {self.batch} of {self.count}, {self.axes}, axes {self.batch_axes}, "
            f"spmd_axis_name {self.spmd_axis_name}, gradients inside: {self.gradients_inside}",
            f"check_vma: {self.check_vma}, exchange axes {self.exchange_axes}, remat {self.remat}",
        ]
        self.say = self.lines.append

    # --- what is drawn -----------------------------------------------------------------------

    def one_of(self, choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def some_of(self, choices: Any, least: int | bool = 1) -> tuple[str, ...]:
        count = self.rng.integers(min(least, len(choices)), len(choices) + 1)
        return tuple(self.rng.permutation(choices)[:count].tolist())

    def draw(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(dtype)

    def draw_exchange_axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those that experts are spread over, and others that tokens are cut over beside them."""
        used = self.some_of(self.mesh.axis_names)
        count = self.rng.integers(1, len(used) + 1)
        return used[:count], used[count:]

    def draw_batch_axes(self) -> tuple[tuple[str, ...], str | None]:
        free = [n for n in self.kinds if n not in sum(self.exchange_axes, ())]
        if self.batch == "shard_map":
            return self.some_of(free), None
        if self.batch != "vmap" or not free or self.rng.random() < 0.4:
            return (), None
        name = self.one_of(free)
        if self.kinds[name] is EXPLICIT:
            return (name,), None
        exchanged = any(self.exchange_axes)  # JAX has no spmd_axis_name around shard_map
        return (), None if exchanged else name

    def draw_dimensions(self) -> dict[str, int | None]:
        """Which dimension of each array is the batch; None where all share one array."""
        axes: dict[str, int | None] = {}
        for name, array in self.members[0].items():
            last = self.batch == "vmap" and self.rng.random() < 0.3
            axes[name] = array.ndim if last else 0
            if self.batch == "none" or (axes and self.rng.random() < 0.25):
                axes[name] = None
        if self.batch != "none" and set(axes.values()) == {None}:
            axes[name] = 0
        for member in self.members:
            member |= {n: self.members[0][n] for n, axis in axes.items() if axis is None}
        return axes

    def parts(self, names: Any) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    def spec(self, shape: Any, names: Any, fixed: dict[int, Any], uneven: bool = False) -> P:
        """A random one over some of these axes, in equal parts; some dimensions are given."""
        parts = [tuple(fixed.get(i, ())) for i in range(len(shape))]
        for name in self.some_of(list(names), self.rng.random() < 0.8):
            fits = [
                i
                for i in range(len(shape))
                if i not in fixed and (uneven or not shape[i] % self.parts((*parts[i], name)))
            ]
            if fits:
                i = self.one_of(fits)
                parts[i] = (*parts[i], name)
        return P(*parts)

    # --- where arrays are put ------------------------------------------------------------------

    def __call__(self, tree: Any) -> Any:
        """What is between two ops, somewhere."""
        return jax.tree.map(lambda a: a if self.rng.random() < 0.4 else self.put(a, {}), tree)

    @contextlib.contextmanager
    def without(self, names: set[str | None]) -> Any:
        """Nothing is cut over these axes."""
        outer, self.taken = self.taken, self.taken | names
        yield
        self.taken = outer

    def put(self, array: Any, fixed: dict[int, Any]) -> Any:
        """Cuts an array in the program; some dimensions over explicit axes as given."""
        mesh = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if mesh.empty else mesh
        free = {
            kind: [
                name
                for name, of_axis in zip(mesh.axis_names, mesh.axis_types, strict=True)
                if of_axis is kind and name not in self.taken
            ]
            for kind in (EXPLICIT, AUTO)
        }
        if EXPLICIT in mesh.axis_types:
            spec = self.spec(array.shape, free[EXPLICIT], fixed)
            self.say(f"reshard {jax.typeof(array)} to {spec}")
            array = jax.sharding.reshard(array, NamedSharding(mesh, spec))
        if free[AUTO]:
            spec = self.spec(array.shape, free[AUTO], {}, uneven=self.rng.random() < 0.3)
            self.say(f"constrain {jax.typeof(array)} to {spec}")
            array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
        return array

    def sharding(self, array: Any) -> NamedSharding:
        spec = self.spec(array.shape, self.mesh.axis_names, {})
        return NamedSharding(self.mesh, spec)

    def shard_map(self, function: Any, in_specs: Any, out_specs: Any, names: Any) -> Any:
        """Arguments on explicit axes are resharded first, which JAX asks for."""
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(names),
            check_vma=self.check_vma,
        )

        def cut(array: Any, spec: P) -> Any:
            parts = [(part,) if isinstance(part, str) else part or () for part in spec]
            explicit = lambda part: tuple(n for n in part if self.kinds[n] is EXPLICIT)
            return self.put(array, {i: explicit(part) for i, part in enumerate(parts) if part})

        def run(*arrays: Any) -> Any:
            with self.without(set(names)):
                arrays = jax.tree.map(cut, arrays, tuple(in_specs))
            return mapped(*arrays)

        return run

    # --- the program ---------------------------------------------------------------------------

    def member(self, arrays: Arrays) -> Any:
        function = functools.partial(results_of, self.case, self)
        function = function if self.remat is None else jax.checkpoint(function, **self.remat)
        return function(arrays)

    def batched(self, function: Any, arrays: Arrays, axes: dict[str, int | None]) -> Any:
        """`function` of each of the batch, which is the first dimension of all results."""
        if self.batch == "none":
            return function(arrays)
        mapped = {name for name, axis in axes.items() if axis is not None}
        if self.batch == "shard_map":
            specs = {name: P(self.batch_axes) if name in mapped else P() for name in arrays}
            local = lambda part: jax.vmap(function, (axes,))(part)
            return self.shard_map(local, (specs,), P(self.batch_axes), self.batch_axes)(arrays)
        # The batch is cut over these explicit axes, or none.
        fix = lambda n: {axes[n]: self.batch_axes} if n in mapped else {}
        with self.without({*self.batch_axes, self.spmd_axis_name}):
            arrays = {name: self.put(array, fix(name)) for name, array in arrays.items()}
            if self.batch == "vmap":
                return jax.vmap(function, (axes,), spmd_axis_name=self.spmd_axis_name)(arrays)
            shared = {name: array for name, array in arrays.items() if name not in mapped}
            xs = {name: arrays[name] for name in mapped}
            return jax.lax.scan(lambda i, each: (i + 1, function(shared | each)), 0, xs)[1]

    def program(self, arrays: Arrays, given: Arrays) -> Any:
        if self.gradients_inside:
            function = lambda both: with_gradients(
                self.member,
                self.case.gradients,
                {name: both[name] for name in arrays},
                {name: both[f"for {name}"] for name in given},
                self.targets,
            )
            renamed = {f"for {name}": array for name, array in given.items()}
            axes = self.axes | dict.fromkeys(renamed, 0)
            return self(self.batched(function, arrays | renamed, axes))
        function = lambda arrays: self.batched(self.member, arrays, self.axes)
        by = self.case.gradients
        return self(with_gradients(function, by, self(arrays), self(given), self.targets))

    def check(self) -> None:
        """Raises `Wrong`, or what Triax or JAX raise."""
        wanted = self.wanted()
        axes = self.axes if self.batch != "none" else dict.fromkeys(self.axes)
        arrays = {n: self.stacked(self.members, n, axis) for n, axis in axes.items()}
        first = None if self.batch == "none" else 0
        given = {name: self.stacked(self.given, name, first) for name in self.given[0]}
        placed = jax.tree.map(lambda a: jax.device_put(a, self.sharding(a)), (arrays, given))
        for name, array in (placed[0] | placed[1]).items():
            self.say(f"{name}: {array.shape} {array.dtype} cut as {array.sharding.spec}")
        out = {n: self.one_of([None, self.sharding(array)]) for n, array in wanted.items()}
        self.say(f"results: { {n: o and o.spec for n, o in out.items()} }")
        with jax.set_mesh(self.mesh) if self.is_set else contextlib.nullcontext():
            found = jax.jit(self.program, out_shardings=out)(*placed)
        for name, array in wanted.items():
            self.compare(name, found[name], array)

    def wanted(self) -> Arrays:
        program = self.uncut.program(self.targets)
        outputs = [program(*each) for each in zip(self.members, self.given, strict=True)]
        self.exact = self.uncut.exact(self.members[0], self.given[0], outputs[0])
        wanted = {}
        for name in outputs[0]:
            # Results of `glu_gradients` begin with "d_", too.
            array = name.removeprefix("d_")
            is_gradient = name != array and array in self.case.gradients
            axis = self.axes[array] if is_gradient and not self.gradients_inside else 0
            if self.batch == "none":
                axis = None
            wanted[name] = self.stacked(outputs, name, axis)
            if axis is None and self.count > 1:
                wanted[name] = sum(np.asarray(each[name], np.float64) for each in outputs)
        return wanted

    def stacked(self, trees: Any, name: str, axis: int | None) -> np.ndarray:
        if axis is None:
            return np.asarray(trees[0][name])
        return np.stack([np.asarray(tree[name]) for tree in trees], axis)

    def compare(self, name: str, found: Any, wanted: Any) -> None:
        # Of an array that a batch shares, the gradient of a move is a sum: in float64 here.
        exact = name in self.exact and found.dtype == wanted.dtype
        try:
            compare(name, found, wanted, exact, self.dtype, self.terms)
        except AssertionError as error:
            raise Wrong(str(error)) from None
