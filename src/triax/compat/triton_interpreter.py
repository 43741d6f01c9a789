"""What Triax takes from the insides of Triton's interpreter.

Triton's interpreter replaces functions of `triton.language` by ones that compute
with NumPy. Stock, it needs torch and an environment variable, leaves names in
the user's module, and in some versions never undoes its replacements. This file
hands out its parts under plain names: the builder that carries out operations,
the replacements in a form that can always be undone, and the AST
transformation of kernels. The interpreter proper is `triax.interpreting`.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic as TritonSemantic
from triton.runtime import JITFunction
from triton.runtime import interpreter as _stock

from triax.compat import patching
from triax.compat.patching import Change as Change

InterpreterBuilder = _stock.InterpreterBuilder
TensorHandle = _stock.TensorHandle
TensorDescHandle = _stock.TensorDescHandle

SUM_COMBINE: JITFunction = tl.standard._sum_combine
PROD_COMBINE: JITFunction = tl.standard._prod_combine
MAX_COMBINE: JITFunction = tl.standard._elementwise_max
MIN_COMBINE: JITFunction = tl.standard._elementwise_min
ARGMAX_COMBINES: tuple[JITFunction, ...] = (
    tl.standard._argmax_combine_tie_break_left,
    tl.standard._argmax_combine_tie_break_fast,
)
ARGMIN_COMBINES: tuple[JITFunction, ...] = (
    tl.standard._argmin_combine_tie_break_left,
    tl.standard._argmin_combine_tie_break_fast,
)

_NUMPY_DTYPES = {
    "int1": np.dtype(bool),
    **{f"{u}int{n}": np.dtype(f"{u}int{n}") for n in (8, 16, 32, 64) for u in ("", "u")},
    **{f"fp{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    # Stock Triton computes on the bit patterns of bfloat16 as if they were integers.
    "bf16": np.dtype(ml_dtypes.bfloat16),
    # Float8 is held as bytes: Triton allows no arithmetic on it without a cast.
    **{f"fp8{name}": np.dtype(np.uint8) for name in ("e4nv", "e5", "e4b8", "e5b16", "e4b15")},
}
_ADDRESS = np.dtype(np.uint64)
_MANY = 10_000


def numpy_dtype(dtype: tl.dtype) -> np.dtype:
    """The NumPy dtype that holds a Triton type, a block's being its element's."""
    scalar = dtype.scalar
    return _ADDRESS if scalar.is_ptr() else _NUMPY_DTYPES[scalar.name]


def type_from_name(name: str) -> tl.dtype:
    """Triton's type for one of its mangled names, such as ``i64`` or ``*fp32``."""
    return tl.str_to_ty(name, None)


def tensor(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """An array as the interpreter's tensor; an array of rank 0 becomes a scalar."""
    if array.ndim == 0:
        return tl.tensor(TensorHandle(array.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def transform(tree: ast.Module) -> ast.Module:
    """Rewrites a kernel's AST: what is assigned to a variable becomes a tensor.

    The code refers to the name ``interpreter_semantic``, in newer Triton also to
    the names of `TRANSFORM_NAMES`.
    """
    transformed: ast.Module = _stock.FunctionRewriter.ast_transformer.visit(tree)
    return ast.fix_missing_locations(transformed)


TRANSFORM_NAMES: dict[str, Any] = {
    name: getattr(_stock, name) for name in ("_InterpreterComparison",) if hasattr(_stock, name)
}
CHAINED_COMPARISONS = bool(TRANSFORM_NAMES)
"""Whether this Triton knows what ``a < b < c`` means."""


_CORE_HOLDERS = (
    tl,
    tl.core,
    tl.math,
    tl.core.tensor,
    tl.core.dtype,
    tl.core.tensor_descriptor_base,
    tl.core.condition,
    tl.core.constexpr,
    tl.core.tuple,
)


def _known_shapes() -> Iterable[Change]:
    """Constructors of block types and tensors that look at each shape once.

    Triton's wrap a shape's sizes and multiply them for every value of a program, which took a
    quarter of the interpreter's time.
    """
    make_block_type, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_scalars: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *getattr(shape, "values", shape))
        try:
            known = block_types[key]
        except KeyError:
            make_block_type(self, element_ty, shape)
            if len(block_types) > _MANY:  # each keeps its element type alive, and so its id
                block_types.clear()
            known = block_types[key] = {**vars(self), "_tensor": {}}
        vars(self).update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        # None of a block type that was made before: by a global of the kernel's module, say.
        known = vars(type).get("_tensor", None if type.is_block() else of_scalars)
        if known:
            vars(self).update(known, handle=handle, type=type, dtype=type.scalar)
            return
        make_tensor(self, handle, type)
        if known is not None:
            known.update(shape=self.shape, numel=self.numel)

    yield Change(tl.core.block_type, "__init__", block_type)
    yield Change(tl.core.tensor, "__init__", tensor)


class LanguagePatch:
    """All replacements that interpreting needs, found once and applied per launch.

    Only under `TRITON.alone`, which undoes them.

    Triton's own patching inspects every module anew; applying a recorded list of
    assignments is some ten times faster.
    """

    def __init__(self, builder: Any, semantic: TritonSemantic, more: Iterable[Change]):
        changes = [
            Change(_stock, "interpreter_builder", builder),
            Change(_stock, "interpreter_semantic", semantic),
            Change(_stock, "_get_np_dtype", numpy_dtype),
            *_known_shapes(),
        ]
        patching.replace(changes)
        patching.watch(_CORE_HOLDERS)
        _stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        changes += patching.watched_changes()
        patching.undo()
        changes += more
        self.replaced: dict[int, tuple[Any, Any]] = {}
        """By identity: each replaced function of the language and its replacement, for
        kernels whose module imported the function itself."""
        self._changes: dict[int, tuple[Any, dict[str, Any]]] = {}
        for change in changes:
            holder = change.holder
            self._changes.setdefault(id(holder), (holder, {}))[1][change.name] = change.value
            if isinstance(holder, types.ModuleType) and holder is not _stock:
                original = vars(holder).get(change.name)
                self.replaced[id(original)] = (original, change.value)

    def apply(self) -> None:
        """Puts the replacements in place, until `patching.undo`."""
        for holder, values in self._changes.values():
            patching.replace_all(holder, values)
