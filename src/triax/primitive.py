"""The JAX primitive behind `triton_call`, in reading order: running it eagerly, abstract
evaluation and effects, vmap, differentiation, lowering.

Parameters of the primitive: `call` (a `launch.BoundCall`), `result_avals` (the outputs' shapes
and dtypes) and `vmap_method`. JAX's batching rule for FFI calls reads the last two by name.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from triax import lowering
from triax.binding.launch import ArrayType, BoundCall, Descriptor, Operand, leaves
from triax.compat import jax_private
from triax.compiling import ahead
from triax.errors import ArgumentValueError, DifferentiationError

triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True


# --- eager --------------------------------------------------------------------


eager_listener: contextvars.ContextVar[Callable[[BoundCall, Sequence[Any], Any], None] | None] = (
    contextvars.ContextVar("triax_eager_listener", default=None)
)
"""A function called before each eager call, with the call, its operands and its `result_avals`."""


def _impl(*args: Any, call: BoundCall, result_avals: Any, vmap_method: str | None) -> list[Any]:
    params = {"call": call, "result_avals": result_avals, "vmap_method": vmap_method}
    if (listener := eager_listener.get()) is not None:
        listener(call, args, result_avals)
    # Without operands, the call runs where JAX puts new arrays.
    device = _cpu_device(args or (jnp.zeros(()),))
    if device is None or call.implementation == "triton":
        with jax.disable_jit(False):  # the call itself is compiled even under `disable_jit`
            return list(_triton_call(*args, **params))
    return _interpret(args, call, result_avals, device)


@functools.partial(jax.jit, static_argnames=("call", "result_avals", "vmap_method"))
def _triton_call(*args: Any, **params: Any) -> Any:
    return triton_call_p.bind(*args, **params)


def _cpu_device(args: Sequence[Any]) -> Any | None:
    """The one CPU device that all arrays are on, or None."""
    devices = {d for arg in args if isinstance(arg, jax.Array) for d in arg.devices()}
    if len(devices) != 1:
        return None
    (device,) = devices
    return device if device.platform == "cpu" else None


def _interpret(args: Sequence[Any], call: BoundCall, result_avals: Any, device: Any) -> list[Any]:
    """Runs the interpreter directly, so that its exceptions reach the caller unchanged.

    From inside a compiled program, JAX can only pass on their text.
    """
    from triax.interpreting.run import run  # here: it imports triton

    arrays = [np.asarray(arg) for arg in args]
    operands, results = tuple(map(ArrayType.of, arrays)), tuple(map(ArrayType.of, result_avals))
    outputs = run(call.launch(call.candidates[0], operands, results), arrays, call.checked)
    committed = any(isinstance(arg, jax.Array) and arg.committed for arg in args)
    return [jax.device_put(output, device if committed else None) for output in outputs]


triton_call_p.def_impl(_impl)


# --- abstract evaluation and effects -------------------------------------------


@triton_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, call: BoundCall, result_avals: Any, vmap_method: str | None) -> Any:
    del vmap_method
    # Every call is traced through here, under all transformations.
    ahead.expect(call, [a.dtype for a in avals], [a.dtype for a in result_avals])
    outputs = [
        jax_private.result_aval("triton_call", avals, a.shape, a.dtype) for a in result_avals
    ]
    return outputs, {jax_private.side_effect()} if call.has_side_effect else set()


# --- vmap -------------------------------------------------------------------------

VmapMethod = Literal["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]
VMAP_METHODS: tuple[VmapMethod, ...] = get_args(VmapMethod)


def _batch(
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    call: BoundCall,
    result_avals: Any,
    vmap_method: str | None,
) -> Any:
    if vmap_method is None:
        raise ArgumentValueError(
            f"Kernel {call.display_name!r} is under jax.vmap without a `vmap_method`. Pass "
            f"`vmap_method` to triton_call: one of {', '.join(map(repr, VMAP_METHODS))}. The first "
            "two launch the kernel once per element; the others launch it once, on arrays with a "
            "leading batch dimension, which the kernel and its grid must then expect."
        )
    if vmap_method in ("expand_dims", "broadcast_all"):
        _check_descriptors(call, dims, vmap_method)
    if vmap_method == "expand_dims":
        args, dims = _broadcast_aliased(args, dims, call)
    return jax_private.ffi_batching_rule(
        triton_call_p, args, dims, call=call, result_avals=result_avals, vmap_method=vmap_method
    )


batching.primitive_batchers[triton_call_p] = _batch


def _check_descriptors(call: BoundCall, dims: Sequence[Any], vmap_method: str) -> None:
    """Raises where an array behind a descriptor would get a batch that the descriptor lacks."""
    for name, argument in call.arguments:
        for leaf in leaves(argument):
            if isinstance(leaf, Descriptor):
                operand = leaf.buffer.index if isinstance(leaf.buffer, Operand) else None
                if operand is None or vmap_method == "broadcast_all" or dims[operand] is not None:
                    raise ArgumentValueError(
                        f"Argument `vmap_method` is {vmap_method!r}, but `{name}` of kernel "
                        f"{call.display_name!r} is a host descriptor, which would show one element "
                        "of the batch alone. Pass 'sequential'."
                    )


def _broadcast_aliased(
    args: Sequence[Any], dims: Sequence[Any], call: BoundCall
) -> tuple[list[Any], list[Any]]:
    """Broadcasts unbatched aliased operands, so that each batch element updates its own copy."""
    args, dims = list(args), list(dims)
    (size, *_) = (a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    for index in {alias.operand for alias in call.aliases}:
        if dims[index] is None:
            args[index] = jnp.broadcast_to(args[index], (size, *args[index].shape))
            dims[index] = 0
    return args, dims


# --- differentiation ----------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, call: BoundCall, **_: Any) -> Any:
    raise DifferentiationError(
        f"Kernel {call.display_name!r} was differentiated, but a Triton kernel has no derivative "
        "of its own. Define one for the calling function with jax.custom_vjp (or jax.custom_jvp). "
        "If you need no gradient, apply jax.lax.stop_gradient to the kernel's inputs; applying it "
        "to the outputs is too late."
    )


ad.primitive_jvps[triton_call_p] = _jvp


# --- lowering -----------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, call: BoundCall, platform: str | None = None, **_: Any) -> Any:
    if platform is None:
        return lowering.lower(ctx, *operands, call=call)
    return lowering.lower_for(platform, ctx, *operands, call=call)


for _platform in ("cuda", "cpu", "rocm"):
    _rule = functools.partial(_lower, platform=_platform)
    mlir.register_lowering(triton_call_p, _rule, platform=_platform)
mlir.register_lowering(triton_call_p, _lower)
