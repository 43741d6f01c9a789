"""`Checkpoint`: the tensors of a folder of safetensors files, each read when it is used.

A safetensors file has eight bytes with the length of its header; the header, JSON with each
tensor's dtype, shape and place; and the tensors. The library of that name cannot return float8.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from triax import messages
from triax.errors import CheckpointError

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
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
