"""The parts of Triton's interpreter that Triax uses.

Triton's interpreter replaces functions of `triton.language` by functions that compute
with NumPy. By itself it needs torch and an environment variable, leaves names in
the user's module, and in some versions never undoes its replacements. This file
exports its parts under plain names: the builder that carries out operations,
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
import triton
import triton.language as tl
from packaging.version import Version
from triton.compiler.code_generator import CodeGenerator
from triton.language.semantic import TritonSemantic
from triton.runtime import JITFunction
from triton.runtime import interpreter as _stock

from triax.compat import patching
from triax.compat.patching import Change as Change

InterpreterBuilder = _stock.InterpreterBuilder
TensorHandle = _stock.TensorHandle
TensorDescHandle = _stock.TensorDescHandle

SUM_COMBINE: JITFunction = tl.standard._sum_combine
MAX_COMBINE: JITFunction = tl.standard._elementwise_max
MIN_COMBINE: JITFunction = tl.standard._elementwise_min
_NUMPY_DTYPES = {
    "int1": np.dtype(bool),
    **{f"{u}int{n}": np.dtype(f"{u}int{n}") for n in (8, 16, 32, 64) for u in ("", "u")},
    **{f"fp{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    # Workaround: triton all: it computes on the bits of bfloat16 and float8 as on integers.
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "fp8e4b15": np.dtype(np.uint8),
}
HISTOGRAMS_WRAP = Version(triton.__version__) < Version("3.8")
"""Whether compiled histograms count a value outside of the bins in the bin of its lowest bits."""
_ADDRESS = np.dtype(np.uint64)
_MANY = 10_000
_AGGREGATE = "__triton_aggregate__"


def numpy_dtype(dtype: tl.dtype) -> np.dtype:
    """Returns the NumPy dtype for the elements of a Triton type."""
    scalar = dtype.scalar
    return _ADDRESS if scalar.is_ptr() else _NUMPY_DTYPES[scalar.name]


def type_from_name(name: str) -> tl.dtype:
    """Returns Triton's type for a mangled name such as ``i64`` or ``*fp32``."""
    return tl.str_to_ty(name, None)


def tensor(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """Wraps an array as a tensor of the interpreter; an array of rank 0 becomes a scalar."""
    if array.ndim == 0:
        return tl.tensor(TensorHandle(array.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def as_compiled(value: Any) -> Any:
    """Converts a value as the compiler does: constants to `tl.constexpr`, tuples to `tl.tuple`."""
    if isinstance(value, (tuple, tl.core.tuple)):
        return _tuple(value, value)
    return value if isinstance(value, tl.core.base_value) else tl.constexpr(value)


def _tuple(parts: Iterable[Any], like: Any) -> Any:
    """Makes a `tl.tuple` of `parts` with the field names of `like`."""
    fields = like.type.fields if isinstance(like, tl.core.tuple) else getattr(like, "_fields", None)
    values = [as_compiled(part) for part in parts]
    return tl.core.tuple(values, tl.core.tuple_type([value.type for value in values], fields))


def is_aggregate(value: Any) -> bool:
    """Whether a value is an instance of a class made by `triton.aggregate`."""
    return hasattr(type(value), _AGGREGATE)


def aggregates() -> list[Any]:
    """Returns all living classes that `triton.aggregate` made."""
    return [class_ for class_ in tl.core.base_value.__subclasses__() if _AGGREGATE in vars(class_)]


def transform(tree: ast.Module) -> ast.Module:
    """Rewrites a kernel's AST so that assigned values become tensors.

    The new code uses the name ``interpreter_semantic``, in newer Triton also the names in
    `TRANSFORM_NAMES`.
    """
    transformed: ast.Module = _stock.FunctionRewriter.ast_transformer.visit(tree)
    return ast.fix_missing_locations(transformed)


# The names from outside of a kernel that the compiler always allows.
BUILTIN_NAMES = frozenset(CodeGenerator.builtin_namespace)

TRANSFORM_NAMES: dict[str, Any] = {
    name: getattr(_stock, name) for name in ("_InterpreterComparison",) if hasattr(_stock, name)
}
NUMBERS_DECAY = not hasattr(CodeGenerator, "decide_return_type")
"""Whether a number that a function returns always becomes a tensor, as before Triton 3.7."""
CHAINED_COMPARISONS = bool(TRANSFORM_NAMES)
"""Whether the installed Triton supports ``a < b < c``."""
AGGREGATES_HAVE_OPERATORS = hasattr(CodeGenerator, "_operator_priority")
"""Whether an aggregate's operators take a tensor or number on the other side."""


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


class Semantic(TritonSemantic):
    """Triton's typing rules, with shortcuts for what most operations of a kernel are."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._types: dict[tuple[Any, ...], tl.dtype] = {}
        self._integers: dict[tuple[int, str], tl.tensor] = {}

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        if type(x) is tl.tensor:
            return x
        # Unchecked values are those a kernel assigns: the compiler also converts tuples' numbers.
        if not check_type and isinstance(x, (tuple, tl.core.tuple)):
            return _tuple_like(x, [self.to_tensor(part, False) for part in x])
        return super().to_tensor(x, check_type)

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *rules: Any, **more: Any) -> Any:
        # The fourth rule is that of divisions, which change a type.
        are_tensors = type(lhs) is tl.tensor is type(rhs) and len(rules) < 4 and not more
        alike = are_tensors and lhs.shape is rhs.shape and lhs.dtype is rhs.dtype
        if alike and not lhs.dtype.is_ptr():
            return lhs, rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *rules, **more)

    def computation_type_impl(self, a: Any, a_is_number: Any, b: Any, *more: Any) -> Any:
        key = (a.name, a_is_number, b.name, *more)
        if key not in self._types:
            self._types[key] = super().computation_type_impl(a, a_is_number, b, *more)
        return self._types[key]

    def scalar_constant(self, value: Any, dtype: tl.dtype) -> Any:
        if type(value) is not int:
            return super().scalar_constant(value, dtype)
        key = (value, dtype.name)
        if key not in self._integers:
            if len(self._integers) > _MANY:
                self._integers.clear()
            constant = self._integers[key] = super().scalar_constant(value, dtype)
            constant.handle.data.flags.writeable = False  # all operations with the number share it
        return self._integers[key]

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, _splat(rhs, lhs)
        if not lhs.type.is_block():
            return _splat(lhs, rhs), rhs
        return super().broadcast_impl_value(lhs, rhs)

    def dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any,
        *more: Any,
    ) -> Any:  # fmt: skip
        formats = [_Format(getattr(f, "value", f)) for f in (lhs_format, rhs_format)]
        return super().dot_scaled(lhs, lhs_scale, formats[0], rhs, rhs_scale, formats[1], *more)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        # Workaround: triton <3.6: `atomic_min` gives a half of its result a pointer type.
        if isinstance(y, tl.tensor) and y.dtype.is_ptr() and not y.handle.dtype.scalar.is_ptr():
            y = tensor(y.handle.data.reshape(y.shape), y.handle.dtype.scalar)
        return super().where(condition, x, y)


def _splat(scalar: Any, like: Any) -> Any:
    data = np.empty(like.handle.data.shape, scalar.handle.data.dtype)
    data[...] = scalar.handle.data
    return tl.tensor(TensorHandle(data, scalar.dtype), like.type.with_element_ty(scalar.dtype))


class _Format(str):
    """The name of a number format of `tl.dot_scaled`."""

    # Workaround: triton <3.7: it reads the `.value` of the name.

    value = property(str.__str__)


def _tuple_like(old: Any, parts: list[Any]) -> Any:
    if isinstance(old, tl.core.tuple):
        return _tuple(parts, old)
    return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)


def _known_shapes() -> Iterable[Change]:
    """Yields patches that make block types and tensors inspect each shape once.

    Triton's constructors wrap and multiply a shape's sizes for every value of a program, which
    takes a quarter of the interpreter's time.
    """
    make_block_type, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
    unwrap = tl.core._unwrap_if_constexpr
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_scalars: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}  # equal shapes are one object
    plain = {int, bool, float, str, type(None), tl.core.tensor, tl.core.dtype}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *getattr(shape, "values", shape))
        try:
            known = block_types[key]
        except KeyError:
            make_block_type(self, element_ty, shape)
            if len(block_types) > _MANY:  # entries keep their element types alive, as ids are keys
                block_types.clear()
            known = block_types[key] = {**vars(self), "_tensor": {}}
        vars(self).update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        # `known` is None for a block type made before the patch.
        known = vars(type).get("_tensor", None if type.is_block() else of_scalars)
        if known:
            vars(self).update(known, handle=handle, type=type, dtype=type.scalar)
            return
        make_tensor(self, handle, type)
        if known is not None:
            self.shape = shapes.setdefault(tuple(size.value for size in self.shape), self.shape)
            known.update(shape=self.shape, numel=self.numel)

    def unwrap_if_constexpr(value: Any) -> Any:
        type_ = type(value)
        if type_ is tl.core.constexpr:
            return value.value
        return value if type_ in plain else unwrap(value)

    yield Change(tl.core.block_type, "__init__", block_type)
    yield Change(tl.core.tensor, "__init__", tensor)
    yield Change(tl.core, "_unwrap_if_constexpr", unwrap_if_constexpr)


def _with_semantic(builtin: Any, semantic: Semantic) -> Any:
    """Wraps a language function as Triton's interpreter does, but with two calls fewer."""
    function = getattr(builtin, "__wrapped__", builtin)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    def operate(self: Any, other: Any) -> Any:
        # An aggregate's own operator takes precedence on either side.
        if type(other) is not tl.tensor and is_aggregate(other):
            return NotImplemented
        return function(self, other, _semantic=semantic)

    is_operator = builtin.__name__.startswith("__") and function.__code__.co_argcount == 3
    return operate if is_operator else call


class LanguagePatch:
    """All replacements that interpreting needs, found once and applied per launch.

    Use it only under `TRITON.alone`, which undoes the replacements. Triton's own patching inspects
    every module each time; applying a recorded list of assignments is some ten times faster.
    """

    def __init__(self, builder: Any, semantic: Semantic, more: Iterable[Change]):
        changes = [
            Change(_stock, "interpreter_builder", builder),
            Change(_stock, "interpreter_semantic", semantic),
            Change(_stock, "_get_np_dtype", numpy_dtype),
            *_known_shapes(),
        ]
        patching.replace(patching.grouped(changes))
        changed = patching.watch(_CORE_HOLDERS)
        _stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        assigned = changed()
        patching.undo()
        for holder, values in assigned:
            for name, value in values.items():
                wrapped = (getattr(value, "__kwdefaults__", None) or {}).get("member")
                if tl.core.is_builtin(wrapped):
                    value = _with_semantic(wrapped, semantic)
                changes.append(Change(holder, name, value))
        self._changes = patching.grouped([*changes, *more])
        self.replaced: dict[int, tuple[Any, Any]] = {}
        """Replaced functions of the language and their replacements, by the function's id, for
        kernels whose module imported the function itself."""
        for holder, values in self._changes:
            if isinstance(holder, types.ModuleType) and holder is not _stock:
                originals = {name: vars(holder).get(name) for name in values}
                self.replaced |= {id(o): (o, values[name]) for name, o in originals.items()}

    def apply(self) -> None:
        """Puts the replacements in place, until `patching.undo`."""
        patching.replace(self._changes)
