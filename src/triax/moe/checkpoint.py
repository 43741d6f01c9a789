"""`Checkpoint`, the tensors of a folder of safetensors files, and the experts of a layer in it.

A safetensors file has eight bytes with the length of its header; the header, JSON with each
tensor's dtype, shape and place; and the tensors. The library of that name cannot return float8.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.activations.reference import SPECS
from triax.moe.model_types import COUNTS, Described, describe, quantization_of
from triax.moe.quantization import checkpoints
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared.arguments import Array

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "BOOL": "bool",
    **{f"{kind.upper()}{8 * size}": f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)},
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


# Not read: tokens, and the cache of attention, stay in their dtype.
_OF_TOKENS = (
    *("input_scale", "activation_scale", "input_global_scale", "qscale_act", "k_scale", "v_scale"),
)
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # of an expert in a name


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder of safetensors files, or of one such file, as NumPy arrays by name.

        checkpoint = moe.Checkpoint("models/Qwen3-30B-A3B-FP8")
        checkpoint["model.norm.weight"]
        checkpoint.config["num_experts_per_tok"]

    The folder has `model.safetensors.index.json` and the files that it names, or one
    `model.safetensors`. If one file is given, the `config.json` beside it is read, if there is one.

    A file is opened when the first of its tensors is looked up. Tensors are read-only maps, whose
    bytes are read when they are used. Dtypes include bfloat16, float8_e4m3fn, float8_e5m2 and
    float8_e8m0fnu. A checkpoint can be pickled, and equals another of the same folder, files and
    configuration.

    Attributes:
      folder, files: its path, and that of each tensor's file by the tensor's name.
      config: what `config.json` holds; empty if there is none. If it has no `quantization_config`,
        that of ModelOpt's `hf_quant_config.json` stands there.

    Raises:
      CheckpointError: a folder or file is missing, or a file damaged; the message names it.
      KeyError: a name that is looked up is not among the tensors; the message has the nearest.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        path, self._opened = Path(folder).expanduser(), functools.cache(_opened)
        with _reading(path):
            file = path if path.is_file() else path / _FILE
        self.folder = file.parent
        config, index = self.folder / "config.json", self.folder / _INDEX
        with _reading(config):
            self.config = _parsed(config, config.read_bytes()) if config.exists() else {}
            of_modelopt, key = self.folder / "hf_quant_config.json", "quantization_config"
            if key not in self.config and of_modelopt.exists():
                self.config[key] = _parsed(of_modelopt, of_modelopt.read_bytes(), "quantization")
        with _reading(index):
            text = index.read_bytes() if file != path and index.exists() else None
        if text is not None:
            names = _parsed(index, text, "weight_map")
        else:
            names = dict.fromkeys(self._opened(file)[1], file.name)
        self.files = {name: self.folder / str(of) for name, of in names.items()}
        for name, path in self.files.items():
            if not isinstance(names[name], str) or path.parent != self.folder:
                raise CheckpointError(
                    f"{index} names {path}, which is not in the folder, for `{name}`."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the opened files: another process opens its own."""
        return {name: of for name, of in vars(self).items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opened=functools.cache(_opened))

    def __eq__(self, other: object) -> bool:
        """Whether both have the same folder, files and configuration; bytes are not compared."""
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]  # its configuration can be changed

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the tensor, or the default: without the names for an error's message."""
        return self[name] if name in self else default  # noqa: SIM401  # this is `get`

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.files:
            near = _nearest(name, self.files)
            raise KeyError(f"{name!r} is not among the tensors of {self.folder}.{near}")
        data, header = self._opened(self.files[name])
        entry = header.get(name, "no such tensor")
        try:
            start, end = _place(entry)
            if end > len(data):
                raise ValueError("not in the file")
            array: np.ndarray = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], data[start:end])
            if array.nbytes != end - start:
                raise ValueError("shape and place differ")
            return array
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Tensor `{name}` of {self.files[name]} is missing, damaged or of an unknown dtype:"
                f" the header has {entry}, and {len(data)} bytes follow. Download the file again."
            ) from error


def _opened(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the bytes of a file's tensors, and its header."""
    with _reading(path):
        if not path.exists():
            raise _missing(path)
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = _parsed(path, data[8:start].tobytes() if start <= len(data) else b"")
    header.pop("__metadata__", None)
    places = []
    for name, entry in header.items():
        with contextlib.suppress(KeyError, TypeError, ValueError):  # raised when it is looked up
            places.append((*_place(entry), name))
    places = sorted(place for place in places if place[0] < place[1])
    for (_, end, one), (begin, _, other) in itertools.pairwise(places):
        if begin < end:
            raise CheckpointError(
                f"{path} is damaged: `{one}` and `{other}` overlap. Download it again."
            )
    return data[start:], header


def _place(entry: Any) -> tuple[int, int]:
    """Returns where a tensor begins and ends; raises any of three errors if the entry is wrong."""
    start, end = entry["data_offsets"]
    if not type(start) is type(end) is int or not 0 <= start <= end:
        raise ValueError("no range of bytes")
    return start, end


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _missing(path: Path) -> CheckpointError:
    others = sorted(other.name for other in path.parent.glob("*.safetensors"))
    there = f" This one has {messages.short(others)}." * bool(others)
    if not path.parent.is_dir():
        there = f" There is no folder {path.parent.absolute()}: download it first."
    return CheckpointError(
        f"{path} is missing. A checkpoint is a folder with {_INDEX} and the files that it "
        f"names, or with {_FILE}, such as huggingface_hub.snapshot_download returns." + there
    )


def _parsed(path: Path, text: bytes, key: str = "") -> dict[str, Any]:
    """Returns the JSON object in the text of a file or of its header, or the one under a key."""
    try:
        parsed = json.loads(text, object_pairs_hook=_unrepeated)
        return {**(parsed[key] if key else parsed)}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged, or Git LFS's pointer to a file: no JSON object, "
            f"{error}. Download it again, or run git lfs pull."
        ) from error


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; its names must differ, or the last one would win."""
    unrepeated = dict(pairs)
    if len(unrepeated) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return unrepeated


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


def linear_from_checkpoint(
    tensors: Mapping[str, Array], prefix: str, *, config: Mapping[str, object] | None = None
) -> ScaledArray | Array:
    """Returns the weights [out, in] of one linear layer of a checkpoint, of attention say.

        w = moe.linear_from_checkpoint(checkpoint, "model.layers.3.self_attn.q_proj")
        w = w.astype(jnp.bfloat16)  # whether it is quantized or not

    The formats are those of single experts in `Experts.from_checkpoint`. A checkpoint may have
    layers of floats among quantized ones: a layer's tensors tell.

    Args:
      tensors: arrays by name, such as a `moe.Checkpoint`.
      prefix: what is before `.weight`, `.qweight` or `.weight_packed` in their names.
      config: what `config.json` holds; None is `tensors.config`, if there is one.

    Returns:
      The floats of `weight`, or a `ScaledArray`, of NumPy arrays. A bias is a tensor of its own.

    Raises:
      ArgumentTypeError: `tensors` or `config` is no mapping.
      CheckpointError: a tensor is missing or not known, its shape, dtype or format is wrong or not
        what `config` says, or `config` has a key or value that is not known.
    """
    _check_mapping(tensors)
    config = getattr(tensors, "config", {}) if config is None else config
    quantization = quantization_of(config)
    stem = f"{prefix}."
    names = [name for name in tensors if isinstance(name, str) and name.startswith(stem)]
    if not names:
        raise CheckpointError(
            f"Argument `prefix` must be what is before the last `.` in names of tensors; got "
            f"{prefix!r}.{_nearest(stem, tensors)}"
        )
    ends = [name for name in checkpoints.NAMES if name != "bias"]
    _check_names(names, stem, {*checkpoints.NAMES, *_OF_TOKENS}.__contains__)
    with reading(tensors, stem, *ends) as own:
        return checkpoints.linear(own, quantization, prefix)


def _nearest(name: Any, tensors: Iterable[Any]) -> str:
    """A sentence with the names of tensors that are most like one that is missing."""
    names = [of for of in tensors if isinstance(of, str)]
    near = difflib.get_close_matches(name, names, 3, 0.3) if isinstance(name, str) else []
    return f" The nearest are {', '.join(f'`{of}`' for of in near)}." if near else ""


def _check_mapping(tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            "Argument `tensors` must be arrays by name, such as moe.Checkpoint(folder); got "
            f"{messages.shown(tensors)}."
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints name the linear layers of experts, and store their weights.

    Attributes:
      linears: their names behind the stem, those of the first product and that of the second.
      ends: what is behind these names, and what it is in `checkpoints.NAMES`.
      single: whether each expert has its own tensors; its number is before the names.
      by_rows: whether weights are [experts · width, hidden], those of the second product too.
      within: what is between a layer's prefix and these names, or the experts' numbers.
    """

    linears: tuple[str, ...]
    ends: Mapping[str, str]
    single: bool = False
    by_rows: bool = False
    within: str = "experts."

    def knows(self, name: str) -> bool:
        """Whether what is behind the stem in a tensor's name is known."""
        number, _, rest = name.partition(".") if self.single else ("0", "", name)
        linear = next((of for of in self.linears if rest.startswith(of)), "")
        ends = *self.ends, *(f".{of}" for of in _OF_TOKENS), "_activation_scale"
        return bool(_NUMBER.fullmatch(number) and linear and rest.removeprefix(linear) in ends)

    def leads(self, name: str) -> bool:
        """Whether it is the name of a tensor of the first linear layer."""
        first = self.linears[0]
        return first in name.split(".") if self.single else name.startswith(first)


_OF_MODULES = {f".{name}": name for name in checkpoints.NAMES}
_OF_STACKS = {
    "": "weight",
    "_bias": "bias",
    "_blocks": "weight",
    "_scales": "weight_scale",
    "_scale_inv": "weight_scale_inv",
}
# A layer's is the first one that has its place, and whose first linear layer is there.
FAMILIES = (
    Family(("gate_up_proj", "down_proj"), _OF_STACKS),  # gpt-oss, Llama 4, transformers 5
    Family(("mlp.w1", "mlp.v1", "mlp.w2"), _OF_STACKS, by_rows=True),  # DBRX
    Family(("input_linear", "output_linear"), _OF_MODULES, within=""),  # Granite
    Family(("gate_proj", "up_proj", "down_proj"), _OF_MODULES, within=""),  # Step-3, Step-3.5
    Family(("w1", "w3", "w2"), _OF_MODULES, single=True),  # Mixtral, DeepSeek-V4
    Family(("gate_proj", "up_proj", "down_proj"), _OF_MODULES, single=True),  # most others
    Family(("up_proj", "down_proj"), _OF_MODULES, single=True),  # Nemotron-H
)
# The prefix of a layer, in the names of tensors of its experts.
EXPERTS = re.compile(
    r"(.+?)\.experts\..+|(.+\.(?:block_sparse_)?moe)\.(?:(?:in|out)put_linear|\w+_proj)\..+"
)


def read_experts(
    tensors: Any,
    prefix: Any,
    config: Any,
    experts: Any,
    activation: Any,
    interleaved: Any,
    progress: Any,
    tiles: Any,
) -> dict[str, Any]:
    """Returns the arguments of `Experts`; those here are `Experts.from_checkpoint`'s."""
    _check_mapping(tensors)
    messages.check_bool(tiles=tiles)
    if interleaved is not None:
        messages.check_bool(interleaved=interleaved)
    if progress is not None:
        messages.check_callable("progress", progress)
    layers: dict[str, list[str]] = {}
    for name in tensors:
        if isinstance(name, str) and (at := EXPERTS.match(name)):
            layers.setdefault(at[1] or at[2], []).append(name)
    if not isinstance(prefix, str) or prefix not in layers:
        raise CheckpointError(
            f"Argument `prefix` must be one of {messages.short(sorted(layers))}, which are before "
            f"`.experts.` in names of {getattr(tensors, 'folder', 'the tensors')}; got {prefix!r}."
            " Names are those of Hugging Face's layout."
        )
    config = getattr(tensors, "config", {}) if config is None else config
    said = describe(config, activation, interleaved, prefix)
    names = layers[prefix]
    within = "experts." * names[0].startswith(f"{prefix}.experts.")
    stem = f"{prefix}.{within}"
    tensors, stacked = _restacked(tensors, stem, names)
    if is_restacked := stacked is not names:
        said, names = dataclasses.replace(said, interleaved=False), stacked
    ends = [name.removeprefix(stem) for name in names]
    here = [of for of in FAMILIES if of.within == within]
    family = next((of for of in here if any(map(of.leads, ends))), here[-1])
    _check_names(names, stem, family.knows)
    if interleaved and (is_restacked or len(family.linears) == 3):
        raise ArgumentValueError(
            f"Argument `interleaved` must be False or None for `{stem}…`, whose gate and up have "
            "tensors of their own; got True."
        )
    if family.single:
        weights = _separate(tensors, stem, family, names, said, experts, progress, tiles)
    else:
        weights = _stacked(tensors, stem, family, names, said, experts, tiles)
    hidden, width = weights["w_down"].shape[-2:][:: 1 if weights["transposed"] else -1]
    _check_sizes(said.hidden, hidden, stem, "columns of `down_proj`")
    _check_sizes(said.width, width, stem, "rows of `down_proj`")
    return {"activation": said.activation, **weights}


def _restacked(tensors: Any, stem: str, names: list[str]) -> tuple[Any, list[str]]:
    """Stacks the weights of single experts if there is one tensor of all experts' scales.

    transformers 5.24 saves a model so that it has quantized to float8 itself.
    """
    ends = {name.removeprefix(stem) for name in names}
    count = sum(end.endswith(".down_proj.weight") for end in ends)
    stacks = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    single = {
        f"{expert}.{linear}.weight"
        for linears in stacks.values()
        for linear in linears
        for expert in range(count)
    }
    if not count or ends != single | {f"{stack}_scale_inv" for stack in stacks}:
        return tensors, names
    made = {
        stem + stack: np.concatenate(
            [
                np.stack([tensors[f"{stem}{expert}.{linear}.weight"] for expert in range(count)])
                for linear in linears
            ],
            axis=1,
        )
        for stack, linears in stacks.items()
    }
    return collections.ChainMap(made, tensors), [*made, *(f"{name}_scale_inv" for name in made)]


def _check_sizes(said: Mapping[str, Any], size: int, stem: str, what: str) -> None:
    for key, of in said.items():
        if of != size:
            raise CheckpointError(
                f"The model's configuration has `{key}` {messages.short(of)}, and `{stem}…` has "
                f"{size} {what}. Tensors are missing, or `config` is another model's."
            )


def _check_names(names: list[str], stem: str, known: Callable[[str], bool]) -> None:
    """Raises for tensors that are not read: weights may depend on them.

    `known` is given what is behind the stem in a name.
    """
    if unknown := sorted(name for name in names if not known(name.removeprefix(stem))):
        raise CheckpointError(
            f"`{unknown[0]}` is not known beside the other tensors of the layer, whose weights may "
            f"depend on it ({messages.counted(len(unknown), 'such tensor')}). If they do not, "
            "leave it out: pass a dictionary of the others as `tensors`."
        )


def _in_order(chosen: range, progress: Any) -> Iterator[int]:
    """Gives the places of all experts, in the order in which `progress` gives the experts."""
    left = dict.fromkeys(chosen)
    order = progress(chosen) if progress else chosen
    if not isinstance(order, Iterable):
        raise ArgumentTypeError(
            f"Argument `progress` must return an iterator of {chosen}; got {messages.shown(order)}."
        )
    for expert in order:
        is_integer = isinstance(expert, int | np.integer) and not isinstance(expert, bool)
        if not is_integer or expert not in left:
            raise ArgumentValueError(
                f"Argument `progress` must give each of {chosen} once; got {messages.short(expert)}"
                f"{' again' * (is_integer and expert in chosen)}."
            )
        del left[int(expert)]
        yield chosen.index(int(expert))
    if left:
        raise ArgumentValueError(
            f"Argument `progress` must give each of {chosen} once; it left out {next(iter(left))}."
        )


def _chosen(experts: Any, count: int) -> range:
    chosen = range(count) if experts is None else experts
    if not isinstance(chosen, range) or not chosen or not 0 <= chosen[0] <= chosen[-1] < count:
        raise (ArgumentValueError if isinstance(chosen, range) else ArgumentTypeError)(
            f"Argument `experts` must be a part of {range(count)}; got {messages.shown(chosen)}."
        )
    return chosen


def _stacked(
    tensors: Any,
    stem: str,
    family: Family,
    names: list[str],
    said: Described,
    experts: Any,
    tiles: bool,
) -> dict[str, Any]:
    """Reads tensors of all experts, as gpt-oss has them; a part is a view."""
    *first, last = family.linears
    spec = SPECS.get(said.activation) if isinstance(said.activation, str) else None
    if spec and not spec.gated:
        raise ArgumentValueError(
            f"Argument `activation` must have a gate, because `{stem}{first[0]}` has one; got "
            f"{said.activation!r}. SiLU of the gate is 'swiglu'."
        )
    if said.interleaved is None and len(first) == 1:
        raise CheckpointError(
            f"Argument `interleaved` must say whether gate and up alternate in `{stem}{first[0]}`"
            ", because the model's configuration has no `model_type` that is known: True as in "
            "gpt-oss, or False if all of the gate comes first."
        )
    biased = said.biased or any(name.endswith("bias") for name in names)
    of_bias = next(end for end, name in family.ends.items() if name == "bias")
    by_shape = family.ends is _OF_STACKS and len(first) == 1  # whether out or in comes first
    arrays: dict[str, list[Any]] = {}
    for linear in family.linears:
        key = "down" if linear == last else "gate_up"
        with reading(tensors, stem + linear, *family.ends) as own:
            parts = {family.ends[end]: array for end, array in own.items() if end != of_bias}
            if len(parts) < len(own.keys() - {of_bias}):
                raise ArgumentValueError("Weights are there both in floats and in MXFP4.")
            for end in ("_blocks", "_scales") if own.keys() & {"_blocks", "_scales"} else ():
                own[end]  # raises if it is missing
            made = checkpoints.linear(parts, said.quantization, stem + linear)
            if family.by_rows:
                made = _by_expert(made, said.counts)
                made = made.swapaxes(1, 2) if linear == last else made
            made = made.mT if by_shape and isinstance(made, ScaledArray) else made
            arrays.setdefault(f"w_{key}", []).append(made)
            if biased:
                arrays.setdefault(f"b_{key}", []).append(own[of_bias])
    # As gate and up are twice as wide, [experts, out, in] and [experts, in, out] differ.
    both, down = arrays["w_gate_up"][0], arrays["w_down"][0]
    transposed = both.shape[-1] == down.shape[-2]
    count = len(both)
    _check_sizes(said.counts, count, stem, "experts")
    part = _chosen(experts, count)
    weights: dict[str, Any] = {}
    for key, of in arrays.items():
        of = [array[part.start : part.stop : part.step] for array in of]
        of = [checkpoints.in_tiles(array) for array in of] if tiles else of
        weights[key] = of[0] if len(of) == 1 else tuple(of)
    interleaved = len(first) == 1 and said.interleaved
    return {**weights, "interleaved": interleaved, "transposed": transposed}


def _by_expert(array: np.ndarray, counts: Mapping[str, Any]) -> np.ndarray:
    """Splits rows of all experts, which are below each other."""
    key, count = next(iter(counts.items()), (COUNTS[-1], None))
    if not isinstance(count, int) or count < 1 or len(array) % count:
        raise ArgumentValueError(
            f"The {len(array)} rows are those of all experts, and `{key}` of the model's "
            f"configuration must be their number; got {messages.short(count)}. Pass `config` with "
            "it."
        )
    return array.reshape(count, -1, array.shape[-1])


def _separate(
    tensors: Any,
    stem: str,
    family: Family,
    names: list[str],
    said: Described,
    experts: Any,
    progress: Any,
    tiles: bool,
) -> dict[str, Any]:
    """Copies each expert's own tensors into stacks [experts, linear layers, out, in]."""
    numbers = {int(name.removeprefix(stem).partition(".")[0]) for name in names}
    count = 1 + max(numbers)
    _check_sizes(said.counts, count, stem, "experts")
    chosen = _chosen(experts, count)
    if missing := next((f"{stem}{expert}" for expert in chosen if expert not in numbers), ""):
        raise CheckpointError(f"`{missing}` is missing: no tensor's name begins so.")
    both = len(family.linears) - 1
    stacks: list[Any] = []  # of gate and up, and of down
    biases: dict[tuple[int, int], Any] = {}  # by linear layer and place
    for at in _in_order(chosen, progress):
        expert = chosen[at]
        for i, name in enumerate(family.linears):
            which, beside = divmod(i, both)
            module = f"{stem}{expert}.{name}"
            with reading(tensors, f"{module}.", *checkpoints.NAMES) as own:
                if "bias" in own:
                    biases[i, at] = own.pop("bias")
                linear = checkpoints.linear(own, said.quantization, module)
                leaves, tree = jax.tree.flatten(checkpoints.in_tiles(linear) if tiles else linear)
                got = messages.short(leaves)
                if which == len(stacks):
                    size = 1 if which else both
                    new = [np.empty((len(chosen), size, *of.shape), of.dtype) for of in leaves]
                    stacks.append((f"`{module}.…` has {got}", got, tree, new))
                first, wanted, structure, stack = stacks[which]
                if (got, tree) != (wanted, structure):
                    raise ArgumentValueError(f"All experts must be alike: {first}; got {got}.")
            for into, leaf in zip(stack, leaves, strict=True):
                into[at, beside] = leaf
    weights: dict[str, Any] = {}
    for key, (*_, tree, stack) in zip(("w_gate_up", "w_down"), stacks, strict=True):
        made = tree.unflatten([of.reshape(len(of), -1, *of.shape[3:]) for of in stack])
        scaled = isinstance(made, ScaledArray)
        weights[key] = dataclasses.replace(made, block=(1, *made.block)) if scaled else made
    # AutoGPTQ wrote zeros as the biases of linear layers that have none.
    if said.biased or any(map(np.any, biases.values())):
        weights |= _biases(stem, family, chosen, biases)
    return {**weights, "transposed": True}


def _biases(
    stem: str, family: Family, chosen: range, biases: Mapping[tuple[int, int], Any]
) -> dict[str, Any]:
    """Returns the stacks of all linear layers' biases, none of which may be missing."""
    stacks = []
    for i, name in enumerate(family.linears):
        if missing := [expert for at, expert in enumerate(chosen) if (i, at) not in biases]:
            raise CheckpointError(
                f"`{stem}{missing[0]}.{name}.bias` is missing, and experts have biases."
            )
        stacks.append(np.stack([biases[i, at] for at in range(len(chosen))]))
    return {"b_gate_up": np.concatenate(stacks[:-1], axis=-1), "b_down": stacks[-1]}
