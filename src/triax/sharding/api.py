"""`triax.sharded`: a user's function, cut over devices by a rule."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.sharding import explicit, linear, ops
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
    """Returns `function`, run by each device on its part of the arrays.

    To XLA a kernel is a black box: under plain `jit` it gathers sharded operands, and every device
    runs the whole call. `rule` names the dimensions, and `cut` those that may be cut:

        rms_norm = triax.sharded(rms_norm, "t h, h -> t h", cut="t")

    The result does not depend on how arrays are cut: dimensions that may not be are gathered. So
    are dimensions that do not split into equal parts. It works under plain `jit`, on meshes with
    explicit axes (results' types say how they are cut; call it under `jit`) and inside
    `jax.shard_map`, where the arrays are parts already. Under `jax.vmap` a batch may be cut as
    well. Gradients are those of `function`, which may be or call a `jax.custom_vjp`: parts run it
    again and then its backward pass, and the gradient of an array without a dimension that is cut,
    as of a weight, is summed over the parts, in the array's dtype.

    Args:
      function: takes arrays by position and options by keyword; returns arrays. They may be in
        pytrees, whose leaves each have a place in `rule`. On a part of the arrays it must return
        that part of the result, so it may not close over arrays, and it must take sizes from its
        arguments.
      rule: as in Shardy's sharding rules, the names of the dimensions of each array with blanks
        between them, arrays apart by commas: arguments, "->", results. Dimensions of the same name
        have the same size. A scalar has no names: "t h, -> t h".
      cut: the names of dimensions that may be cut, as "t" or "b t". Each is in an argument and in
        every result.
      reduce: names that may be cut and that a result lacks: the result is the sum of what the parts
        return. For a product with "t k, k n -> t n" that is "k"; a bias is added outside, or every
        part would add it. Return float32 if the sum must not be rounded to less.

    Returns:
      A function like `function`.

    Raises:
      ArgumentTypeError, ArgumentValueError: `rule`, `cut` or `reduce` contradict each other, or,
        when the function is called, the arrays.
    """
    messages.check_callable("function", function)
    parsed = _parse(rule)
    both = _names("cut", cut), _names("reduce", reduce)
    _check_cut(rule, parsed, *both)
    # A letter for each name, as the declarations of ops have.
    known = sorted({name for part in parsed for names in part for name in names})
    if len(known) > len(string.ascii_lowercase):
        raise ArgumentValueError(
            f"Argument `rule` must have at most 26 names; got {len(known)} in {rule!r}."
        )
    letter = dict(zip(known, string.ascii_lowercase, strict=False))
    operands, outputs = (
        tuple("".join(letter[name] for name in names) for names in part) for part in parsed
    )
    letters = "".join(letter[name] for name in (*both[0], *both[1]))

    @functools.wraps(function)
    def wrapper(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        label = f"{getattr(function, '__name__', 'function')} ({rule})"
        leaves, tree = jax.tree.flatten(arguments)
        _check_arguments(label, leaves, options)
        sizes = _check_sizes(label, "argument", parsed[0], leaves)
        out_tree = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_tree
            results = function(*jax.tree.unflatten(tree, leaves), **options)
            found, out_tree = jax.tree.flatten(results)
            return found

        def check_results(results: Any) -> None:
            _check_sizes(label, "result", parsed[1], results, dict(sizes))
            _check_sums(label, parsed[1], both[1], results)

        def check_constants(jaxpr: Any) -> None:
            _check_constants(label, jaxpr, {sizes[name] for name in (*both[0], *both[1])} - {1})

        checks = check_constants, check_results
        found = _Cut(label, flat, operands, outputs, letters, *checks)(*map(jnp.asarray, leaves))
        result: _Result = jax.tree.unflatten(out_tree, found)
        return result

    return wrapper


# --- the function and its derivatives ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Cut:
    """A function of flat arrays and its rule, in letters; its derivatives are others of these.

    A result that lacks a letter of `cut` is the sum of the parts' results.
    """

    label: str
    function: Function
    operands: tuple[str, ...]
    results: tuple[str, ...]
    cut: str
    check_constants: Callable[[Any], None]
    check_results: Callable[[Any], None] | None = None

    def __call__(self, *leaves: Any) -> list[Any]:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if not traced and explicit.explicit_mesh(leaves) is None:
            results = list(map(jnp.asarray, self.function(*leaves)))
            if self.check_results is not None:
                self.check_results(results)
            return results  # so that exceptions of interpreted kernels reach the caller unchanged
        split = Split(self.operands, self.results, self.cut, self._part)
        whole = lambda *leaves: tuple(self.function(*leaves))
        found = ops.bind(
            _sharded_p,
            self.label,
            whole,
            split,
            self._rule,
            leaves,
            calls_back=True,
            check=self._check,
        )
        return list(found)

    def _check(self, jaxpr: Any, results: Any) -> None:
        if self.check_results is not None:
            self.check_results(results)
        self.check_constants(jaxpr)

    def _part(self, shard: Shard, *leaves: Any) -> tuple[Any, ...]:
        sizes = {
            letter: size
            for letters, leaf in zip(self.operands, leaves, strict=True)
            for letter, size in zip(letters, leaf.shape, strict=True)
        }
        summed = []
        for index, (letters, result) in enumerate(
            zip(self.results, self.function(*leaves), strict=True)
        ):
            wanted = tuple(map(sizes.get, letters, result.shape))
            if result.shape != wanted:
                raise ArgumentValueError(
                    f"{self.label}: on a device's part of the arrays result {index} must have the "
                    f"shape {wanted}; got {result.shape}. The function must take sizes from its "
                    "arguments."
                )
            for letter in self.cut:
                result = result if letter in letters else shard.sum(letter, result)
            summed.append(result)
        return tuple(summed)

    def _rule(
        self, tree: Any, out_tree: Any, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        del tree, out_tree
        found = self(*primals)
        floats = [i for i, a in enumerate(found) if jnp.issubdtype(a.dtype, jnp.inexact)]
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        moved: list[Any] = [None] * len(found)
        if not floats or not moving:
            return found, moved
        count = len(primals)
        along, back = self._forward(moving, floats, count), self._backward(moving, floats, count)
        changes = linear.call(
            lambda saved, named: along(*saved, *named.values()),
            lambda saved, cotangents: dict(zip(names, back(*saved, *cotangents), strict=True)),
            tuple(primals),
            dict(zip(names := list(map(str, moving)), (tangents[i] for i in moving), strict=True)),
            [found[i] for i in floats],
        )
        for i, change in zip(floats, changes, strict=True):
            moved[i] = change
        return found, moved

    def _at(self, primals: Sequence[Any], moving: list[int], floats: list[int]) -> Function:
        """The results that are floats, as a function of the arguments that move."""

        def at(*values: Any) -> list[Any]:
            leaves = list(primals)
            for i, value in zip(moving, values, strict=True):
                leaves[i] = value
            results = self.function(*leaves)
            return [results[i] for i in floats]

        return at

    def _forward(self, moving: list[int], floats: list[int], count: int) -> _Cut:
        def function(*flat: Any) -> Any:
            primals, tangents = flat[:count], flat[count:]
            at = self._at(primals, moving, floats)
            return jax.jvp(at, [primals[i] for i in moving], list(tangents))[1]

        return dataclasses.replace(
            self,
            function=function,
            operands=(*self.operands, *(self.operands[i] for i in moving)),
            results=tuple(self.results[i] for i in floats),
            check_results=None,
        )

    def _backward(self, moving: list[int], floats: list[int], count: int) -> _Cut:
        def function(*flat: Any) -> Any:
            primals, cotangents = flat[:count], flat[count:]
            at = self._at(primals, moving, floats)
            return jax.vjp(at, *(primals[i] for i in moving))[1](list(cotangents))

        return dataclasses.replace(
            self,
            function=function,
            operands=(*self.operands, *(self.results[i] for i in floats)),
            results=tuple(self.operands[i] for i in moving),
            check_results=None,
        )


_sharded_p = ops.primitive("triax_sharded")


# --- checks -----------------------------------------------------------------------------------

_Rule = tuple[list[list[str]], list[list[str]]]


def _parse(rule: Any) -> _Rule:
    if not isinstance(rule, str):
        raise ArgumentTypeError(
            f"Argument `rule` must be a string such as 't h, h -> t h'; got {messages.shown(rule)}."
        )
    sides = rule.split("->")
    if len(sides) != 2:
        raise ArgumentValueError(
            f"Argument `rule` must have arguments, one '->' and results, as 't h, h -> t h'; got "
            f"{rule!r}."
        )
    found: list[list[list[str]]] = []
    for side in sides:
        found.append([names.split() for names in side.split(",")])
        for names in found[-1]:
            for name in names:
                if not re.fullmatch(r"[A-Za-z_]\w*", name):
                    raise ArgumentValueError(
                        f"Argument `rule` must have names of letters, digits and '_', with blanks "
                        f"between them; got {name!r} in {rule!r}."
                    )
                if names.count(name) > 1:
                    raise ArgumentValueError(
                        f"Argument `rule` must name each dimension of an array differently; got "
                        f"{name!r} twice in {' '.join(names)!r}."
                    )
    return found[0], found[1]


def _names(argument: str, value: Any) -> tuple[str, ...]:
    names: Any = value.split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"Argument `{argument}` must be names of `rule`, as 't' or 'b t'; got "
            f"{messages.shown(value)}."
        )
    return tuple(dict.fromkeys(names))


def _check_cut(rule: str, parsed: _Rule, cut: tuple[str, ...], reduce: tuple[str, ...]) -> None:
    of_arguments = {name for names in parsed[0] for name in names}
    if not cut and not reduce:
        raise ArgumentTypeError(
            "Argument `cut` is missing: the names of the dimensions in `rule` that may be cut. The "
            "function must treat their elements alike and apart, as a norm over h does with t in "
            "'t h, h -> t h'."
        )
    for argument, names in (("cut", cut), ("reduce", reduce)):
        for name in names:
            if name not in of_arguments:
                raise ArgumentValueError(
                    f"Argument `{argument}` must have names of arguments in `rule`, {rule!r}; got "
                    f"{name!r}.{messages.near_misses(name, of_arguments)}"
                )
    for name in cut:
        if name in reduce:
            which = "`reduce`" if all(name in named for named in parsed[1]) else "`cut`"
            raise ArgumentValueError(
                f"Argument `reduce` has {name!r}, and so has `cut`. Names in `reduce` are cut as "
                f"well, also in results that have them: leave it out of {which}."
            )
        for index, named in enumerate(parsed[1]):
            if name not in named:
                raise ArgumentValueError(
                    f"Argument `cut` has {name!r}, which result {index} of {rule!r} lacks. If the "
                    f"results of the parts are to be summed, pass reduce={name!r}; if not, leave "
                    "it out, and it is never cut."
                )
    for name in reduce:
        if all(name in names for names in parsed[1]):
            raise ArgumentValueError(
                f"Argument `reduce` has {name!r}, which every result of {rule!r} has, so there is "
                f"nothing to sum. Pass cut={name!r}."
            )


def _check_arguments(label: str, leaves: Sequence[Any], options: dict[str, Any]) -> None:
    for index, leaf in enumerate(leaves):
        if not jax_private.is_array(leaf):
            raise ArgumentTypeError(
                f"{label}: argument {index} must be an array; got {messages.shown(leaf)}. Pass "
                "options by keyword."
            )
    for name, value in options.items():
        if any(map(jax_private.is_array, jax.tree.leaves(value))):
            raise ArgumentTypeError(
                f"{label}: argument `{name}` is an array, so it must be passed by position, and "
                "have its place in `rule`."
            )


def _check_sizes(
    label: str,
    what: str,
    declared: Sequence[Sequence[str]],
    arrays: Sequence[Any],
    sizes: dict[str, int] | None = None,
) -> dict[str, int]:
    """The size of each name, of those in `sizes` and in `arrays`."""
    sizes = {} if sizes is None else sizes
    if len(declared) != len(arrays):
        raise ArgumentValueError(
            f"{label}: `rule` has {messages.counted(len(declared), what)}, and the function has "
            f"{len(arrays)}: {messages.short([messages.short(a) for a in arrays])}."
        )
    for index, (names, array) in enumerate(zip(declared, arrays, strict=True)):
        if len(names) != len(array.shape):
            raise ArgumentValueError(
                f"{label}: `rule` names {messages.counted(len(names), 'dimension')} of {what} "
                f"{index}, {' '.join(names)!r}; got {messages.short(array)}."
            )
        for name, size in zip(names, array.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise ArgumentValueError(
                    f"{label}: {name!r} is {sizes[name]}, and {size} in {what} {index}, "
                    f"{' '.join(names)!r}; got {messages.short(array)}."
                )
    return sizes


def _check_sums(
    label: str, declared: Sequence[Sequence[str]], reduce: Sequence[str], results: Sequence[Any]
) -> None:
    for index, (names, result) in enumerate(zip(declared, results, strict=True)):
        summed = [name for name in reduce if name not in names]
        if summed and result.dtype == bool:
            raise ArgumentValueError(
                f"{label}: result {index} is summed over parts of {summed[0]!r}, so it must not be "
                "of booleans. Return a count: the result of `any` is whether it is above 0."
            )


_SMALL = 128


def _check_constants(label: str, jaxpr: Any, sizes: set[int]) -> None:
    """Refuses what a device's part would get whole, though it may need a part of it.

    JAX's own functions have tables too, made with NumPy, which are small: those are let through
    that have no dimension of a size that is cut.
    """
    for value in _constants(jaxpr):
        shape = jnp.shape(value)
        # A part would take the first rows of a table that is longer than what is cut.
        long = sizes and math.prod(shape) >= _SMALL and max(shape) >= min(sizes)
        own = isinstance(value, jax.Array) or sizes & {*shape} or long
        if isinstance(value, jax.core.Tracer) or (shape and own):
            raise ArgumentValueError(
                f"{label}: the function closes over an array, {messages.short(value)}, or makes it "
                "with NumPy. Make it an argument, so that `rule` says how it is cut."
            )


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The arrays in a jaxpr, and in those inside of it."""
    yield from jaxpr.consts
    for step in jaxpr.eqns:
        for parameter in step.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _constants(inner)
