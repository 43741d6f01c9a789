"""Chooses the code an op runs: compiled kernels, interpreted kernels, or plain JAX.

By default the platform decides. It is known only when a program is lowered, so an op puts both into
the program, and lowering keeps one.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from triax import messages
from triax.binding import dtypes
from triax.compat import triton_private
from triax.errors import ArgumentTypeError
from triax.moe.shared import arguments

Implementation = Literal["triton", "interpret", "xla"]
IMPLEMENTATIONS = (None, *get_args(Implementation))


def resolve(implementation: Any, **arrays: jax.Array | None) -> Implementation | None:
    """Returns a valid `implementation`, or "xla" by default if no kernel can be launched.

    Raises:
      ArgumentValueError: it is none of `IMPLEMENTATIONS`.
      ArgumentTypeError: a kernel was requested, but Triton has no element type for one of `arrays`,
        which have the names of the op's arguments.
      MissingDependencyError: a kernel was requested, but Triton is not installed.
      UnsupportedError: one of `arrays` has a symbolic size, and "xla" was not requested.
    """
    arguments.check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "xla":
        return implementation
    for name, array in arrays.items():
        if array is not None:
            messages.check_sizes_known(name, array.shape, ", or pass `implementation='xla'`")
    try:
        for name, array in arrays.items():
            if array is not None:
                dtypes.check(array.dtype, name)
    except ArgumentTypeError:
        if implementation is None:
            return "xla"
        raise
    if implementation is not None:
        triton_private.triton()
    # Systems other than Linux have no Triton, and no CUDA either.
    elif importlib.util.find_spec("triton") is None:
        return "xla"
    return implementation


def resolve_for_floats(implementation: Any, **arrays: Any) -> Implementation | None:
    """Like `resolve`, for kernels that compute in float32.

    With types other than floats up to float32 it returns "xla", or raises `ArgumentTypeError` if
    kernels were requested.
    """
    implementation = resolve(implementation, **arrays)
    for name, array in arrays.items():
        if array is None or (
            jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize <= 4
        ):
            continue
        if implementation is None:
            return "xla"
        if implementation != "xla":
            raise ArgumentTypeError(
                f"Argument `{name}` must be a float of at most 32 bits for the kernels; got "
                f"{array.dtype}. Cast it, or let `implementation` be None or 'xla'."
            )
    return implementation


@functools.lru_cache(maxsize=1024)  # options may be sizes
def choose(
    implementation: str | None, kernels: Callable[..., Any], xla: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """Returns `kernels` or `xla`, which give the same, as a function of arrays alone.

    It is the same function for the same options, so that JAX can tell that it has compiled it.
    """
    xla = functools.partial(xla, **options)
    if implementation == "xla":
        return jax.jit(
            xla, inline=True
        )  # outside `jit` a plan is one program, not one for each step
    # By default None, not "triton": a program exported for several platforms lowers every branch
    # for each of them, even dead ones.
    kernels = functools.partial(kernels, implementation=implementation, **options)
    if implementation is not None:
        return kernels
    return functools.partial(jax.lax.platform_dependent, cuda=kernels, default=xla)
