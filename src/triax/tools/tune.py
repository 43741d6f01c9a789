"""`tune`: measures every Triton call of a function on its real operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from triax import messages, settings
from triax.binding.launch import ArrayType, BoundCall
from triax.compat import jax_private
from triax.compiling import compiler
from triax.devices import Device, capability_of, is_cuda
from triax.errors import ArgumentTypeError, TuningError, UnsupportedError
from triax.primitive import eager_listener
from triax.tuning import policy
from triax.tuning.recording import Records, record
from triax.tuning.request import Request


def tune(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Records:
    """Measures the configs of every Triton call in a function on copies of its real operands.

        triax.tune(train_step, params, batch)

    The function runs once, operation by operation (as under `jax.disable_jit`), on the GPU its
    arguments are on. Each call with several configs is measured on its operands there, and the best
    config is stored in the user's store, even if one was already known. Programs compiled before
    keep their config. Your own primitives, lowered with `triton_call_lowering`, are compiled as a
    whole and measured on random operands.

    Args:
      function: the function to tune; its result is dropped.
      *args, **kwargs: its arguments.

    Returns:
      The `Records` of the calls in order of first use, one per key, each with every candidate's
      time. They are saved already; `save` also writes them into another folder.

    Raises:
      ArgumentTypeError: `function` is not callable, or JAX is tracing, as inside `jax.jit`.
      UnsupportedError: a call's operands are not on a GPU of this process.
      CompilationError: none of a kernel's configs compiles and runs.
      TuningError: nothing can be measured here, as under a sanitizer; the message says why.
    """
    messages.check_callable("function", function)
    _check_values((args, kwargs))
    tuned: set[str] = set()  # names of keys

    def listen(call: BoundCall, operands: Sequence[Any], result_avals: Any) -> None:
        if settings.sanitizer.value is not None:
            raise TuningError(
                f"Kernel {call.display_name!r} is under a sanitizer, and `tune` measures kernels: "
                "call it outside of `triax.testing.sanitized`."
            )
        types = tuple(map(ArrayType.of, operands))
        launches = call.launches(types, tuple(map(ArrayType.of, result_avals)))
        if len(launches) < 2:
            return
        device, capability = _device(call, operands)
        compile_all = compiler.compile_all
        request = Request(call, launches, capability, compile_all, device, list(operands))
        if request.key.name not in tuned:
            tuned.add(request.key.name)
            policy.choose(request)

    token = eager_listener.set(listen)
    try:
        with record() as records, jax.disable_jit():
            result = jax.block_until_ready(function(*args, **kwargs))
    finally:
        eager_listener.reset(token)
    _check_values(result)
    return records


def _check_values(arrays: Any) -> None:
    traced = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.core.Tracer)]
    if traced:
        raise ArgumentTypeError(
            "`tune` runs a function on arrays with values; got "
            f"{messages.shown(traced[0])}. Call it outside of `jax.jit`, `vmap` and `grad`."
        )


def _device(call: BoundCall, operands: Sequence[Any]) -> tuple[Device, int]:
    """Finds the one GPU that a call's operands are on."""
    holding = {d for o in operands if isinstance(o, jax.Array) for d in o.devices()}
    devices = holding or {jax.devices()[0]}
    for device in devices:
        index = jax_private.local_index(device) if is_cuda(device) else None
        if index is not None and len(devices) == 1:
            return Device(index, str(device.device_kind)), capability_of(device)
    raise UnsupportedError(
        f"Kernel {call.display_name!r} runs on {', '.join(map(str, devices))}; tuning needs its "
        "operands on one GPU of this process."
    )
