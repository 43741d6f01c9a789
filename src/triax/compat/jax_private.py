"""Wraps all the internals of JAX and jaxlib that Triax uses.

Each function is a thin wrapper of a private symbol, and hides differences between versions
by probing for the symbol itself. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import ffi as _ffi
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax.sharding import PartitionSpec

from triax.compat import versions
from triax.errors import MissingDependencyError, UnsupportedError

# --- jaxlib's Triton module ---------------------------------------------------


@functools.cache
def gpu_triton() -> ModuleType:
    """Imports jaxlib's `gpu_triton` module with the CUDA plugin's constructors in it.

    The import registers the custom-call targets with XLA.

    Raises:
      MissingDependencyError: no CUDA plugin is installed.
      VersionError: the plugin's version differs from jaxlib's, or is too old.
    """
    jaxlib = versions.installed("jaxlib") or "unknown"
    plugin = versions.cuda_plugin()
    versions.check_plugin(plugin, jaxlib)
    versions.check_dispatch(versions.gated_version())
    module = importlib.import_module("jaxlib.gpu_triton")
    if not hasattr(module, "TritonKernel"):
        raise MissingDependencyError(
            "Lowering a Triton kernel for CUDA needs JAX's CUDA plugin, which is not installed. "
            f"Install `jax[cuda13]=={jaxlib}`; where there is no GPU, {how_to_lower()} is "
            "enough to lower."
        )
    return module


def how_to_lower() -> str:
    """Returns the command after which programs can be lowered where there is no GPU."""
    return f"`pip install --no-deps jax-cuda13-plugin=={versions.installed('jaxlib')}`"


def make_triton_kernel(kernel: Any) -> Any:
    """Makes jaxlib's TritonKernel for a `CompiledKernel`, with this version's argument list."""
    ttir = ""  # only ever logged; an empty one keeps the bytes small and free of paths
    rest = (kernel.shared_bytes, kernel.ptx, ttir, kernel.compute_capability)
    if not versions.KERNEL_NUM_CTAS.passes(versions.gated_version()):
        cluster = (kernel.num_ctas, 1, 1)
        return gpu_triton().TritonKernel(kernel.name, kernel.num_warps, *rest, *cluster)
    return gpu_triton().TritonKernel(kernel.name, kernel.num_warps, kernel.num_ctas, *rest)


def supports_tensor_maps() -> bool:
    """Whether jaxlib encodes host TMA descriptors."""
    return hasattr(gpu_triton(), "create_tma_descriptor_parameter")


# --- tracing ------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether `value` is an array of JAX (traced or not) or NumPy, or a constant in a trace."""
    constant = getattr(sys.modules.get("jax._src.literals"), "TypedNdArray", np.ndarray)
    return isinstance(value, (jax.Array, np.ndarray, constant))


def side_effect() -> Any:
    """Returns the effect that JAX gives foreign calls with `has_side_effect` to keep them alive."""
    return _ffi._FfiEffect


def insert_varying_casts(args: Sequence[Any]) -> list[Any]:
    """Casts arrays to common varying axes and shardings inside `shard_map`."""
    cast = getattr(_core, "auto_insert_reshard", None) or _core.standard_insert_pvary
    return list(cast(*args)) if args else []


def result_aval(
    name: str, in_avals: Sequence[Any], shape: tuple[int, ...], dtype: Any, sharding: Any = None
) -> Any:
    """Returns an output's abstract value, varying over all mesh axes that any input varies over."""
    varying = _core.standard_vma_rule(name, *in_avals)
    if sharding is None:
        sharding = _core.get_cur_mesh_sharding(PartitionSpec(*[None] * len(shape)))
    if hasattr(_core, "ManualAxisType"):
        axes = _core.ManualAxisType(varying=varying)
        return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=axes)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, vma=varying)


def no_vmapped_axes() -> AbstractContextManager[Any]:
    """A context in which all explicit mesh axes may be used, also the axes that `vmap` hides.

    Under `vmap` the mapped function does not see the axes over which the batch is sharded.
    """
    taken = getattr(_core.get_axis_env(), "explicit_mesh_axis_names", None)
    if not taken:
        return contextlib.nullcontext()
    if not hasattr(_core, "remove_explicit_mesh_axis_names"):
        return _without_explicit_axes()
    context: AbstractContextManager[Any] = _core.remove_explicit_mesh_axis_names(taken)
    return context


# Workaround: jax <0.9: names of explicit axes can only be added.
@contextlib.contextmanager
def _without_explicit_axes() -> Iterator[None]:
    before = _core.get_axis_env()
    _core.trace_ctx.set_axis_env(
        type(before)(before.axis_sizes, before.spmd_axis_names, frozenset())
    )
    try:
        yield
    finally:
        _core.trace_ctx.set_axis_env(before)


def ffi_batching_rule(primitive: Any, args: Any, dims: Any, **params: Any) -> Any:
    """Runs JAX's own batching of foreign calls, by `vmap_method` and `result_avals`."""
    return _ffi.ffi_batching_rule(primitive, args, dims, **params)


# --- lowering -----------------------------------------------------------------


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """Returns the platforms that a primitive is lowered for; several only while exporting."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def exported_platforms(ctx: Any) -> tuple[str, ...]:
    """Returns all platforms that the program is exported for; none if it is not exported."""
    module = ctx.module_context
    for_export = getattr(module.lowering_parameters, "for_export", False)
    return tuple(module.platforms) if for_export else ()


@functools.cache
def _count(platform: str | None) -> int:
    try:
        return jax.device_count(platform)
    except RuntimeError:  # no such platform
        return 0


def require_devices(primitive: Any, platform: str | None = "cuda") -> None:
    """Makes JAX name its devices to the lowering of this primitive, if `platform` has several.

    Without this, JAX lowers a program of one device once for all devices, and names none of them.
    It is only done when the primitive is bound and there are several devices, because JAX does not
    lower such programs for an `AbstractMesh`.
    """
    # Counting devices must not start a backend.
    if _xla_bridge.backends_are_initialized() and _count(platform) > 1:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


def lowering_devices(ctx: Any) -> tuple[Any, ...]:
    """Returns the devices the program is lowered for, if the lowering context knows them."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is not None:
        try:
            return tuple(np.asarray(mesh.devices).flat)
        except (AttributeError, ValueError):  # an abstract mesh has no devices
            return ()
    return tuple(getattr(context, "device_assignment", None) or ())


def manual_mesh(ctx: Any) -> Any | None:
    """Returns the mesh, with devices, of the `shard_map` around a primitive, or None.

    It is also None if an axis of several devices is not manual, or if the program is exported.
    """
    context = ctx.module_context.axis_context
    if exported_platforms(ctx) or not lowering_devices(ctx) or not hasattr(context, "mesh"):
        return None
    axes = {name for name, size in context.mesh.shape.items() if size > 1}
    return context.mesh if axes <= {*context.manual_axes} else None


def is_partitioned(ctx: Any) -> bool:
    """Whether XLA partitions the program over several devices; False inside `shard_map`.

    It is also False if the program is exported, or if neither devices nor a mesh are known, as in
    programs for an `AbstractMesh`.
    """
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None) or ()
    several = len(devices) > 1 and context.abstract_mesh is not None
    return several and not exported_platforms(ctx)


def spec_of(array: Any, mesh: Any) -> tuple[Any, ...]:
    """Returns the mesh axes over which XLA shards an array; () if mesh axes cannot express it."""
    if array.sharding is None:
        return ()
    xla = array.sharding._to_xla_hlo_sharding(len(array.shape))
    try:
        return tuple(_sharding_impls.parse_flatten_op_sharding(xla, mesh)[0])
    except Exception:  # it is sharded over a part of an axis
        return ()


class Switchboard:
    """One host callback of a program, shared by all callbacks in the parts that XLA has traced.

    A program's callbacks are counted before XLA compiles it, and its parts are traced while XLA
    compiles. So all parts share one callback, whose first operand selects the function to call. To
    JAX's lowering of a part, a switchboard looks like the program's list of callbacks.
    """

    def __init__(self, index: int):
        self._index, self._callbacks = index, list[Any]()
        self._announced = False

    def __call__(self, number: Any, *operands: Any) -> Any:
        return self._callbacks[int(number)](number, *operands)

    def __len__(self) -> int:
        return self._index + 1

    def announce(self) -> int:
        """Returns the number of the next appended callback, which gets it as first operand."""
        self._announced = True
        return len(self._callbacks)

    def append(self, callback: Any) -> None:
        if not self._announced:
            raise UnsupportedError(
                "A function that XLA partitions over devices (triax.sharded) has a host callback, "
                "such as jax.debug.print or jax.pure_callback. Remove the callback, or call the "
                "function inside jax.shard_map."
            )
        self._announced = False
        self._callbacks.append(callback)


def add_switchboard(ctx: Any) -> Switchboard:
    """Adds a switchboard to the program that is lowered; on GPUs kernels need no callbacks."""
    board = Switchboard(len(ctx.module_context.host_callbacks))
    if "cpu" in lowering_platforms(ctx):
        ctx.module_context.add_host_callback(board)
    return board


def with_switchboard(ctx: Any, board: Switchboard) -> Any:
    """Returns the context of a lowering rule whose callbacks go to `board`."""
    return ctx.replace(module_context=ctx.module_context.replace(host_callbacks=board))


def switchboard(ctx: Any) -> Switchboard | None:
    """Returns the switchboard of a lowering rule in a part that XLA has traced, else None."""
    callbacks = ctx.module_context.host_callbacks
    return callbacks if isinstance(callbacks, Switchboard) else None


# --- distributed ----------------------------------------------------------------


class KeyValueClient:
    """The key-value service of a `jax.distributed` job.

    `process` is this process's number among the job's `num_processes`. JAX's public functions for
    both numbers wait for the backends of all processes.
    """

    def __init__(self, client: Any, process: int = 0, num_processes: int = 1):
        self._client = client
        self.process, self.num_processes = process, num_processes

    def find(self, key: str) -> str | None:
        """Returns the value of a key, or None; never waits."""
        try:
            value: str = self._client.key_value_try_get(key)
            return value
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)

    def count(self, folder: str) -> int:
        """Returns the number of keys below `folder`."""
        return len(self._client.key_value_dir_get(folder))

    def claim(self, key: str, value: str) -> str | None:
        """Sets a key unless it is set; returns its value, None if it was deleted meanwhile."""
        return value if self._set(key, value) else self.find(key)

    def set_first(self, key: str, value: str, timeout_ms: int) -> str:
        """Sets a key unless it is set; returns its value."""
        return (
            value if self._set(key, value) else self._client.blocking_key_value_get(key, timeout_ms)
        )

    def _set(self, key: str, value: str) -> bool:
        """Sets a key; False if it is set already."""
        try:
            self._client.key_value_set(key, value)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True


def key_value_client() -> KeyValueClient | None:
    """Returns the job's key-value service, or None in a job of one process."""
    state = _distributed.global_state
    if state.client is None:
        return None
    return KeyValueClient(state.client, state.process_id, state.num_processes)


# --- devices ----------------------------------------------------------------------


def default_platform() -> str | None:
    """Returns the platform that programs run on by default: "cpu", "gpu", …

    Returns None until a backend is started, because asking must not start one.
    """
    if not _xla_bridge.backends_are_initialized():
        return None
    device = jax.config.jax_default_device
    return str(getattr(device, "platform", device) or jax.default_backend())


def local_index(device: Any) -> int | None:
    """Returns the driver's ordinal of a GPU of this process; None for another process's GPU."""
    if device.process_index != jax.process_index():
        return None
    index = device.local_hardware_id
    return None if index is None else int(index)
