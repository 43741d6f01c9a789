"""Finds out ahead of time what a config's `pre_hook` does to a launch.

Triton runs such a hook before every launch, on the kernel's arguments. No Python runs inside a
compiled program, so the hook runs once here, on stand-ins. In: a hook and its kernel's arguments.
Out: the outputs that the hook zeroes and the block shapes that it sets. Other effects are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triax.binding.kernel import Hook, MetaParameters
from triax.binding.launch import Alias, Argument, Descriptor, Operand, Result, Scalar, rebuild
from triax.binding.stand_in import Array
from triax.compat import triton_private
from triax.errors import UnsupportedError

_REMEDY = (
    "The hook runs once, ahead of time, and may only zero outputs (`.zero_()`) and set the "
    "`block_shape` of descriptors. Do other work in JAX, before the call."
)


def find_effects(
    hook: Hook,
    where: str,
    parameters: Sequence[tuple[str, Argument]],
    seen: Mapping[str, Any],
    aliases: Sequence[Alias],
) -> tuple[set[int], dict[Operand | Result, Any]]:
    """Runs a hook on stand-ins.

    Args:
      hook: the hook.
      where: the kernel and config of the hook, for messages.
      parameters: the argument of each runtime parameter.
      seen: the same arguments as shapes and dtypes, or as values of scalars.
      aliases: which operands are outputs.

    Returns:
      The outputs that the hook zeroes, and the block shapes that it sets, by buffer.

    Raises:
      UnsupportedError: the hook raises, or has another effect.
    """
    log = _Log(where, {alias.operand: alias.result for alias in aliases})
    arguments = {name: log.stand_in(name, leaf, seen[name]) for name, leaf in parameters}
    try:
        MetaParameters({**arguments, **hook.values}).given_to(hook.function, where)
    except Exception as error:
        if log.refusal is None:
            raised = f"{where} raised {type(error).__name__}: {error}."
            said = str(error) if where in str(error) else raised
            raise UnsupportedError(f"{said} {_REMEDY}") from error
    if log.refusal is not None:  # even if the hook caught the exception
        raise log.refusal
    return log.zeroed, log.block_shapes()


class _Log:
    """Makes the stand-ins for one run, and records what is done to them."""

    def __init__(self, where: str, result_of_operand: Mapping[int, int]):
        self.where = where
        self.refusal: UnsupportedError | None = None
        self.zeroed: set[int] = set()
        self._result_of = result_of_operand
        self._descriptors: list[tuple[str, Descriptor, Any, dict[str, Any]]] = []

    def refuse(self, what: str) -> UnsupportedError:
        self.refusal = self.refusal or UnsupportedError(f"{self.where} {what}. {_REMEDY}")
        return self.refusal

    def zero(self, name: str, leaf: Operand | Result) -> None:
        index = leaf.index if isinstance(leaf, Result) else self._result_of.get(leaf.index)
        if index is None:
            raise self.refuse(f"zeroes `{name}`, which is neither an output nor aliased to one")
        self.zeroed.add(index)

    def stand_in(self, name: str, leaf: Argument, seen: Any) -> Any:
        if isinstance(leaf, tuple):
            parts = zip(leaf, seen, strict=True)
            return rebuild(
                leaf, [self.stand_in(f"{name}[{i}]", *pair) for i, pair in enumerate(parts)]
            )
        if isinstance(leaf, Scalar):
            return leaf.value
        if isinstance(leaf, Descriptor):
            base = _Array(self, f"{name}.base", leaf.buffer, seen)
            descriptor = triton_private.descriptor_stand_in(
                leaf.layout,
                base=base,
                shape=list(leaf.shape),
                strides=list(leaf.strides),
                block_shape=list(leaf.block_shape),
                padding=leaf.padding,
            )
            before = {n: list(v) if isinstance(v, list) else v for n, v in vars(descriptor).items()}
            self._descriptors.append((name, leaf, descriptor, before))
            return descriptor
        return _Array(self, name, leaf, seen)

    def block_shapes(self) -> dict[Operand | Result, Any]:
        """The block shapes that the hook changed. Other changes to a descriptor are refused."""
        changed = {}
        for name, leaf, descriptor, before in self._descriptors:
            after = vars(descriptor)
            for field in sorted({*before, *after}):
                same = field in before and field in after and before[field] == after[field]
                if not same and field != "block_shape":
                    raise self.refuse(f"changes `{name}.{field}`")
            if list(after["block_shape"]) != before["block_shape"]:
                changed[leaf.buffer] = after["block_shape"]
        return changed


_READABLE = {"dtype", "ndim", "shape", *(n for n in vars(Array) if not n.startswith("_"))}


class _Array:
    """A stand-in for an array that records `zero_` and refuses other changes."""

    __slots__ = ("_leaf", "_log", "_name", "_seen")

    def __init__(self, log: _Log, name: str, leaf: Operand | Result, seen: Array):
        for field, value in zip(self.__slots__, (leaf, log, name, seen), strict=True):
            object.__setattr__(self, field, value)

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def zero_(self) -> _Array:
        self._log.zero(self._name, self._leaf)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _READABLE:
            return getattr(self._seen, name)
        # Probes: Python and libraries ask what an object is, hooks whether it is a descriptor.
        if name.startswith("__") or name in ("base", "block_shape", "padding", "strides"):
            raise AttributeError(name)
        raise self._log.refuse(f"uses `{self._name}.{name}`")

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._log.refuse(f"sets `{self._name}.{name}`")
