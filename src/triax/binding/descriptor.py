"""Host-side TMA descriptors as operands of `triton_call`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from triax import messages
from triax.binding.grid import is_int
from triax.compat import triton_private, versions
from triax.errors import ArgumentTypeError, ArgumentValueError

BlockShape: TypeAlias = tuple[int, ...] | Callable[[Mapping[str, Any]], Sequence[int]]


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements: (2, 3, 4) → (12, 4, 1)."""
    if hasattr(shape, "shape") or not isinstance(shape, Sequence):
        remedy = " Use its `shape`." if hasattr(shape, "shape") else ""
        raise ArgumentTypeError(
            f"Argument `shape` must be a tuple of ints; got {messages.shown(shape)}.{remedy}"
        )
    messages.check_sizes_known("shape", shape)
    if not all(is_int(size) and size >= 0 for size in shape):
        raise ArgumentTypeError(
            f"Argument `shape` must be a tuple of non-negative ints; got {messages.shown(shape)}."
        )
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def check_strides(strides: tuple[int, ...], dtype: Any) -> None:
    """Raises `ArgumentValueError` unless TMA can address an array of `dtype` by its strides."""
    if strides[-1] != 1 or any(stride * dtype.itemsize % 16 for stride in strides[:-1]):
        raise ArgumentValueError(
            "Argument `strides` of TensorDescriptor must end in 1 and be multiples of 16 bytes "
            f"before that; got {strides} of {dtype} ({dtype.itemsize} bytes). Pad the rows of the "
            "array."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorDescriptor:
    """A TMA descriptor of an array, made on the host when the kernel is launched.

        desc = triax.TensorDescriptor.from_array(x, block_shape=(64, 64))
        triax.triton_call(desc, kernel=k, …)  # the kernel calls desc.load([i, j])

    Of a `jax.ShapeDtypeStruct` it is the descriptor of an output, through which the kernel stores.
    As if it were left out, its parameter takes the next output.

        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        show = triax.TensorDescriptor.from_array(out, block_shape=(64, 64))
        triax.triton_call(desc, out_ptr=show, kernel=k, out_type=out, …)

    Shapes and strides count elements. Needs a jaxlib that can encode descriptors, and a
    GPU with TMA (compute capability 9.0 or later).

    Args:
      base: the array, or a `jax.ShapeDtypeStruct` for an output. Its address is aligned to 16
        bytes, like all of XLA's buffers.
      shape: the shape the descriptor shows, one to five dimensions.
      strides: element strides; the last is 1, the others multiples of 16 bytes.
      block_shape: the shape of the blocks to load and store, or a callable that returns it given
        the meta-parameters, called once per config like a grid: ``lambda meta: (meta["BM"],
        meta["BK"])``. A config's `pre_hook` may also set it.
      layout: the shared-memory layout, for Gluon kernels.
      padding: the value that loads outside the array read, "zero" or "nan".
      round_f32_to_tf32: rounds float32 to tf32 on the way in. Needs Triton 3.7 or later.

    Raises:
      ArgumentTypeError, ArgumentValueError: the ranks differ, or TMA cannot address the array this
        way.
      UnsupportedError: the installed Triton does not support `round_f32_to_tf32`.
    """

    base: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    strides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    block_shape: BlockShape = dataclasses.field(metadata={"static": True})
    layout: Any = dataclasses.field(default=None, metadata={"static": True})
    padding: Literal["zero", "nan"] = dataclasses.field(default="zero", metadata={"static": True})
    round_f32_to_tf32: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def from_array(
        cls,
        array: jax.Array | jax.ShapeDtypeStruct,
        block_shape: Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]],
        layout: Any = None,
        padding: Literal["zero", "nan"] = "zero",
        round_f32_to_tf32: bool = False,
    ) -> TensorDescriptor:
        """The descriptor of a whole, row-major array or output."""
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ArgumentTypeError(
                f"Argument `array` of TensorDescriptor must be an array; got "
                f"{messages.shown(array)}. Use jnp.asarray."
            )
        return cls(
            array,
            tuple(array.shape),
            strides_from_shape(array.shape),
            tuple(block_shape) if isinstance(block_shape, Sequence) else block_shape,
            layout,
            padding,
            round_f32_to_tf32,
        )

    def __post_init__(self) -> None:
        fields = {"shape": self.shape, "strides": self.strides}
        if not callable(self.block_shape):
            fields["block_shape"] = self.block_shape
        for name, sizes in fields.items():
            least = 1 if name == "block_shape" else 0
            if not isinstance(sizes, tuple) or not all(is_int(n) and n >= least for n in sizes):
                raise ArgumentTypeError(
                    f"Argument `{name}` of TensorDescriptor must be a tuple of Python ints, each "
                    f"at least {least}; got {messages.shown(sizes)}."
                )
        ranks = [len(sizes) for sizes in fields.values()]
        if len(set(ranks)) != 1 or not 1 <= ranks[0] <= 5:
            raise ArgumentValueError(
                "Arguments `shape`, `strides` and `block_shape` of TensorDescriptor must have the "
                f"same length, one to five; got {self.shape}, {self.strides}, {self.block_shape}."
            )
        if self.padding not in ("zero", "nan"):
            raise ArgumentValueError(
                f"Argument `padding` of TensorDescriptor must be 'zero' or 'nan'; got "
                f"{messages.short(self.padding)}."
            )
        if not hasattr(self.base, "dtype"):  # JAX rebuilds pytrees with placeholders
            return
        check_strides(self.strides, self.base.dtype)
        if self.round_f32_to_tf32 and self.base.dtype.name != "float32":
            raise ArgumentTypeError(
                f"Argument `round_f32_to_tf32` of TensorDescriptor needs a float32 array; got "
                f"{self.base.dtype}."
            )
        if self.round_f32_to_tf32:
            triton_private.require(
                versions.TF32_DESCRIPTORS,
                "Argument `round_f32_to_tf32` of TensorDescriptor",
                'Leave it out: `tl.dot` rounds with `input_precision="tf32"`, its default.',
            )
