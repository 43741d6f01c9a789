"""Declares ops: JAX's rules for an op follow from one declaration.

The life of a call, from left to right; no layer knows the layers before it:

    api ──────────► op ──────────────► launcher ──────► triton_call
    checks the      one primitive,     result types,    the bridge: a kernel
    arguments       named after it     grid, config     in a program

An `Op` is declared in its folder's `ops.py`: its name, the dimensions of its arrays, its two
implementations (kernels on CUDA, plain JAX elsewhere), its derivative, and which of them may
be sharded over devices. A call binds the op's primitive, whose rules follow from the declaration
(`triax.sharding.ops`). Lowering keeps one implementation, by platform (`implementation`). An op's
derivative consists of ops and linear functions, so that derivatives of any order exist, forward and
reverse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import jax

from triax.errors import DifferentiationError
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
from triax.sharding import explicit, linear, ops
from triax.sharding.splits import Dims, Split

Function = Callable[..., Any]


def not_differentiable(why: str) -> Function:
    """Returns the `derivative` of an op that has none: it raises an error that says why."""

    def refuse(*_: Any) -> NoReturn:
        raise DifferentiationError(why)

    return refuse


class Op:
    """An op of the package: a function of arrays, and of hashable options.

    Args:
      name: its name in jaxprs, programs and profiles, after "triax_".
      arguments, results: their `Dims`; one letter stands for one size.
      xla: ``xla(*arguments, **options)`` in plain JAX.
      kernels: ``kernels(*arguments, implementation=…, **options)``, the same by `triton_call`. None
        for an op that is composed of other ops: its `xla` gets `implementation`, too.
      derivative: ``derivative(call, arguments, tangents, results)`` returns the results' tangents;
        `call` is the op with its options. `tangents` are structured like `arguments`, the tangents
        that it returns like `results`; a tangent that is zero is None. With "xla" JAX
        differentiates `xla`, for an op whose derivative needs no kernel. None is for an op with
        integer results.
      shardable: the dimensions that may be sharded over devices; batches of `jax.vmap` always may.
      local: ``local(call, shard, *arguments)`` runs the op on one device's shard of the arguments;
        by default it is ``call.run(*arguments)``. If no result has a dimension of `shardable`,
        `local` must add up the devices' results over it.
      any_bits: whether the kernels only move bits, so that the GPU need not support the dtypes.
      differentiated: called as `xla`, for an op composed of others: what JAX differentiates in
        place of `xla`, which then need not keep what derivatives read.
      inline: whether the op only adds a derivative to other ops. Each of these is then sharded
        for itself, and this op needs no dimensions and no `shardable`.
      dims: ``dims(*arguments, **options)`` returns `arguments`, `results` and `shardable` of one
        call, and optionally `Split.pieces`, for an op in which they differ from call to call.
    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Sequence[Dims] = (),
        results: Dims | tuple[Dims, ...] = (),
        xla: Function,
        kernels: Function | None = None,
        derivative: Function | Literal["xla"] | None = None,
        differentiated: Function | None = None,
        shardable: str = "",
        local: Function | None = None,
        any_bits: bool = False,
        inline: bool = False,
        dims: Function | None = None,
    ):
        self.name, self.xla, self.kernels, self.any_bits = name, xla, kernels, any_bits
        self.local, self.differentiated = local, differentiated
        self.derivative, self.inline = derivative, inline
        self.dims, self.declared = dims, (tuple(arguments), results, shardable)
        self.primitive = ops.primitive(f"triax_{name}")
        self._calls = functools.lru_cache(maxsize=1024)(self._call)  # bounded: options may be sizes

    def __call__(
        self, *arguments: Any, implementation: Implementation | None, **options: Any
    ) -> Any:
        return self.of(implementation, **options)(*arguments)

    def of(self, implementation: Implementation | None, **options: Any) -> Call:
        """Returns the op with options, one object for equal options, so that JAX's caches hit."""
        return self._calls(implementation, **options)

    def _call(self, implementation: Implementation | None, **options: Any) -> Call:
        return Call(self, implementation, options)


class Call:
    """An op with its options: a function of pytrees of arrays.

    Attributes:
      run: the implementation without JAX's rules, for one device's shard.
    """

    def __init__(self, op: Op, implementation: Implementation | None, options: dict[str, Any]):
        self.op, self.implementation, self.options = op, implementation, options
        if op.kernels is None:
            self.run: Function = functools.partial(op.xla, implementation=implementation, **options)
        else:
            self.run = implementations.choose(
                implementation, op.kernels, op.xla, any_bits=op.any_bits, **options
            )

    def replace(self, op: Op | None = None, **options: Any) -> Call:
        """Returns the call of this op, or another one, with some options replaced."""
        return (op or self.op).of(self.implementation, **{**self.options, **options})

    def __repr__(self) -> str:
        options = {**self.options, "implementation": self.implementation}
        return f"{self.op.name}({', '.join(f'{k}={v!r}' for k, v in options.items())})"

    def __call__(self, *arguments: Any) -> Any:
        op, split = self.op, None
        if op.inline or op.derivative is None:
            leaves = jax.tree.leaves(arguments)
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
            if not traced and (op.inline or explicit.explicit_mesh(leaves) is None):
                return self.run(*arguments)  # one program; binding would run one per step
        if not op.inline:
            declared = op.declared if op.dims is None else op.dims(*arguments, **self.options)
            dims, results, shardable, *pieces = declared
            local = op.local or (lambda call, shard, *arguments: call.run(*arguments))
            split = Split(dims, results, shardable, functools.partial(local, self), *pieces)
        return ops.bind(
            op.primitive,
            repr(self),
            self.run,
            split,
            self._rule,
            arguments,
            calls_back=self.implementation == "interpret",
        )

    def _rule(
        self, tree: Any, out_tree: Any, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns flat results and their tangents."""
        derivative, plain = self.op.derivative, self.op.differentiated
        if derivative == "xla" or plain is not None:
            how = {} if plain is None else {"implementation": self.implementation}
            plain = functools.partial(plain or self.op.xla, **how, **self.options)
            flat = lambda *leaves: jax.tree.leaves(plain(*tree.unflatten(leaves)))
            both: tuple[list[Any], list[Any]] = linear.jvp(flat, primals, tangents)
            return both
        arguments = tree.unflatten(primals)
        results = self(*arguments)
        if derivative is None:
            return jax.tree.leaves(results), [None] * out_tree.num_leaves
        moved = derivative(self, arguments, tree.unflatten(tangents), results)
        return jax.tree.leaves(results), out_tree.flatten_up_to(moved)
