"""Carries out the operations of Triton's IR on NumPy arrays.

A subclass of the builder that Triton's interpreter uses, with the parts replaced
that are wrong (bfloat16, in older versions also NaNs and booleans), that would
touch real memory, or that fail without saying what is missing.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from triax.bridge.compat import triton_interpreter as compat
from triax.bridge.compat.triton_interpreter import TensorHandle, numpy_dtype
from triax.bridge.errors import UnsupportedError
from triax.bridge.interpreter.memory import Memory

_FLOAT8 = {
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT1_ARITHMETIC = (np.add, np.subtract, np.multiply)


class MissingOperation(UnsupportedError, AttributeError):
    """An operation that the interpreter does not have; also answers `hasattr`."""


class Builder(compat.InterpreterBuilder):
    """The operations. `memory` is that of the launch being interpreted."""

    memory: Memory
    options: Any

    def __init__(self) -> None:
        super().__init__()
        self.options = compat.debug_options(self.options)
        self.grid_idx: tuple[int, int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingOperation(
            f"The interpreter of Triton {triton.__version__} has no operation `{name}`; "
            "run the kernel on a GPU."
        )

    # Memory. Versions differ in how they pass cache hints, which mean nothing here.

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *hints: Any, **more_hints: Any
    ) -> TensorHandle:
        dtype = ptrs.get_element_ty()
        default = None if other is None else other.data
        lanes = _lanes(mask, ptrs)
        data = self.memory.load(ptrs.data, lanes, default, numpy_dtype(dtype))
        return TensorHandle(data, dtype)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *hints: Any, **more_hints: Any
    ) -> None:
        # Where old versions computed in a wider type, only the element's bytes may be written.
        values = value.data.astype(numpy_dtype(ptrs.get_element_ty()), copy=False)
        self.memory.store(ptrs.data, values, _lanes(mask, ptrs))

    def create_atomic_rmw(
        self, operation: Any, ptr: Any, val: Any, mask: Any, *order: Any
    ) -> TensorHandle:
        dtype = val.dtype.scalar
        values = val.data.astype(numpy_dtype(dtype), copy=False)
        lanes = _lanes(mask, ptr)
        return TensorHandle(self.memory.update(operation.name, ptr.data, values, lanes), dtype)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, *order: Any) -> TensorHandle:
        dtype = cmp.dtype.scalar
        stored = numpy_dtype(dtype)
        expected, values = (h.data.astype(stored, copy=False) for h in (cmp, val))
        return TensorHandle(self.memory.compare_and_swap(ptr.data, expected, values), dtype)

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
        if z.data.dtype.itemsize > 2:
            return super().create_fma(x, y, z)
        # Rounds once: float64 holds the products and sums of 16-bit floats.
        wide = [handle.data.astype(np.float64) for handle in (x, y, z)]
        return TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)

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
        self, library: str, path: str, symbol: str, *rest: Any
    ) -> TensorHandle:
        raise UnsupportedError(
            f"The interpreter cannot call `{symbol}` of the GPU library {library or path!r}; "
            "use a function of `tl.math`, or run the kernel on a GPU."
        )

    def create_inline_asm(self, assembly: str, *rest: Any) -> TensorHandle:
        raise UnsupportedError(
            f"The interpreter cannot run inline assembly ({assembly.strip().splitlines()[0]!r}); "
            "run the kernel on a GPU."
        )

    def create_grid_dependency_wait(self) -> None:
        """Programs run one after another: there is nothing to wait for."""

    def create_grid_dependency_launch_dependents(self) -> None:
        """Programs run one after another: there is nobody to launch."""


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
