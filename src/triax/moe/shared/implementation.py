"""Chooses the code an op runs: compiled kernels, interpreted kernels, or plain JAX.

By default the platform decides. It is known only when a program is lowered, so an op puts kernels
and plain JAX into the program, and lowering keeps one of them.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.binding import dtypes
from triax.compat import triton_private
from triax.errors import ArgumentTypeError, UnsupportedError
from triax.moe.shared import arguments
from triax.moe.shared.target import Target, for_target

Implementation = Literal["triton", "interpret", "xla"]
IMPLEMENTATIONS = (None, *get_args(Implementation))


def check(implementation: Any, *, floats: bool = False, **arrays: Any) -> None:
    """Checks the argument `implementation` of a public function, beside its other arguments.

    With `floats` kernels compute in float32, and take floats up to that alone.

    Raises:
      ArgumentValueError: `implementation` is not in `IMPLEMENTATIONS`.
      ArgumentTypeError: a kernel was requested that does not take the dtype of one of `arrays`,
        which are named like the function's arguments.
      MissingDependencyError: a kernel was requested, but Triton is not installed.
      UnsupportedError: one of `arrays` has a symbolic size, and "xla" was not requested.
    """
    arguments.check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "xla":
        return
    for name, array in arrays.items():
        if array is None:
            continue
        messages.check_sizes_known(name, array.shape, ", or pass `implementation='xla'`")
        if implementation is not None:
            dtypes.check(array.dtype, name)
            if not _fits(array.dtype, floats):
                raise ArgumentTypeError(
                    f"Argument `{name}` must be a float of at most 32 bits for the kernels; got "
                    f"{array.dtype}. Cast it, or let `implementation` be None or 'xla'."
                )
    if implementation is not None:
        triton_private.triton()


def fit(
    implementation: Implementation | None, *arrays: Any, floats: bool = False
) -> Implementation | None:
    """Returns a checked `implementation`, or "xla" instead of None if no kernel can be launched.

    That is so if kernels do not take one of `arrays` (`floats` is as in `check`), or if there is no
    Triton: systems other than Linux have none, and no CUDA either.
    """
    if implementation is not None:
        return implementation
    for array in arrays:
        if array is not None and not _fits(array.dtype, floats):
            return "xla"
    return None if importlib.util.find_spec("triton") is not None else "xla"


def _fits(dtype: Any, floats: bool) -> bool:
    if floats and not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4):
        return False
    return dtypes.is_supported(dtype)


def _if_gpu_has_dtypes(
    implementation: str | None,
    kernels: Callable[..., Any],
    xla: functools.partial[Any],
    *operands: Any,
) -> Any:
    """Runs `kernels`, or `xla` if the program's GPU lacks an operand's 8-bit float type."""
    # Scales are no numbers to a GPU: kernels take theirs in 8 bits as codes.
    numbers = [of.values if hasattr(of, "dequantize") else of for of in operands]
    float8 = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(numbers)} & dtypes.FLOAT8.keys()
    if not float8:
        return kernels(*operands)
    return for_target(
        _with_small_floats,
        *operands,
        out_type=jax.eval_shape(xla, *operands),
        implementation=implementation,
        kernels=kernels,
        xla=xla,
        small=tuple(sorted(float8, key=str)),
    )


def _with_small_floats(
    target: Target,
    *operands: Any,
    kernels: Callable[..., Any],
    xla: functools.partial[Any],
    small: tuple[np.dtype, ...],
    implementation: str | None,
) -> Any:
    known = triton_private.small_floats(target.compute_capability)
    lacking = [dtype.name for dtype in small if dtypes.triton_name(dtype) not in known]
    if not lacking:
        return kernels(*operands)
    if implementation is not None:
        raise UnsupportedError(
            f"Argument `implementation` is {implementation!r}, and kernels for compute capability "
            f"{target.compute_capability} have no {', '.join(lacking)}. Let it be None, to run "
            "plain JAX on this GPU, or cast the operands to bfloat16."
        )
    warnings.warn(
        f"{xla.func.__name__.removesuffix('_reference')} runs in plain JAX, which converts "
        f"{', '.join(lacking)} in memory in every call: kernels for compute capability "
        f"{target.compute_capability} have no such type. Use 16 bits, or int8 for weights alone.",
        UserWarning,
        stacklevel=2,
    )
    return xla(*operands)


def choose(
    implementation: str | None,
    kernels: Callable[..., Any],
    xla: Callable[..., Any],
    *,
    any_bits: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Returns `kernels` or `xla`, which give the same results, as a function of arrays alone.

    With `any_bits` the kernels only move bits, so the GPU need not support the dtypes.
    """
    xla = functools.partial(xla, **options)
    if implementation == "xla":
        # With `jit`, an op called outside of `jit` is one program, not one for each step.
        return jax.jit(xla, inline=True)
    # The default stays None, because a program exported for several platforms lowers every branch
    # for each platform, even dead ones.
    kernels = functools.partial(kernels, implementation=implementation, **options)
    if implementation != "interpret" and not any_bits:
        kernels = functools.partial(_if_gpu_has_dtypes, implementation, kernels, xla)
    if implementation is not None:
        return kernels
    return functools.partial(jax.lax.platform_dependent, cuda=kernels, default=xla)
