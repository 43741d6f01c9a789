"""Annotates operations in lowered MLIR modules, and reads custom calls from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo


def annotate(results: Sequence[Any], attributes: dict[str, str]) -> None:
    """Adds frontend attributes to the operation that produced `results`.

    XLA keeps the attributes and prints them in its dumps; they have no other effect.
    """
    if not results:
        return
    operation = results[0].owner
    values = {name: ir.StringAttr.get(text) for name, text in sorted(attributes.items())}
    operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(values)


def fence(value: Any) -> Any:
    """Puts an optimization barrier of its own behind a value.

    A call and the slice or the update of its operand or result then stay two operations: XLA
    promises to move nothing across a barrier.
    """
    # Workaround: xla all, openxla/xla#43831: dynamic slice fusion, on by default from JAX 0.11 on,
    # makes one operation of a call, the slices that it reads and the dynamic-update-slice of its
    # result. It forgets the call's aliases, so that the update is lost, and where source and target
    # are one array, the kernel reads what it has already written. One barrier for each array: the
    # pass looks through a barrier over several. See docs/internals.md.
    (fenced,) = stablehlo.OptimizationBarrierOp([value]).results
    return fenced


def custom_calls(module: Any, targets: Collection[str]) -> list[Any]:
    """Returns the StableHLO custom calls of these targets in an MLIR module, as operations."""
    calls = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and target(operation) in targets:
            calls.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return calls


def target(call: Any) -> str:
    """The name of the function that a custom call calls."""
    return str(ir.StringAttr(call.attributes["call_target_name"]).value)


def opaque(call: Any) -> bytes | None:
    """The payload of a custom call, if it has one."""
    attributes = call.attributes
    if "mhlo.backend_config" in attributes:  # a dictionary, in the typed FFI
        config = ir.DictAttr(attributes["mhlo.backend_config"])
        return bytes(ir.StringAttr(config["opaque"]).value_bytes) if "opaque" in config else None
    if "backend_config" in attributes:
        return bytes(ir.StringAttr(attributes["backend_config"]).value_bytes)
    return None


def frontend_attributes(call: Any) -> dict[str, str]:
    """The attributes that `annotate` added to a custom call."""
    if "mhlo.frontend_attributes" not in call.attributes:
        return {}
    entries = ir.DictAttr(call.attributes["mhlo.frontend_attributes"])
    return {entry.name: ir.StringAttr(entry.attr).value for entry in entries}


def aliases(call: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of operands and results of a custom call that share memory, sorted."""
    pairs = []
    if "output_operand_aliases" in call.attributes:
        for alias in map(stablehlo.OutputOperandAlias, call.attributes["output_operand_aliases"]):
            # A single result is not a tuple, and has no index.
            index = alias.output_tuple_indices[0] if len(call.results) > 1 else 0
            pairs.append((alias.operand_index, index))
    return tuple(sorted(pairs))


def is_fenced(call: Any) -> bool:
    """Whether each result that is used, and each aliased operand, is behind a `fence`.

    An operand that another custom call made, such as an uninitialised buffer, needs none.
    """
    users = [use.owner.operation for result in call.results for use in result.uses]
    owners = [call.operands[index].owner for index, _ in aliases(call)]
    makers = [getattr(owner, "operation", None) for owner in owners]  # None: a block's argument
    return all(map(_is_fence, users)) and all(
        maker is not None and (_is_fence(maker) or maker.name == call.name) for maker in makers
    )


def _is_fence(operation: Any) -> bool:
    return operation.name == "stablehlo.optimization_barrier" and len(operation.operands) == 1
