"""Reads the experts of a layer from a checkpoint's tensors: the arguments of `Experts`.

Either each expert has its own tensors, which are stacked here, or the checkpoint has them stacked
(gpt-oss). Names tell the format, and `quantization_config` what they leave open.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.activations.reference import Activation, Swiglu
from triax.moe.quantization import checkpoints
from triax.moe.quantization.scaled import ScaledArray

_COUNTS = "num_local_experts", "num_experts", "n_routed_experts"
_ACTIVATIONS: dict[Any, Activation] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
_FORMATS = "qweight", "weight_packed", "weight_scale_inv", "weight_scale", "weight"
_LINEARS = "gate_proj", "up_proj", "down_proj"


class Source:
    """The tensors of a layer's experts, and what `config.json` says."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str, config: Mapping[str, Any]):
        self.tensors, self.prefix = tensors, f"{prefix}.experts."
        self.config = config.get("text_config") or config
        quantization = config.get("quantization_config") or self.config.get("quantization_config")
        self.quantization: Mapping[str, Any] = quantization or {}

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def error(self, error: object, *names: str) -> CheckpointError:
        """Returns an error that names tensors, and the files that they are in."""
        path: Any = getattr(self.tensors, "path", lambda name: "the tensors")
        files = {str(path(self.prefix + name)) for name in names if self.has(name)}
        where = ", ".join(sorted(files)) or getattr(self.tensors, "folder", "the tensors")
        shown = ", ".join(f"`{self.prefix}{name}`" for name in names)
        return CheckpointError(f"Cannot read {shown} of {where}: {error}")

    def make(self, function: Callable[..., Any], *names: str) -> Any:
        """Calls a function of tensors; what it raises names them."""
        try:
            if missing := [name for name in names if not self.has(name)]:
                raise ArgumentValueError(f"`{self.prefix}{missing[0]}` is missing.")
            return function(*(np.asarray(self.tensors[self.prefix + name]) for name in names))
        except (ArgumentTypeError, ArgumentValueError) as error:
            raise self.error(error, *names) from error


def read(
    tensors: Mapping[str, Any],
    prefix: str,
    config: Mapping[str, Any] | None,
    experts: range | None,
    activation: Activation | None,
    progress: Callable[[range], Iterable[int]] | None,
) -> dict[str, Any]:
    """Returns the arguments of `Experts`; those here are `Experts.from_checkpoint`'s."""
    if not isinstance(experts, range | None):
        raise ArgumentTypeError(
            f"Argument `experts` must be a range; got {messages.shown(experts)}."
        )
    source = Source(tensors, prefix, getattr(tensors, "config", {}) if config is None else config)
    if source.has("gate_up_proj") or source.has("gate_up_proj_blocks"):
        found = _stacked(source, experts)
    else:
        found = _one_by_one(source, experts, progress or (lambda chosen: chosen))
    return {**found, "activation": activation or _activation(source)}


def _activation(source: Source) -> Activation:
    name, limit = source.config.get("hidden_act") or "silu", source.config.get("swiglu_limit")
    if source.has("gate_up_proj_bias"):  # gpt-oss
        return Swiglu(alpha=1.702, limit=float(limit or 7.0), up_offset=1.0)
    if limit or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"The model's configuration has the activation {name!r} and `swiglu_limit` {limit}, "
            "whose formula is not known. Pass `activation`, such as moe.Swiglu(limit=10.0)."
        )
    return _ACTIVATIONS[name]


def _chosen(experts: range | None, count: int) -> range:
    found = range(count) if experts is None else experts
    if not found or found.step < 1 or found[0] < 0 or found[-1] >= count:
        raise ArgumentValueError(
            f"Argument `experts` must be a part of range({count}), the layer's; got {found}."
        )
    return found


def _floats(weight: np.ndarray) -> np.ndarray:
    wide = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize >= 2
    if not wide or weight.ndim != 3:
        raise ArgumentTypeError(
            "weights without scales must be matrices of floats of 16 bits or more; got "
            f"{messages.short(weight)}."
        )
    return weight


def _stacked(source: Source, experts: range | None) -> dict[str, Any]:
    """Reads tensors of all experts, of which a part is a view."""
    blocks = "_blocks" if source.has("gate_up_proj_blocks") else ""
    count = source.make(len, f"gate_up_proj{blocks}")
    chosen = _chosen(experts, count)

    def part(array: np.ndarray) -> np.ndarray:
        if len(array) != count:
            raise ArgumentValueError(f"there must be {count} experts; got {len(array)}.")
        return array[chosen.start : chosen.stop : chosen.step]

    def matrix(name: str) -> Any:
        if not blocks:
            return source.make(lambda weight: part(_floats(weight)), name)
        make = lambda *both: checkpoints.from_mxfp4(*map(part, both))
        return source.make(make, f"{name}_blocks", f"{name}_scales")

    found = {"w_gate_up": matrix("gate_up_proj"), "w_down": matrix("down_proj")}
    if biased := source.has("gate_up_proj_bias"):
        found |= {f"b_{of}": source.make(part, f"{of}_proj_bias") for of in ("gate_up", "down")}
    # As gate and up are twice as wide, [experts, out, in] and [experts, in, out] differ.
    transposed = found["w_gate_up"].shape[-1] == found["w_down"].shape[-2]
    return {**found, "interleaved": biased, "transposed": transposed}


def _one_by_one(source: Source, experts: range | None, progress: Any) -> dict[str, Any]:
    """Copies the tensors of each expert into stacks of all, gate and up into one."""
    named = re.compile(rf"{re.escape(source.prefix)}(\d+)\.(w1\.)?")
    found = {match.groups() for match in map(named.match, source.tensors) if match}
    if not found:
        layers = {
            name.partition("experts.")[0][:-1] for name in source.tensors if ".experts." in name
        }
        known = messages.short(sorted(layers))
        raise source.error(f"there are none. Argument `prefix` must be one of {known}.", "…")
    counts = [source.config[key] for key in _COUNTS if source.config.get(key)]
    chosen = _chosen(experts, (counts or [max(int(expert) for expert, _ in found) + 1])[0])
    linears = ("w1", "w3", "w2") if any(w1 for _, w1 in found) else _LINEARS
    stacks: list[Any] = []
    for at, expert in enumerate(progress(chosen)):
        names = [f"{expert}.{linear}" for linear in linears]
        gate, up, down = (_linear(source, name) for name in names)
        pieces, like = ((gate, up), (down,)), [_like(of) for of in (gate, up, down)]
        if not stacks:
            first = [like[0], like[0], like[2]]
        if like != first:
            differ = "shapes, dtypes or formats differ between gate and up, or from other experts"
            raise source.error(differ, *(f"{name}.weight" for name in names))
        stacks = stacks or [_room(len(chosen), *of) for of in pieces]
        for room, of in zip(stacks, pieces, strict=True):
            part = jax.tree.map(operator.itemgetter(slice(at, at + 1)), room)
            jax.tree.map(_join, part, *of)
    transposed = not all(isinstance(of, ScaledArray) for of in stacks)
    if transposed:  # floats are [experts, out, in], and scaled arrays [experts, in, out]
        stacks = [of.mT if isinstance(of, ScaledArray) else of for of in stacks]
    return {"w_gate_up": stacks[0], "w_down": stacks[1], "transposed": transposed}


def _like(weights: Any) -> Any:
    leaves, structure = jax.tree.flatten(weights)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _room(count: int, *weights: Any) -> Any:
    """Returns arrays for experts with such weights, [1, out, …], next to each other along out."""

    def empty(*of: np.ndarray) -> np.ndarray:
        return np.empty((count, len(of) * of[0].shape[1], *of[0].shape[2:]), of[0].dtype)

    return jax.tree.map(empty, *weights)


def _join(to: np.ndarray, *parts: np.ndarray) -> None:
    np.concatenate(parts, axis=1, out=to)


def _linear(source: Source, name: str) -> Any:
    """Returns a linear layer's weights: floats [1, out, in], or a scaled array [1, in, out].

    Parameters of the functions by position have the names of tensors.
    """
    kind = next((of for of in _FORMATS if source.has(f"{name}.{of}")), "weight")
    function, how = _format(source, kind)
    suffix = "_inv" if kind == "weight_scale_inv" else ""
    takes = {}
    for parameter in inspect.signature(function).parameters.values():
        tensor = f"{name}.{parameter.name}{suffix if parameter.name == 'weight_scale' else ''}"
        needed = parameter.default is parameter.empty
        if parameter.kind != parameter.KEYWORD_ONLY and (needed or source.has(tensor)):
            takes[parameter.name] = tensor
    for of in {"bias", "g_idx", "weight_zero_point"} - set(takes):
        if source.has(f"{name}.{of}"):
            raise source.error("experts of this format have no such tensor", f"{name}.{of}")

    def make(*arrays: np.ndarray) -> Any:
        given = zip(takes, (array[None] for array in arrays), strict=True)
        made: Any = function(**dict(given), **how)
        out = made.shape[2]
        if not isinstance(made, ScaledArray) or (made.block[2] and out % made.block[2] == 0):
            return made
        # Blocks of the gate must not reach into `up`, which lies next to it.
        scales: Any = np.repeat(made.scales, made.block[2] or out, 1)[:, :out]
        return dataclasses.replace(made, scales=scales, block=(*made.block[:2], 1))

    return source.make(make, *takes.values())


def _format(source: Source, kind: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function for a format, and what `quantization_config` says about it."""
    config = source.quantization
    if groups := config.get("config_groups"):
        config = {**config, **(next(iter(groups.values())).get("weights") or {})}
    size = {"group_size": config.get("group_size")}
    match kind:
        case "weight":
            return _floats, {}
        case "weight_packed":
            return checkpoints.from_compressed_tensors, size
        case "weight_scale" | "weight_scale_inv":
            block = config.get("weight_block_size") or config.get("block_structure")
            return checkpoints.from_8_bits, {"block": block or (128, 128)}
    keys = "quant_method", "checkpoint_format", "version"
    match method := [str(config.get(key)).lower() for key in keys]:
        case ["gptq", "gptq" | "gptq_v2" | "none" as stored, _]:
            return checkpoints.from_gptq, {**size, "v2": stored == "gptq_v2"}
        case ["awq", _, "gemm" | "none"]:
            return checkpoints.from_awq, size
    raise CheckpointError(
        f"`{source.prefix}…` is GPTQ or AWQ, and `quantization_config` must have the `quant_method`"
        ' "gptq", with `checkpoint_format` "gptq" or "gptq_v2", or "awq", with `version` "gemm"; '
        f"got {method}."
    )
