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

_INDEX = "model.safetensors.index.json"
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
    used, and a file is opened for the first of its tensors. Their dtypes include bfloat16,
    float8_e4m3fn, float8_e5m2 and float8_e8m0fnu.

    Attributes:
      folder: its path.
      config: what `config.json` holds; empty if there is none.

    Raises:
      CheckpointError: a folder or file is missing, or a file damaged; the message names it.
      KeyError: a name that is looked up is not among the tensors.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            why = "is a file. Pass its folder" if self.folder.exists() else "does not exist"
            raise CheckpointError(
                f"{self.folder} {why}: a folder with safetensors files, such as the one that "
                "huggingface_hub.snapshot_download returns."
            )
        index, config = self.folder / _INDEX, self.folder / "config.json"
        self.config = _parsed(config, config.read_bytes()) if config.exists() else {}
        self._opened: dict[Path, tuple[np.ndarray, dict[str, Any]]] = {}
        if index.exists():
            names = _parsed(index, index.read_bytes()).get("weight_map")
            if not isinstance(names, dict):
                raise CheckpointError(f"{index} has no `weight_map`. Download it again.")
            self._paths = {name: self.folder / str(file) for name, file in names.items()}
        elif (file := self.folder / "model.safetensors").exists():
            self._paths = dict.fromkeys(self._open(file)[1], file)
        else:
            there = sorted(path.name for path in self.folder.glob("*.safetensors"))[:3]
            raise CheckpointError(
                f"{self.folder} has neither {_INDEX}, which names the files of a checkpoint, nor "
                f"model.safetensors; it has {', '.join(there) or 'no safetensors files'}."
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        files = len(set(self._paths.values()))
        return f"<Checkpoint {self.folder}: tensors: {len(self)}, files: {files}>"

    def __getitem__(self, name: str) -> np.ndarray:
        path = self.path(name)
        data, tensors = self._open(path)
        entry, why = tensors.get(name), "has a damaged entry in the header"
        try:
            kind, shape, (start, end) = map(entry.get, ("dtype", "shape", "data_offsets"))  # type: ignore[union-attr]
            if kind not in _DTYPES:
                why = "has an unknown dtype"
            elif end > len(data):
                why = f"is cut off: {len(data)} bytes of tensors are there, and it ends at {end}"
            dtype = np.dtype(_DTYPES[kind])
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError("shape and place differ")
            return data[start:end].view(dtype).reshape(shape)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = why if name in tensors else f"is not there, although {_INDEX} says so"
            raise CheckpointError(
                f"Tensor `{name}` of {path} {why}. Download the file again. The header has {entry}."
            ) from error

    def path(self, name: str) -> Path:
        """Returns the file that has a tensor."""
        if name not in self._paths:
            raise KeyError(f"{name} is not in {self.folder}")
        return self._paths[name]

    def _open(self, path: Path) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns the bytes of a file's tensors, and its header."""
        if path not in self._opened:
            if path.parent != self.folder or not path.exists():
                raise CheckpointError(
                    f"{self.folder / _INDEX} names {path}, which is not in the folder."
                )
            size = path.stat().st_size
            data = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.empty(0, np.uint8)
            if data[:24].tobytes() == b"version https://git-lfs.":
                raise CheckpointError(f"{path} is Git LFS's pointer to a file. Run git lfs pull.")
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
