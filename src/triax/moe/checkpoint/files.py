"""`Checkpoint`: the tensors of a folder of safetensors files, each read when it is used.

A safetensors file has eight bytes with the length of its header; the header, JSON with each
tensor's dtype, shape and place; and the tensors. The library of that name cannot return float8.
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

from triax.errors import CheckpointError

_DTYPES = {
    "BOOL": "bool",
    **{f"{kind.upper()}{8 * size}": f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)},
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

    The folder has `model.safetensors.index.json` and the files that it names, or one
    `model.safetensors`. Arrays are read-only maps of the files: their bytes are read when they are
    used. Their dtypes include bfloat16, float8_e4m3fn, float8_e5m2 and float8_e8m0fnu.

    Attributes:
      folder: its path.
      config: what `config.json` holds; empty if there is none.

    Raises:
      CheckpointError: a file is missing or damaged; the message names it.
      KeyError: a name that is looked up is not among the tensors.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        index, config = (self.folder / n for n in ("model.safetensors.index.json", "config.json"))
        self.config = _parsed(config, config.read_bytes()) if config.exists() else {}
        self._opened: dict[Path, tuple[np.ndarray, dict[str, Any]]] = {}
        if index.exists():
            names = _parsed(index, index.read_bytes()).get("weight_map")
            if not isinstance(names, dict):
                raise CheckpointError(f"{index} has no `weight_map`. Download it again.")
            self._paths = {name: self.folder / str(file) for name, file in names.items()}
        else:
            file = self.folder / "model.safetensors"
            self._paths = dict.fromkeys(self._open(file)[1], file)
        for path in set(self._paths.values()):
            if path.parent != self.folder or not path.exists():
                raise CheckpointError(f"{index} names {path}, which is not in the folder.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, name: str) -> np.ndarray:
        path = self.path(name)
        data, tensors = self._open(path)
        try:
            kind, shape, (start, end) = map(tensors[name].get, ("dtype", "shape", "data_offsets"))
            dtype = np.dtype(_DTYPES[kind])
            size = math.prod(shape) * dtype.itemsize
            if end - start != size or end > len(data):
                raise ValueError(f"the file has {len(data)} bytes of tensors")
            return data[start:end].view(dtype).reshape(shape)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Tensor `{name}` is not in {path}, or the file is truncated or has an unknown "
                f"dtype: its header has {tensors.get(name)} for it ({error})."
            ) from error

    def path(self, name: str) -> Path:
        """Returns the file that has a tensor."""
        if name not in self._paths:
            raise KeyError(f"{name} is not in {self.folder}")
        return self._paths[name]

    def _open(self, path: Path) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns the bytes of a file's tensors, and its header."""
        if path not in self._opened:
            if not path.exists():
                raise CheckpointError(f"{path} does not exist, nor an index of several files.")
            size = path.stat().st_size
            data = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.empty(0, np.uint8)
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            if start > size:
                raise CheckpointError(f"{path} is truncated, or no safetensors file.")
            header = _parsed(path, data[8:start].tobytes())
            header.pop("__metadata__", None)
            self._opened[path] = data[start:], header
        return self._opened[path]


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Returns the JSON object that is the text of a file, or its header."""
    try:
        return {**json.loads(text)}
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged: no JSON object, {error}."
        ) from error
