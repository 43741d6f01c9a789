"""MoE layers of three libraries for PyTorch, forward and backward, which users would pick instead.

`LAYERS` has by name what makes a library's `TorchLayer` from the number of a token's experts, and
`call_of` what to time. Arrays go to PyTorch through DLPack, without a copy. Where a library is
missing, its error is raised. Nothing waits for the host, so that a call can become a CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks.harness.rivals import Call


class TorchLayer(NamedTuple):
    """A layer of a library.

    Attributes:
      run: makes tokens from tokens, the router's logits and the weights, w_gate_up and w_down.
      stored: makes the weights as the library stores them from ours, and back.
    """

    run: Callable[..., Any]
    stored: Callable[..., Any] = lambda gate_up, down, back=False: (gate_up, down)


def call_of(layer: TorchLayer, operands: list[jax.Array]) -> Call:
    """The layer with autograd: tokens, and the gradients of x, logits and both weights.

    Args:
      layer: the layer.
      operands: x, logits, w_gate_up, w_down, and the gradient of the tokens.
    """
    import torch

    x, logits, gate_up, down, gradient = operands
    given = jax.block_until_ready([x, logits, *layer.stored(gate_up, down), gradient])
    *tensors, upstream = map(torch.from_dlpack, given)

    def call(_kept: Any = given) -> Any:  # with the arrays that the tensors are views of
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = layer.run(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    return call


def _softmax_of_chosen(torch: Any, logits: Any, top_k: int) -> tuple[Any, Any]:
    weights, chosen = torch.topk(torch.softmax(logits, dim=1), top_k)
    return weights / weights.sum(dim=1, keepdim=True), chosen


def _swiglu(torch: Any) -> Any:
    def swiglu(gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    return torch.compile(swiglu, dynamic=False)  # loads of sizes that are known are wider


def _sort(torch: Any, chosen: Any, experts: int) -> tuple[Any, Any, Any]:
    """The chosen experts in order, the pairs in their order, and where each expert's rows end."""
    expert_of, order = torch.sort(chosen.flatten())
    each = torch.arange(experts, device=chosen.device)
    return expert_of, order, torch.searchsorted(expert_of, each, right=True, out_int32=True)


def grouped_mm(top_k: int) -> TorchLayer:
    """`torch.nn.functional.grouped_mm` as in transformers' MoE blocks, with compiled moves.

    A move's gradient is a move by the inverse order: autograd of PyTorch's would add up rows with
    atomics.
    """
    import torch

    grouped, swiglu = torch.nn.functional.grouped_mm, _swiglu(torch)

    @torch.compile(dynamic=False)
    def take_tokens(x: Any, order: Any) -> Any:
        return x[order // top_k]

    @torch.compile(dynamic=False)
    def sum_rows(rows: Any, row_of: Any) -> Any:
        return rows[row_of].sum(dim=1, dtype=torch.float32).to(rows.dtype)

    @torch.compile(dynamic=False)
    def weigh_rows(rows: Any, row_of: Any, weights: Any) -> Any:
        return (weights[..., None] * rows[row_of]).sum(dim=1).to(rows.dtype)

    @torch.compile(dynamic=False)
    def weigh_rows_grad(grad: Any, rows: Any, row_of: Any, weights: Any, order: Any) -> Any:
        d_rows = weights.flatten()[order, None] * grad[order // top_k]
        d_weights = (rows[row_of] * grad[:, None]).sum(dim=2, dtype=torch.float32)
        return d_rows.to(rows.dtype), d_weights

    class Permute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, order: Any, row_of: Any) -> Any:
            ctx.save_for_backward(row_of)
            return take_tokens(x, order)

        @staticmethod
        def backward(ctx: Any, d_rows: Any) -> Any:
            return sum_rows(d_rows, *ctx.saved_tensors), None, None

    class Unpermute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, row_of: Any, weights: Any, order: Any) -> Any:
            ctx.save_for_backward(rows, row_of, weights, order)
            return weigh_rows(rows, row_of, weights)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            d_rows, d_weights = weigh_rows_grad(grad, *ctx.saved_tensors)
            return d_rows, None, d_weights, None

    def run(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        weights, chosen = _softmax_of_chosen(torch, logits, top_k)
        _, order, ends = _sort(torch, chosen, len(gate_up))
        row_of = torch.argsort(order).view(chosen.shape)
        inner = swiglu(grouped(Permute.apply(x, order, row_of), gate_up, offs=ends))
        return Unpermute.apply(grouped(inner, down, offs=ends), row_of, weights, order)

    return TorchLayer(run)


def scattermoe(top_k: int) -> TorchLayer:
    """ScatterMoE's `GLUMLP`, with the gate's columns first, and sizes counted without the host."""
    import torch

    multiply = importlib.import_module("scattermoe.parallel_experts").parallel_linear
    swiglu = _swiglu(torch)

    def run(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        weights, chosen = _softmax_of_chosen(torch, logits, top_k)
        by_expert = _sort(torch, chosen, len(gate_up))
        rows = swiglu(multiply(x, gate_up, top_k, *by_expert, grouped_out=True))
        return multiply(rows, down, 1, *by_expert, gates=weights.to(x.dtype), grouped_in=True)

    return TorchLayer(run)


def sonicmoe(top_k: int) -> TorchLayer:
    """SonicMoE's `moe_TC_softmax_topk_layer` from the logits on, tuned, which is its default.

    It stores the depth innermost, and the columns of gate and up in turn.
    """
    import torch

    library = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU

    def stored(gate_up: jax.Array, down: jax.Array, back: bool = False) -> tuple[Any, Any]:
        experts, rows, columns = gate_up.shape
        halves = (rows // 2, 2, columns) if back else (rows, 2, columns // 2)
        turned = gate_up.reshape(experts, *halves).transpose(0, 3, 2, 1)
        return turned.reshape(experts, columns, rows), down.swapaxes(1, 2)

    def run(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        empty = lambda size: torch.empty(size, dtype=torch.int32, device="cuda")
        (tokens, experts), rows = logits.shape, len(x) * top_k
        route = library.TC_Softmax_Topk_Router_Function.apply
        weights, chosen = route(logits, experts, top_k, True, False)
        counts, ends = empty(experts), empty(experts + 1)
        token_of, pair_of, row_of = empty(rows), empty(rows), empty(rows)
        moves = token_of, pair_of, row_of
        library.TC_topk_router_metadata_triton(chosen, experts, counts, ends, *moves)
        first, second = gate_up.permute(1, 2, 0), down.permute(1, 2, 0)
        how = *moves, None, False, swiglu
        a, h = library._UpProjection.apply(x, first, None, ends, rows, top_k, *how, False)
        given = a, h, second, None, weights, ends, tokens, top_k
        return library._DownProjection.apply(*given, *how)

    return TorchLayer(run, stored)


LAYERS: dict[str, Callable[[int], TorchLayer]] = {
    "SonicMoE": sonicmoe,
    "torch grouped_mm": grouped_mm,
    "ScatterMoE": scattermoe,
}
