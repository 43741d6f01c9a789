"""Finds the experts of a layer among a checkpoint's tensors, and returns what `Experts` is made of.

Either each expert has its own tensors, which are stacked here, or the checkpoint has them stacked
(gpt-oss). The names of the tensors tell the format; `quantization_config` tells what they leave
open.
"""

from __future__ import annotations

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

Progress = Callable[[range], Iterable[int]]

COUNTS = "num_local_experts", "num_experts", "n_routed_experts"
ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
FORMATS: dict[str, tuple[Callable[..., ScaledArray], list[str], list[str]]] = {
    "qweight": (checkpoints.from_gptq, ["qweight", "qzeros", "scales"], ["g_idx"]),
    "weight_packed": (
        checkpoints.from_compressed_tensors,
        ["weight_packed", "weight_scale"],
        ["weight_shape", "weight_zero_point", "weight_g_idx"],
    ),
    "weight_scale_inv": (checkpoints.from_8_bits, ["weight", "weight_scale_inv"], []),
    "weight_scale": (checkpoints.from_8_bits, ["weight", "weight_scale"], []),
}
"""By a tensor that tells the format: the function, the tensors that it takes, and optional ones."""


class Source:
    """The tensors of a layer's experts, and what `config.json` says."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str, config: Mapping[str, Any]):
        self.tensors, self.prefix = tensors, f"{prefix}.experts."
        self.config = config.get("text_config") or config
        found = config.get("quantization_config") or self.config.get("quantization_config")
        self.quantization: Mapping[str, Any] = found or {}

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def where(self, *names: str) -> str:
        """Returns names of tensors, and their files if they are known."""
        text = ", ".join(f"`{self.prefix}{name}`" for name in names)
        if not (folder := getattr(self.tensors, "folder", None)):
            return text
        path: Callable[[str], Any] = self.tensors.path  # type: ignore[attr-defined]
        files = {str(path(self.prefix + name)) for name in names if self.has(name)}
        return f"{text} in {', '.join(sorted(files)) or folder}"

    def make(self, function: Callable[..., Any], *names: str, **how: Any) -> Any:
        """Calls a function of tensors; what it raises names them."""
        if missing := [name for name in names if not self.has(name)]:
            raise CheckpointError(
                f"Tensor `{self.prefix}{missing[0]}` is missing; needed are {self.where(*names)}."
            )
        try:
            return function(*(np.asarray(self.tensors[self.prefix + n]) for n in names), **how)
        except (ArgumentTypeError, ArgumentValueError) as error:
            raise CheckpointError(f"{self.where(*names)}: {error}") from error


def read(
    tensors: Mapping[str, Any],
    prefix: str,
    config: Mapping[str, Any] | None,
    experts: range | None,
    activation: Activation | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Returns the arguments of `Experts`; those here are `Experts.from_checkpoint`'s."""
    if not isinstance(prefix, str):
        raise ArgumentTypeError(f"Argument `prefix` must be a str; got {messages.shown(prefix)}.")
    if experts is not None and not isinstance(experts, range):
        raise ArgumentTypeError(
            f"Argument `experts` must be a range; got {messages.shown(experts)}."
        )
    source = Source(tensors, prefix, getattr(tensors, "config", {}) if config is None else config)
    stacked = source.has("gate_up_proj") or source.has("gate_up_proj_blocks")
    found = _stacked(source, experts) if stacked else _one_by_one(source, experts, progress)
    return {"activation": _activation(source) if activation is None else activation, **found}


def _activation(source: Source) -> Activation:
    """Returns the activation that `config.json` names; gpt-oss alone has biases."""
    name, limit = (source.config.get(key) for key in ("hidden_act", "swiglu_limit"))
    if source.has("gate_up_proj_bias"):
        return Swiglu(alpha=1.702, limit=float(limit or 7.0), up_offset=1.0)
    if limit or (name or "silu") not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json has `hidden_act` {name!r} and `swiglu_limit` {limit}, which are not one "
            "known function. Pass `activation`, such as moe.Swiglu(limit=10.0)."
        )
    return ACTIVATIONS[name or "silu"]


def _chosen(experts: range | None, count: int) -> range:
    found = range(count) if experts is None else experts
    if not found or min(found) < 0 or max(found) >= count:
        raise ArgumentValueError(
            f"Argument `experts` must be in range({count}), the layer's experts; got {found}."
        )
    return found


def _floats(weight: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(weight.dtype, jnp.floating) or weight.dtype.itemsize < 2:
        raise ArgumentTypeError(
            f"weights without scales must be floats of 16 bits or more; got {weight.dtype}."
        )
    return weight


def _stacked(source: Source, experts: range | None) -> dict[str, Any]:
    """Reads tensors of all experts; those of a part of the experts are views."""

    def part(array: np.ndarray) -> np.ndarray:
        chosen = _chosen(experts, len(array))
        found = array[min(chosen) : max(chosen) + 1 : abs(chosen.step)]
        return found if chosen.step > 0 else found[::-1]

    def matrix(name: str) -> Any:
        if source.has(f"{name}_blocks"):
            make = lambda blocks, scales: checkpoints.from_mxfp4(part(blocks), part(scales))
            return source.make(make, f"{name}_blocks", f"{name}_scales")
        return source.make(lambda weight: part(_floats(weight)), name)

    first, down = matrix("gate_up_proj"), matrix("down_proj")
    found = {"w_gate_up": first, "w_down": down}
    if biased := source.has("gate_up_proj_bias"):
        for name in ("gate_up", "down"):
            found[f"b_{name}"] = source.make(part, f"{name}_proj_bias")
    # As gate and up are twice as wide, [experts, out, in] and [experts, in, out] differ.
    return {**found, "interleaved": biased, "transposed": first.shape[-1] == down.shape[-2]}


def _one_by_one(source: Source, experts: range | None, progress: Progress | None) -> dict[str, Any]:
    """Reads the tensors of each expert into its place in the stacks."""
    named = re.compile(rf"{re.escape(source.prefix)}(\d+)\.(w1\.)?")
    matches = [match for match in map(named.match, source.tensors) if match]
    if not matches:
        where = getattr(source.tensors, "folder", "the tensors")
        layers = {name.partition(".experts.")[0] for name in source.tensors if ".experts." in name}
        raise CheckpointError(
            f"No tensor in {where} is named `{source.prefix}…`. Argument `prefix` must be a "
            f"layer's, one of {messages.short(sorted(layers))}."
        )
    most = max(int(match[1]) for match in matches) + 1
    chosen = _chosen(experts, next((source.config[k] for k in COUNTS if k in source.config), most))
    linears = ("w1", "w3", "w2") if matches[0][2] else ("gate_proj", "up_proj", "down_proj")
    for at, expert in enumerate(progress(chosen) if progress else chosen):
        names = [f"{expert}.{linear}" for linear in linears]
        gate, up, down = (_linear(source, name) for name in names)
        if at == 0:
            first = _like(gate), _like(gate), _like(down)
            stacks = _empty(len(chosen), gate, up), _empty(len(chosen), down)
        if (_like(gate), _like(up), _like(down)) != first:
            raise CheckpointError(
                f"{source.where(*names)}: tensors differ in shape, dtype or format from those of "
                "gate and up, or of another expert."
            )
        _put(stacks[0], at, gate, up)
        _put(stacks[1], at, down)
    found: list[Any] = list(stacks)
    transposed = not all(isinstance(of, ScaledArray) for of in found)
    if transposed:  # floats are [experts, out, in], and scaled arrays [experts, in, out]
        found = [of.mT if isinstance(of, ScaledArray) else of for of in found]
    return {"w_gate_up": found[0], "w_down": found[1], "transposed": transposed}


def _like(weights: Any) -> Any:
    leaves, structure = jax.tree.flatten(weights)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _empty(count: int, *weights: Any) -> Any:
    """Makes room for experts with these weights, [1, out, …], after each other along `out`."""
    of, times = weights[0], len(weights)
    return jax.tree.map(
        lambda leaf: np.empty((count, times * leaf.shape[1], *leaf.shape[2:]), leaf.dtype), of
    )


def _put(stack: Any, at: int, *weights: Any) -> None:
    join = lambda to, *leaves: np.concatenate([leaf[0] for leaf in leaves], out=to[at])
    jax.tree.map(join, stack, *weights)


def _linear(source: Source, name: str) -> Any:
    """Returns a linear layer's weights: floats [1, out, in], or a scaled array [1, in, out]."""
    for of in ("bias", "weight_zero_point"):
        if source.has(f"{name}.{of}") and not source.has(f"{name}.weight_packed"):
            raise CheckpointError(f"Tensor {source.where(f'{name}.{of}')} has no place in Experts.")
    kind = next((kind for kind in FORMATS if source.has(f"{name}.{kind}")), None)
    if kind is None:
        return source.make(lambda weight: _floats(weight)[None], f"{name}.weight")
    function, needed, optional = FORMATS[kind]
    function, how = _how(source, kind, function)
    optional = [] if function is checkpoints.from_awq else optional
    given = needed + [of for of in optional if source.has(f"{name}.{of}")]

    def make(*arrays: np.ndarray) -> ScaledArray:
        lead = [array[None] for array in arrays]
        rest = dict(zip(given[len(needed) :], lead[len(needed) :], strict=True))
        return function(*lead[: len(needed)], **rest, **how)

    found: ScaledArray = source.make(make, *(f"{name}.{of}" for of in given))
    _, depth, rows = found.block
    out = found.shape[-1]
    if rows and out % rows == 0:
        return found
    # Gate and up lie next to each other, where blocks of one must not reach into the other.
    scales: Any = np.repeat(found.scales, rows or out, axis=1)[:, :out]
    return ScaledArray(found.values, scales, (1, depth, 1), True, found.packed, found.zeros)


def _how(source: Source, kind: str, function: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function for a format, and what `quantization_config` says about it."""
    config = source.quantization
    groups = [of.get("weights") or {} for of in (config.get("config_groups") or {}).values()]
    if kind.startswith("weight_scale"):
        blocks = [config, *({"weight_block_size": of.get("block_structure")} for of in groups)]
        block = next((b for of in blocks if (b := of.get("weight_block_size"))), (128, 128))
        return function, {"block": block}
    if kind == "weight_packed":
        sizes = {of.get("group_size") for of in groups}
        return function, {"group_size": sizes.pop() if len(sizes) == 1 else None}
    how = {"group_size": config.get("group_size")}
    method, stored = config.get("quant_method"), config.get("checkpoint_format") or "gptq"
    version = str(config.get("version") or "gemm").lower()
    if method == "gptq" and stored in ("gptq", "gptq_v2"):
        return function, {**how, "v2": stored == "gptq_v2"}
    if method == "awq" and version == "gemm":
        return checkpoints.from_awq, how
    raise CheckpointError(
        f'{source.where()}: `quantization_config` must have the `quant_method` "gptq", with the '
        '`checkpoint_format` "gptq" or "gptq_v2", or "awq", with the `version` "gemm"; got '
        f"{method!r}, {config.get('checkpoint_format')!r}, {config.get('version')!r}."
    )
