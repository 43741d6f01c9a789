"""Records: what was found in one run, on which device, with which versions, and when.

A script has a function that yields names and figures, and ends with `record.main`, which prints
them and writes them beside the script. What turns out wrong ends the script: it gets no speed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from triax.compat import versions
from triax.devices import is_cuda, reported_by_driver

_PACKAGES = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin triton cuda-bindings torch tokamax"
_PACKAGES += " transformer-engine transformer-engine-jax transformers vllm"
_PACKAGES += " sonic-moe quack-kernels nvidia-cutlass-dsl scattermoe"


def main(measure: Callable[[], Iterable[tuple[str, Any]]], **shape: Any) -> None:
    """Runs a script that needs a GPU and has no arguments of its own."""
    script: Any = sys.modules[measure.__module__]
    keep(parse(parser(script.__file__, script.__doc__)).output, measure(), **shape)


def parser(file: str, doc: str) -> argparse.ArgumentParser:
    """The arguments of a script: where its record goes, beside it by default."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--output", type=Path, default=Path(file).with_suffix(".json"))
    return made


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, of a script that ends here without a GPU."""
    options = parser.parse_args()
    device = jax.devices()[0]
    if not is_cuda(device):
        sys.exit(f"This needs an NVIDIA GPU; JAX has {device}.")
    return options


def known(path: Path) -> dict[str, Any]:
    """The record of a path, to be kept beside what this device finds: of this kind of device.

    The script ends here if it is of another.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["device"] != (here := jax.devices()[0].device_kind):
        sys.exit(f"{path} is of one {found['device']}, and this is one {here}. Measure all of it.")
    return found


def keep(
    path: Path, found: Iterable[tuple[str, Any]], before: dict[str, Any] | None = None, **shape: Any
) -> dict[str, Any]:
    """Prints and writes results by their names, as they come, after those from `before`."""
    results = dict(before or {})
    for name, figures in found:
        results[name] = figures
        print(name, shown(figures), flush=True)
        write(path, **shape, results=results)
    return results


def shown(figures: Any) -> Any:
    """Figures with four digits each."""
    if isinstance(figures, dict):
        return {name: shown(value) for name, value in figures.items()}
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


def write(path: Path, **found: Any) -> None:
    """Writes what was found, with the time, the device and the versions.

    Written whole and renamed: a run that is killed leaves a record that can be read.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(environment() | found, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


@functools.cache
def environment() -> dict[str, Any]:
    """When and on what this process measures."""
    device = jax.devices()[0]
    reported = reported_by_driver() if is_cuda(device) else []
    found = {name: versions.installed(name) for name in _PACKAGES.split()}
    own = {"triax": versions.__version__, "python": platform.python_version()}
    return {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device.device_kind,
        "driver": next((version for _, version in reported), None),
        "host_cores": os.cpu_count(),
        "versions": own | {name: version for name, version in found.items() if version},
    }


def where(record: dict[str, Any]) -> str:
    """On what and when a record was made, in one line."""
    names = [name for name in ("triax", "jax", "triton") if name in record["versions"]]
    versions = (f"{name} {record['versions'][name]}" for name in names)
    return ", ".join([record["device"], *versions, record["written"][:10]])


def reason(error: Exception) -> str:
    """Why there are no figures, in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def check(what: str, actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Ends the script if results differ by more than a share of what is expected."""
    off = difference(actual, expected)
    if not off <= tolerance:
        sys.exit(f"{what}: wrong by {off:.3g} of what is expected, which may be {tolerance}")


def difference(actual: Any, expected: Any) -> float:
    """The norm of the difference of any leaf, over that of what is expected; inf where it is NaN.

    Integers differ by 0 or by inf.
    """
    found = 0.0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if a.shape != b.shape or not jnp.issubdtype(b.dtype, jnp.floating):
            off = 0.0 if jnp.array_equal(a, b) else math.inf
        else:
            off = float(_norm(a, b) / (_norm(b) + 1e-30))
        found = max(found, off if math.isfinite(off) else math.inf)
    return found


@jax.jit
def _norm(a: jax.Array, b: Any = 0.0) -> jax.Array:
    wide = lambda x: jnp.asarray(x).astype("float32")
    return jnp.sqrt(jnp.sum(jnp.square(wide(a) - wide(b))))
