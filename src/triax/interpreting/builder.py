"""Carries out the operations of Triton's IR on NumPy arrays.

`Builder` extends the builder of Triton's interpreter. It replaces the parts that are
wrong (bfloat16, in older versions also NaNs and booleans), that would touch real memory,
or that fail without saying what is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from triax.compat import triton_interpreter as compat
from triax.compat.triton_interpreter import TensorHandle, numpy_dtype
from triax.errors import OutOfBounds, UnsupportedError
from triax.interpreting import conversions, dots
from triax.interpreting.conversions import BFLOAT16
from triax.interpreting.memory import Memory, unsigned

_INT1_ARITHMETIC = (np.add, np.subtract, np.multiply)
_ALL = TensorHandle(np.array(True), tl.int1)
"""The mask of an access in all lanes."""


class MissingOperation(UnsupportedError, AttributeError):
    """The interpreter lacks an operation; an AttributeError too, so that `hasattr` works."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call with one result, as Triton asks for it."""

    result: TensorHandle

    def get_result(self, _: int) -> TensorHandle:
        return self.result


class InterpretedDescriptor(compat.TensorDescHandle):  # type: ignore[misc]  # Triton has no types
    """A tensor descriptor, whose blocks may begin at any element."""

    # Workaround: triton >=3.5: its class refuses a last offset that is no multiple of 16 bytes.
    def materialize_pointers(self, offsets: Any) -> tuple[TensorHandle, TensorHandle]:
        dtype = self.base.dtype.scalar
        axes = zip(offsets, self.block_shape, strict=True)
        at = np.ix_(*(o.data.astype(np.int64).item() + np.arange(n) for o, n in axes))
        mask, elements = np.ones(self.block_shape, bool), np.zeros(self.block_shape, np.int64)
        for index, size, stride in zip(at, self.shape, self.strides, strict=True):
            mask &= (index >= 0) & (index < size.data)
            elements += index * stride.data
        step = numpy_dtype(dtype.element_ty).itemsize
        addresses = self.base.data + (elements * step).astype(np.uint64)
        return TensorHandle(addresses, dtype), TensorHandle(mask, tl.int1)


def _integer(dtype: tl.dtype) -> Callable[[Any, int], TensorHandle]:
    """Returns a method that makes constants of an integer type, which wrap around."""
    stored = numpy_dtype(dtype)
    wide = np.dtype(f"{stored.kind}8")
    return lambda self, value: TensorHandle(np.array([value], wide).astype(stored), dtype)


class Builder(compat.InterpreterBuilder):  # type: ignore[misc]  # Triton has no types
    """Triton's operations; `memory` and `num_warps` belong to the launch being interpreted."""

    memory: Memory
    num_warps: int
    options: Any

    def __init__(self) -> None:
        super().__init__()
        # `tl.device_assert` asserts, and integers may wrap.
        self.options = dataclasses.replace(self.options, debug=True, sanitize_overflow=False)
        self.grid_idx: tuple[int, int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingOperation(
            f"The interpreter of Triton {triton.__version__} has no operation `{name}`; "
            "run the kernel on a GPU."
        )

    # Memory. Versions differ in how they pass cache hints, which mean nothing here.

    def create_addptr(self, ptr: Any, offset: Any) -> TensorHandle:
        step = np.uint64(numpy_dtype(ptr.dtype.scalar.element_ty).itemsize)
        offsets = offset.data.astype(np.uint64) * step
        return TensorHandle(self.memory.moved(ptr.data, offsets), ptr.dtype)

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *hints: Any, is_volatile: bool = False,
        order: str | None = None, **more: Any,
    ) -> TensorHandle:  # fmt: skip
        if is_volatile or (hints and hints[-1] is True):
            order = "volatile"
        dtype = ptrs.dtype.scalar.element_ty
        others = None if other is None else other.data
        data = self.memory.load(ptrs.data, _lanes(mask, ptrs), others, numpy_dtype(dtype), order)
        return TensorHandle(data, dtype)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *hints: Any, order: str | None = None, **more: Any
    ) -> None:
        # Old versions compute in a wider type, but only the element's bytes may be written.
        values = value.data.astype(numpy_dtype(ptrs.dtype.scalar.element_ty), copy=False)
        self.memory.store(ptrs.data, values, _lanes(mask, ptrs), order)

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        return self.create_masked_load(ptr, mask, None, order=_order(sem, scope))

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:
        self.create_masked_store(ptr, val, mask, order=_order(sem, scope))

    def create_atomic_poll(
        self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        matched = self.create_atomic_load(ptr, _ALL, sem, scope).data == expected.data
        # Programs run one after another, so nothing can arrive while this one waits.
        if not matched.all() and not isinstance(timeout_ns, TensorHandle):
            raise UnsupportedError(
                "The interpreter runs programs one after another, in the order of their numbers, "
                "and `tl.atomic_poll` waits for a value that no earlier program wrote. Pass "
                "`timeout_ns`, let programs wait only for earlier ones, or run the kernel on a GPU."
            )
        return TensorHandle(matched, tl.int1)

    def create_atomic_rmw(
        self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        return self._update(operation.name, ptr, [val], mask, _order(sem, scope))

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> TensorHandle:
        return self._update("CAS", ptr, [val, cmp], _ALL, _order(sem, scope))

    def _update(
        self, operation: str, ptr: Any, operands: list[Any], mask: Any, order: str
    ) -> TensorHandle:
        dtype = operands[0].dtype.scalar
        arrays = [operand.data.astype(numpy_dtype(dtype), copy=False) for operand in operands]
        old = self.memory.update(operation, ptr.data, arrays, _lanes(mask, ptr), order)
        return TensorHandle(old, dtype)

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, block_shape: Any, is_signed: bool,
        padding: Any = "zero",
    ) -> Any:  # fmt: skip
        # Workaround: triton 3.5: its own check counts strides in elements, not in bytes.
        itemsize = numpy_dtype(base.dtype.element_ty).itemsize
        if base.data.item() % 16 or any(s.data.item() * itemsize % 16 for s in strides[:-1]):
            raise ValueError(
                "The base and all strides but the last of a tensor descriptor must be "
                "multiples of 16 bytes."
            )
        return InterpretedDescriptor(base, shape, strides, block_shape, padding)

    def create_descriptor_reduce(
        self, kind: Any, descriptor: Any, value: Any, indices: Any
    ) -> None:
        ptrs, mask = descriptor.materialize_pointers(indices)
        self._update(kind.name, ptrs, [value], mask, "relaxed")

    # Conversions.

    def cast_impl(self, src: Any, dst_type: Any) -> TensorHandle:
        source, target, dtype = src.dtype.scalar, dst_type.scalar, numpy_dtype(dst_type)
        if target.is_floating():
            data = conversions.to_float(src.data, dtype)
        elif source.is_floating():
            data = conversions.to_integer(src.data, dtype)
        else:
            data = src.data.astype(dtype)
        return TensorHandle(data, target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        target = dst_type.scalar
        if "fp8e4b15" in (src.dtype.scalar.name, target.name):
            raise UnsupportedError(
                "The interpreter cannot convert `tl.float8e4b15`; run the kernel on a GPU."
            )
        toward_zero = getattr(rounding_mode, "name", "RTNE") != "RTNE"
        data = conversions.to_float(src.data, numpy_dtype(target), toward_zero)
        return TensorHandle(data, target)

    get_int8, get_int16, get_int32 = map(_integer, (tl.int8, tl.int16, tl.int32))
    get_uint8, get_uint16, get_uint32 = map(_integer, (tl.uint8, tl.uint16, tl.uint32))

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(np.array([value], BFLOAT16), tl.bfloat16)

    def get_all_ones_value(self, type: Any) -> TensorHandle:
        dtype = numpy_dtype(type)
        return TensorHandle(np.array([-1]).astype(dtype), type.scalar)

    # Shapes.

    def create_gather(self, src: Any, indices: Any, axis: int) -> TensorHandle:
        size = src.data.shape[axis]
        outside = (indices.data < 0) | (indices.data >= size)
        if outside.any():
            raise OutOfBounds(
                f"{self.memory.where()}: tl.gather with index {indices.data[outside][0]}, outside "
                f"the {size} elements of axis {axis} of its source; {outside.sum()} of "
                f"{outside.size} indices are outside. Clamp the indices."
            )
        return TensorHandle(np.take_along_axis(src.data, indices.data, axis), src.dtype.scalar)

    def create_histogram(self, data: Any, bins: int, mask: Any) -> TensorHandle:
        values = data.data if mask is None else data.data[_lanes(mask, data)]
        inside = (values >= 0) & (values < bins)
        if compat.HISTOGRAMS_WRAP and not inside.all():
            raise OutOfBounds(
                f"{self.memory.where()}: tl.histogram of the value {values[~inside][0]} in {bins} "
                "bins. Triton leaves such values out from 3.8 on, and counts them in another bin "
                f"until then (installed: {triton.__version__}): mask them."
            )
        counts = np.bincount(values[inside].astype(np.int64), minlength=bins)
        return TensorHandle(counts.astype(np.int32), tl.int32)

    # Arithmetic.

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> TensorHandle:
        dtype = lhs.dtype.scalar
        a, b = lhs.data, rhs.data
        if a.dtype == np.bool_ and op in _INT1_ARITHMETIC:
            # Workaround: triton <=3.8, #10919: one-bit integers wrap, NumPy's booleans do not.
            return TensorHandle((op(a.astype(np.int8), b.astype(np.int8)) & 1).astype(bool), dtype)
        output = op(a, b)
        stored = output.dtype if output.dtype == np.bool_ else numpy_dtype(dtype)
        return TensorHandle(output.astype(stored, copy=False), dtype)

    # Workaround: triton <=3.7: its versions of these three propagate NaNs.

    def create_minnumf(self, lhs: Any, rhs: Any) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> TensorHandle:
        keep = propagate_nans.name == "ALL"
        low, high = (np.maximum, np.minimum) if keep else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    def create_fma(self, x: Any, y: Any, z: Any) -> TensorHandle:
        # Workaround: triton <=3.8: it rounds twice.
        from triax.interpreting import libdevice  # here: few kernels need scipy

        return TensorHandle(libdevice.fma(x.data, y.data, z.data), z.dtype.scalar)

    def create_umulhi(self, lhs: Any, rhs: Any) -> TensorHandle:
        # Workaround: triton <=3.8: it multiplies signed operands as signed numbers.
        high = super().create_umulhi(*(TensorHandle(unsigned(h.data), h.dtype) for h in (lhs, rhs)))
        return TensorHandle(high.data.view(lhs.data.dtype), lhs.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
        return TensorHandle(dots.dot(a.data, b.data, d.data), d.dtype.scalar)

    def create_dot_scaled(
        self, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any,
        fast_math: bool, a_packs_depth: bool, b_packs_depth: bool, d: Any,
    ) -> TensorHandle:  # fmt: skip
        dtype = np.dtype(np.float16 if "FP16" in (a_format.name, b_format.name) else BFLOAT16)
        left = dots.scaled(a, a_scale, a_format.name, a_packs_depth, dtype)
        # Both operands' scales have the depth last.
        b = TensorHandle(np.swapaxes(b.data, -1, -2), b.dtype)
        right = dots.scaled(b, b_scale, b_format.name, b_packs_depth, dtype)
        product = dots.dot(left, np.swapaxes(right, -1, -2), d.data)
        return TensorHandle(product, d.dtype.scalar)

    # The rest.

    def create_assert(self, condition: Any, message: str, *where: Any) -> None:
        if not condition.data.all():
            raise AssertionError(f"tl.device_assert: {message}")

    def create_assume(self, condition: Any) -> None:
        if not condition.data.all():
            raise AssertionError("tl.assume: what the kernel assumes is false")

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: Any, dtype: Any, is_pure: bool
    ) -> TensorHandle:
        from triax.interpreting import libdevice  # here: few kernels need scipy

        function = libdevice.find(symbol)
        if function is None:
            raise missing_function(symbol, library or path or "libdevice")
        data = function(*(arg.data for arg in args))
        return TensorHandle(data.astype(numpy_dtype(dtype), copy=False), dtype.scalar)

    def create_inline_asm(
        self, assembly: str, constraints: str, args: Any, types: Any, *rest: Any
    ) -> Any:
        from triax.interpreting import instructions  # here: few kernels have assembly

        run = instructions.find(assembly) if len(types) == 1 else None
        if run is None:
            raise UnsupportedError(
                "The interpreter cannot run inline assembly "
                f"({assembly.strip().splitlines()[0]!r}); run the kernel on a GPU."
            )
        data = run(*(arg.data for arg in args)).view(numpy_dtype(types[0].scalar))
        return _Call(TensorHandle(data, types[0].scalar))


def missing_function(symbol: str, library: str) -> UnsupportedError:
    """Makes the error for a function of a GPU library that the interpreter does not have."""
    return UnsupportedError(
        f"The interpreter does not have `{symbol}` of the GPU library {library!r}; use a function "
        "of `tl.math`, or run the kernel on a GPU."
    )


def _lanes(mask: Any, pointers: Any) -> np.ndarray:
    """Converts a mask to one boolean for each pointer.

    Arithmetic on one-bit values leaves them in wider integers, which NumPy would take for
    positions; only their lowest bit means anything.
    """
    data = np.broadcast_to(mask.data, pointers.data.shape)
    return data if data.dtype == bool else (data & 1).astype(bool)


def _order(semantics: Any, scope: Any) -> str:
    """Returns an atomic's memory order between programs: relaxed if its scope is one CTA."""
    return "relaxed" if scope.name == "CTA" else str(semantics.name).lower()
