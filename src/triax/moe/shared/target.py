"""Runs code that depends on the GPU, which is known only when a program is lowered.

`for_target` puts a placeholder into the program. Lowering calls the caller's function with the
`Target`, and replaces the placeholder by the result. That way a kernel's blocks, its grid, and
whether it loads through TMA can depend on the GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from triax import architectures, devices
from triax.architectures import Architecture
from triax.compat import jax_private
from triax.errors import DifferentiationError


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU that a program is lowered for.

    Attributes:
      compute_capability: 90 for an H100 or H200.
      multiprocessors: their number.
      tensor_maps: whether kernels can take a `TensorDescriptor`: the GPU has TMA, and jaxlib
        encodes descriptors for it.
      mesh: the GPUs of the `shard_map` around the code, if it splits the program over all axes.
    """

    compute_capability: int
    multiprocessors: int
    tensor_maps: bool
    mesh: Any = None

    @property
    def architecture(self) -> Architecture:
        return architectures.of(self.compute_capability)


INTERPRETER = Target(compute_capability=90, multiprocessors=3, tensor_maps=True)
"""A tiny GPU for interpreted kernels, so that the few programs of persistent kernels loop."""


def for_target(
    write: Callable[..., Any],
    *operands: Any,
    out_type: Any,
    implementation: str | None,
    **options: Any,
) -> Any:
    """Runs `write` with the GPU that the program is lowered for.

    Args:
      write: ``write(target, *operands, implementation=…, **options)`` returns arrays of `out_type`.
        Calls with the same `write` and equal options share programs.
      *operands: pytrees of arrays.
      out_type: a pytree of anything with `shape` and `dtype`.
      implementation: with "interpret" the target is `INTERPRETER`.
      **options: hashable.
    """
    options["implementation"] = implementation
    if implementation == "interpret":
        return write(INTERPRETER, *operands, **options)
    leaves, in_tree = jax.tree.flatten(operands)
    types, out_tree = jax.tree.flatten(out_type)
    jax_private.require_devices(for_target_p)
    outputs = for_target_p.bind(
        *jax_private.insert_varying_casts(leaves),
        write=write,
        options=tuple(options.items()),
        in_tree=in_tree,
        result_avals=tuple(jax.core.ShapedArray(t.shape, t.dtype) for t in types),
        vmap_method="sequential",
    )
    return jax.tree.unflatten(out_tree, outputs)


for_target_p = Primitive("for_target")
for_target_p.multiple_results = True


@for_target_p.def_impl
def _impl(*args: Any, **params: Any) -> list[Any]:
    with jax.disable_jit(False):  # the target is known only in lowering
        return list(_compiled(*args, **params))


@functools.partial(
    jax.jit,
    static_argnames=("write", "options", "in_tree", "result_avals", "vmap_method"),
)
def _compiled(*args: Any, **params: Any) -> Any:
    return for_target_p.bind(*args, **params)


@for_target_p.def_abstract_eval
def _abstract_eval(*avals: Any, result_avals: Any, **_: Any) -> Any:
    return [jax_private.result_aval("for_target", avals, a.shape, a.dtype) for a in result_avals]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return jax_private.ffi_batching_rule(for_target_p, args, dims, **params)


batching.primitive_batchers[for_target_p] = _batch


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    raise DifferentiationError(
        "A part of a program that depends on its target was differentiated. Give the function "
        "around it a derivative with jax.custom_vjp."
    )


ad.primitive_jvps[for_target_p] = _jvp


def _lower(ctx: Any, *operands: Any, write: Any, options: Any, in_tree: Any, **_: Any) -> Any:
    target = _target(ctx, write.__name__.strip("_"))

    def function(*leaves: Any) -> Any:
        return jax.tree.leaves(write(target, *in_tree.unflatten(leaves), **dict(options)))

    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _target(ctx: Any, name: str) -> Target:
    if "cuda" not in jax_private.lowering_platforms(ctx):
        # A program exported for several platforms is lowered with every branch for each of them.
        return INTERPRETER
    gpus = devices.gpus(ctx)
    capability = devices.compute_capability(name, None, gpus)
    counts = [count for d in gpus if (count := getattr(d, "core_count", None))]
    architecture = architectures.of(capability)
    mesh = jax_private.manual_mesh(ctx)
    return Target(
        compute_capability=capability,
        multiprocessors=min(counts) if counts else architecture.multiprocessors,
        tensor_maps=architecture.tma and jax_private.supports_tensor_maps(),
        mesh=mesh if mesh is not None and all(map(devices.is_cuda, mesh.devices.flat)) else None,
    )


mlir.register_lowering(for_target_p, _lower)
