"""Lowers a bound call into an XLA program, per platform.

On CUDA one config is chosen, compiled and emitted as one custom call. On the CPU a host callback
runs the kernel in Triton's interpreter. Other platforms are refused with the reason.
`triton_call_lowering` does the same in the lowering rule of a user's own primitive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from triax import devices, messages, settings
from triax.binding import candidates
from triax.binding.arguments import seen_by_callables
from triax.binding.grid import is_int
from triax.binding.kernel import Kernel
from triax.binding.launch import Argument, ArrayType, BoundCall, Operand, Result, leaves
from triax.compat import jax_private
from triax.compiling import ahead, compiler
from triax.emitting import emit
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from triax.interpreting import callback
from triax.tuning import policy
from triax.tuning.request import Request


def lower(ctx: Any, *operands: Any, call: BoundCall) -> Sequence[Any]:
    """Emits a call for the platform being lowered for."""
    platforms = set(jax_private.lowering_platforms(ctx))
    if len(platforms) > 1:
        raise UnsupportedError(
            f"Kernel {call.display_name!r} is lowered by one rule for several platforms "
            f"({', '.join(sorted(platforms))}). Register the rule once per platform."
        )
    (platform,) = platforms
    return lower_for(platform, ctx, *operands, call=call)


def lower_for(platform: str, ctx: Any, *operands: Any, call: BoundCall) -> Sequence[Any]:
    """Emits a call for one platform: "cuda", "cpu", or an error for any other."""
    exported = jax_private.exported_platforms(ctx)
    # A multi-platform export lowers each `jax.lax.platform_dependent` branch that any of its
    # platforms takes for all of them, so a call that never runs must not fail the export.
    may_be_dead = "cuda" in exported and platform != "cuda"
    if platform != "cpu" and may_be_dead:
        return emit.placeholder(ctx, operands, emit.NO_CODE)
    if platform == "rocm":
        raise UnsupportedError(
            f"Kernel {call.display_name!r} is lowered for ROCm, which Triax does not support yet. "
            "Run it on an NVIDIA GPU, or on the CPU."
        )
    if platform not in ("cuda", "cpu"):
        raise UnsupportedError(
            f"Kernel {call.display_name!r} is lowered for {platform!r}; Triton kernels run on CUDA "
            "GPUs, and on the CPU in Triton's interpreter."
        )
    if platform == "cpu" and call.implementation == "triton":
        raise UnsupportedError(
            f"Kernel {call.display_name!r}: Argument `implementation` is 'triton', and the program "
            "is lowered for the CPU. Use None or 'interpret' there."
        )
    types = _array_types(ctx)
    launches = call.launches(*types)
    ahead.met(launches)
    if not launches:
        return emit.nothing(ctx, operands, call)
    fallback = None
    if call.fallback is not None and not call.fallback.is_empty:
        fallback = call.launch(call.fallback, *types)
    if platform == "cpu" or call.implementation == "interpret":
        if may_be_dead and call.implementation is None:
            return emit.placeholder(ctx, operands, emit.INTERPRETED)
        if exported:  # a host callback cannot be serialized
            raise UnsupportedError(
                f"Kernel {call.display_name!r} is exported for {platform!r} to run in Triton's "
                "interpreter, which is not part of an exported program. Export it for CUDA "
                "(platforms=['cuda']), with `implementation` None or 'triton'."
            )
        # Every config gives a valid result, and speed does not matter in the interpreter.
        return callback.emit_callback(ctx, operands, call, fallback or launches[0])
    gpus = devices.gpus(ctx)
    capability = devices.compute_capability(call.display_name, call.compute_capability, gpus)
    device = devices.for_tuning(ctx, gpus, capability)
    request = Request(call, launches, capability, compiler.compile_all, device, fallback=fallback)
    choice = policy.choose(request)
    kernels = [ahead.compile_launch(launch, capability) for launch in choice.launches]
    policy.note(choice, kernels)
    return emit.compiled(ctx, operands, call, choice.launches, kernels, choice.key)


def _array_types(ctx: Any) -> tuple[tuple[ArrayType, ...], tuple[ArrayType, ...]]:
    """The types of a lowering rule's operands and results."""
    for name, avals in (("operands", ctx.avals_in), ("results", ctx.avals_out)):
        for index, aval in enumerate(avals):
            if {*map(type, aval.shape)} - {int}:
                messages.check_sizes_known(f"{name}[{index}]", aval.shape)
    operands = tuple(ArrayType(aval.shape, np.dtype(aval.dtype)) for aval in ctx.avals_in)
    return operands, tuple(ArrayType(aval.shape, np.dtype(aval.dtype)) for aval in ctx.avals_out)


def triton_call_lowering(
    ctx: Any,
    kernel: Any,
    *operands: Any,
    grid: Any,
    input_output_aliases: Mapping[int, int] | None = None,
    constexprs: Mapping[str, Any] | None = None,
    name: str = "",
    tuning: settings.TuningMode | None = None,
    compute_capability: int | None = None,
    tuning_inputs: Callable[..., Any] | None = None,
) -> Sequence[Any]:
    """Lowers a Triton kernel inside the lowering rule of your own primitive.

        def rule(ctx, x, y, *, block):
            n = ctx.avals_in[0].size
            return triax.triton_call_lowering(
                ctx, add_kernel, x, y,
                grid=lambda meta: (triton.cdiv(n, meta["BLOCK"]),),
                constexprs={"n": n, "BLOCK": block})

        mlir.register_lowering(my_primitive, rule, platform="cuda")
        mlir.register_lowering(my_primitive, rule, platform="cpu")

    The parameters that are not in `constexprs` are pointers: first all inputs, then all outputs, in
    parameter order. Either every aliased output has a parameter of its own, which points to its
    operand's memory, or none has. To omit a pointer, set its parameter to None in `constexprs`.
    ``*args`` takes the pointers that the other parameters leave; in a kernel with ``*args``, every
    aliased output has a pointer of its own.

    If `constexprs` and a config both set a name, the config's value is used, provided that the
    config was chosen: it was measured, found in a store, or comes from mode "runtime". A config
    that only stands in for a choice (in mode "off", in mode "cached" with nothing stored, or
    without a GPU to measure on) gives way to `constexprs`. `grid` sees the values that are used.

    Args:
      ctx: the lowering rule's context.
      kernel: a Triton kernel, optionally with `@triton.autotune` or `@triton.heuristics`.
      *operands: the rule's operands (MLIR values), as many as `ctx.avals_in`.
      grid: an int, a tuple of one to three ints, or a callable of the meta-parameters.
      input_output_aliases: maps operand indices to the indices of the outputs that share memory.
      constexprs: values of `tl.constexpr` parameters and of scalars, all compiled in as constants.
      name: shown in logs and profiles; the kernel's name by default.
      tuning: the tuning mode; by default the one in force.
      compute_capability, tuning_inputs: as in `triton_call`.

    Returns:
      The custom call's results, one MLIR value per `ctx.avals_out`.

    Raises:
      ArgumentTypeError, ArgumentValueError: a mistake in the arguments.
      CompilationError: the kernel does not compile.
    """
    view = Kernel.of(kernel)
    values, pairs = constexprs or {}, input_output_aliases or {}
    _check_given(ctx, operands, values, pairs)
    if not isinstance(name, str):
        raise ArgumentTypeError(f"Argument `name` must be a string; got {messages.shown(name)}.")
    candidates.check_capability(compute_capability)
    if tuning_inputs is not None:
        messages.check_callable("tuning_inputs", tuning_inputs)
    mode = settings.mode_in_force(tuning)
    operand_types, result_types = _array_types(ctx)
    for operand in pairs:
        if not 0 <= operand < len(operand_types):
            raise ArgumentValueError(
                f"Argument `input_output_aliases` must name operands by index; got {operand}, and "
                f"the primitive has {len(operand_types)} operands."
            )
    arguments = _place_pointers(view, values, operand_types, result_types, pairs)
    names = [n for n, part in arguments for leaf in leaves(part) if isinstance(leaf, Operand)]
    aliases = candidates.check_aliases(pairs, operand_types, result_types, names)
    request = candidates.UnresolvedCall(
        kernel=view,
        parameters=arguments,
        arguments=seen_by_callables(arguments, operand_types, result_types),
        keywords=values,
        options={},
        grid=grid,
        num_results=len(result_types),
        aliases=aliases,
        conflicts="config",
    )
    tried = candidates.build(request)
    fallback = tried[0]
    if view.autotuner is not None:
        fallback = candidates.build(dataclasses.replace(request, conflicts="caller"))[0]
    call = BoundCall(
        kernel=view,
        arguments=arguments,
        candidates=tried if len(tried) > 1 else (fallback,),
        aliases=aliases,
        name=name,
        tuning=mode,
        compute_capability=compute_capability,
        tuning_inputs=tuning_inputs,
        fallback=fallback,
        checked=settings.checked(),
    )
    return lower(ctx, *operands, call=call)


def _check_given(ctx: Any, operands: Sequence[Any], constexprs: Any, aliases: Any) -> None:
    """Checks the arguments that a lowering rule passes to `triton_call_lowering`."""
    if not hasattr(ctx, "avals_in"):
        raise ArgumentTypeError(
            "Argument `ctx` must be the context that JAX passes to a lowering rule; got "
            f"{messages.shown(ctx)}."
        )
    if len(operands) != len(ctx.avals_in) or not all(map(_is_mlir, operands)):
        raise ArgumentTypeError(
            "Arguments `operands` must be the MLIR values that the lowering rule gets, all "
            f"{len(ctx.avals_in)} of them; got {messages.short([*operands])}."
        )
    for argument, value, what in (
        ("constexprs", constexprs, "a mapping from parameters to values"),
        ("input_output_aliases", aliases, "a mapping from operands to outputs, such as {0: 0}"),
    ):
        if not isinstance(value, Mapping):
            raise ArgumentTypeError(
                f"Argument `{argument}` must be {what}; got {messages.shown(value)}."
            )
    for parameter in (name for name, value in constexprs.items() if _is_mlir(value)):
        raise ArgumentTypeError(
            f"Argument `constexprs` must have Python values, which the kernel is compiled for; got "
            f"an MLIR value for `{parameter}`. Pass it as an operand, and load it in the kernel."
        )
    if not all(is_int(index) for pair in aliases.items() for index in pair):
        raise ArgumentTypeError(
            "Argument `input_output_aliases` must map indices of operands to indices of outputs, "
            f"as {{0: 0}}; got {messages.short(dict(aliases))}."
        )


def _is_mlir(value: Any) -> bool:
    return hasattr(value, "owner") and hasattr(value, "type")


def _place_pointers(
    view: Kernel,
    constexprs: Mapping[str, Any],
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
    aliases: Mapping[int, int],
) -> tuple[tuple[str, Argument], ...]:
    """Assigns pointers to parameters in order: all inputs, then all or only unaliased outputs."""
    with_values = {*constexprs, *view.values_set_by_stages()}
    names = [p.name for p in view.runtime_parameters if p.name not in with_values]
    pointers: list[Argument] = [Operand(i) for i in range(len(operands))]
    outputs = [Result(j) for j in range(len(results))]
    rest = view.variadic.name if view.variadic is not None else ""
    if rest in names:
        pointers += outputs
        begin = names.index(rest)
        if (end := begin + len(pointers) - len(names) + 1) >= begin:
            pointers[begin:end] = [tuple(pointers[begin:end])]
    else:
        if aliases and len(names) == len(operands) + len(results) - len(aliases):
            outputs = [leaf for leaf in outputs if leaf.index not in aliases.values()]
        pointers += outputs
    if len(names) != len(pointers):
        aliased = f", {len(aliases)} of them aliased" if aliases else ""
        remedy = "Each input and output takes one parameter"
        if aliases:
            remedy += ", or each aliased pair shares one"
        raise ArgumentValueError(
            f"Kernel {view.name!r} has {messages.counted(len(names), 'parameter')} besides "
            f"`constexprs` ({', '.join(names)}), and the primitive has "
            f"{messages.counted(len(operands), 'input')} and "
            f"{messages.counted(len(results), 'output')}{aliased}. {remedy}; scalars go to "
            "`constexprs`."
        )
    return tuple(zip(names, pointers, strict=True))
