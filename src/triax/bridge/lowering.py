"""How a bound call becomes part of an XLA program, per platform.

CUDA: the config is chosen here, before XLA sees the kernel, and one custom call is
emitted. CPU: a host callback that runs the kernel in Triton's interpreter. Everything
else is refused with the reason. `triton_call_lowering` is the same road for authors of
primitives of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from triax.bridge import ahead, candidates, custom_call, frames, settings
from triax.bridge.compat import jax_private
from triax.bridge.errors import ArgumentValueError, UnsupportedError
from triax.bridge.kernel import Kernel
from triax.bridge.launch import ArrayType, Call, Launch, Operand, Result
from triax.tuning import policy
from triax.tuning.key import Device

CANNOT_EXPORT = "triax_interpreted_kernel_cannot_be_exported_for_cpu"
"""Target of the call that stands for an interpreted kernel in an exported program."""

NO_CODE = "triax_kernel_has_no_code_for_this_platform"
"""Target of the call that stands for a kernel in a program exported for another platform."""


def lower(ctx: Any, *operands: Any, call: Call) -> Sequence[Any]:
    """Emits a call for the platform that the context is lowered for."""
    platforms = set(jax_private.lowering_platforms(ctx))
    if len(platforms) > 1:
        raise UnsupportedError(
            f"Kernel {call.display_name!r} is lowered by one rule for several platforms "
            f"({', '.join(sorted(platforms))}). Register the rule once per platform."
        )
    (platform,) = platforms
    return lower_for(platform, ctx, *operands, call=call)


def lower_for(platform: str, ctx: Any, *operands: Any, call: Call) -> Sequence[Any]:
    """Emits a call for one platform: "cuda", "cpu", or an error for any other."""
    if platform not in ("cuda", "cpu") and jax_private.is_exporting(ctx):
        # Exporting for several platforms lowers each branch of `jax.lax.platform_dependent` for
        # all of them: a call that never runs there must not stop the export.
        return jax.ffi.ffi_lowering(NO_CODE, api_version=4)(ctx, *operands)
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
        return _emit_nothing(ctx, operands, call)
    fallback = None
    if call.fallback is not None and not call.fallback.is_empty:
        fallback = call.launch(call.fallback, *types)
    if platform == "cpu" or call.implementation == "interpret":
        # One result is as good as another, and the interpreter has no speed to choose by.
        return _emit_interpreted(ctx, operands, call, fallback or launches[0])
    devices = gpus(ctx)
    capability = compute_capability(call.display_name, call.compute_capability, devices)
    choice = policy.choose(
        call,
        launches,
        capability,
        _tuning_device(ctx, devices, capability),
        fallback=fallback,
    )
    launches = [launch for launch, _ in choice.chosen]
    built = custom_call.build(call, launches, [kernel for _, kernel in choice.chosen])
    return _emit_custom_call(ctx, operands, built, describe(call, launches, choice.key))


def _array_types(ctx: Any) -> tuple[tuple[ArrayType, ...], tuple[ArrayType, ...]]:
    """The types of the operands and of the results."""
    return tuple(map(ArrayType.of, ctx.avals_in)), tuple(map(ArrayType.of, ctx.avals_out))


def _emit_nothing(ctx: Any, operands: Sequence[Any], call: Call) -> Sequence[Any]:
    """A grid without programs: aliased outputs are their operands, the others are zero."""
    source = {alias.result: alias.operand for alias in call.aliases}

    def outputs(*arrays: jax.Array) -> list[jax.Array]:
        return [
            arrays[source[i]] if i in source else jnp.zeros(aval.shape, aval.dtype)
            for i, aval in enumerate(ctx.avals_out)
        ]

    return mlir.lower_fun(outputs, multiple_results=True)(ctx, *operands)


def _emit_interpreted(
    ctx: Any, operands: Sequence[Any], call: Call, launch: Launch
) -> Sequence[Any]:
    if jax_private.is_exporting(ctx):
        # A host callback cannot be serialised. A target that nobody registers can: the program
        # still runs on its other platforms, and on the CPU fails with this name.
        return jax.ffi.ffi_lowering(CANNOT_EXPORT, api_version=4)(ctx, *operands)

    from triax.bridge import interpreter  # here: it imports triton, and `import triax` should not

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return interpreter.run(launch, [np.asarray(array) for array in arrays], call.checked)
        except Exception as error:
            frames.raise_as_text(error)

    return jax_private.emit_callback(
        ctx,
        run,
        operands,
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=call.has_side_effect,
    )


def _emit_custom_call(
    ctx: Any,
    operands: Sequence[Any],
    built: custom_call.CustomCall,
    description: dict[str, str],
) -> Sequence[Any]:
    buffers = built.buffers
    values, avals = [], []
    for leaf in buffers.operands:
        if isinstance(leaf, Operand):
            values.append(operands[leaf.index])
            avals.append(ctx.avals_in[leaf.index])
        else:
            avals.append(ctx.avals_out[leaf.index])
            values.append(_uninitialised(ctx, avals[-1]))
    scratch = jax.core.ShapedArray((built.scratch_bytes,), np.dtype(np.uint8))
    avals_out = [scratch if i is None else ctx.avals_out[i] for i in buffers.results]
    inner = jax_private.with_avals(ctx, avals, avals_out)
    options: dict[str, Any] = {
        "operand_output_aliases": dict(buffers.aliases),
        "has_side_effect": built.has_side_effect,
        "api_version": built.target.api_version,
    }
    attributes: dict[str, Any] = {}
    if built.target.api_version >= 4:
        attributes["opaque"] = built.opaque
        if built.cost_estimate_json is not None:
            attributes["cost_estimate_json"] = built.cost_estimate_json
    else:
        options["backend_config"] = built.opaque
    results = jax.ffi.ffi_lowering(built.target.name, **options)(inner, *values, **attributes)
    jax_private.annotate(results, description)
    by_output = dict(zip(buffers.results, results, strict=True))
    return [by_output[index] for index in range(len(ctx.avals_out))]


def describe(call: Call, launches: Sequence[Launch], key: str) -> dict[str, str]:
    """What a reader of the program should know of a call; kept in it as frontend attributes.

    `key` is the name under which its config was looked up, "" where there was no choice.
    """
    return {
        **({"triax.key": key} if key else {}),
        "triax.kernel": call.display_name,
        "triax.config": " | ".join(str(launch.candidate) for launch in launches),
        "triax.grid": " | ".join("x".join(map(str, launch.grid)) for launch in launches),
    }


def _uninitialised(ctx: Any, aval: Any) -> Any:
    """A buffer with nothing in it yet, for an output that stands before an operand."""
    rule = jax.ffi.ffi_lowering("AllocateBuffer", api_version=1, skip_ffi_layout_processing=True)
    (value,) = rule(jax_private.with_avals(ctx, [], [aval]))
    return value


def gpus(ctx: Any) -> list[Any]:
    """The GPUs that the program is lowered for, else those of this process."""
    return [d for d in jax_private.lowering_devices(ctx) if is_cuda(d)] or _local_gpus()


def compute_capability(kernel: str, given: int | None, devices: Sequence[Any]) -> int:
    """What the caller gave, else that of the GPUs, else ``TRIAX_CUDA_ARCH``."""
    if given is not None:
        return given
    found = {capability_of(device) for device in devices}
    if len(found) > 1:
        raise UnsupportedError(
            f"Kernel {kernel!r} is lowered for GPUs of compute capabilities "
            f"{', '.join(map(str, sorted(found)))} at once. Give `compute_capability` (the lowest)."
        )
    if found:
        return found.pop()
    if (arch := settings.cuda_arch()) is not None:
        return arch
    raise ArgumentValueError(
        f"Kernel {kernel!r} is lowered for CUDA and no GPU is here to ask for its "
        "architecture. Give `compute_capability` (90 for an H100 or H200), or set TRIAX_CUDA_ARCH."
    )


def _tuning_device(ctx: Any, devices: Sequence[Any], compute_capability: int) -> Device | None:
    """The first of the GPUs that belongs to this process, where it may be measured on."""
    for device in devices:
        index = jax_private.local_index(device)
        if index is not None and capability_of(device) == compute_capability:
            return Device(index, str(device.device_kind), not jax_private.is_exporting(ctx))
    return None


def capability_of(device: Any) -> int:
    """A GPU's compute capability as an int: 90 for 9.0."""
    return int(str(device.compute_capability).replace(".", ""))


def is_cuda(device: Any) -> bool:
    """Whether a device is an NVIDIA GPU."""
    return device.platform in ("gpu", "cuda") and hasattr(device, "compute_capability")


def _local_gpus() -> list[Any]:
    try:
        return [device for device in jax.local_devices(backend="cuda") if is_cuda(device)]
    except RuntimeError:  # no CUDA backend in this process
        return []


def triton_call_lowering(
    ctx: Any,
    kernel: Any,
    *operands: Any,
    grid: Any,
    input_output_aliases: Mapping[int, int] | None = None,
    constexprs: Mapping[str, Any] | None = None,
    name: str = "",
    tuning: str | None = None,
    compute_capability: int | None = None,
    tuning_inputs: Callable[..., Any] | None = None,
) -> Sequence[Any]:
    """Lowers a Triton kernel inside the lowering rule of your own primitive.

        def rule(ctx, x, y, *, block):
            return triax.triton_call_lowering(
                ctx, add_kernel, x, y,
                grid=lambda meta: (triton.cdiv(x_aval.size, meta["BLOCK"]),),
                constexprs={"n": x_aval.size, "BLOCK": block})

        mlir.register_lowering(my_primitive, rule, platform="cuda")
        mlir.register_lowering(my_primitive, rule, platform="cpu")

    The pointer parameters of the kernel are all inputs, then all outputs, in parameter
    order with the names in `constexprs` left out. Aliased outputs either all have a
    parameter of their own, which points to the same memory as the operand's, or none has.
    A pointer named in `constexprs` with value None is not there.

    Where several configs are tried (measured, found in a store, or mode "runtime"), a
    config's value wins over the one in `constexprs`; where one config stands in for all
    (mode "off", "cached" where nothing is stored, nothing to measure on), the caller's
    wins. `grid` sees the merged values.

    Args:
      ctx: the lowering rule's context.
      kernel: a Triton kernel, with `@triton.autotune` or `@triton.heuristics` or not.
      *operands: the rule's operands (MLIR values), as many as `ctx.avals_in`.
      grid: an int, a tuple of one to three ints, or a callable of the meta-parameters.
      input_output_aliases: indices of operands to indices of outputs that share memory.
      constexprs: values of `tl.constexpr` parameters and of scalars, all compiled in.
      name: what to call it in logs and profiles; the kernel's name by default.
      tuning: the tuning mode; by default the one in force.
      compute_capability, tuning_inputs: as in `triton_call`.

    Returns:
      The custom call's results, one MLIR value per `ctx.avals_out`.

    Raises:
      ArgumentTypeError, ArgumentValueError: a mistake in the arguments.
      CompilationError: the kernel does not compile.
    """
    view = Kernel.of(kernel)
    values = dict(constexprs or {})
    mode = settings.check_tuning_mode(tuning or settings.tuning_mode(), "tuning")
    operand_types, result_types = _array_types(ctx)
    pairs = dict(input_output_aliases or {})
    for operand in pairs:
        if not 0 <= operand < len(operand_types):
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names operand {operand}, and the primitive has "
                f"{len(operand_types)}."
            )
    arguments = _place_pointers(view, values, operand_types, result_types, pairs)
    names = [name for name, leaf in arguments if isinstance(leaf, Operand)]
    types = {
        name: (operand_types if isinstance(leaf, Operand) else result_types)[leaf.index]
        for name, leaf in arguments
    }
    aliases = candidates.check_aliases(pairs, operand_types, result_types, names)
    request = candidates.Request(
        kernel=view,
        parameters=arguments,
        arguments={
            name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in types.items()
        },
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
    call = Call(
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


def _place_pointers(
    view: Kernel,
    constexprs: Mapping[str, Any],
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
    aliases: Mapping[int, int],
) -> tuple[tuple[str, Operand | Result], ...]:
    """The pointer parameters, in order: all inputs, then all outputs, or those not aliased."""
    given = {*constexprs, *view.values_set_by_stages()}
    names = [p.name for p in view.runtime_parameters if p.name not in given]
    leaves: list[Operand | Result] = [Operand(i) for i in range(len(operands))]
    outputs = [Result(j) for j in range(len(results))]
    if aliases and len(names) == len(operands) + len(results) - len(aliases):
        outputs = [leaf for leaf in outputs if leaf.index not in aliases.values()]
    leaves += outputs
    if len(names) != len(leaves):
        aliased = f", {len(aliases)} of them aliased" if aliases else ""
        remedy = "Each takes one"
        if aliases:
            remedy += ", or each aliased pair takes one together"
        raise ArgumentValueError(
            f"Kernel {view.name!r} has {len(names)} parameters besides `constexprs` "
            f"({', '.join(names)}), and the primitive has {len(operands)} inputs and "
            f"{len(results)} outputs{aliased}. {remedy}."
        )
    return tuple(zip(names, leaves, strict=True))
