"""Annotates operations in lowered MLIR modules, and reads custom calls from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class CustomCallOp(NamedTuple):
    """A custom call found in a lowered module; `attributes` are its frontend attributes.

    `fenced` says that each result that is used, and each aliased operand, is behind a `fence`; an
    operand that another custom call made, such as an uninitialised buffer, needs none.
    """

    target: str
    opaque: bytes | None
    attributes: dict[str, str]
    aliases: tuple[tuple[int, int], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    fenced: bool


def custom_calls(module: Any) -> list[CustomCallOp]:
    """Returns all StableHLO custom calls of an MLIR module."""
    found = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            found.append(_custom_call_op(operation))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _custom_call_op(operation: Any) -> CustomCallOp:
    attributes = operation.attributes
    opaque = None
    if "mhlo.backend_config" in attributes:  # a dictionary, in the typed FFI
        config = ir.DictAttr(attributes["mhlo.backend_config"])
        if "opaque" in config:
            opaque = ir.StringAttr(config["opaque"]).value_bytes
    elif "backend_config" in attributes:
        opaque = ir.StringAttr(attributes["backend_config"]).value_bytes
    frontend: dict[str, str] = {}
    if "mhlo.frontend_attributes" in attributes:
        for item in ir.DictAttr(attributes["mhlo.frontend_attributes"]):
            frontend[item.name] = ir.StringAttr(item.attr).value
    pairs = []
    if "output_operand_aliases" in attributes:
        for alias in map(stablehlo.OutputOperandAlias, attributes["output_operand_aliases"]):
            # A single result is not a tuple, and has no index.
            index = alias.output_tuple_indices[0] if len(operation.results) > 1 else 0
            pairs.append((alias.operand_index, index))
    operands, results = (
        tuple(str(v.type) for v in values) for values in (operation.operands, operation.results)
    )
    target = ir.StringAttr(attributes["call_target_name"]).value
    users = [use.owner.operation for result in operation.results for use in result.uses]
    owners = [operation.operands[index].owner for index, _ in pairs]
    makers = [getattr(owner, "operation", None) for owner in owners]  # None: a block's argument
    fenced = all(map(_is_fence, users)) and all(
        maker is not None and (_is_fence(maker) or maker.name == operation.name) for maker in makers
    )
    return CustomCallOp(target, opaque, frontend, tuple(sorted(pairs)), operands, results, fenced)


def _is_fence(operation: Any) -> bool:
    return operation.name == "stablehlo.optimization_barrier" and len(operation.operands) == 1
