"""Reads the experts of a layer from a checkpoint's tensors: the arguments of `Experts`.

Either each expert has its own tensors, which are stacked here, or the checkpoint has them stacked
(gpt-oss). Names tell the format, and `quantization_config` what they leave open.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.activations import api as activations
from triax.moe.activations.reference import Activation, Swiglu
from triax.moe.quantization import checkpoints
from triax.moe.quantization.scaled import ScaledArray

_COUNTS = "num_local_experts", "num_experts", "n_routed_experts"
_ACTIVATIONS: dict[Any, Activation] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
_FORMATS = "qweight", "weight_packed", "weight_scale_inv", "weight_scale", "weight"


class Source:
    """The tensors of a layer's experts, and what `config.json` says."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str, config: Mapping[str, Any]):
        self.tensors, self.prefix = tensors, f"{prefix}.experts."
        self.config = config.get("text_config") or config
        found = config.get("quantization_config") or self.config.get("quantization_config") or {}
        group: Any = next(iter((found.get("config_groups") or {}).values()), {})
        self.quantization: Mapping[str, Any] = {**found, **(group.get("weights") or {})}

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def error(self, what: object, *names: str) -> CheckpointError:
        """Returns an error that names tensors and their files."""
        there = [self.prefix + name for name in names if self.has(name)]
        path: Any = getattr(self.tensors, "path", lambda name: "the tensors")
        files = sorted({str(path(name)) for name in there})
        where = ", ".join(files) or getattr(self.tensors, "folder", "the tensors")
        read = (
            "Read " + ", ".join(f"`{name}`" for name in there) + " from" if there else "Read from"
        )
        return CheckpointError(f"{what} {read} {where}.")

    def make(self, function: Callable[..., Any], *names: str) -> Any:
        """Calls a function of tensors; what it raises names them."""
        if missing := [name for name in names if not self.has(name)]:
            raise self.error(f"`{self.prefix}{missing[0]}` is missing.", *names)
        try:
            return function(*(np.asarray(self.tensors[self.prefix + name]) for name in names))
        except (ArgumentTypeError, ArgumentValueError) as error:
            raise self.error(error, *names) from error


def read(
    tensors: Any, prefix: str, config: Any, experts: Any, activation: Any, progress: Any
) -> dict[str, Any]:
    """Returns the arguments of `Experts`; those here are `Experts.from_checkpoint`'s."""
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            "Argument `tensors` must be arrays by name, such as moe.Checkpoint(folder); got "
            f"{messages.shown(tensors)}."
        )
    if activation is not None and not (spec := activations.resolve(activation)[0]).gated:
        raise ArgumentValueError(
            "Argument `activation` must have a gate, as the experts of checkpoints do; got "
            f"{activation!r}.{activations.remedy_by_gate(spec)}"
        )
    source = Source(tensors, prefix, getattr(tensors, "config", {}) if config is None else config)
    if not any(name.startswith(source.prefix) for name in tensors):
        layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
        one_of = (
            f"Argument `prefix` must be one of {messages.short(sorted(layers))}; got {prefix!r}."
        )
        raise source.error(one_of if layers else "There are no experts: no name has `.experts.`.")
    packed = any(source.has(f"gate_up_proj_{of}") for of in ("blocks", "scales"))
    gpt_oss = packed or source.has("gate_up_proj_bias")
    gpt_oss = gpt_oss or source.config.get("model_type") == "gpt_oss"
    if gpt_oss or source.has("gate_up_proj"):
        found = _stacked(source, experts, gpt_oss, packed)
    else:
        found = _one_by_one(source, experts, progress)
    return {**found, "activation": activation or _activation(source, gpt_oss)}


def _activation(source: Source, gpt_oss: bool) -> Activation:
    name, limit = source.config.get("hidden_act") or "silu", source.config.get("swiglu_limit")
    if gpt_oss:
        return Swiglu(alpha=1.702, limit=float(limit or 7.0), up_offset=1.0)
    if limit or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"The model's configuration has the activation {name!r} and `swiglu_limit` {limit}, "
            "whose formula is not known. Pass `activation`, such as moe.Swiglu(limit=10.0)."
        )
    return _ACTIVATIONS[name]


def _chosen(experts: range | None, count: int) -> range:
    found = range(count) if experts is None else experts
    if not isinstance(found, range):
        raise ArgumentTypeError(
            f"Argument `experts` must be a range, such as {range(-(-count // 2))}; got "
            f"{messages.shown(found)}."
        )
    if not found or not 0 <= found[0] <= found[-1] < count:
        raise ArgumentValueError(
            f"Argument `experts` must be a part of {range(count)}, the layer's; got {found}."
        )
    return found


def _floats(weight: np.ndarray, *, rank: int = 2) -> np.ndarray:
    wide = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize >= 2
    if not wide or weight.ndim != rank:
        raise ArgumentTypeError(
            "Weights without scales must be matrices of floats of 16 bits or more; got "
            f"{messages.short(weight)}."
        )
    return weight


def _stacked(source: Source, experts: Any, gpt_oss: bool, packed: bool) -> dict[str, Any]:
    """Reads tensors of all experts, of which a part is a view."""
    count = source.make(len, "gate_up_proj_blocks" if packed else "gate_up_proj")
    chosen = _chosen(experts, count)

    def part(array: np.ndarray) -> np.ndarray:
        if len(array) != count:
            raise ArgumentValueError(f"There must be {count} experts; got {len(array)}.")
        return array[chosen.start : chosen.stop : chosen.step]

    def matrix(name: str) -> Any:
        if not packed:
            return source.make(lambda weight: part(_floats(weight, rank=3)), name)
        make = lambda *both: checkpoints.from_mxfp4(*map(part, both))
        return source.make(make, f"{name}_blocks", f"{name}_scales")

    found = {"w_gate_up": matrix("gate_up_proj"), "w_down": matrix("down_proj")}
    if gpt_oss:
        found |= {f"b_{of}": source.make(part, f"{of}_proj_bias") for of in ("gate_up", "down")}
    # As gate and up are twice as wide, [experts, out, in] and [experts, in, out] differ.
    transposed = found["w_gate_up"].shape[-1] == found["w_down"].shape[-2]
    return {**found, "interleaved": gpt_oss, "transposed": transposed}


def _one_by_one(source: Source, experts: range | None, progress: Any) -> dict[str, Any]:
    """Copies the tensors of each expert into stacks of all, gate and up next to each other."""
    named = re.compile(rf"{re.escape(source.prefix)}(\d+)\.(w1\.)?")
    found = {match.groups() for match in map(named.match, source.tensors) if match}
    there = {int(expert) for expert, _ in found}
    counts = [source.config[key] for key in _COUNTS if source.config.get(key)]
    chosen = _chosen(experts, (counts or [max(there, default=0) + 1])[0])
    if missing := [expert for expert in chosen if expert not in there]:
        raise source.error(f"Expert {missing[0]} has no tensors, `{source.prefix}{missing[0]}.…`.")
    mixtral = any(w1 for _, w1 in found)
    linears = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    stacks: list[np.ndarray] = []
    for at, expert in enumerate(progress(chosen) if progress else chosen):
        names = [f"{expert}.{linear}" for linear in linears]
        parts, kinds = zip(
            *(jax.tree.flatten(_linear(source, name)) for name in names), strict=True
        )
        like = kinds, [[(leaf.shape, leaf.dtype) for leaf in part] for part in parts]
        if at == 0:
            first = (kinds[0], *kinds[::2]), [like[1][0], *like[1][::2]]
        if like != first:
            raise source.error(
                f"Expert {expert}'s shapes, dtypes or formats differ between gate and up, or from "
                f"expert {chosen[0]}'s.",
                *(f"{name}.{of}" for name in names for of in _FORMATS),
            )
        pieces = [*zip(*parts[:2], strict=True), *zip(parts[2], strict=True)]
        for piece in pieces[len(stacks) :]:
            shape = len(chosen), len(piece) * len(piece[0]), *piece[0].shape[1:]
            stacks.append(np.empty(shape, piece[0].dtype))
        for stack, piece in zip(stacks, pieces, strict=True):
            np.concatenate(piece, out=stack[at])
    made = [(kinds[0], stacks[: len(parts[0])]), (kinds[2], stacks[len(parts[0]) :])]
    weights = [jax.tree.unflatten(*of) for of in made]
    scaled = [isinstance(of, ScaledArray) for of in weights]
    for i, of in enumerate(weights):
        if scaled[i]:  # floats are [experts, out, in], and scaled arrays [experts, in, out]
            of = dataclasses.replace(of, block=(1, *of.block))
            weights[i] = of if all(scaled) else of.mT
    return {"w_gate_up": weights[0], "w_down": weights[1], "transposed": not all(scaled)}


def _linear(source: Source, name: str) -> Any:
    """Returns a linear layer's weights: floats [out, in], or a scaled array [in, out]."""
    kind = next((of for of in _FORMATS if source.has(f"{name}.{of}")), "weight")
    function, how = _format(source, kind)
    takes, lost = {}, ""  # parameters have the names of tensors
    for key, of in inspect.signature(function).parameters.items():
        tensor = f"{name}.{kind if kind == key + '_inv' else key}"
        if of.kind != of.KEYWORD_ONLY and (of.default is of.empty or source.has(tensor)):
            takes[key] = tensor
        elif key.endswith("g_idx"):
            lost = tensor
    for other in {"bias", "g_idx", "weight_zero_point"} - set(takes):
        tensor = f"{name}.{other}"
        # AutoGPTQ wrote zeros as the biases of linear layers that have none.
        if source.has(tensor) and (other != "bias" or source.make(np.any, tensor)):
            of_zeros = " but a bias of zeros" * (other == "bias")
            raise source.error(f"Experts of this format have no such tensor{of_zeros}.", tensor)
    config = source.quantization
    act_order = config.get("desc_act") or config.get("actorder") in (True, "group", "dynamic")

    def make(*arrays: np.ndarray) -> Any:
        made: Any = function(**dict(zip(takes, arrays, strict=True)), **how)
        if not isinstance(made, ScaledArray):
            return made
        (group, rows), out = made.block, made.shape[1]
        if lost and act_order and group:
            raise ArgumentValueError(
                f"Groups are in act-order, as `quantization_config` says, and "
                f"`{source.prefix}{lost}` is missing."
            )
        if rows and out % rows == 0:
            return made
        # Blocks of the gate must not reach into `up`, which lies next to it.
        scales: Any = np.repeat(made.scales, rows or out, 0)[:out]
        return dataclasses.replace(made, scales=scales, block=(group, 1))

    return source.make(make, *takes.values())


def _format(source: Source, kind: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function for a format, and what `quantization_config` says about it."""
    config = source.quantization
    size, block = (config.get(key) for key in ("group_size", "weight_block_size"))
    if kind == "weight":
        return _floats, {}
    if kind == "weight_packed":
        return checkpoints.from_compressed_tensors, {"group_size": size}
    if kind != "qweight":
        block = block or config.get("block_structure") or (128, 128)
        return checkpoints.from_8_bits, {"block": block}
    keys = "quant_method", "bits", "checkpoint_format", "version"
    match [str(config.get(key)).lower() for key in keys]:
        case ["gptq", "4" | "none", "gptq" | "gptq_v2" | "none" as stored, _]:
            return checkpoints.from_gptq, {"group_size": size, "v2": stored == "gptq_v2"}
        case ["awq", "4" | "none", _, "gemm" | "none"]:
            return checkpoints.from_awq, {"group_size": size}
        case _:
            got = ", ".join(f"`{key}` {config.get(key)!r}" for key in keys)
            raise CheckpointError(
                f"`{source.prefix}…` is GPTQ or AWQ: `quantization_config` must have the "
                '`quant_method` "gptq", with `checkpoint_format` "gptq" or "gptq_v2", or "awq", '
                f'with `version` "gemm", and 4 `bits`; got {got}. If these are wrong, pass right '
                "ones: `config={**checkpoint.config, …}`."
            )
