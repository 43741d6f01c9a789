"""Binds a call's operands and keywords to the kernel's parameters.

In: a kernel view, positional operands and keywords. Out: the runtime parameters in the
kernel's order, each with an array operand, an output, a scalar or a tuple of these; the
arrays; the aliases between operands and outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.binding import candidates, dtypes, grid, stand_in
from triax.binding.descriptor import TensorDescriptor, check_strides
from triax.binding.kernel import Kernel
from triax.binding.launch import (
    Alias,
    Argument,
    ArrayType,
    Descriptor,
    Operand,
    Result,
    Scalar,
    rebuild,
)
from triax.binding.values import Static
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call's values by parameter name.

    `runtime` has the runtime parameters with a value, given or by default, in the kernel's order.
    `free` names, in order, the parameters that may take outputs: those that fall back to a default
    of None, those without a value, and those of `described`, which take an output through a
    descriptor. `keywords` are constexprs and names that only grids and heuristics read.
    """

    runtime: dict[str, Any]
    free: tuple[str, ...]
    described: dict[str, TensorDescriptor]
    keywords: dict[str, Any]


def bind(
    view: Kernel, operands: Sequence[Any], kwargs: Mapping[str, Any], num_outputs: int
) -> Bound:
    """Binds operands and keywords to a kernel's parameters, as Python would.

    Before ``*args``, operands skip the parameters that are given by name. They also skip those that
    nothing else gives a value, if there are exactly `num_outputs` of them: these take the outputs.

    Raises:
      ArgumentTypeError: there are too many operands, or a parameter is given twice.
    """
    settable = view.values_set_by_stages() if view.stages else frozenset()
    names, rest = view.parameter_names, view.variadic
    by_name = dict(kwargs)
    if rest is not None:
        descriptors = [v for v in kwargs.values() if isinstance(v, TensorDescriptor)]
        undescribed = num_outputs - sum(map(_is_output, descriptors))
        names = _in_front(view, rest.name, settable.union(kwargs), undescribed)
        value = by_name.setdefault(rest.name, tuple(operands[len(names) :]))
        if rest.name not in kwargs:
            operands = operands[: len(names)]
        elif not isinstance(value, tuple):
            raise ArgumentTypeError(
                f"Argument `{rest.name}` of kernel {view.name!r} must be a tuple, the operands of "
                f"`*{rest.name}`; got {messages.shown(value)}."
            )
    if len(operands) > len(names):
        listed = f" ({', '.join(names)})" if names else ""
        besides = f" without a value beside `{rest.name}`" if rest else ""
        raise ArgumentTypeError(
            f"Kernel {view.name!r} has {messages.counted(len(names), 'parameter')}{besides}"
            f"{listed}, and got {messages.counted(len(operands), 'positional operand')}."
        )
    by_position = dict(zip(names, operands, strict=False))
    twice = [name for name in by_position if name in kwargs]
    if twice:
        raise ArgumentTypeError(
            f"Kernel {view.name!r} got `{twice[0]}` both as a positional operand and as a keyword."
        )
    by_name = by_position | by_name
    runtime, free, described = {}, [], {}
    for parameter in view.runtime_parameters:
        name = parameter.name
        if isinstance(by_name.get(name), TensorDescriptor) and _is_output(by_name[name]):
            described[name] = by_name.pop(name)
            free.append(name)
        elif name in by_name:
            runtime[name] = by_name.pop(name)
        elif name not in settable:
            if parameter.has_default:
                runtime[name] = parameter.default
            if parameter.default is None:
                free.append(name)
    return Bound(runtime, tuple(free), described, by_name)


def _is_output(descriptor: TensorDescriptor) -> bool:
    """Whether a descriptor is of an output: its base is a type, and has no data."""
    return isinstance(descriptor.base, (jax.ShapeDtypeStruct, jax.core.ShapedArray))


def _in_front(view: Kernel, rest: str, valued: frozenset[str], num_outputs: int) -> tuple[str, ...]:
    """The parameters before ``*rest`` that take operands; `valued` ones already have a value."""
    free = {p.name for p in view.runtime_parameters if not p.has_default} - valued
    passed = valued | free if len(free) == num_outputs else valued
    before = view.parameter_names[: view.parameter_names.index(rest)]
    return tuple(name for name in before if name not in passed)


@dataclasses.dataclass
class Flattened:
    """Collects array operands in order while arguments are turned into leaves.

    `leaves` are the flattened operands as aliases count them: a name, and an array's index or None
    for a scalar. `names` and `types` belong to `arrays`. `refs` has the Refs whose values are
    passed, by the index of the array. `block_shapes` has those of descriptors that are callables,
    by the descriptor's buffer.
    """

    kernel: str
    arrays: list[Any] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    types: list[ArrayType] = dataclasses.field(default_factory=list)
    leaves: list[tuple[str, int | None]] = dataclasses.field(default_factory=list)
    refs: dict[int, jax.Ref] = dataclasses.field(default_factory=dict)
    block_shapes: dict[Operand | Result, Any] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: Any) -> Argument:
        if isinstance(value, tuple):
            return rebuild(value, [self.add(f"{name}[{i}]", v) for i, v in enumerate(value)])
        if isinstance(value, TensorDescriptor):
            return self._add_descriptor(name, value)
        if value is None:
            return Scalar(Static(None))  # None is no pytree leaf, so aliases do not count it
        if isinstance(getattr(value, "ref", None), jax.Ref):
            raise ArgumentTypeError(
                f"Argument `{name}` of kernel {self.kernel!r} is a view of a Ref. Pass the whole "
                "Ref, and the offsets as operands."
            )
        if isinstance(value, np.generic) and value.dtype.kind in "biufV":  # V: types of ml_dtypes
            value = value.item()
        if isinstance(value, (int, float, np.floating)):  # a plain number, whose type Triton picks
            if not isinstance(value, bool):
                value = int(value) if isinstance(value, int) else float(value)
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise ArgumentValueError(f"Argument `{name}` must fit 64 bits; got {value}.")
            self.leaves.append((name, None))
            return Scalar(Static(value))
        if isinstance(value, (jax.Array, jax.Ref)) or jax_private.is_array(value):
            return Operand(self._add_array(name, value))
        remedy = ""
        if isinstance(value, list):
            remedy = " Make it an array with jnp.asarray, or a tuple."
        elif hasattr(value, "__dlpack__"):
            remedy = " Make it a JAX array with jax.dlpack.from_dlpack."
        elif callable(value):
            remedy = " The kernel to be called goes to `kernel`."
        raise ArgumentTypeError(
            f"Argument `{name}` of kernel {self.kernel!r} must be an array, a bool, int or float, "
            f"None, a Ref, a TensorDescriptor or a tuple of these; got {messages.shown(value)}."
            f"{remedy}"
        )

    def _add_array(self, name: str, value: Any) -> int:
        type_ = array_type(name, value)
        index = len(self.arrays)
        # Workaround: jax <0.9: a traced Ref is an array too, so this comes first.
        if isinstance(value, jax.Ref):
            value = self._read(name, index, value)
        elif not isinstance(value, jax.Array):
            value = _on_device(name, value)
            type_ = array_type(name, value)  # 64 bits become 32, unless JAX has them enabled
        self.types.append(type_)
        self.arrays.append(value)
        self.names.append(name)
        self.leaves.append((name, index))
        return index

    def _read(self, name: str, index: int, ref: jax.Ref) -> jax.Array:
        """Reads the value of a Ref; the call updates the value and writes it back to the Ref."""
        for other, known in self.refs.items():
            if known is ref:
                raise ArgumentValueError(
                    f"Argument `{name}` of kernel {self.kernel!r} is the same Ref as "
                    f"`{self.names[other]}`, and a call can update a Ref only once. Pass it once; "
                    "where the kernel only reads it, pass its value, `ref[...]`."
                )
        self.refs[index] = ref
        value: jax.Array = ref[...]
        return value

    def _add_descriptor(self, name: str, value: TensorDescriptor) -> Descriptor:
        if _is_output(value):
            raise ArgumentTypeError(
                f"Argument `{name}` of kernel {self.kernel!r} is the descriptor of an output (its "
                "base is a type, not an array) in a tuple. Pass it as a parameter of its own."
            )
        operand = Operand(self._add_array(name, value.base))
        # Checked again: without 64-bit types JAX has narrowed the elements, so rows have fewer
        # bytes.
        check_strides(value.strides, self.types[operand.index].dtype)
        return self.describe(operand, value)

    def describe(self, buffer: Operand | Result, value: TensorDescriptor) -> Descriptor:
        """Returns the descriptor of a buffer."""
        block_shape = value.block_shape
        if callable(block_shape):
            self.block_shapes[buffer] = block_shape
            block_shape = ()
        rest = value.layout, value.padding, value.round_f32_to_tf32
        return Descriptor(buffer, value.shape, value.strides, block_shape, *rest)


def array_type(argument: str, array: Any) -> ArrayType:
    """Checks the type of an operand or output, and returns it.

    Raises:
      ArgumentTypeError, UnsupportedError: Triton has no such element type, or a size is not a
        non-negative int.
    """
    if array.dtype not in dtypes.TRITON_NAMES:
        dtypes.check(array.dtype, argument)
    shape = array.shape
    if {*map(type, shape)} - {int} or min(shape, default=0) < 0:
        messages.check_sizes_known(argument, shape)
        if not all(grid.is_int(size) and size >= 0 for size in shape):
            raise ArgumentTypeError(
                f"Argument `{argument}` must have a shape of non-negative ints; got {shape}."
            )
    return ArrayType(tuple(map(int, shape)), np.dtype(array.dtype))


def _on_device(name: str, value: Any) -> jax.Array:
    """Converts a host array to JAX's; refuses 64-bit integers that would wrap around in 32 bits."""
    array = jnp.asarray(value)
    narrowed = array.dtype.kind in "iu" and array.dtype.itemsize < value.dtype.itemsize
    if narrowed and (value.astype(array.dtype) != value).any():
        raise ArgumentValueError(
            f"Argument `{name}` has values that {array.dtype} cannot hold, and JAX has disabled "
            f"{value.dtype}. Enable it (jax.config.update('jax_enable_x64', True))."
        )
    return array


def resolve_aliases(
    view: Kernel,
    aliases: Mapping[int | str, int],
    flat: Flattened,
    results: Sequence[ArrayType],
) -> tuple[Alias, ...]:
    """Resolves the caller's aliases to pairs of an array operand and an output."""
    pairs: dict[int, int] = {}
    for key, result in aliases.items():
        name, index = _find_leaf(key, flat.leaves, view.parameter_names)
        if index is None:
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names operand {key!r}, which is the scalar "
                f"`{name}`; only arrays have a buffer to share."
            )
        if index in flat.refs:
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names `{name}`, a Ref, which is updated in place "
                "anyway. Leave it out, and its output too."
            )
        if not grid.is_int(result):
            raise ArgumentTypeError(
                f"Argument `input_output_aliases` must map to the index of an output; got "
                f"{messages.short(result)} for operand {key!r}."
            )
        if index in pairs:
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names operand `{name}` twice, by its name and by "
                "its index. Name it once."
            )
        pairs[index] = int(result)
    return candidates.check_aliases(pairs, flat.types, results, flat.names)


def _find_leaf(
    key: Any, leaves: Sequence[tuple[str, int | None]], parameters: Sequence[str]
) -> tuple[str, int | None]:
    """Finds the flattened operand that a key of `input_output_aliases` names."""
    if grid.is_int(key):
        if 0 <= key < len(leaves):
            return leaves[int(key)]
        raise ArgumentValueError(
            f"Argument `input_output_aliases` names operand {key}, but there are {len(leaves)}, "
            f"scalars included ({', '.join(name for name, _ in leaves)})."
        )
    if not isinstance(key, str):
        raise ArgumentTypeError(
            "Argument `input_output_aliases` must name operands by parameter or by index; got "
            f"{messages.shown(key)}."
        )
    by_name = dict(leaves)
    if key in by_name:
        return key, by_name[key]
    if parts := [name for name in by_name if name.startswith(f"{key}[")]:
        raise ArgumentValueError(
            f"Argument `input_output_aliases` names operand {key!r}, which is a tuple. Name one of "
            f"its parts: {', '.join(parts)}."
        )
    remedy = messages.near_misses(key, by_name)
    if key in parameters:
        remedy = " Pass the array whose memory the output takes; without an alias, leave both out."
    raise ArgumentValueError(
        f"Argument `input_output_aliases` names operand {key!r}, which was not given.{remedy}"
    )


def place_outputs(
    view: Kernel,
    bound: Bound,
    supplied: Mapping[str, Argument],
    flat: Flattened,
    results: Sequence[ArrayType],
    aliases: Sequence[Alias],
) -> tuple[tuple[str, Argument], ...]:
    """Places outputs in free parameters; returns all runtime arguments in the kernel's order.

    Outputs go to the parameters without a value and, if there are more outputs than that, to all
    parameters with a default of None. If only some of the latter are needed, it is an error.
    """
    free = [name for name in bound.free if name not in supplied]
    aliased = {alias.result for alias in aliases}
    outputs = [i for i in range(len(results)) if i not in aliased]
    taking = bound.free if len(outputs) > len(free) else free
    if len(outputs) != len(taking):
        arrays = [(n, leaf) for n, leaf in supplied.items() if isinstance(leaf, Operand)]
        alike = [n for n, leaf in arrays if flat.types[leaf.index] in results]
        raise _wrong_number_of_outputs(view, bound, free, len(outputs), alike)
    places: dict[str, Argument] = dict(zip(taking, map(Result, outputs), strict=True))
    for name, descriptor in bound.described.items():
        result = places[name]
        assert isinstance(result, Result)
        if (base_type := array_type(name, descriptor.base)) != results[result.index]:
            raise ArgumentValueError(
                f"Argument `{name}` of kernel {view.name!r} is the descriptor of an output "
                f"{messages.short(base_type)}, but output {result.index} of `out_type` is "
                f"{messages.short(results[result.index])}. Make it of the same "
                "jax.ShapeDtypeStruct: outputs go to parameters in the kernel's order."
            )
        places[name] = flat.describe(result, descriptor)
    names = [p.name for p in view.runtime_parameters if p.name in supplied or p.name in places]
    return tuple((name, places.get(name) or supplied[name]) for name in names)


def _wrong_number_of_outputs(
    view: Kernel, bound: Bound, free: Sequence[str], outputs: int, alike: Sequence[str]
) -> ArgumentTypeError:
    """Builds the error; `alike` are the operands that have the type of an output."""
    listed = f" ({', '.join(free)})" if free else ""
    hint = (
        "A parameter without a value is an output: supply the parameters that are not outputs. An "
        "output that is aliased to an operand has no parameter of its own: the kernel stores to "
        "the operand's parameter."
    )
    if bound.described:
        hint += (
            f" The parameters with an output's descriptor ({', '.join(bound.described)}) take "
            "outputs that are not aliased."
        )
    absent = bound.runtime.keys() & bound.free
    if absent and outputs > len(free):
        hint += (
            f" Parameters with a default of None ({', '.join(sorted(absent))}) can take "
            "outputs too, but only all of them: pass None to parameters that are not outputs."
        )
    elif outputs > len(free):  # the call passes outputs as operands, as in Triton
        guess = f" (`{alike[-1]}`?)" if alike and not free else ""
        hint = (
            "Triax makes the outputs and passes them to the kernel: leave out the operands that "
            f"the kernel writes to{guess}, and pass the operands after them by name. To update an "
            "operand, alias an output to it with `input_output_aliases`."
        )
    if extra := sorted(set(bound.keywords) - set(view.parameter_names)):
        misses = messages.near_misses(extra[0], view.parameter_names)
        hint += f" There is no parameter `{extra[0]}`.{misses}"
    return ArgumentTypeError(
        f"Argument `out_type` has {messages.counted(outputs, 'output')} not aliased to an operand, "
        f"but kernel {view.name!r} has {messages.counted(len(free), 'parameter')} not supplied"
        f"{listed}. "
        f"{hint}"
    )


def seen_by_callables(
    placed: Sequence[tuple[str, Argument]],
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
) -> dict[str, Any]:
    """The runtime arguments as grids, heuristics and pruning see them."""
    structs = [
        [stand_in.Array(array.shape, array.dtype) for array in types]  # type: ignore[no-untyped-call]
        for types in (operands, results)
    ]
    seen = {}
    for name, argument in placed:
        parts, tree = jax.tree_util.tree_flatten(argument)
        buffers = [leaf.buffer if isinstance(leaf, Descriptor) else leaf for leaf in parts]
        values = [
            leaf.static.value
            if isinstance(leaf, Scalar)
            else structs[isinstance(leaf, Result)][leaf.index]
            for leaf in buffers
        ]
        seen[name] = jax.tree_util.tree_unflatten(tree, values)
    return seen
