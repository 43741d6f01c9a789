"""Chooses the kernel of every product: the first of a list whose needs are met."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from triax.moe.activations.launchers import glu
from triax.moe.activations.reference import GluSpec
from triax.moe.products import any_gpu, any_gpu_gradients, few_rows, sm90_8_bits, sm90_16_bits
from triax.moe.products.operands import Parts, parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.product import GroupOuter, Product, RaggedDot
from triax.moe.products.reference import quantized_outer_reference
from triax.moe.quantization.packing import fill, unfill, whole_tiles
from triax.moe.quantization.scaled import ScaledArray, filled
from triax.moe.shared.arrays import stored
from triax.moe.shared.target import Target, for_target


class ProductKernel(NamedTuple):
    """A way to compute a product.

    Attributes:
      name: of the file that launches it, or of the kernel.
      needs: returns what the kernel needs and a product does not have; None if it takes it.
      launch: computes the product.
      applies_glu: whether `launch` also applies the activation of a product that has one.
    """

    name: str
    needs: Callable[[Any], str | None]
    launch: Callable[[Any], Any]
    applies_glu: bool = False


class ProductChoice(NamedTuple):
    """The kernel of a product, and what those before it in the list need."""

    product: str
    kernel: str
    needs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"  not {kernel}, which needs {needed}" for kernel, needed in self.needs]
        return "\n".join([f"{self.product}: {self.kernel}", *lines])


_choices: contextvars.ContextVar[list[ProductChoice] | None] = contextvars.ContextVar(
    "choices", default=None
)


@contextlib.contextmanager
def noted() -> Iterator[list[ProductChoice]]:
    """Lists the choices for products that are lowered inside, each once."""
    choices: list[ProductChoice] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def _dequantized(product: RaggedDot) -> Any:
    few_rows.warn_of_dequantizing(product)
    return _run(RAGGED_DOT, few_rows.dequantized(product))


def _in_plain_jax(product: GroupOuter) -> jax.Array:
    sides = product.left.values, product.right.values
    keywords: dict[str, Any] = {"options": product.options, "dtypes": product.rounded_to}
    return quantized_outer_reference(*sides, *product.sources, product.groups, **keywords)


RAGGED_DOT = (
    ProductKernel("very_few_rows", few_rows.needs_of_very_few, few_rows.very_few_rows),
    ProductKernel("few_rows", few_rows.needs, few_rows.few_rows),
    ProductKernel("dequantized", few_rows.dequantizing_needs, _dequantized, applies_glu=True),
    ProductKernel("sm90_8_bits", sm90_8_bits.needs, sm90_8_bits.ragged_dot),
    ProductKernel("sm90_16_bits", sm90_16_bits.needs, sm90_16_bits.ragged_dot, applies_glu=True),
    ProductKernel("any_gpu", lambda _: None, any_gpu.ragged_dot),
)
GROUP_OUTER = (
    ProductKernel("sm90_16_bits", sm90_16_bits.needs_of_gradients, sm90_16_bits.group_outer),
    ProductKernel("any_gpu", any_gpu_gradients.needs, any_gpu_gradients.group_outer),
    ProductKernel("plain JAX", lambda _: None, _in_plain_jax),
)


def choose(kernels: tuple[ProductKernel, ...], product: Product) -> ProductKernel:
    """Returns the first kernel that takes a product; the last one takes all."""
    needs = []
    for kernel in kernels:
        needed = kernel.needs(product)
        if needed is None:
            break
        needs.append((kernel.name, needed))
    choice = ProductChoice(str(product), kernel.name, tuple(needs))
    if (choices := _choices.get()) is not None and choice not in choices:
        choices.append(choice)
    return kernel


def _run(kernels: tuple[ProductKernel, ...], product: Product) -> Any:
    """Launches the kernel of a product, and its activation where the kernel does not apply it."""
    kernel = choose(kernels, product)
    result = kernel.launch(product)
    if kernel.applies_glu or not isinstance(product, RaggedDot) or product.glu is None:
        return result
    keywords: dict[str, Any] = {"spec": product.glu, "implementation": product.implementation}
    inner = glu(result, None, product.row_weights, **keywords)
    return result if product.keep_product else None, inner


def ragged_dot(
    rows: Any, weights: Any, *others: Any, transposed: bool, options: Options, **keywords: Any
) -> jax.Array:
    """Multiplies each row by its group's weights, maybe transposed; zeros outside groups."""
    if isinstance(weights, ScaledArray) and weights.shard is not None:
        depth, columns = ((of, whole_tiles(of)) for of in weights.shard)
        groups, *biases = others
        if biases and biases[0] is not None:
            biases[0] = fill(biases[0], 1, *columns)
        operands = fill(rows, 1, *depth), filled(weights), groups, *biases
        out = ragged_dot(*operands, transposed=transposed, options=options, **keywords)
        return unfill(out, 1, *columns)
    axis = 1 if transposed and not isinstance(weights, ScaledArray) else 2
    out_type = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[axis]), stored(options.dtype))
    keywords |= {"options": dataclasses.replace(options, dtype=out_type.dtype)}
    keywords |= {"transposed": transposed, "out_type": out_type}
    return for_target(_ragged_dot, rows, weights, *others, **keywords).astype(options.dtype)


def ragged_dot_glu(
    rows: Any,
    weights: Any,
    groups: Groups,
    bias: Any,
    row_weights: Any,
    *,
    transposed: bool,
    options: Options,
    spec: GluSpec,
    **keywords: Any,
) -> Any:
    """Returns gate and up as `ragged_dot` does, or None, and the result of `glu`."""
    columns = weights.shape[1 if transposed else 2]
    shapes = (rows.shape[0], columns), (rows.shape[0], spec.width(columns))
    product, inner = (jax.ShapeDtypeStruct(shape, options.dtype) for shape in shapes)
    keywords |= {"out_type": (product if keywords["keep_product"] else None, inner)}
    keywords |= {"transposed": transposed, "options": options, "glu": spec}
    return for_target(_ragged_dot, rows, weights, groups, bias, None, row_weights, **keywords)


def _ragged_dot(
    target: Target,
    rows: Any,
    weights: Any,
    groups: Groups,
    bias: jax.Array | None = None,
    bias_weights: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    **keywords: Any,
) -> Any:
    operands: dict[str, Any] = {"left": parts(rows), "right": parts(weights), "weights": weights}
    operands |= {"bias": bias, "bias_weights": bias_weights, "row_weights": row_weights}
    return _run(RAGGED_DOT, RaggedDot(target=target, groups=groups, **operands, **keywords))


def group_outer(left: jax.Array, right: jax.Array, groups: Groups, **keywords: Any) -> Any:
    """Sums left × right over the rows of each group: [groups, left, right]."""
    return quantized_outer(left, right, None, None, groups, dtypes=None, **keywords)


def quantized_outer(
    left: jax.Array,
    right: jax.Array,
    left_source: jax.Array | None,
    right_source: jax.Array | None,
    groups: Groups,
    *,
    options: Options,
    dtypes: tuple[np.dtype, np.dtype] | None,
    **keywords: Any,
) -> Any:
    """Sums left × right over the rows of each group, both in 8 bits, but for dtypes of None."""
    shape = groups.sizes.shape[0], left.shape[1], right.shape[1]
    keywords |= {"out_type": jax.ShapeDtypeStruct(shape, options.dtype), "options": options}
    keywords |= {"rounded_to": dtypes}
    return for_target(_group_outer, left, right, (left_source, right_source), groups, **keywords)


def _group_outer(
    target: Target,
    left: jax.Array,
    right: jax.Array,
    sources: tuple[jax.Array | None, jax.Array | None],
    groups: Groups,
    **keywords: Any,
) -> Any:
    sides: Any = {"left": Parts(left), "right": Parts(right), "sources": sources}
    return _run(GROUP_OUTER, GroupOuter(target=target, groups=groups, **sides, **keywords))
