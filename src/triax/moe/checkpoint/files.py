"""`Checkpoint`: the tensors of a folder of safetensors files, each read when it is used.

A safetensors file has 8 bytes with the length of its header, the header in JSON, which gives each
tensor's dtype, shape and place, and the tensors' bytes. The library of that name does not return
float8 to NumPy or JAX.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, CheckpointError, MissingTensor

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"

_DTYPES = {
    "BOOL": np.bool_,
    **{f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"f{size}" for size in (2, 4, 8)},
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

    The folder is as Hugging Face writes it: `model.safetensors.index.json` and the files that it
    names, or one `model.safetensors`; and `config.json`. Arrays are maps of the files, read-only:
    their bytes are read when they are used. Bytes of bfloat16, float8_e4m3fn, float8_e5m2 and
    float8_e8m0fnu have these dtypes.

    Args:
      folder: a path.

    Attributes:
      folder: the path.
      config: what `config.json` holds, a dict; empty if there is no such file.

    Raises:
      ArgumentTypeError: `folder` is not a path.
      CheckpointError: a file is missing or damaged; the message names it.
      MissingTensor: of a lookup: no tensor has this name. It is a KeyError.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        if not isinstance(folder, str | os.PathLike):
            raise ArgumentTypeError(
                f"Argument `folder` must be a path; got {messages.shown(folder)}."
            )
        self.folder = Path(folder)
        self.config = _json(self.folder / CONFIG) if (self.folder / CONFIG).exists() else {}
        self._files: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        index = self.folder / INDEX
        if index.exists():
            self._listed_in = index
            self._file_of: dict[str, str] = _json(index).get("weight_map", {})
            if not isinstance(self._file_of, dict):
                raise CheckpointError(f"{index} has no `weight_map` of names to files.")
        else:
            self._listed_in = self.folder / SINGLE
            if not self._listed_in.exists():
                raise CheckpointError(
                    f"{self.folder} has neither {INDEX} nor {SINGLE}. Pass the folder of a "
                    "downloaded checkpoint."
                )
            self._file_of = dict.fromkeys(self._open(SINGLE)[1], SINGLE)
        for name in set(self._file_of.values()):
            if Path(str(name)).name != name or not (self.folder / name).exists():
                raise CheckpointError(
                    f"{index} names a file {name!r} that is not in {self.folder}. Download the "
                    "checkpoint again."
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}, {messages.counted(len(self), 'tensor')})"

    def path(self, name: str) -> Path:
        """Returns the file that has the tensor `name`."""
        if name not in self._file_of:
            hint = messages.near_misses(name, (), self._file_of) if isinstance(name, str) else ""
            raise MissingTensor(f"No tensor is named {name!r} in {self._listed_in}.{hint}")
        return self.folder / self._file_of[name]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> np.ndarray:
        path = self.path(name)
        data, tensors = self._open(path.name)
        if name not in tensors:
            raise CheckpointError(f"Tensor `{name}` is not in {path}, where {INDEX} has it.")
        try:
            entry = tensors[name]
            kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            sizes = all(type(size) is int and size >= 0 for size in (*shape, start, end))
        except (TypeError, KeyError, ValueError):
            sizes = False
        if not sizes or not isinstance(kind, str):
            raise CheckpointError(f"The header of {path} is damaged at tensor `{name}`.")
        if kind not in _DTYPES:
            raise CheckpointError(
                f"Tensor `{name}` in {path} has the dtype {kind}; known are {', '.join(_DTYPES)}."
            )
        dtype = np.dtype(_DTYPES[kind])
        if not end - start == math.prod(shape) * dtype.itemsize or end > data.size:
            raise CheckpointError(
                f"Tensor `{name}` in {path}, {kind} of shape {shape}, takes bytes {start} to {end} "
                f"of {data.size}. The file is truncated or damaged: download it again."
            )
        return data[start:end].view(dtype).reshape(shape)

    def _open(self, name: str) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns the bytes of a file's tensors, and its header."""
        if name not in self._files:
            path = self.folder / name
            size = path.stat().st_size
            data = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.empty(0, np.uint8)
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            if size < 8 or start > size:
                raise CheckpointError(
                    f"{path} is no safetensors file, or truncated: it has {size} bytes. Download "
                    "it again."
                )
            header = _parsed(path, data[8:start].tobytes())
            header.pop("__metadata__", None)
            self._files[name] = data[start:], header
        return self._files[name]


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Returns the JSON object in a file, or raises."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged: its JSON ends with {error}. Download it again."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must have a JSON object; got {messages.shown(found)}.")
    return found
