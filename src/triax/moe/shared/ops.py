"""Ops: what JAX knows of each, declared once.

The life of a call, from left to right; no station knows those before it:

    api ──────────► op ──────────────► launcher ──────► triton_call
    checks and      one primitive,     result types,    the bridge: a kernel
    names           named after it     grid, config     in a program

An `Op` is declared in its folder's `ops.py`: its name, the letters of its shapes, its two ways to
run (kernels on CUDA, plain JAX elsewhere), its derivative, and which letters may be cut over
devices. A call binds the op's primitive, whose rules follow from the declaration:

- *lowering* keeps one of the two ways, by platform (`implementation`); where XLA cuts the program
  over several devices, each device runs its part (`sharding`);
- *differentiation* calls the op's derivative, which is made of ops and linear functions again, so
  that derivatives of any order exist, forward and reverse (`linear`);
- *batching* maps the function, its derivative and its letters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching

from triax.compat import jax_private
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear, sharding
from triax.moe.shared.sharding import FlatSplit, Letters, Split

Function = Callable[..., Any]


class Op:
    """An op of the package: a function of arrays, and of options that are hashable.

    Args:
      name: in jaxprs, programs and profiles, after "triax_".
      arguments, results: their `Letters`; arrays whose letters are equal have equal sizes.
      xla: ``xla(*arguments, **options)`` in plain JAX.
      kernels: ``kernels(*arguments, implementation=…, **options)``, the same by `triton_call`. None
        for an op composed of others: then `xla` takes `implementation` too.
      derivative: ``derivative(call, arguments, tangents, results)`` returns the results' tangents;
        `call` is the op with its options. Tangents have the structure of the arguments or of the
        results, with None for those that are zero. "xla" differentiates `xla`, for results whose
        derivatives need no kernel. None is for integers, which have no derivative.
      cut: the letters that may be cut over devices. Batches under `jax.vmap` always may.
      part: ``part(call, shard, *arguments)`` runs the op on one device's part: by default
        ``call.run(*arguments)``. It sums over cut letters that no result has.
      any_bits: whether the kernels only move numbers, and need not know their dtypes.
      inline: whether it is made of ops that are cut over devices each for itself. Then letters and
        `cut` are not needed, and its derivative is what it is there for.
    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Sequence[Letters] = (),
        results: Letters | tuple[Letters, ...] = (),
        xla: Function,
        kernels: Function | None = None,
        derivative: Function | Literal["xla"] | None = None,
        cut: str = "",
        part: Function | None = None,
        any_bits: bool = False,
        inline: bool = False,
    ):
        self.name, self.xla, self.kernels, self.any_bits = name, xla, kernels, any_bits
        self.arguments, self.results, self.cut, self.part = tuple(arguments), results, cut, part
        self.derivative, self.inline = derivative, inline
        self.primitive = _primitive(f"triax_{name}")
        self._calls = functools.lru_cache(maxsize=1024)(self._call)  # options may be sizes

    def __call__(self, *arguments: Any, implementation: str | None, **options: Any) -> Any:
        return self.of(implementation, **options)(*arguments)

    def of(self, implementation: str | None, **options: Any) -> Call:
        """The op with its options: one object for equal ones, so JAX knows what it has compiled."""
        return self._calls(implementation, **options)

    def _call(self, implementation: str | None, **options: Any) -> Call:
        return Call(self, implementation, options)


class Call:
    """An op with its options: a function of pytrees of arrays.

    Attributes:
      run: the function without its rules, for a part of the arrays.
    """

    def __init__(self, op: Op, implementation: str | None, options: dict[str, Any]):
        self.op, self.implementation, self.options = op, implementation, options
        if op.kernels is None:
            self.run: Function = functools.partial(op.xla, implementation=implementation, **options)
        else:
            self.run = implementations.choose(
                implementation, op.kernels, op.xla, any_bits=op.any_bits, **options
            )
        part = op.part
        run = (
            (lambda shard, *args: self.run(*args))
            if part is None
            else functools.partial(part, self)
        )
        self._split = Split(op.arguments, op.results, op.cut, run)

    def like(self, op: Op | None = None, **options: Any) -> Call:
        """This op, or another one, with the same implementation and options but for those given."""
        return (op or self.op).of(self.implementation, **{**self.options, **options})

    def __repr__(self) -> str:
        options = {**self.options, "implementation": self.implementation}
        return f"{self.op.name}({', '.join(f'{k}={v!r}' for k, v in options.items())})"

    def __call__(self, *arguments: Any) -> Any:
        leaves, tree = jax.tree.leaves(arguments), jax.tree.structure(arguments)
        inline = self.op.inline
        mesh = None if inline else sharding.explicit_mesh(leaves)
        traced = mesh is not None or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if (inline or self.op.derivative is None) and not traced:
            return self.run(*arguments)  # one program, where the primitive is one for each step
        # Inside shard_map, what the platforms' code returns must vary over the same mesh axes.
        leaves = jax_private.insert_varying_casts(leaves)
        arguments = jax.tree.unflatten(tree, leaves)
        if mesh is None:
            run = self.run if inline else sharding.left_whole(self.run)
            jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
        else:
            shapes = sharding.shapes(mesh, self.run, arguments)
        split = None if inline else sharding.flatten(self._split, arguments, shapes, repr(self))
        if mesh is not None and split is not None:
            jaxpr = _in_parts(mesh, split, leaves)
        # The thread in which XLA has a part traced may not know of `jax.enable_x64`. And XLA cannot
        # cut what is interpreted: a host callback that is lowered while XLA compiles does not live
        # as long as the program.
        wide = any(a.dtype.itemsize > 4 for a in (*leaves, *jaxpr.out_avals))
        may_cut = not (wide or inline or mesh) and self.implementation != "interpret"
        out_tree = jax.tree.structure(shapes)
        jax_private.require_devices(self.op.primitive, None if may_cut else "cuda")
        outputs = self.op.primitive.bind(
            *leaves,
            call=_Bound(
                self,
                # As a function, so that JAX does not treat its jaxpr as a part of the program.
                function=jaxpr_as_fun(jaxpr),
                rule=functools.partial(self._rule, tree, out_tree),
                types=tuple(map(sharding.type_of, jaxpr.out_avals)),
                split=split if may_cut or mesh is not None else None,
                mesh=mesh,
            ),
        )
        return jax.tree.unflatten(out_tree, outputs)

    def _rule(
        self, tree: Any, out_tree: Any, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Flat results and their tangents."""
        arguments, moving = tree.unflatten(primals), tree.unflatten(tangents)
        derivative = self.op.derivative
        if derivative == "xla":
            plain = functools.partial(self.op.xla, **self.options)
            flat = lambda *leaves: jax.tree.leaves(plain(*tree.unflatten(leaves)))
            results: tuple[list[Any], list[Any]] = linear.jvp(flat, primals, tangents)
            return results
        found = self(*arguments)
        if derivative is None:
            return jax.tree.leaves(found), [None] * out_tree.num_leaves
        moved = derivative(self, arguments, moving, found)
        return jax.tree.leaves(found), out_tree.flatten_up_to(moved)


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound:
    """The parameter of an op's primitive: flat functions, the results' types, how it is cut."""

    call: Call
    function: Function
    rule: Function
    types: tuple[jax.ShapeDtypeStruct, ...]
    split: FlatSplit | None
    mesh: Any

    def __repr__(self) -> str:
        return repr(self.call)


def _in_parts(mesh: Any, split: FlatSplit, operands: Sequence[Any]) -> Any:
    with jax_private.no_vmapped_axes():
        return jax.make_jaxpr(sharding.over_explicit_mesh(mesh, split, operands))(*operands)


def _primitive(name: str) -> Primitive:
    def lowered(ctx: Any, call: _Bound) -> Function:
        if call.split is not None and call.mesh is None and sharding.is_partitioned(ctx):
            return sharding.partitioned(call.split, call.function)
        return call.function

    primitive = linear.primitive(name, lowered)

    def jvp(primals: Any, tangents: Any, *, call: _Bound) -> Any:
        outputs, results = call.rule(tuple(primals), linear.not_zero(tangents))
        moved = []
        for output, result in zip(outputs, results, strict=True):
            aval = jax.typeof(output).to_tangent_aval()
            # A result that is rounded to integers has none, whatever its operands have.
            without = result is None or aval.dtype == jax.dtypes.float0
            moved.append(ad.Zero(aval) if without else result)
        return outputs, moved

    def batch(args: Any, axes: Any, *, call: _Bound) -> Any:
        axes = tuple(axes)
        split = None if call.split is None else sharding.batched(call.split, axes)
        function = jax.vmap(call.function, axes)
        size = linear.batch_size(args, axes)
        cut = sharding.explicit_batch(args, axes) if call.mesh is None else None
        types = tuple(sharding.batched_type(kind, size, cut) for kind in call.types)
        if call.mesh is not None and split is not None:  # cut over more axes now: by batches
            jaxpr = _in_parts(call.mesh, split, args)
            function, types = jaxpr_as_fun(jaxpr), tuple(map(sharding.type_of, jaxpr.out_avals))
        rule = jax.vmap(call.rule, (axes, axes))
        batched = dataclasses.replace(call, function=function, rule=rule, types=types, split=split)
        outputs = primitive.bind(*args, call=batched)
        return outputs, [0] * len(outputs)

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive
