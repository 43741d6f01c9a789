"""Writes small checkpoints."""

from __future__ import annotations

import json

import numpy as np

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def write_file(path, tensors, header=None):
    """Writes a safetensors file by the format's description, with a header in another's place."""
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        end = at + array.nbytes
        entries[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries | (header or {})).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write(folder, tensors, config=None, files=1):
    """Writes a folder, with an index if there are several files."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(tensors.items())[number::files])
        write_file(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
