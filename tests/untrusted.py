"""Coverage-guided fuzzing of what reads text and arguments of others, by atheris.

    pip install atheris
    python -m tests.untrusted store -max_total_time=300
    python -m tests.untrusted all -max_total_time=120     # writes benchmarks/untrusted.json

`store` reads bytes as a stored record: ValueError is all that may come out.
`command` runs the command `triax`, in folders of its own: an exit status, and no traceback.
`arguments` calls kernels with operands, grids and results of any kind: errors of Triax alone.

What comes after the target is for libFuzzer. A failure is an exception that nobody caught.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import atheris

HOME = pathlib.Path(tempfile.mkdtemp(prefix="triax-fuzz-"))
os.environ.update(
    JAX_PLATFORMS="cpu", TRIAX_CACHE_DIR=str(HOME / "cache"), TRITON_CACHE_DIR=str(HOME / "triton")
)

with atheris.instrument_imports(include=["triax"]):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import triax
    from tests import kernels
    from tests.tuning import records
    from triax import cli, errors
    from triax.tuning import store

VALID = records.record(0).to_json()
COMMANDS = (
    *("doctor", "tune", "explain", "cache", "list", "show", "clear"),
    *("--all", "--json", "--ptx", "--into", "-v", "--version"),
    *(
        "--output",
        "--help",
        "none.json",
        "none.py:f",
        "os:getcwd",
        "a:b:c",
        ":",
    ),
)


NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1.5, float("nan"), 1e300, 10**400, True)
NAMES = ("../../x", "", "\x00", "\ud800", "a" * 5000, "BLOCK=64", "kernel_0", "__class__")


def pick(data: Any, choices: Sequence[Any]) -> Any:
    return choices[data.ConsumeIntInRange(0, len(choices) - 1)]


def text(data: Any) -> str:
    return str(data.ConsumeUnicodeNoSurrogates(data.ConsumeIntInRange(0, 40)))


def json_value(data: Any, depth: int = 0) -> Any:
    match data.ConsumeIntInRange(0, 7 if depth < 3 else 5):
        case 0 | 1:
            return pick(data, NUMBERS)
        case 2:
            return pick(data, NAMES)
        case 3 | 4:
            return text(data)
        case 5:
            return None
        case 6:
            return [json_value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))]
        case _:
            return {pick(data, NAMES): json_value(data, depth + 1)}


def changed(data: Any, of: Any) -> Any:
    """The JSON value with one part of it changed, added or left out."""
    if not isinstance(of, dict | list) or not of or not data.ConsumeIntInRange(0, 5):
        return json_value(data)
    place = pick(data, list(of) if isinstance(of, dict) else range(len(of)))
    if not data.ConsumeIntInRange(0, 9):
        del of[place]
    elif isinstance(of, dict) and not data.ConsumeIntInRange(0, 9):
        of[text(data)] = of[place]
    else:
        of[place] = changed(data, of[place])
    return of


def read_store(of: bytes) -> None:
    """Bytes, or a record with changed parts."""
    data = atheris.FuzzedDataProvider(of)
    if not data.ConsumeIntInRange(0, 5):
        found = data.ConsumeBytes(len(of))
    else:
        record = json.loads(VALID)
        for _ in range(data.ConsumeIntInRange(1, 3)):
            record = changed(data, record)
        found = json.dumps(record).encode()
    file = HOME / "record.json"
    file.write_bytes(found)
    with contextlib.suppress(ValueError):
        kept = store.Store(file.parent, "a test").read(file)
        assert store.Record.from_json(kept.to_json()) == kept
        place = store.Store(HOME / "cache", "a test")
        assert place.path(kept.key).parent == place.folder, kept.key.name


def run_command(of: bytes) -> None:
    data = atheris.FuzzedDataProvider(of)
    arguments = [
        pick(data, COMMANDS) if data.ConsumeIntInRange(0, 3) else text(data)
        for _ in range(data.ConsumeIntInRange(0, 5))
    ]
    if "clear" in arguments:  # which asks a person
        return
    os.chdir(HOME)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = cli.main(arguments)
        except SystemExit as ended:  # as argparse does
            status = ended.code
    assert isinstance(status, int), (arguments, status)
    assert "Traceback" not in said.getvalue(), (arguments, said.getvalue())


def value(data: Any, depth: int = 0) -> Any:
    """Anything one may pass where an argument is wanted."""
    kinds = (jnp.float32, jnp.int8, jnp.bfloat16, bool, jnp.complex64, "float8_e4m3fn", "int4")
    match data.ConsumeIntInRange(0, 9 if depth < 2 else 6):
        case 0:
            return pick(data, (*NUMBERS, 1j))
        case 1:
            return data.ConsumeInt(8)
        case 2:
            return text(data)
        case 3:
            return pick(data, (None, object(), slice(1), ..., b"", frozenset()))
        case 4:
            shape = tuple(data.ConsumeIntInRange(0, 3) for _ in range(data.ConsumeIntInRange(0, 3)))
            return jnp.zeros(shape, pick(data, kinds))
        case 5:
            return pick(data, (np.float64(2), np.zeros(3), np.array("a"), np.zeros(2, "O")))
        case 6:
            shape = tuple(
                data.ConsumeIntInRange(-2, 70) for _ in range(data.ConsumeIntInRange(0, 3))
            )
            with contextlib.suppress(Exception):  # JAX may refuse the shape itself
                return jax.ShapeDtypeStruct(shape, pick(data, kinds))
            return shape
        case 7:
            return [value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))]
        case 8:
            return tuple(value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3)))
        case _:
            return {text(data): value(data, depth + 1)}


def call_kernel(of: bytes) -> None:
    data = atheris.FuzzedDataProvider(of)
    x = jnp.zeros(64)
    arguments: list[Any] = [x, x]
    keywords: dict[str, Any] = {
        "kernel": kernels.add_kernel,
        "out_type": jax.ShapeDtypeStruct((64,), jnp.float32),
        "grid": (1,),
        "n": 64,
        "BLOCK": 64,
    }
    for _ in range(data.ConsumeIntInRange(1, 3)):
        names = (*keywords, "num_warps", "num_stages", "input_output_aliases", "zeroed_outputs")
        names += ("name", "backend_options", "vmap_method", "configs", "constexprs", text(data))
        match data.ConsumeIntInRange(0, 3):
            case 0 if arguments:
                arguments[data.ConsumeIntInRange(0, len(arguments) - 1)] = value(data)
            case 1:
                arguments.append(value(data))
            case _:
                keywords[pick(data, names)] = value(data)
    with contextlib.suppress(errors.TriaxError):
        jax.eval_shape(lambda: triax.triton_call(*arguments, **keywords))


TARGETS = {"store": read_store, "command": run_command, "arguments": call_kernel}


def write_record(options: Sequence[str]) -> int:
    """Runs all targets, each in a process of its own, and returns how many found something."""
    targets = {}
    for name in TARGETS:
        command = [sys.executable, "-m", "tests.untrusted", name, "-len_control=0", *options]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        counts = re.search(r"^Done (\d+) runs in (\d+) second", done.stderr, re.MULTILINE)
        if done.returncode or counts is None:
            print(done.stderr, file=sys.stderr)
        inputs, seconds = map(int, counts.groups()) if counts else (0, 0)
        targets[name] = {"inputs": inputs, "seconds": seconds, "failed": bool(done.returncode)}
    found: dict[str, Any] = {"written": time.strftime("%Y-%m-%d", time.gmtime())}
    packages = ("atheris", "jax", "triton")
    found["versions"] = {name: importlib.metadata.version(name) for name in packages}
    file = pathlib.Path(__file__).parents[1] / "benchmarks" / "untrusted.json"
    file.write_text(json.dumps(found | {"targets": targets}, indent=1) + "\n")
    return sum(of["failed"] for of in targets.values())


if __name__ == "__main__":
    if sys.argv[1] == "all":
        sys.exit(write_record(sys.argv[2:]))
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
