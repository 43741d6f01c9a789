"""The parts of XLA's custom call for compiled launches.

In: a call, its launches and compiled kernels. Out: the target, the bytes jaxlib parses,
and the order in which buffers must be passed. jaxlib walks a kernel's parameters and
takes one buffer for each array parameter: first the custom call's operands in order,
then its results. Triton's global scratch is one more result, because jaxlib's own allocation at
launch fails while a CUDA graph is captured; so is that of Triton's sanitizers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import zlib
from collections.abc import Sequence
from typing import Any

from triax.binding import dtypes
from triax.binding.launch import (
    Assumption,
    BoundCall,
    CompiledKernel,
    Descriptor,
    Launch,
    Operand,
    Result,
    Scalar,
    TensorMap,
)
from triax.compat import jax_private, triton_private, versions
from triax.errors import CompilationError, ReadOnlyOperand, UnsupportedError, VersionError

logger = logging.getLogger(__name__)

# Far more than any GPU has, so the grid is wrong; XLA would only report running out of memory.
_MAX_SCRATCH_BYTES = 1 << 40


@dataclasses.dataclass(frozen=True)
class BufferOrder:
    """The buffers of the custom call, in jaxlib's order.

    `operands` names each operand of the custom call: an `Operand`, or a `Result` for
    which an uninitialised buffer is passed in. `results` are the flattened outputs in
    the custom call's order, and None for each scratch of the kernel. `aliases` pairs positions
    in `operands` and `results`.
    """

    operands: tuple[Operand | Result, ...]
    results: tuple[int | None, ...]
    aliases: tuple[tuple[int, int], ...]


def _buffers(launch: Launch) -> list[Operand | Result | Scalar]:
    """Of each leaf the array, also behind a descriptor, or the number."""
    leaves = (leaf for _, leaf in launch.named_leaves)
    return [leaf.buffer if isinstance(leaf, Descriptor) else leaf for leaf in leaves]


def order_buffers(launch: Launch, *, scratches: int = 0) -> BufferOrder:
    """Finds the buffer order for which jaxlib's walk matches the kernel's parameter order.

    Outputs at the end of the parameter list are plain results of the custom call. An output before
    an operand is passed as an uninitialised operand that a result is aliased to. Scratch is last.
    """
    pointers = [buffer for buffer in _buffers(launch) if not isinstance(buffer, Scalar)]
    first_tail = len(pointers)
    while first_tail and isinstance(pointers[first_tail - 1], Result):
        first_tail -= 1
    operands = tuple(pointers[:first_tail])
    tail = [leaf.index for leaf in pointers[first_tail:]]
    # Buffers after the last parameter are ignored, so the rest may be in any order.
    surplus = (i for i in range(len(launch.results)) if i not in tail)
    results = (*tail, *[None] * scratches, *surplus)
    pairs = [
        (operands.index(Operand(alias.operand)), results.index(alias.result))
        for alias in launch.aliases
    ]
    pairs += [
        (position, results.index(leaf.index))
        for position, leaf in enumerate(operands)
        if isinstance(leaf, Result)
    ]
    return BufferOrder(operands, results, tuple(sorted(pairs)))


def choose_target(call: BoundCall, launches: Sequence[Launch]) -> versions.CallTarget:
    """Chooses the custom-call target for one fixed launch, or for several to be timed at run time.

    Raises:
      UnsupportedError: there are several launches, but no target that can tune them safely.
    """
    several = len(launches) > 1
    target = versions.choose_target(versions.gated_version(), autotuned_at_run_time=several)
    if several and target.name != versions.LEGACY_TARGET:
        raise UnsupportedError(  # no other target tunes after its inputs exist
            f"Kernel {call.display_name!r}: tuning mode 'runtime' needs the custom-call target "
            f"{versions.LEGACY_TARGET}. Use another tuning mode."
        )
    return target


def payload(
    call: BoundCall,
    launches: Sequence[Launch],
    kernels: Sequence[CompiledKernel],
    buffers: BufferOrder,
) -> bytes:
    """The bytes that jaxlib parses when the program is loaded.

    Raises:
      VersionError: jaxlib lacks a feature that the kernel needs.
      UnsupportedError: jaxlib cannot launch the kernel.
    """
    calls = list(map(_kernel_call, launches, kernels))
    proto = calls[0]
    if len(calls) > 1:
        proto = jax_private.gpu_triton().TritonAutotunedKernelCall(
            call.display_name,
            [(c, str(launch.candidate.config)) for c, launch in zip(calls, launches, strict=True)],
            _saved_buffers(launches[0], buffers),
        )
    return zlib.compress(proto.to_proto(call.display_name, call.serialized_metadata))


_ADVICE = {
    "writes": "If an argument disables the write, declare that argument as tl.constexpr.",
    "may write": "A pointer that is selected, or swapped in a loop, counts as all pointers it may "
    "be: give each pointer a store of its own.",
}


def check_writes(launch: Launch, kernel: CompiledKernel) -> None:
    """Raises `ReadOnlyOperand` for a kernel that writes to an operand without an aliased output."""
    names = [name for name, _ in launch.named_leaves]
    aliased = {alias.operand for alias in launch.aliases}
    buffers = _buffers(launch)
    read_only = {
        index
        for index, leaf in enumerate(buffers)
        if isinstance(leaf, Operand) and leaf.index not in aliased
    }
    tuner = launch.kernel.autotuner
    reset = () if tuner is None else tuner.reset_to_zero
    writes = [*kernel.writes, *((names.index(name),) for name in reset if name in names)]
    certain = [reached for reached in writes if read_only.issuperset(reached)]
    for reached in certain or writes:
        if wrong := [index for index in reached if index in read_only]:
            written = " or ".join(f"`{names[index]}`" for index in wrong)
            does = "writes" if len(wrong) == len(reached) else "may write"
            raise ReadOnlyOperand(
                f"Kernel {launch.name!r} {does} to {written}, an operand that no output is aliased "
                "to. XLA may share its memory with other values: alias an output to the operand, "
                f"or write to an output of its own. {_ADVICE[does]} (Parameters that are not "
                "supplied are outputs: pass the operands after an output by name.)"
            )


def scratch_bytes(launch: Launch, kernel: CompiledKernel) -> tuple[int, int]:
    """The scratch memory of all blocks of a launch: Triton's global scratch, a sanitizer's.

    Raises:
      CompilationError: it is more than any GPU has.
    """
    blocks = math.prod(launch.candidate.grid) * kernel.num_ctas
    of_a_block = kernel.global_scratch_bytes, kernel.sanitizer_scratch_bytes
    needed = blocks * sum(of_a_block)
    if needed > _MAX_SCRATCH_BYTES:
        raise CompilationError(
            f"Kernel {launch.name!r} needs {sum(of_a_block)} bytes of scratch memory "
            f"for each of {blocks} blocks, {needed} bytes in all. Give a smaller `grid`, with "
            "programs that loop over tiles, or make the descriptors on the host "
            "(triax.TensorDescriptor)."
        )
    return blocks * of_a_block[0], blocks * of_a_block[1]


def _saved_buffers(launch: Launch, buffers: BufferOrder) -> list[tuple[int, int, int]]:
    """The aliased buffers jaxlib saves before timing, as (input, n_inputs + output, bytes).

    Uninitialised buffers need no saving.
    """
    # Workaround: jaxlib all: it compares `buffers[input]` with `buffers[output]`, where the buffers
    # are inputs followed by outputs; with the plain output index it would restore nothing.
    return [
        (operand, len(buffers.operands) + result, launch.operands[leaf.index].nbytes)
        for operand, result in buffers.aliases
        if isinstance(leaf := buffers.operands[operand], Operand)
    ]


def cost_estimate(call: BoundCall, target: versions.CallTarget, version: str) -> str | None:
    """The call's cost estimate as JSON; None if there is none, or jaxlib cannot take it."""
    if not call.cost_estimate:
        return None
    if target.name == versions.NEW_TARGET and versions.COST_ESTIMATE.passes(version):
        return json.dumps({name: static.value for name, static in call.cost_estimate})
    logger.info(
        "kernel %s: the cost estimate is not passed to XLA, which needs jaxlib %s; %s is installed",
        call.display_name,
        versions.COST_ESTIMATE.stable,
        version,
    )
    return None


def _kernel_call(launch: Launch, kernel: CompiledKernel) -> Any:
    module = jax_private.gpu_triton()
    zeroed = launch.zeroed_bytes()
    leaves = launch.named_leaves
    parameters: list[Any] = []
    for position, assumed in kernel.parameters:
        name, leaf = leaves[position]
        if isinstance(leaf, Descriptor):
            if leaf.buffer in zeroed:
                raise UnsupportedError(
                    f"Kernel {launch.name!r} writes a zeroed output through a host TMA descriptor, "
                    "but jaxlib only zeroes arrays passed as pointers. Make the descriptor of an "
                    "array of zeros instead, and alias the output to it (`input_output_aliases`)."
                )
            parameters += _tensor_map_parameters(module, launch, leaf, assumed)
        elif isinstance(leaf, Scalar):
            assert isinstance(assumed, str)
            scalar = dtypes.launch_scalar(name, leaf.static.value, assumed)
            parameters.append(module.create_scalar_parameter(*scalar))
        else:
            alignment = 16 if assumed else 0
            parameters.append(module.create_array_parameter(zeroed.get(leaf, 0), alignment))
    _, sanitizer_bytes = scratch_bytes(launch, kernel)
    if kernel.global_scratch_bytes:
        parameters.append(module.create_array_parameter(0, kernel.global_scratch_align))
    elif sanitizer_bytes:
        parameters.append(module.create_scalar_parameter(0, "i64"))  # a null pointer in its place
    if sanitizer_bytes:  # Triton's own launcher zeroes it, too
        alignment = kernel.sanitizer_scratch_align
        parameters.append(module.create_array_parameter(sanitizer_bytes, alignment))
    compiled = jax_private.make_triton_kernel(kernel)
    return module.TritonKernelCall(compiled, *launch.candidate.grid, parameters)


def _tensor_map_parameters(
    module: Any, launch: Launch, leaf: Descriptor, tensor_map: Assumption
) -> list[Any]:
    """A descriptor, and its shape and strides, which Triton passes as separate parameters."""
    if not jax_private.supports_tensor_maps():
        raise VersionError(
            f"Kernel {launch.name!r} takes a host TMA descriptor, which this jaxlib cannot encode "
            f"({versions.gated_version()}). Upgrade JAX, or make the descriptor in the kernel with "
            "tl.make_tensor_descriptor."
        )
    if not isinstance(tensor_map, TensorMap):
        raise UnsupportedError(
            f"Kernel {launch.name!r} takes a host TMA descriptor, but its target has no TMA: that "
            "needs compute capability 9.0 or later."
        )
    descriptor = module.create_tma_descriptor_parameter(
        elem_type=triton_private.host_element_type(
            tensor_map.element_type, tf32=leaf.round_f32_to_tf32
        ),
        swizzle=tensor_map.swizzle,
        shape=leaf.shape,
        strides=leaf.strides,
        block_shape=tensor_map.block_shape,
        oob_fill=1 if leaf.padding == "nan" else 0,
    )
    sizes = [module.create_scalar_parameter(n, "i32") for n in leaf.shape]
    strides = [module.create_scalar_parameter(n, "i64") for n in leaf.strides]
    return [descriptor, *sizes, *strides]
