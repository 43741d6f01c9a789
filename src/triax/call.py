"""`triton_call`: validates a user's call, binds it to the kernel, and binds the JAX primitive."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, get_args, overload

import jax

from triax import messages, settings
from triax.binding import arguments, candidates, sources
from triax.binding.grid import GridLike, is_int
from triax.binding.kernel import Kernel
from triax.binding.launch import Alias, ArrayType, BoundCall, KernelImplementation
from triax.binding.values import pack_values
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.interpreting import frames
from triax.primitive import VMAP_METHODS, VmapMethod, triton_call_p

IMPLEMENTATIONS = (None, *get_args(KernelImplementation))
_COSTS = ("flops", "bytes_accessed", "transcendentals")
_NEVER_THE_KERNELS = ("kernel", "grid", "out_type")
_ALSO_OPTIONS = ("num_warps", "num_stages", "num_ctas", "debug")
_KERNELS_OWN = "the kernel's own"  # not an identifier, so it cannot clash with a keyword

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _kernels_names_first(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorates `triton_call`: a keyword that also names a kernel parameter goes to the kernel.

    `function` gets such keywords in a dictionary, under `_KERNELS_OWN`, and not as its own
    arguments, except for compiler options, which it gets twice.
    """
    kinds = inspect.signature(function).parameters.items()
    names = {name for name, p in kinds if p.kind is p.KEYWORD_ONLY} - set(_NEVER_THE_KERNELS)

    @functools.wraps(function)
    def wrapper(*operands: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        if not names.isdisjoint(keywords) and "kernel" in keywords:
            parameters = Kernel.of(keywords["kernel"]).parameter_names
            own = {n: keywords[n] for n in parameters if n in names and n in keywords}
            rest = {n: v for n, v in keywords.items() if n not in own or n in _ALSO_OPTIONS}
            keywords = {**rest, _KERNELS_OWN: own}  # type: ignore[assignment]
        try:
            return function(*operands, **keywords)
        except Exception as error:
            if trace := frames.of_kernels(error.__traceback__):
                raise error.with_traceback(trace)  # noqa: B904  # re-raises the same error
            raise

    return wrapper


class _HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


# The overloads map `out_type` to the result's type. To stay short, they list only the required
# keywords and those that take a `Literal`.
@overload
def triton_call(
    *operands: Any,
    kernel: Any,
    out_type: NamedTuple,
    grid: GridLike,
    vmap_method: VmapMethod | None = None,
    implementation: KernelImplementation | None = None,
    tuning: settings.TuningMode | None = None,
    **kwargs: Any,
) -> Any: ...
@overload
def triton_call(
    *operands: Any,
    kernel: Any,
    out_type: _HasShape,
    grid: GridLike,
    vmap_method: VmapMethod | None = None,
    implementation: KernelImplementation | None = None,
    tuning: settings.TuningMode | None = None,
    **kwargs: Any,
) -> jax.Array: ...
@overload
def triton_call(
    *operands: Any,
    kernel: Any,
    out_type: tuple[_HasShape, _HasShape],
    grid: GridLike,
    vmap_method: VmapMethod | None = None,
    implementation: KernelImplementation | None = None,
    tuning: settings.TuningMode | None = None,
    **kwargs: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def triton_call(
    *operands: Any,
    kernel: Any,
    out_type: tuple[_HasShape, ...],
    grid: GridLike,
    vmap_method: VmapMethod | None = None,
    implementation: KernelImplementation | None = None,
    tuning: settings.TuningMode | None = None,
    **kwargs: Any,
) -> tuple[jax.Array, ...]: ...
@overload
def triton_call(
    *operands: Any,
    kernel: Any,
    out_type: Any = None,
    grid: GridLike,
    vmap_method: VmapMethod | None = None,
    implementation: KernelImplementation | None = None,
    tuning: settings.TuningMode | None = None,
    **kwargs: Any,
) -> Any: ...
@_kernels_names_first
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
    vmap_method: VmapMethod | None = None,
    implementation: KernelImplementation | None = None,
    tuning: settings.TuningMode | None = None,
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

    Positional operands and keywords bind to the kernel's parameters as in Python. Parameters that
    are not supplied and have no default are the outputs, in order; so are those given the
    `TensorDescriptor` of a `jax.ShapeDtypeStruct`, which are written by TMA. If `out_type` has more
    outputs than that, parameters that are not supplied and have the default None are outputs, too:
    pass None explicitly where a parameter is not an output.

    A kernel's ``*args`` (Triton 3.8 or later) takes the remaining positional operands, or a tuple
    passed by name. Before ``*args``, positional operands skip outputs and parameters given by name:
    for ``def k(out_ptr, n, *xs)``, ``triton_call(x, y, n=n, kernel=k, …)`` is enough.

    A keyword that names both a kernel parameter and one of the arguments below (`num_stages`, say)
    goes to the kernel; `num_warps`, `num_stages`, `num_ctas` and `debug` also reach the compiler,
    as in Triton. `kernel`, `grid` and `out_type` never go to the kernel.

    Args:
      *operands: arrays, Python and NumPy scalars (bool, int, float), None, nested tuples of
        these, `jax.Ref`s (read before the call and written after it, which XLA turns into an update
        in place), `TensorDescriptor`s. Arrays are passed as pointers to dense row-major buffers
        aligned to 16 bytes; scalars are specialised on, as in Triton.
      kernel: a function decorated with `@triton.jit` or Gluon's jit, optionally with
        `@triton.autotune` and `@triton.heuristics` around it, in any order.
      out_type: a pytree of objects with `shape` and `dtype`; the result has its structure.
      grid: the number of programs: an int, a tuple or list of one to three ints, or a callable that
        returns one of those given the meta-parameters (all arguments, constexprs and options by
        name, arrays as `jax.ShapeDtypeStruct`). The callable runs once per config, with the values
        that config is compiled with. If a size is zero, nothing runs and the outputs are zeros (an
        aliased output equals its operand).
      input_output_aliases: maps operands to the flattened outputs that share their memory. An
        operand is given by parameter name, or by index among the flattened operands, scalars
        included, in the kernel's parameter order. An aliased output has no parameter of its own.
        The result is the same whether or not the caller donates the array.
      zeroed_outputs: indices of flattened outputs to zero before the launch, or a callable that
        returns them given the meta-parameters.
      num_warps, num_stages, num_ctas: Triton's options. With `@triton.autotune`, only the
        configs that agree with them are tried.
      debug: turns device assertions on.
      backend_options: other options of Triton's CUDA compiler.
      name: shown in profiles, logs and errors; the kernel's name by default.
      compute_capability: the target architecture: 90 for an H100 or H200. By default that of the
        GPUs the program is lowered for; without GPUs, or if they differ, ``TRIAX_CUDA_ARCH``.
      cost_estimate: "flops", "bytes_accessed", "transcendentals" of one call, kept in the
        program for profilers.
      has_side_effect: keeps the call in the program even if its outputs are unused.
      serialized_metadata: bytes stored in the call, for other tools.
      vmap_method: how the call batches under `jax.vmap`, as in `jax.ffi.ffi_call`:
        "sequential", "sequential_unrolled", "expand_dims", "broadcast_all".
      implementation: None picks by platform: CUDA compiles the kernel, the CPU runs it in
        Triton's interpreter with every access checked. "triton" insists on the first,
        "interpret" on the second.
      tuning: the tuning mode of this call; by default the one in force (see `tuning_mode`).
      tuning_inputs: a callable that takes the operands' shapes (`jax.ShapeDtypeStruct`s) and
        returns arrays to measure configs on. Kernels that compute addresses from data need it.
      **kwargs: more operands, constexprs and meta-parameters by name. A name that is neither a
        parameter nor read by a callable grid or heuristic is an error.

    Returns:
      The outputs, in the structure of `out_type`.

    Raises:
      ArgumentTypeError, ArgumentValueError: a mistake in the call; the message names the
        argument, its value and the remedy.
      UnsupportedError: Triax does not support the kernel or the platform.
      CompilationError: when the program is lowered, if Triton refuses the kernel.
    """
    view = Kernel.of(kernel)
    kwargs |= kwargs.pop(_KERNELS_OWN, {})
    _check_kinds(
        name=name,
        serialized_metadata=serialized_metadata,
        backend_options=backend_options,
        cost_estimate=cost_estimate,
        input_output_aliases=input_output_aliases,
    )
    messages.check_choice("implementation", implementation, IMPLEMENTATIONS)
    messages.check_choice("vmap_method", vmap_method, (None, *VMAP_METHODS))
    candidates.check_capability(compute_capability)
    messages.check_bool(debug=debug, has_side_effect=has_side_effect)
    if tuning_inputs is not None:
        messages.check_callable("tuning_inputs", tuning_inputs)
    mode = settings.mode_in_force(tuning)
    results, out_tree = _flatten_out_type(out_type, kwargs)
    num_outputs = len(results) - len(input_output_aliases or ())
    bound = arguments.bind(view, operands, kwargs, num_outputs)
    flat = arguments.Flattened(view.name)
    supplied = {name: flat.add(name, value) for name, value in bound.runtime.items()}
    aliases: tuple[Alias, ...] = ()
    if input_output_aliases:
        aliases = arguments.resolve_aliases(view, input_output_aliases, flat, results)
    placed = arguments.place_outputs(view, bound, supplied, flat, results, aliases)
    options: dict[str, Any] = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "num_ctas": num_ctas,
        "debug": debug or None,
    }
    for option, value in (backend_options or {}).items():
        if options.get(option) is not None:
            raise ArgumentValueError(
                f"Argument `{option}` is also in `backend_options` ({messages.short(value)}); give "
                "it once."
            )
        options[option] = value
    # Each Ref's value is an operand with an aliased output of its own.
    aliases += tuple(Alias(i, len(results) + k) for k, i in enumerate(flat.refs))
    request = candidates.UnresolvedCall(
        kernel=view,
        parameters=placed,
        arguments=arguments.seen_by_callables(placed, flat.types, results),
        keywords=bound.keywords,
        options=options,
        grid=grid,
        num_results=len(results),
        aliases=aliases,
        zeroed_outputs=zeroed_outputs,
        block_shapes=flat.block_shapes,
        other_names=_ARGUMENTS,
    )
    resolved = candidates.build(request)
    # Candidates may have equal values, which are needed once. Comparisons are slow, so a single
    # candidate's values are not compared.
    constants = [static for candidate in resolved for _, static in candidate.constants]
    if len(resolved) > 1:
        constants = [*dict.fromkeys(constants)]
    call = BoundCall(
        kernel=view,
        arguments=placed,
        candidates=resolved,
        aliases=aliases,
        name=name,
        tuning=mode,
        implementation=implementation,
        compute_capability=None if compute_capability is None else int(compute_capability),
        cost_estimate=_check_costs(cost_estimate) if cost_estimate else (),
        has_side_effect=has_side_effect,
        serialized_metadata=serialized_metadata,
        debug=debug,
        tuning_inputs=tuning_inputs,
        checked=settings.checked(),
        code=sources.fingerprint(view.function, *(static.value for static in constants)),
    )
    jax_private.require_devices(triton_call_p)
    outputs = triton_call_p.bind(
        *jax_private.insert_varying_casts(flat.arrays),
        call=call,
        result_avals=tuple(
            jax.core.ShapedArray(t.shape, t.dtype)
            for t in (*results, *(flat.types[index] for index in flat.refs))
        ),
        vmap_method=vmap_method,
    )
    for ref, value in zip(flat.refs.values(), outputs[len(results) :], strict=True):
        ref[...] = value
    return jax.tree_util.tree_unflatten(out_tree, outputs[: len(results)])


_ARGUMENTS = tuple(inspect.signature(triton_call).parameters)


_KINDS: dict[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "serialized_metadata": (bytes, "bytes"),
    "backend_options": (Mapping, "a mapping"),
    "cost_estimate": (Mapping, "a mapping"),
    "input_output_aliases": (Mapping, "a mapping from operands to outputs, such as {0: 0}"),
}


def _check_kinds(**arguments: Any) -> None:
    for argument, value in arguments.items():
        type_, what = _KINDS[argument]
        if not isinstance(value, type_) and not (value is None and type_ is Mapping):
            raise ArgumentTypeError(
                f"Argument `{argument}` must be {what}; got {messages.shown(value)}."
            )


def _flatten_out_type(out_type: Any, keywords: Mapping[str, Any]) -> tuple[list[ArrayType], Any]:
    if out_type is None:
        misspelt = difflib.get_close_matches("out_type", keywords, n=1)
        raise ArgumentTypeError(
            "Argument `out_type` is missing: give a pytree of jax.ShapeDtypeStruct, one for each "
            "output; () if the kernel only updates Refs."
            + "".join(f" There is no argument `{name}`." for name in misspelt)
        )
    leaves, tree = jax.tree_util.tree_flatten(out_type)
    results = []
    for index, leaf in enumerate(leaves):
        label = f"out_type[{index}]" if len(leaves) > 1 else "out_type"
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ArgumentTypeError(
                f"Argument `{label}` must have `shape` and `dtype`; got "
                f"{messages.shown(leaf)}. Use jax.ShapeDtypeStruct(shape, dtype)."
            )
        results.append(arguments.array_type(label, leaf))
        canonical = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if canonical != leaf.dtype:
            raise ArgumentTypeError(
                f"Argument `{label}` has dtype {leaf.dtype}, which JAX has disabled. Enable it "
                f"(jax.config.update('jax_enable_x64', True)), or ask for {canonical}."
            )
    return results, tree


def _check_costs(costs: Mapping[str, int]) -> Any:
    for name, value in costs.items():
        if name not in _COSTS:
            raise ArgumentValueError(
                f"Argument `cost_estimate` must only have {', '.join(_COSTS)}; got {name!r}."
            )
        if not is_int(value) or value < 0:
            raise ArgumentTypeError(
                f"Argument `cost_estimate` must have non-negative ints; got {name}="
                f"{messages.short(value)}."
            )
    return pack_values({name: int(value) for name, value in costs.items()})
