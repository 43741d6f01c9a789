"""Products by Marlin and by triton_kernels, two libraries for PyTorch that servers use.

`marlin` and `triton_kernels` take weights [experts, depth, columns] and return one or more ways to
multiply rows by them, by name. Arrays go to PyTorch through DLPack, without a copy. Where a library
is missing or fails, its error is raised.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import moe
from triax.benchmark import clock_of

Call = Callable[[], Any]
Way = Callable[[jax.Array, np.ndarray], Call]
"""Takes rows [rows, depth], sorted by expert, and sizes of groups int32 [experts]."""

# vLLM's names of what Marlin multiplies: integers are stored with 8 or 128 added.
MARLIN_TYPES = {
    "float4_e2m1fn": "float4_e2m1f",
    "int4": "uint4b8",
    "int8": "uint8b128",
    "float8_e4m3fn": "float8_e4m3fn",
}
_FLIPS = {"int4": 0x88, "int8": 0x80}  # the bits of a byte that this changes
_TILE = 128  # Marlin's fastest kernels need both sizes to be multiples of it
_TICKS_PER_US = 2000  # of a GPU's clock, at most


@jax.jit
def marlin_layout(w: moe.ScaledArray) -> tuple[jax.Array, jax.Array]:
    """Weights that are stored transposed in Marlin's layout, both sizes padded to 128s.

    Each of 32 threads reads its part of a tile, 16 deep and 64 columns wide, as four words of
    4-bit numbers. A word has eight numbers: those of two columns 8 apart, at two pairs of depths 8
    apart; its lower half has the first of each pair. A word of 8-bit numbers has one column.

    Returns:
      Words, int32 [experts, depth / 16, columns · 2], or columns · 4 in 8 bits; and scales
      [experts, groups, columns], bfloat16, or the codes of float8_e8m0fnu as uint8.
    """
    numbers = 2 if w.packed else 1  # of a byte
    codes = jax.lax.bitcast_convert_type(w.values, jnp.uint8)
    fill = (0, 0), (0, -codes.shape[1] % _TILE), (0, -codes.shape[2] % (_TILE // numbers))
    codes = jnp.pad(codes, fill) ^ _FLIPS.get(w.dtype.name, 0)
    experts, columns, depth = codes.shape[0], codes.shape[1], codes.shape[2] * numbers
    # Columns are split into 64s, 16s, 8s and ones; the depth into 16s, 8s, pairs and ones, where
    # a byte does not hold a pair.
    codes = codes.reshape(experts, columns // 64, 4, 2, 8, depth // 16, 2, 4, 2 // numbers)
    codes = codes.transpose(0, 5, 1, 4, 7, 2, 3, 8, 6)
    codes = codes.reshape(experts, depth // 16, -1, 4)
    if w.packed:
        codes, at = codes.astype(jnp.uint32), jnp.arange(0, 16, 4, dtype=jnp.uint32)
        codes = ((codes & 15) << at | (codes >> 4) << at + 16).sum(-1, dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(codes, jnp.int32)

    _, deep, wide = w.block
    is_code = w.scales.dtype == jnp.float8_e8m0fnu
    scales = jax.lax.bitcast_convert_type(w.scales, jnp.uint8) if is_code else w.scales
    scales = jnp.repeat(scales, wide, axis=1)[:, : w.shape[2]].swapaxes(1, 2)
    groups = depth // deep if deep else 1
    fill = (0, 0), (0, groups - scales.shape[1]), (0, columns - scales.shape[2])
    scales = jnp.pad(scales, fill)
    if groups > 1:  # in the order of the columns of weights in a thread; else of results
        scales = scales.reshape(experts, groups, -1, 8, 8).swapaxes(-2, -1)
    else:
        scales = scales.reshape(experts, groups, -1, 4, 4, 2).swapaxes(-3, -2)
    if is_code:  # four of a word are widened at once, in this order
        scales = scales.reshape(experts, groups, -1, 2, 2).swapaxes(-2, -1)
    elif w.dtype.name == "float8_e4m3fn":  # Marlin moves its bits, and keeps the exponent's bias
        scales = scales * 2.0**120
    scales = scales.reshape(experts, groups, columns)
    return words, scales if is_code else scales.astype(jnp.bfloat16)


def marlin(w: moe.ScaledArray) -> dict[str, Way]:
    """vLLM's Marlin, called as its `fused_marlin_moe` does."""
    import torch
    from vllm.scalar_type import scalar_types

    importlib.import_module("vllm._moe_C_stable_libtorch")  # registers the operators
    library = torch.ops._moe_C
    words, scales = map(torch.from_dlpack, jax.block_until_ready(marlin_layout(w)))
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    kind = getattr(scalar_types, MARLIN_TYPES[w.dtype.name]).id
    experts, depth, columns = len(words), 16 * words.shape[1], scales.shape[2]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    locks = torch.zeros(4 * num_sms, dtype=torch.int32, device="cuda")

    def way(x: jax.Array, sizes: np.ndarray) -> Call:
        rows = torch.nn.functional.pad(torch.from_dlpack(x), (0, depth - x.shape[1]))
        count = len(rows)
        block = next((b for b in (8, 16, 32, 48) if count / experts / b < 0.9), 64)
        most = min(count + experts * (block - 1), count * block)
        empty = lambda size: torch.empty(size, dtype=torch.int32, device="cuda")
        blocks = empty(most), empty(-(-most // block)), empty(1)
        expert_of = np.repeat(np.arange(experts, dtype=np.int32), sizes)
        chosen = torch.from_numpy(expert_of).cuda()[:, None]
        library.moe_align_block_size(chosen, experts, block, *blocks, None)
        out = torch.empty(count, columns, dtype=torch.bfloat16, device="cuda")
        weights = torch.ones(count, device="cuda")
        given = rows, out, words, None, scales, None, None, None, locks, *blocks, weights
        # Rows are one for each choice, sums in float32; the library chooses threads and blocks.
        how = block, 1, False, kind, count, columns, depth, False, True, False, -1, -1, -1
        return lambda: library.moe_wna16_marlin_gemm(*given, *how)

    return {"Marlin": way}


def triton_kernels(w: Any) -> dict[str, Way]:
    """OpenAI's `matmul_ogs`, of bfloat16 with columns first, or of MXFP4 as vLLM prepares it."""
    try:
        importlib.import_module("triton_kernels")
    except ImportError:
        sys.modules["triton_kernels"] = importlib.import_module("vllm.third_party.triton_kernels")
    import torch
    from triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.routing import RoutingData, compute_expt_data
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    def way(weights: Any, constraints: dict[str, int], scales: Any = None) -> Way:
        config = PrecisionConfig(weight_scale=scales, out_dtype=torch.bfloat16)

        def prepare(x: jax.Array, sizes: np.ndarray) -> Call:
            rows, counts = torch.from_dlpack(x), torch.from_numpy(sizes).cuda()
            blocks = compute_expt_data(counts, len(sizes), len(x))
            routing = RoutingData(None, counts, len(sizes), 1, blocks)

            def call() -> Any:
                opt_flags.reset_opt_flags_constraints()
                opt_flags.update_opt_flags_constraints(constraints)
                return matmul_ogs(rows, weights, None, routing, precision_config=config)

            return call

        return prepare

    if isinstance(w, jax.Array):
        return {"triton_kernels": way(torch.from_dlpack(w).mT.contiguous().mT, {})}
    values, scales = torch.from_dlpack(w.values), torch.from_dlpack(w.scales.view(jnp.uint8))
    kind, how = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    values = convert_layout(wrap_torch_tensor(values.mT, dtype=FP4), kind, **how)
    scales = wrap_torch_tensor(torch.nn.functional.pad(scales, (0, -scales.shape[2] % 4)).mT)
    found = {}
    for warps, split in itertools.product((8, 4), (1, None)):
        kind, how = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=warps)
        constraints = {"split_k": split} if split else {}
        name = f"triton_kernels, {warps} warps, {'whole' if split else 'free'} depth"
        found[name] = way(values, constraints, convert_layout(scales, kind, **how))
    torch.cuda.empty_cache()
    return found


def as_graph(call: Call) -> Call:
    """A CUDA graph of a call that has run before."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads too
        out = call()

    def replay(_kept: Call = call) -> Any:  # with the arrays that the graph reads
        graph.replay()
        return out

    return replay


def hold(us: float) -> None:
    """Keeps torch's stream busy, as `CudaClock.hold` keeps JAX's."""
    import torch

    torch.cuda._sleep(round(_TICKS_PER_US * us))


def clock(is_own: bool) -> Any:
    """What times calls of JAX, or of torch."""
    found = copy.copy(clock_of(jax.devices()[0]))
    if not is_own:
        found.hold = hold
    return found


def result(out: Any) -> Any:
    """Torch's tensors as arrays, once they are there."""
    import torch

    torch.cuda.synchronize()
    return jax.tree.map(jnp.from_dlpack, out)
