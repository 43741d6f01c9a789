"""Arrays of any dtype that JAX has, in one file: NumPy's and safetensors' lack float8 or e8m0.

A line of JSON has each array's dtype and shape; their bytes follow, one after another. It needs
NumPy, and the dtypes that come with JAX.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np


def save(path: Path, arrays: Iterable[Any]) -> None:
    """Writes arrays, each of which is fetched from its devices when its turn comes."""
    arrays = [*arrays]
    header = [[jnp.dtype(array.dtype).name, [*array.shape]] for array in arrays]
    with open(path, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        for array in arrays:
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)


def load(path: Path) -> Iterator[np.ndarray]:
    """Gives the arrays in their order, as read-only maps of the file."""
    with open(path, "rb") as file:
        header, position = json.loads(file.readline()), file.tell()
    data = np.memmap(path, np.uint8, "r")
    for name, shape in header:
        end = position + math.prod(shape) * jnp.dtype(name).itemsize
        yield data[position:end].view(jnp.dtype(name)).reshape(shape)
        position = end
