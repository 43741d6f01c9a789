"""`triax.sharded`: a user's function, sharded over devices by a rule."""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentValueError, TriaxError
from triax.sharding import explicit, linear, ops, rules
from triax.sharding.splits import Function, Shard, Split

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def sharded(
    function: Callable[_Parameters, _Result],
    rule: str,
    *,
    cut: str | Sequence[str] = (),
    reduce: str | Sequence[str] = (),
) -> Callable[_Parameters, _Result]:
    """Returns a function like `function` that each device runs on its shard of the arrays.

    To XLA a kernel is a black box: under plain `jit` XLA gathers sharded operands, and every device
    runs the whole call. `rule` names the dimensions, and `cut` lists those that may be sharded:

        rms_norm = triax.sharded(rms_norm, "t h, h -> t h", cut="t")

    The result does not depend on how the arrays are sharded: dimensions that may not be sharded, or
    do not split into equal shards, are gathered. The function works under plain `jit`, on meshes
    with explicit axes (results' types say how they are sharded; call it under `jit`) and inside
    `jax.shard_map`, where the arrays are local already. Under `jax.vmap` the batch may be sharded.

    Gradients are those of `function`, which may be or call a `jax.custom_vjp`: each shard runs
    `function` again, then its backward pass. The gradient of an array without a sharded dimension,
    such as a weight, is summed over the shards. Floats are summed in float32 or wider, and
    rounded once to the dtype of the result or of the array.

    Args:
      function: takes arrays by position and options by keyword, and returns arrays. Each leaf of a
        pytree of arrays has a place in `rule`. Given a shard of the arrays, `function` must return
        that shard of the result, so it may not close over arrays, and must take sizes from its
        arguments.
      rule: names the dimensions of each array, as in Shardy's sharding rules: blanks between names,
        commas between arrays, "->" between arguments and results. Dimensions of the same name have
        the same size. A scalar has no names: "t h, -> t h".
      cut: names of dimensions that may be sharded, such as "t" or "b t". Each must be in an
        argument and in every result.
      reduce: names that may be sharded and that a result lacks: that result is the sum over the
        shards. For a product with "t k, k n -> t n", pass "k". Add a bias, or divide a sum to get a
        mean, outside of `function`; otherwise every shard does it. Return float32 if neither the
        shards' results nor their sum may be rounded to less.

    Raises:
      ArgumentTypeError, ArgumentValueError: `rule`, `cut` and `reduce` contradict each other or, at
        a call, do not fit the arrays.
    """
    messages.check_callable("function", function)
    parsed = rules.parse(rule)
    both = rules.names("cut", cut), rules.names("reduce", reduce)
    rules.check_cut(rule, parsed, *both)
    # A `Split` has one letter for each dimension.
    known = sorted({name for part in parsed for names in part for name in names})
    if len(known) > len(string.ascii_lowercase):
        raise ArgumentValueError(
            f"Argument `rule` must have at most 26 names; got {len(known)} in {rule!r}."
        )
    dim = dict(zip(known, string.ascii_lowercase, strict=False))
    operands, outputs = (
        tuple("".join(dim[name] for name in names) for names in part) for part in parsed
    )
    dims = "".join(dim[name] for name in (*both[0], *both[1]))

    @functools.wraps(function)
    def wrapper(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        label = f"{getattr(function, '__name__', 'function')} ({rule})"
        leaves, tree = jax.tree.flatten(arguments)
        rules.check_arguments(label, leaves, options)
        sizes = rules.check_sizes(label, "argument", parsed[0], leaves)
        out_tree = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_tree
            results = function(*jax.tree.unflatten(tree, leaves), **options)
            flattened, out_tree = jax.tree.flatten(results)
            return flattened

        def check_results(results: Any) -> None:
            rules.check_sizes(label, "result", parsed[1], results, dict(sizes))
            rules.check_sums(label, parsed[1], both[1], results)

        def check_constants(jaxpr: Any) -> None:
            rules.check_constants(
                label, jaxpr, {sizes[name] for name in (*both[0], *both[1])} - {1}
            )

        checks = check_constants, check_results
        results = _Sharded(label, flat, operands, outputs, dims, *checks)(*map(jnp.asarray, leaves))
        result: _Result = jax.tree.unflatten(out_tree, results)
        return result

    return wrapper


# --- the function and its derivatives ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Sharded:
    """A function of flat arrays and its rule in letters; the derivatives are `_Sharded`s as well.

    A result that lacks a dimension of `shardable` is the sum of the shards' results.
    """

    label: str
    function: Function
    operands: tuple[str, ...]
    results: tuple[str, ...]
    shardable: str
    check_constants: Callable[[Any], None]
    check_results: Callable[[Any], None] | None = None

    def __call__(self, *leaves: Any) -> list[Any]:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if not traced and explicit.explicit_mesh(leaves) is None:
            results = list(map(jnp.asarray, self.function(*leaves)))
            if self.check_results is not None:
                self.check_results(results)
            return results  # so that exceptions of interpreted kernels reach the caller unchanged
        split = Split(self.operands, self.results, self.shardable, self._local)
        whole = lambda *leaves: tuple(self.function(*leaves))
        results = ops.bind(
            _sharded_p,
            self.label,
            whole,
            split,
            self._rule,
            leaves,
            calls_back=True,
            check=self._check,
        )
        return list(results)

    def _check(self, jaxpr: Any, results: Any) -> None:
        if self.check_results is not None:
            self.check_results(results)
        self.check_constants(jaxpr)

    def _local(self, shard: Shard, *leaves: Any) -> tuple[Any, ...]:
        sizes = {
            dim: size
            for dims, leaf in zip(self.operands, leaves, strict=True)
            for dim, size in zip(dims, leaf.shape, strict=True)
        }
        try:
            results = self.function(*leaves)
        except TriaxError:
            raise
        except (TypeError, ValueError) as error:  # JAX's, for shapes that do not fit
            shapes = ", ".join(map(str, (leaf.shape for leaf in leaves)))
            raise ArgumentValueError(
                f"{self.label}: on a device's part of the arrays, of shapes {shapes}: {error} The "
                "function must take sizes from its arguments."
            ) from error
        summed = []
        for index, (dims, result) in enumerate(zip(self.results, results, strict=True)):
            wanted = tuple(map(sizes.get, dims, result.shape))
            if result.shape != wanted:
                raise ArgumentValueError(
                    f"{self.label}: on a device's part of the arrays result {index} must have the "
                    f"shape {wanted}; got {result.shape}. The function must take sizes from its "
                    "arguments."
                )
            over = "".join(dim for dim in self.shardable if dim not in dims)
            summed.append(shard.sum(over, result))
        return tuple(summed)

    def _rule(
        self, tree: Any, out_tree: Any, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        del tree, out_tree
        results = self(*primals)
        floats = [i for i, a in enumerate(results) if jnp.issubdtype(a.dtype, jnp.inexact)]
        active = [i for i, tangent in enumerate(tangents) if tangent is not None]
        moved: list[Any] = [None] * len(results)
        if not floats or not active:
            return results, moved
        along, back = self._derivatives(active, floats)
        changes = linear.call(
            lambda saved, named: along(*saved, *named.values()),
            lambda saved, cotangents: dict(zip(names, back(*saved, *cotangents), strict=True)),
            tuple(primals),
            dict(zip(names := list(map(str, active)), (tangents[i] for i in active), strict=True)),
            [results[i] for i in floats],
        )
        for i, change in zip(floats, changes, strict=True):
            moved[i] = change
        return results, moved

    def _derivatives(self, active: list[int], floats: list[int]) -> tuple[_Sharded, _Sharded]:
        """Returns the JVP and the VJP of results `floats` with respect to arguments `active`."""
        count = len(self.operands)

        def in_active(primals: Sequence[Any]) -> tuple[Function, list[Any]]:
            def function(*leaves: Any) -> list[Any]:
                results = self.function(*leaves)
                return [results[i] for i in floats]

            return linear.in_active(function, primals, active)

        def forward(*flat: Any) -> Any:
            return jax.jvp(*in_active(flat[:count]), list(flat[count:]))[1]

        def backward(*flat: Any) -> Any:
            at, values = in_active(flat[:count])
            return jax.vjp(at, *values)[1](list(flat[count:]))

        arguments = tuple(self.operands[i] for i in active)
        results = tuple(self.results[i] for i in floats)
        new = functools.partial(dataclasses.replace, self, check_results=None)
        return (
            new(function=forward, operands=self.operands + arguments, results=results),
            new(function=backward, operands=self.operands + results, results=arguments),
        )


_sharded_p = ops.primitive("triax_sharded")
