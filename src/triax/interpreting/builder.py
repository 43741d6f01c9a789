"""Carries out the operations of Triton's IR on NumPy arrays.

A subclass of the builder that Triton's interpreter uses, with the parts replaced
that are wrong (bfloat16, in older versions also NaNs and booleans), that would
touch real memory, or that fail without saying what is missing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from triax.binding import dtypes
from triax.compat import triton_interpreter as compat
from triax.compat.triton_interpreter import TensorHandle, numpy_dtype
from triax.errors import UnsupportedError
from triax.interpreting.memory import Memory

_FLOAT8 = {name: dtype for dtype, name in dtypes.FLOAT8.items()}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT1_ARITHMETIC = (np.add, np.subtract, np.multiply)


class MissingOperation(UnsupportedError, AttributeError):
    """An operation that the interpreter does not have; also answers `hasattr`."""


class Builder(compat.InterpreterBuilder):  # type: ignore[misc]  # Triton has no types
    """The operations. `memory` and `num_warps` are those of the launch being interpreted."""

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
        self, ptrs: Any, mask: Any, other: Any, *hints: Any, **more_hints: Any
    ) -> TensorHandle:
        return self._load(ptrs, mask, None if other is None else other.data)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *hints: Any, **more_hints: Any
    ) -> None:
        self._store(ptrs, value, mask)

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        return self._load(ptr, mask, None, _order(sem, scope))

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:
        self._store(ptr, val, mask, _order(sem, scope))

    def create_atomic_poll(
        self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        everywhere = TensorHandle(np.ones(ptr.data.shape, bool), tl.int1)
        matched = self._load(ptr, everywhere, None, _order(sem, scope)).data == expected.data
        # Programs run one after another, so nothing can arrive while this one waits.
        if not matched.all() and not isinstance(timeout_ns, TensorHandle):
            raise UnsupportedError(
                "The interpreter runs programs one after another, in the order of their numbers, "
                "and `tl.atomic_poll` waits for a value that no earlier program wrote. Pass "
                "`timeout_ns`, let programs wait only for earlier ones, or run the kernel on a GPU."
            )
        return TensorHandle(matched, tl.int1)

    def _load(
        self, ptrs: Any, mask: Any, other: np.ndarray | None, order: str | None = None
    ) -> TensorHandle:
        dtype = ptrs.dtype.scalar.element_ty
        data = self.memory.load(ptrs.data, _lanes(mask, ptrs), other, numpy_dtype(dtype), order)
        return TensorHandle(data, dtype)

    def _store(self, ptrs: Any, value: Any, mask: Any, order: str | None = None) -> None:
        # Where old versions computed in a wider type, only the element's bytes may be written.
        values = value.data.astype(numpy_dtype(ptrs.dtype.scalar.element_ty), copy=False)
        self.memory.store(ptrs.data, values, _lanes(mask, ptrs), order)

    def create_atomic_rmw(
        self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        dtype = val.dtype.scalar
        values = val.data.astype(numpy_dtype(dtype), copy=False)
        lanes = _lanes(mask, ptr)
        order = _order(sem, scope)
        old = self.memory.update(operation.name, ptr.data, values, lanes, order)
        return TensorHandle(old, dtype)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> TensorHandle:
        dtype = cmp.dtype.scalar
        stored = numpy_dtype(dtype)
        expected, values = (h.data.astype(stored, copy=False) for h in (cmp, val))
        order = _order(sem, scope)
        return TensorHandle(self.memory.compare_and_swap(ptr.data, expected, values, order), dtype)

    def create_make_tensor_descriptor(
        self,
        base: Any,
        shape: Any,
        strides: Any,
        block_shape: Any,
        is_signed: bool,
        padding: Any = "zero",
    ) -> Any:
        # Triton's own check counts strides in elements in some versions and in bytes in others.
        itemsize = numpy_dtype(base.dtype.element_ty).itemsize
        if base.data.item() % 16 or any(s.data.item() * itemsize % 16 for s in strides[:-1]):
            raise ValueError(
                "The base and all strides but the last of a tensor descriptor must be "
                "multiples of 16 bytes."
            )
        return compat.TensorDescHandle(base, shape, strides, block_shape, padding)

    # Conversions.

    def cast_impl(self, src: Any, dst_type: Any) -> TensorHandle:
        return TensorHandle(src.data.astype(numpy_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        toward_zero = getattr(rounding_mode, "name", "RTNE") != "RTNE"
        if toward_zero or "fp8e4b15" in (source.name, target.name):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        data = _as_float(src)
        if target.name not in _FLOAT8:
            return TensorHandle(data.astype(numpy_dtype(target)), target)
        # GPUs convert to float8 with saturation.
        limit = float(ml_dtypes.finfo(_FLOAT8[target.name]).max)
        data = np.clip(data, -limit, limit).astype(_FLOAT8[target.name])
        return TensorHandle(data.view(np.uint8), target)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(np.array([value], _BFLOAT16), tl.bfloat16)

    def get_all_ones_value(self, type: Any) -> TensorHandle:
        dtype = numpy_dtype(type)
        return TensorHandle(np.array([-1]).astype(dtype), type.scalar)

    # Shapes.

    def create_splat(self, type: Any, value: Any) -> TensorHandle:
        data = np.empty(compat.sizes_of(type), numpy_dtype(value.dtype))
        data[...] = value.data
        return TensorHandle(data, value.dtype.scalar)

    # Arithmetic.

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> TensorHandle:
        dtype = lhs.dtype.scalar
        a, b = lhs.data, rhs.data
        if a.dtype == np.bool_ and op in _INT1_ARITHMETIC:
            # A one-bit integer wraps; NumPy's booleans saturate or refuse.
            return TensorHandle((op(a.astype(np.int8), b.astype(np.int8)) & 1).astype(bool), dtype)
        output = op(a, b)
        if output.dtype != np.bool_:
            output = output.astype(numpy_dtype(dtype), copy=False)
        return TensorHandle(output, dtype)

    def create_minnumf(self, lhs: Any, rhs: Any) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> TensorHandle:
        keep = propagate_nans.name == "ALL"
        low, high = (np.maximum, np.minimum) if keep else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    def create_fma(self, x: Any, y: Any, z: Any) -> TensorHandle:
        from triax.interpreting import libdevice  # here: few kernels need scipy

        return TensorHandle(libdevice.fma(x.data, y.data, z.data), z.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
        dtype = d.data.dtype
        wide = np.dtype(np.float32) if d.dtype.scalar.is_floating() else dtype
        wide = np.promote_types(wide, dtype) if dtype != _BFLOAT16 else wide
        x, y = (_as_float(h) if h.dtype.scalar.is_floating() else h.data for h in (a, b))
        product = np.matmul(x.astype(wide, copy=False), y.astype(wide, copy=False))
        return TensorHandle((product + d.data.astype(wide)).astype(dtype), d.dtype.scalar)

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

    def create_inline_asm(self, assembly: str, *rest: Any) -> TensorHandle:
        raise UnsupportedError(
            f"The interpreter cannot run inline assembly ({assembly.strip().splitlines()[0]!r}); "
            "run the kernel on a GPU."
        )


def missing_function(symbol: str, library: str) -> UnsupportedError:
    """The error for a function of a GPU library that the interpreter does not have."""
    return UnsupportedError(
        f"The interpreter does not have `{symbol}` of the GPU library {library!r}; use a function "
        "of `tl.math`, or run the kernel on a GPU."
    )


def _as_float(handle: Any) -> np.ndarray:
    """Floats of any width as float32, or as they are where they are wider."""
    data = handle.data
    if handle.dtype.scalar.name in _FLOAT8:
        data = data.view(_FLOAT8[handle.dtype.scalar.name])
    return data if data.dtype.itemsize > 4 else data.astype(np.float32, copy=False)


def _lanes(mask: Any, pointers: Any) -> np.ndarray:
    """A mask as booleans, one for each pointer.

    Arithmetic on one-bit values leaves them in wider integers, which NumPy would take for
    positions; only their lowest bit means anything.
    """
    data = np.broadcast_to(mask.data, pointers.data.shape)
    return data if data.dtype == bool else (data & 1).astype(bool)


def _order(semantics: Any, scope: Any) -> str:
    """How an atomic orders the accesses of different programs; one CTA is one program."""
    return "relaxed" if scope.name == "CTA" else str(semantics.name).lower()
