"""Turns the output of Triton's compiler into a `CompiledKernel`, or says why it cannot run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from triax import architectures
from triax.binding.launch import (
    Assumption,
    CompiledKernel,
    Descriptor,
    Launch,
    Scalar,
    TensorMap,
    leaves_with_paths,
)
from triax.compat import triton_private, wgmma
from triax.compiling import writes
from triax.errors import CompilationError

_MAX_WARPS = 32  # 1024 threads per block on every architecture
_MAX_CTAS = 8  # a larger cluster needs an attribute of the kernel that jaxlib does not set


def check_fits(launch: Launch, compiled: triton_private.Compiled, compute_capability: int) -> None:
    """Raises `CompilationError` for a kernel that no GPU of this kind can launch."""
    known = architectures.BY_CAPABILITY.get(compute_capability)  # otherwise the driver checks
    if known is not None and compiled.shared_bytes > known.shared_bytes:
        raise CompilationError(
            f"it needs {compiled.shared_bytes} bytes of shared memory per block, and compute "
            f"capability {compute_capability} has {known.shared_bytes}; use smaller blocks or "
            "fewer stages"
        )
    if compiled.num_warps > _MAX_WARPS:
        raise CompilationError(
            f"it needs {compiled.num_warps} warps, and a block has at most {_MAX_WARPS}"
        )
    clusters = compute_capability >= 90
    if compiled.num_ctas > (_MAX_CTAS if clusters else 1):
        limit_text = f"jaxlib launches at most {_MAX_CTAS}" if clusters else "clusters need 90"
        raise CompilationError(
            f"it needs clusters of {compiled.num_ctas} blocks (num_ctas) on compute capability "
            f"{compute_capability}; {limit_text}"
        )
    if compiled.profile_scratch_bytes and launch.sanitizer is None:
        raise CompilationError(
            "it was compiled for Triton's profiler, which nobody would read here; turn the "
            "instrumentation off"
        )


def finish(
    launch: Launch,
    compute_capability: int,
    source: Any,
    compiled: triton_private.Compiled,
) -> CompiledKernel:
    """Builds the `CompiledKernel` of Triton's `ASTSource` and output, with a unique entry name."""
    name, ptx = unique_entry(wgmma.drain_at_loops(compiled.ptx), compiled.entry)
    leaves = enumerate(launch.named_leaves)
    pointers = [i for i, (_, leaf) in leaves if not isinstance(leaf, Scalar)]
    with triton_private.front_end_lock:
        module = triton_private.read_ir(compiled.ir_path, compute_capability)
        count, written = writes.origins(module)
    if count != len(pointers):
        raise CompilationError(
            f"cannot determine which arguments the kernel writes: {len(pointers)} arrays, {count} "
            "IR pointers"
        )
    return CompiledKernel(
        name=name,
        ptx=ptx,
        compute_capability=compute_capability,
        num_warps=compiled.num_warps,
        num_ctas=compiled.num_ctas,
        shared_bytes=compiled.shared_bytes,
        global_scratch_bytes=compiled.global_scratch_bytes,
        global_scratch_align=compiled.global_scratch_align,
        sanitizer_scratch_bytes=compiled.profile_scratch_bytes,
        sanitizer_scratch_align=compiled.profile_scratch_align,
        parameters=tuple(_parameters(launch, source, compiled)),
        writes=tuple(tuple(pointers[i] for i in reached) for reached in written),
    )


def _parameters(
    launch: Launch,
    source: Any,
    compiled: triton_private.Compiled,
) -> Iterator[tuple[int, Assumption]]:
    positions = {p.name: i for i, p in enumerate(launch.kernel.parameters)}
    tensor_maps = map(_tensor_map, compiled.tensor_descriptors)
    leaves = (
        (name, *pair) for name, argument in launch.arguments for pair in leaves_with_paths(argument)
    )
    for index, (name, path, leaf) in enumerate(leaves):
        type_name = triton_private.type_name(source, name, path)
        if type_name == "constexpr":
            continue
        if isinstance(leaf, Scalar):
            yield index, type_name
        elif isinstance(leaf, Descriptor):
            yield index, next(tensor_maps, None)
        else:
            yield index, triton_private.is_divisible_by_16(source, (positions[name], *path))


def _tensor_map(meta: dict[str, Any]) -> TensorMap:
    for unsupported in ("is_im2col", "fp4_padded"):
        if meta.get(unsupported):
            raise CompilationError(
                f"it uses a TMA descriptor of kind {unsupported}, which XLA's Triton call cannot "
                "encode"
            )
    return TensorMap(tuple(meta["block_size"]), int(meta["elem_type"]), int(meta["swizzle"]))


def unique_entry(ptx: str, entry: str) -> tuple[str, str]:
    """Renames the PTX entry to its name plus a hash of the PTX.

    The hash is of the code itself, so two kernels share a name only if they are the same, and the
    name does not change with a comment, a line number or a folder. Profiles can tell kernels apart
    by it.

    Returns:
      The new name and the PTX with it.
    """
    # Workaround: jaxlib <0.9.1: a kernel could be handed out in place of another of the same name
    # (`versions.OWNED_MODULE_KEYS`).
    # A kernel may be called `add` or `ld`, like an instruction, so the name is only replaced where
    # it is the entry's. The pattern begins with the name and then looks at what precedes it: a
    # fixed text is found faster, and PTX is long.
    escaped = re.escape(entry)
    if re.search(rf"\.entry {escaped}\(", ptx) is None:
        raise CompilationError(f"Triton's PTX has no entry named {entry!r}")
    entry_token = re.compile(
        rf"{escaped}(?:(?<=\.entry {escaped})(?=\()"
        rf"|(?<=\.globl\t{escaped})\b"
        rf"|(?<![\w$.%]{escaped})(?=_param_\d))"
    )
    digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
    name = f"{entry}_{digest}"
    # The comment "// -- Begin function x" may keep the old name.
    return name, entry_token.sub(name, ptx)
