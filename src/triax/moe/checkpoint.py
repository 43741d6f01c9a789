"""`Checkpoint`, the tensors of a folder of safetensors files, and the experts of a layer in it.

A safetensors file has eight bytes with the length of its header; the header, JSON with each
tensor's dtype, shape and place; and the tensors. The library of that name cannot return float8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.activations.reference import Activation, Swiglu
from triax.moe.quantization import checkpoints
from triax.moe.quantization.scaled import ScaledArray

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "BOOL": "bool",
    **{f"{kind.upper()}{8 * size}": f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)},
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder of safetensors files by name, as NumPy arrays.

        checkpoint = moe.Checkpoint("models/Qwen3-30B-A3B-FP8")
        checkpoint["model.norm.weight"]
        checkpoint.config["num_experts_per_tok"]

    The folder has `model.safetensors.index.json` and the files that it names, or one
    `model.safetensors`. A file is opened for the first of its tensors, which are read-only maps:
    bytes are read when used. Dtypes include bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu.

    Attributes:
      folder, files: its path, and that of each tensor's file by the tensor's name.
      config: what `config.json` holds; empty if there is none.

    Raises:
      CheckpointError: a folder or file is missing, or a file damaged; the message names it.
      KeyError: a name that is looked up is not among the tensors.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder, self._opened = Path(folder).expanduser(), functools.cache(_opened)
        config, index, file = (self.folder / of for of in ("config.json", _INDEX, _FILE))
        self.config = _parsed(config, config.read_bytes()) if config.exists() else {}
        if index.exists():
            names = _parsed(index, index.read_bytes(), "weight_map")
        else:
            names = dict.fromkeys(self._opened(file)[1], _FILE)
        self.files = {name: self.folder / str(of) for name, of in names.items()}
        if outside := next((of for of in self.files.values() if of.parent != self.folder), None):
            raise CheckpointError(f"{index} names {outside}, which is not in the folder.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> np.ndarray:
        data, header = self._opened(self.files[name])
        entry = header.get(name, "no such tensor")
        try:
            start, end = entry["data_offsets"]
            found: np.ndarray = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], data[start:end])
            if found.nbytes != end - start:
                raise ValueError("shape and place differ")
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Tensor `{name}` of {self.files[name]} is missing, damaged or of an unknown dtype:"
                f" the header has {entry}, and {len(data)} bytes follow. Download the file again."
            ) from error


def _opened(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the bytes of a file's tensors, and its header."""
    if not path.exists():
        others = sorted(other.name for other in path.parent.glob("*.safetensors"))
        there = f" This one has {messages.short(others)}." * bool(others)
        if not path.parent.is_dir():
            there = f" There is no folder {path.parent.absolute()}: download it first."
        raise CheckpointError(
            f"{path} is missing. A checkpoint is a folder with {_INDEX} and the files that it "
            f"names, or with {_FILE}, such as huggingface_hub.snapshot_download returns." + there
        )
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = _parsed(path, data[8:start].tobytes() if start <= len(data) else b"")
    header.pop("__metadata__", None)
    return data[start:], header


def _parsed(path: Path, text: bytes, key: str = "") -> dict[str, Any]:
    """Returns the JSON object in the text of a file or of its header, or the one under a key."""
    try:
        found = json.loads(text)
        return {**(found[key] if key else found)}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged, or Git LFS's pointer to a file: no JSON object, "
            f"{error}. Download it again, or run git lfs pull."
        ) from error


@contextlib.contextmanager
def reading(tensors: Any, stem: str, *ends: str) -> Iterator[dict[str, Any]]:
    """Gives the tensors that are named by the stem and an end; errors get their names and files."""
    try:
        yield {end: np.asarray(tensors[stem + end]) for end in ends if stem + end in tensors}
    except (ArgumentTypeError, ArgumentValueError, KeyError) as error:
        what = f"`{stem}{error.args[0]}` is missing." if isinstance(error, KeyError) else str(error)
        if error.args == ("weight",):
            what += " GPTQ and AWQ have `qweight` instead, compressed-tensors `weight_packed`."
        files = getattr(tensors, "files", {})
        there = {str(file) for name, file in files.items() if name.startswith(stem)}
        where = ", ".join(sorted(there)) or getattr(tensors, "folder", "the tensors")
        raise CheckpointError(f"`{stem.rstrip('.')}` in {where}: {what}") from error


def read_experts(
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
        raise CheckpointError(
            f"Argument `prefix` must be one of {messages.short(sorted(layers))}, which are before "
            f"`.experts.` in names of {getattr(tensors, 'folder', 'the tensors')}; got {prefix!r}."
            " Names are those of Hugging Face's layout."
        )
    config = getattr(tensors, "config", {}) if config is None else config
    config = {**config, **(config.get("text_config") or {})}
    stem = f"{prefix}.experts."
    gpt_oss = any(f"{stem}gate_up_proj_{of}" in tensors for of in ("blocks", "scales", "bias"))
    gpt_oss = gpt_oss or config.get("model_type") == "gpt_oss"
    found = {"activation": activation or _activation(config, gpt_oss)}
    if gpt_oss or f"{stem}gate_up_proj" in tensors:
        return found | _stacked(tensors, stem, experts, gpt_oss)
    return found | _separate(tensors, stem, config, experts, progress)


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
    if not isinstance(found, range) or not found or not 0 <= found[0] <= found[-1] < count:
        raise (ArgumentValueError if isinstance(found, range) else ArgumentTypeError)(
            f"Argument `experts` must be a part of {range(count)}; got {messages.shown(found)}."
        )
    return found


def _stacked(tensors: Any, stem: str, experts: Any, gpt_oss: bool) -> dict[str, Any]:
    """Reads tensors of all experts, as gpt-oss has them; a part is a view."""
    found: dict[str, Any] = {}
    for of in ("gate_up", "down"):
        with reading(tensors, f"{stem}{of}_proj", "", "_blocks", "_scales", "_bias") as own:
            if "_blocks" in own or "_scales" in own:
                found[f"w_{of}"] = checkpoints.from_mxfp4(own["_blocks"], own["_scales"])
            else:
                found[f"w_{of}"] = checkpoints.linear({"weight": own[""]}, {})
            if gpt_oss:
                found[f"b_{of}"] = own["_bias"]
    # As gate and up are twice as wide, [experts, out, in] and [experts, in, out] differ.
    transposed = found["w_gate_up"].shape[-1] == found["w_down"].shape[-2]
    part = _chosen(experts, len(found["w_gate_up"]))
    found = {key: array[part.start : part.stop : part.step] for key, array in found.items()}
    return {**found, "interleaved": gpt_oss, "transposed": transposed}


def _separate(tensors: Any, stem: str, config: Any, experts: Any, progress: Any) -> dict[str, Any]:
    """Copies each expert's own tensors into stacks [experts, linear layers, out, in]."""
    found = {name.removeprefix(stem).split(".")[0] for name in tensors if name.startswith(stem)}
    count = 1 + max((int(number) for number in found if number.isdecimal()), default=0)
    keys = "num_experts", "num_local_experts", "n_routed_experts"
    stated = next(filter(None, map(config.get, keys)), count)
    if stated != count:
        raise CheckpointError(
            f"The model's configuration has {stated} experts, and `{stem}…` has {count}. "
            "Files or names of the index are missing, or `config` is another model's."
        )
    chosen = _chosen(experts, count)
    mixtral = any(name.startswith(stem) and ".w1." in name for name in tensors)
    linears = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    quantization = config.get("quantization_config") or {}
    stacks: list[Any] = []  # of gate and up, and of down
    for at, expert in enumerate(progress(chosen) if progress else chosen):
        for i, name in enumerate(linears):
            which, beside = divmod(i, 2)
            with reading(tensors, f"{stem}{expert}.{name}.", *checkpoints.NAMES) as own:
                leaves, tree = jax.tree.flatten(checkpoints.linear(own, quantization))
                got = messages.short(leaves)
                if which == len(stacks):
                    new = [np.empty((len(chosen), 2 - which, *of.shape), of.dtype) for of in leaves]
                    stacks.append((f"`{stem}{expert}.{name}.…` has {got}", got, tree, new))
                first, wanted, _, stack = stacks[which]
                if got != wanted:
                    raise ArgumentValueError(f"All experts must be alike: {first}; got {got}.")
            for into, leaf in zip(stack, leaves, strict=True):
                into[at, beside] = leaf
    weights: dict[str, Any] = {}
    for key, (*_, tree, stack) in zip(("w_gate_up", "w_down"), stacks, strict=True):
        made = tree.unflatten([of.reshape(len(of), -1, of.shape[-1]) for of in stack])
        scaled = isinstance(made, ScaledArray)
        weights[key] = dataclasses.replace(made, block=(1, *made.block)) if scaled else made
    return {**weights, "transposed": True}
