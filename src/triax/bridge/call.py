"""`triton_call`: validates a user's call, binds it to the kernel's parameters, hands it to JAX."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.bridge import candidates, dtypes, settings
from triax.bridge.compat import jax_private
from triax.bridge.descriptor import TensorDescriptor
from triax.bridge.errors import ArgumentTypeError, ArgumentValueError
from triax.bridge.grid import GridLike
from triax.bridge.kernel import Kernel
from triax.bridge.launch import (
    Alias,
    Argument,
    ArrayType,
    Call,
    Descriptor,
    Operand,
    Result,
    Scalar,
    Static,
    pack_values,
    rebuild,
)
from triax.bridge.primitive import VMAP_METHODS, triton_call_p

IMPLEMENTATIONS = (None, "triton", "interpret")
_COSTS = ("flops", "bytes_accessed", "transcendentals")


def triton_call(
    *operands: Any,
    kernel: Any,
    out_type: Any = None,
    grid: GridLike,
    input_output_aliases: Mapping[int | str, int] | None = None,
    zeroed_outputs: candidates.ZeroedOutputs = (),
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_ctas: int | None = None,
    debug: bool = False,
    backend_options: Mapping[str, Any] | None = None,
    name: str = "",
    compute_capability: int | None = None,
    cost_estimate: Mapping[str, int] | None = None,
    has_side_effect: bool = False,
    serialized_metadata: bytes = b"",
    vmap_method: str | None = None,
    implementation: str | None = None,
    tuning: str | None = None,
    tuning_inputs: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Triton kernel on JAX arrays.

        @triton.jit
        def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offsets, mask=offsets < n)
            y = tl.load(y_ptr + offsets, mask=offsets < n)
            tl.store(out_ptr + offsets, x + y, mask=offsets < n)

        def add(x, y):
            return triax.triton_call(
                x, y, n=x.size, BLOCK=1024, kernel=add_kernel, out_type=jax.typeof(x),
                grid=lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),))

    Positional operands and keywords bind to the kernel's parameters as in Python. The
    parameters that are not supplied and have no default are the outputs, in order.

    Args:
      *operands: arrays, Python and NumPy scalars (bool, int, float), None, nested tuples of
        these, `jax.Ref`s (updated in place), `TensorDescriptor`s. Arrays are passed as
        pointers to dense row-major buffers aligned to 16 bytes; scalars are compiled for,
        with Triton's usual specialisation.
      kernel: a function decorated with `@triton.jit` or Gluon's jit, with
        `@triton.autotune` and `@triton.heuristics` around it in any nesting or not.
      out_type: a pytree of anything with `shape` and `dtype`; the result has its structure.
      grid: how many programs: an int, a tuple of one to three ints, or a callable from the
        meta-parameters (all arguments, constexprs and options by name, arrays as
        `jax.ShapeDtypeStruct`) to one of those, evaluated for each config on the values
        that config is compiled with. With a zero in it nothing runs, and the outputs are
        zeros (an aliased output is its operand).
      input_output_aliases: operands to flattened outputs that share memory. An operand is
        named by its parameter, or counted among the flattened operands, scalars included,
        in the kernel's parameter order. An aliased output has no parameter of its own.
        Whether the caller donates the array or not, the result is the same.
      zeroed_outputs: flattened outputs to be zeroed before the launch, or a callable from
        the meta-parameters to them.
      num_warps, num_stages, num_ctas: Triton's options. With `@triton.autotune`, only the
        configs that agree are tried.
      debug: compiles device assertions in.
      backend_options: other options of Triton's CUDA compiler.
      name: shown in profiles, logs and errors; the kernel's name by default.
      compute_capability: to compile for, 90 for an H100 or H200. By default that of the
        GPUs the program is lowered for; without a GPU, ``TRIAX_CUDA_ARCH``.
      cost_estimate: "flops", "bytes_accessed", "transcendentals" of one call, kept in the
        program for profilers.
      has_side_effect: keeps the call in the program although nobody uses its outputs.
      serialized_metadata: bytes kept in the call, for other tools.
      vmap_method: how the call batches under `jax.vmap`, as in `jax.ffi.ffi_call`:
        "sequential", "sequential_unrolled", "expand_dims", "broadcast_all".
      implementation: None picks by platform: CUDA compiles the kernel, the CPU runs it in
        Triton's interpreter with every access checked. "triton" insists on the first,
        "interpret" on the second.
      tuning: the tuning mode of this call; by default the one in force (see `tuning`).
      tuning_inputs: a callable from the operands' shapes (`jax.ShapeDtypeStruct`s) to
        arrays to measure configs on. Kernels that compute addresses from data need it.
      **kwargs: more operands, constexprs and meta-parameters by name. A name that no
        parameter has, and no callable grid or heuristic reads, is an error.

    Returns:
      The outputs, in the structure of `out_type`.

    Raises:
      ArgumentTypeError, ArgumentValueError: a mistake in the call; the message names the
        argument, its value and the remedy.
      UnsupportedError: the kernel or the platform is not one Triax can serve.
      CompilationError: when the program is lowered, if Triton refuses the kernel.
    """
    if "out_shape" in kwargs and out_type is None:
        warnings.warn("`out_shape` is called `out_type` now.", DeprecationWarning, stacklevel=2)
        out_type = kwargs.pop("out_shape")
    view = Kernel.of(kernel)
    _check_choice("implementation", implementation, IMPLEMENTATIONS)
    _check_choice("vmap_method", vmap_method, (None, *VMAP_METHODS))
    mode = (
        settings.tuning_mode() if tuning is None else settings.check_tuning_mode(tuning, "tuning")
    )
    capability = _check_capability(compute_capability)
    results, out_tree = _flatten_out_type(out_type)
    bound, keywords = _bind(view, operands, kwargs)
    flat = _Flattened(view.name)
    supplied = {name: flat.add(name, value) for name, value in bound.items()}
    aliases = _resolve_aliases(input_output_aliases or {}, flat, results)
    arguments = _place_outputs(view, supplied, keywords, results, aliases)
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "num_ctas": num_ctas,
        "debug": debug or None,
    }
    request = candidates.Request(
        kernel=view,
        arguments=_seen_by_callables(arguments, flat, results),
        keywords=keywords,
        options=_merge_options(options, backend_options or {}),
        grid=grid,
        num_results=len(results),
        zeroed_outputs=zeroed_outputs,
    )
    call = Call(
        kernel=view,
        arguments=arguments,
        candidates=candidates.build(request),
        aliases=aliases,
        name=name,
        tuning=mode,
        implementation=implementation,
        compute_capability=capability,
        cost_estimate=_check_costs(cost_estimate or {}),
        has_side_effect=has_side_effect,
        serialized_metadata=serialized_metadata,
        debug=debug,
        tuning_inputs=tuning_inputs,
    )
    outputs = triton_call_p.bind(
        *_same_varying_axes(flat.arrays),
        call=call,
        result_avals=tuple(jax_private.shaped_array(r.shape, r.dtype) for r in results),
        vmap_method=vmap_method,
    )
    return jax.tree_util.tree_unflatten(out_tree, outputs)


def _check_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ArgumentValueError(
            f"Argument `{argument}` must be one of {', '.join(map(repr, choices))}; got {value!r}."
        )


def _check_capability(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 50 <= value < 200:
        raise ArgumentValueError(
            "Argument `compute_capability` must be an int such as 90 (for 9.0); got "
            f"{value!r} of type {type(value).__name__}."
        )
    return int(value)


def _flatten_out_type(out_type: Any) -> tuple[list[ArrayType], Any]:
    if out_type is None:
        raise ArgumentTypeError(
            "Argument `out_type` is missing: give a pytree of jax.ShapeDtypeStruct, one for each "
            "output; () if the kernel only updates Refs."
        )
    leaves, tree = jax.tree_util.tree_flatten(out_type)
    results = []
    for index, leaf in enumerate(leaves):
        label = f"out_type[{index}]" if len(leaves) > 1 else "out_type"
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ArgumentTypeError(
                f"Argument `{label}` must have `shape` and `dtype`; got {leaf!r} of type "
                f"{type(leaf).__name__}. Use jax.ShapeDtypeStruct(shape, dtype)."
            )
        dtypes.check(leaf.dtype, label)
        canonical = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if canonical != leaf.dtype:
            raise ArgumentTypeError(
                f"Argument `{label}` has dtype {leaf.dtype}, which JAX does not use now. Enable it "
                f"(jax.config.update('jax_enable_x64', True)), or ask for {canonical}."
            )
        shape = []
        for size in leaf.shape:
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
                raise ArgumentTypeError(
                    f"Argument `{label}` must have a shape of non-negative ints; got {leaf.shape}."
                )
            shape.append(int(size))
        results.append(ArrayType(tuple(shape), np.dtype(leaf.dtype)))
    return results, tree


def _bind(
    view: Kernel, operands: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runtime arguments by parameter, in the kernel's order, and the other keywords."""
    parameters = view.parameters
    if len(operands) > len(parameters):
        raise ArgumentTypeError(
            f"Kernel {view.name!r} has {len(parameters)} parameters "
            f"({', '.join(view.parameter_names)}), and {len(operands)} positional operands were "
            "given."
        )
    given = dict(zip(view.parameter_names, operands, strict=False))
    twice = [name for name in given if name in kwargs]
    if twice:
        raise ArgumentTypeError(
            f"Kernel {view.name!r} got `{twice[0]}` both as a positional operand and as a keyword."
        )
    given |= kwargs
    runtime = {p.name for p in view.runtime_parameters}
    settable = view.values_set_by_stages()
    bound = {p.name: given[p.name] for p in view.runtime_parameters if p.name in given}
    for parameter in view.runtime_parameters:
        if parameter.name not in bound and parameter.has_default and parameter.name not in settable:
            bound[parameter.name] = parameter.default
    keywords = {name: value for name, value in given.items() if name not in runtime}
    ordered = {p.name: bound[p.name] for p in view.runtime_parameters if p.name in bound}
    return ordered, keywords


@dataclasses.dataclass
class _Flattened:
    """Collects array operands in order while arguments are turned into leaves.

    `leaves` are the flattened operands as aliases count them: an array's index, or None
    for a scalar; with their names. `names` are those of the arrays.
    """

    kernel: str
    arrays: list[Any] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    leaves: list[tuple[str, int | None]] = dataclasses.field(default_factory=list)

    def add(self, name: str, value: Any) -> Argument:
        if isinstance(value, tuple):
            return rebuild(value, [self.add(f"{name}[{i}]", v) for i, v in enumerate(value)])
        if isinstance(value, TensorDescriptor):
            return self._add_descriptor(name, value)
        if value is None:
            return Scalar(Static(None))  # a pytree without leaves: aliases do not count it
        if jax_private.is_transformed_ref(value):
            raise ArgumentTypeError(
                f"Argument `{name}` of kernel {self.kernel!r} is a view of a Ref. Pass the whole "
                "Ref, and the offsets as operands."
            )
        if (scalar := _scalar(name, value)) is not None:
            self.leaves.append((name, None))
            return scalar
        if jax_private.is_array(value) or jax_private.is_ref(value):
            return Operand(self._add_array(name, value))
        raise ArgumentTypeError(
            f"Argument `{name}` of kernel {self.kernel!r} must be an array, a bool, int or float, "
            f"None, a Ref, a TensorDescriptor or a tuple of these; got {value!r} of type "
            f"{type(value).__name__}."
        )

    def _add_array(self, name: str, value: Any) -> int:
        dtypes.check(value.dtype, name)
        if not isinstance(value, jax.Array) and not jax_private.is_ref(value):
            value = jnp.asarray(value)
        index = len(self.arrays)
        self.arrays.append(value)
        self.names.append(name)
        self.leaves.append((name, index))
        return index

    def _add_descriptor(self, name: str, value: TensorDescriptor) -> Descriptor:
        return Descriptor(
            self._add_array(name, value.base),
            value.shape,
            value.strides,
            value.block_shape,
            value.layout,
            value.padding,
            value.round_f32_to_tf32,
        )

    def types(self) -> list[ArrayType]:
        return [ArrayType(tuple(a.shape), np.dtype(a.dtype)) for a in self.arrays]


def _scalar(name: str, value: Any) -> Scalar | None:
    """A scalar as the plain Python number that Triton types; None if it is none."""
    if isinstance(value, (bool, np.bool_)):
        return Scalar(Static(bool(value)))
    if isinstance(value, (int, np.integer)):
        if not -(2**63) <= int(value) < 2**64:
            raise ArgumentValueError(f"Argument `{name}` must fit 64 bits; got {int(value)}.")
        return Scalar(Static(int(value)))
    if isinstance(value, (float, np.floating)):
        return Scalar(Static(float(value)))
    return None


def _resolve_aliases(
    aliases: Mapping[int | str, int], flat: _Flattened, results: Sequence[ArrayType]
) -> tuple[Alias, ...]:
    pairs: dict[int, int] = {}
    by_name = dict(flat.leaves)
    for key, result in aliases.items():
        if isinstance(key, str):
            if key not in by_name:
                raise ArgumentValueError(
                    f"Argument `input_output_aliases` names operand {key!r}, which was not given."
                    f"{candidates.near_misses(key, by_name)}"
                )
            name, index = key, by_name[key]
        else:
            if isinstance(key, bool) or not 0 <= key < len(flat.leaves):
                raise ArgumentValueError(
                    f"Argument `input_output_aliases` names operand {key}, and there are "
                    f"{len(flat.leaves)}, scalars included "
                    f"({', '.join(name for name, _ in flat.leaves)})."
                )
            name, index = flat.leaves[key]
        if index is None:
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names operand {key!r}, which is the scalar "
                f"`{name}`; only arrays have a buffer to share."
            )
        if jax_private.is_ref(flat.arrays[index]):
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names `{name}`, a Ref, which is updated in place "
                "without it. Leave it out, and its output too."
            )
        pairs[index] = result
    return candidates.check_aliases(pairs, flat.types(), results, flat.names)


def _place_outputs(
    view: Kernel,
    supplied: Mapping[str, Argument],
    keywords: Mapping[str, Any],
    results: Sequence[ArrayType],
    aliases: Sequence[Alias],
) -> tuple[tuple[str, Argument], ...]:
    """All runtime arguments in the kernel's order, outputs in the places left free."""
    settable = view.values_set_by_stages()
    free = [
        p.name for p in view.runtime_parameters if p.name not in supplied and p.name not in settable
    ]
    aliased = {alias.result for alias in aliases}
    outputs = [i for i in range(len(results)) if i not in aliased]
    if len(free) != len(outputs):
        extra = sorted(set(keywords) - set(view.parameter_names))
        hint = ""
        if extra:
            misses = candidates.near_misses(extra[0], view.parameter_names)
            hint = f" There is no parameter `{extra[0]}`.{misses}"
        listed = f" ({', '.join(free)})" if free else ""
        raise ArgumentTypeError(
            f"Argument `out_type` has {len(outputs)} outputs that are not aliased to an operand, "
            f"and kernel {view.name!r} has {len(free)} parameters that were not supplied{listed}. "
            f"Each such parameter takes one output; supply the others as operands.{hint}"
        )
    places = dict(zip(free, map(Result, outputs), strict=True))
    return tuple(
        (p.name, supplied[p.name] if p.name in supplied else places[p.name])
        for p in view.runtime_parameters
        if p.name not in settable or p.name in supplied
    )


def _seen_by_callables(
    arguments: Sequence[tuple[str, Argument]], flat: _Flattened, results: Sequence[ArrayType]
) -> dict[str, Any]:
    """The runtime arguments as grids, heuristics and pruning see them."""
    operands = flat.types()

    def seen(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return rebuild(argument, [seen(part) for part in argument])
        if isinstance(argument, Scalar):
            return argument.value
        array = (
            results[argument.index] if isinstance(argument, Result) else operands[argument.index]
        )
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    return {name: seen(argument) for name, argument in arguments}


def _merge_options(
    explicit: Mapping[str, Any], backend_options: Mapping[str, Any]
) -> dict[str, Any]:
    twice = [n for n, v in explicit.items() if v is not None and n in backend_options]
    if twice:
        raise ArgumentValueError(
            f"Argument `{twice[0]}` is also in `backend_options` "
            f"({backend_options[twice[0]]!r}); give it once."
        )
    return {**{n: v for n, v in explicit.items() if v is not None}, **backend_options}


def _check_costs(costs: Mapping[str, int]) -> Any:
    for name, value in costs.items():
        if name not in _COSTS:
            raise ArgumentValueError(
                f"Argument `cost_estimate` has {name!r}; it takes {', '.join(_COSTS)}."
            )
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ArgumentTypeError(
                f"Argument `cost_estimate` must have non-negative ints; got {name}={value!r}."
            )
    return pack_values({name: int(value) for name, value in costs.items()})


def _same_varying_axes(arrays: Sequence[Any]) -> list[Any]:
    """Inside `shard_map`, arrays that vary over fewer mesh axes are cast to vary over all."""
    plain = [i for i, array in enumerate(arrays) if not jax_private.is_ref(array)]
    cast = jax_private.insert_varying_casts([arrays[i] for i in plain])
    out = list(arrays)
    for index, array in zip(plain, cast, strict=True):
        out[index] = array
    return out
