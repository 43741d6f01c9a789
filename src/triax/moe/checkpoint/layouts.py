"""Reads the experts of a layer from a checkpoint's tensors: the arguments of `Experts`.

Either each expert has its own tensors, which are stacked here, or the checkpoint has them stacked
(gpt-oss). Names tell the format; `quantization_config` tells GPTQ from AWQ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.activations.reference import Activation, Swiglu
from triax.moe.quantization import checkpoints
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared.arguments import check_array

_CONFIG = (
    " If the model's configuration is wrong or missing, pass `config=`, such as "
    '{**checkpoint.config, "quantization_config": {"quant_method": "gptq"}}.'
)


class Source(NamedTuple):
    """The tensors whose names start with `prefix`, and how they are quantized."""

    tensors: Mapping[str, Any]
    prefix: str
    quantization: Mapping[str, Any]

    def has(self, *names: str) -> bool:
        return any(self.prefix + name in self.tensors for name in names)

    def get(self, name: str, optional: bool = False) -> Any:
        if not optional and not self.has(name):
            raise ArgumentValueError(f"`{self.prefix}{name}` is missing.")
        return np.asarray(self.tensors[self.prefix + name]) if self.has(name) else None

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Source]:
        """Gives the tensors whose names go on with `name`; exceptions get their names and files."""
        own = self._replace(prefix=self.prefix + name)
        try:
            yield own
        except (ArgumentTypeError, ArgumentValueError) as error:
            files = getattr(self.tensors, "files", {})
            there = {str(file) for of, file in files.items() if of.startswith(own.prefix)}
            where = ", ".join(sorted(there)) or getattr(self.tensors, "folder", "the tensors")
            raise CheckpointError(f"`{own.prefix}…` in {where}: {error}") from error


def read(
    tensors: Any, prefix: str, config: Any, experts: Any, activation: Any, progress: Any
) -> dict[str, Any]:
    """Returns the arguments of `Experts`; those here are `Experts.from_checkpoint`'s."""
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            "Argument `tensors` must be arrays by name, such as moe.Checkpoint(folder); got "
            f"{messages.shown(tensors)}."
        )
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    if prefix not in layers:
        known = messages.short(sorted(layers))
        raise CheckpointError(
            f"Argument `prefix` must be one of {known}, which are before `.experts.` in names of "
            f"{getattr(tensors, 'folder', 'the tensors')}; got {prefix!r}."
            + " Names are those of Hugging Face's layout."
            * (not layers)
        )
    config = getattr(tensors, "config", {}) if config is None else config
    config = {**config, **(config.get("text_config") or {})}
    words = config.get("quantization_config") or {}
    group: Any = next(iter((words.get("config_groups") or {}).values()), {})
    source = Source(tensors, f"{prefix}.experts.", {**words, **(group.get("weights") or {})})
    gpt_oss = source.has("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias")
    gpt_oss = gpt_oss or config.get("model_type") == "gpt_oss"
    found = {"activation": activation or _activation(config, gpt_oss)}
    if gpt_oss or source.has("gate_up_proj"):
        return found | _stacked(source, experts, gpt_oss)
    keys = "num_experts", "num_local_experts", "n_routed_experts"
    stated = next(filter(None, map(config.get, keys)), None)
    return found | _one_by_one(source, stated, experts, progress)


def _activation(config: Mapping[str, Any], gpt_oss: bool) -> Activation:
    name, limit = config.get("hidden_act") or "silu", config.get("swiglu_limit")
    if gpt_oss:
        return Swiglu(alpha=1.702, limit=float(limit or 7.0), up_offset=1.0)
    if limit or name not in ("silu", "gelu_pytorch_tanh"):
        raise CheckpointError(
            f"The model's configuration has the activation {name!r} and `swiglu_limit` {limit}, "
            "whose formula is not known. Pass `activation`, such as moe.Swiglu(limit=10.0)."
        )
    return "swiglu" if name == "silu" else "geglu"


def _chosen(experts: Any, count: int) -> range:
    found = range(count) if experts is None else experts
    is_range = isinstance(found, range)
    if not is_range or not found or not 0 <= found[0] <= found[-1] < count:
        raise (ArgumentValueError if is_range else ArgumentTypeError)(
            f"Argument `experts` must be a part of {range(count)}; got {messages.shown(found)}."
        )
    return found


def _stacked(source: Source, experts: Any, gpt_oss: bool) -> dict[str, Any]:
    """Reads tensors of all experts, of which a part is a view."""
    found: dict[str, Any] = {}
    for of in ("gate_up", "down"):
        with source.reading(f"{of}_proj") as own:
            if own.has("_blocks", "_scales"):
                found[f"w_{of}"] = checkpoints.from_mxfp4(own.get("_blocks"), own.get("_scales"))
            else:
                found[f"w_{of}"] = _floats(own.get(""))
            if gpt_oss:
                found[f"b_{of}"] = own.get("_bias")
    # As gate and up are twice as wide, [experts, out, in] and [experts, in, out] differ.
    transposed = found["w_gate_up"].shape[-1] == found["w_down"].shape[-2]
    part = _chosen(experts, len(found["w_gate_up"]))
    found = {key: array[part.start : part.stop : part.step] for key, array in found.items()}
    return {**found, "interleaved": gpt_oss, "transposed": transposed}


def _one_by_one(source: Source, stated: Any, experts: Any, progress: Any) -> dict[str, Any]:
    """Copies the tensors of each expert into stacks [experts, linear layers, out, in]."""
    named = re.compile(rf"{re.escape(source.prefix)}(\d+)\.(w1\.)?")
    numbers = {match.groups() for match in map(named.match, source.tensors) if match}
    count = 1 + max((int(expert) for expert, _ in numbers), default=0)
    if stated not in (None, count):
        raise CheckpointError(
            f"The model's configuration has {stated} experts, and `{source.prefix}…` has {count}. "
            "Files or names of the index are missing, or `config` is another model's."
        )
    chosen = _chosen(experts, count)
    mixtral = any(w1 for _, w1 in numbers)
    linears = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    stacks: list[Any] = []  # of gate and up, and of down
    for at, expert in enumerate(progress(chosen) if progress else chosen):
        for i, name in enumerate(linears):
            which, beside = divmod(i, 2)
            with source.reading(f"{expert}.{name}.") as own:
                leaves, tree = jax.tree.flatten(_linear(own))
                got = messages.short(leaves)
                if which == len(stacks):
                    shape = len(chosen), 2 - which
                    empty = [np.empty((*shape, *of.shape), of.dtype) for of in leaves]
                    stacks.append((f"`{own.prefix}…` has {got}", got, tree, empty))
                first, wanted, _, stack = stacks[which]
                if got != wanted:
                    raise ArgumentValueError(f"All experts must be alike: {first}; got {got}.")
            for into, leaf in zip(stack, leaves, strict=True):
                into[at, beside] = leaf
    found: dict[str, Any] = {"transposed": True}
    for key, (*_, tree, stack) in zip(("w_gate_up", "w_down"), stacks, strict=True):
        made = tree.unflatten([of.reshape(len(of), -1, of.shape[-1]) for of in stack])
        scaled = isinstance(made, ScaledArray)
        found[key] = dataclasses.replace(made, block=(1, *made.block)) if scaled else made
    return found


def _linear(source: Source) -> Any:
    """Returns a linear layer's weights [out, in]: floats, or a scaled array."""
    config, has, get = source.quantization, source.has, source.get
    in_order = not (config.get("desc_act") or config.get("actorder") in (True, "group", "dynamic"))
    # AutoGPTQ wrote zeros as the biases of linear layers that have none.
    for name in ("bias", "weight_zero_point")[: 1 if has("weight_packed") else 2]:
        if np.any(get(name, optional=True)):
            raise ArgumentValueError(f"Experts of this format have no `{name}` but zeros.")
    if has("qweight"):
        _check(config, "quant_method", None, "gptq", "awq")
        _check(config, "bits", 4)
        three = get("qweight"), get("qzeros"), get("scales")
        if config["quant_method"] == "awq":
            _check(config, "version", "gemm", "GEMM")
            made = checkpoints.from_awq(*three)
        else:
            of = _check(config, "checkpoint_format", "gptq", "gptq_v2")
            groups = get("g_idx", optional=in_order)
            made = checkpoints.from_gptq(*three, groups, v2=of == "gptq_v2")
            if config.get("sym") is True:
                if np.any(made.zeros):
                    raise ArgumentValueError(
                        "The zeros of a checkpoint with `sym` must be 8. Those of the second "
                        'version, `"checkpoint_format": "gptq_v2"`, are stored as they are.'
                        + _CONFIG
                    )
                made = dataclasses.replace(made, zeros=None)
    elif has("weight_packed"):
        _check(config, "num_bits", 4)
        three = get("weight_packed"), get("weight_scale"), get("weight_shape", optional=True)
        two = get("weight_zero_point", optional=True), get("weight_g_idx", optional=in_order)
        made = checkpoints.from_compressed_tensors(*three, *two)
    elif has("weight_scale_inv", "weight_scale"):
        scale = "weight_scale" if has("weight_scale") else "weight_scale_inv"
        made = checkpoints.from_8_bits(get("weight"), get(scale))
    elif not has("weight"):
        raise ArgumentValueError(
            f"`{source.prefix}weight` is missing. GPTQ and AWQ have `qweight` instead, "
            "compressed-tensors `weight_packed`."
        )
    else:
        return _floats(get("weight"))
    made = made.mT
    (rows, group), out = made.block, len(made)
    if rows and out % rows == 0:
        return made
    # Blocks of the gate must not reach into `up`, which lies next to it.
    scales: Any = np.repeat(made.scales, rows or out, 0)[:out]
    return dataclasses.replace(made, scales=scales, block=(1, group))


def _check(config: Mapping[str, Any], key: str, default: Any, *others: Any) -> Any:
    """Returns what `quantization_config` has, or the default: that, or one of the others."""
    found = config.get(key) or default
    choices = tuple(choice for choice in (default, *others) if choice is not None)
    messages.check_choice(f'quantization_config["{key}"]', found, choices, _CONFIG)
    return found


def _floats(weight: Any) -> Any:
    remedy = " Numbers of 8 bits or less must have scales."
    check_array("weight", weight, checkpoints.FLOATS, (..., "out", "in"), "experts", remedy)
    return weight
