"""What the layer and its kernels take with other versions of JAX and Triton, and without TMA.

    python -m benchmarks.versions [--beside FOLDER …] [--rounds N] [--output FILE]

A FOLDER has other versions of JAX and Triton, as `pip install --target` leaves them. Each version
runs in processes of its own, in turn; the last one runs the first version's kernels as on a JAX
that encodes no TMA descriptors (0.10, which is what Python 3.11 gets). Results are compared with
the first version's before a time counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS, normal, with_gradients
from benchmarks.harness.timing import median_us
from triax import moe
from triax.compat import jax_private

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"DeepSeek-V3": "deepseek-v3", "64 small experts": "fine-grained"}
DECODE_GROUPS, DECODE_DEPTH, DECODE_COLUMNS = 32, 7168, 4096
QUANTIZED = ("float8_e4m3fn", "int8", "int4", "float4_e2m1fn")


def layers():
    for name, preset in MODELS.items():
        shape = LAYERS[preset]
        given, router = shape.inputs(), moe.Router(shape.top_k)
        for recipe in (None, "rows", "blocks") if name == "DeepSeek-V3" else (None,):
            how = {"router": router, "recipe": recipe}
            op = lambda given, how=how: moe.feed_forward(*given, **how).tokens
            title = f"layer, {name}{f', {recipe}' if recipe else ''}"
            yield title, with_gradients(op), given
    rows = normal(4, 65536, 7168)
    sizes = jnp.full(32, 2048, "int32")
    w = normal(2, 32, 7168, 4096, scale=7168**-0.5)
    yield "ragged_dot", lambda given: moe.ragged_dot(*given), (rows, w, sizes)
    pull = lambda given: jax.vjp(lambda w: moe.ragged_dot(given[0], w, given[3]), given[1])[1](
        given[2]
    )
    yield "ragged_dot, weights' gradient", pull, (rows, w, normal(5, 65536, 4096), sizes)
    experts = jax.random.randint(jax.random.key(6), (8192, 8), 0, 32, "int32")

    def moves(given):
        x, experts = given
        plan = moe.make_plan(experts, 32)
        return moe.unpermute(jax.lax.optimization_barrier(moe.permute(x, plan)), plan)

    yield "plan, permute and unpermute", moves, (normal(0, 8192, 7168), experts)


def decoding():
    """Few rows times weights in 8 and 4 bits, in tiles: 8 and 32 rows an expert, and 128."""
    shape = DECODE_GROUPS, DECODE_COLUMNS, DECODE_DEPTH
    w = normal(2, *shape, scale=DECODE_DEPTH**-0.5).swapaxes(1, 2)
    for dtype in QUANTIZED:
        how = {"block": (1, None, 1)}
        if dtype == "float4_e2m1fn":
            how = {"block": (1, 32, 1), "scale_dtype": "float8_e8m0fnu"}
        made = lambda w, d=dtype, h=how: moe.quantize(w, d, transposed=True, **h).tile()
        weights = jax.jit(made)(w)
        for rows in (8, 32, 128):
            x = normal(7, DECODE_GROUPS * rows, DECODE_DEPTH)
            sizes = jnp.full(DECODE_GROUPS, rows, "int32")
            name = f"{rows} rows an expert, {dtype} in tiles"
            yield name, lambda given: moe.ragged_dot(*given), (x, weights, sizes)


def measure():
    """Times of this process's versions, and a figure of each result."""
    found = {}
    for name, function, given in (*layers(), *decoding()):
        program = jax.jit(function)
        leaves = jax.tree.leaves(program(given))
        size = float(np.sqrt(sum(float(jnp.sum(jnp.square(a.astype("float32")))) for a in leaves)))
        us = median_us(program, given, target_ms=40.0, bursts=name.startswith("layer"))
        found[name] = {"median_us": us, "size": size}
    return found


def run(folder, pointers):
    """`measure` in a process with other versions."""
    paths = [folder] if folder else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "benchmarks.versions", "--worker"]
    command += ["--pointers"] * pointers
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{folder or 'the first version'} failed")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--beside", nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pointers", action="store_true", help=argparse.SUPPRESS)
    options = record.parse(parser)
    if options.worker:
        supported = not options.pointers and jax_private.supports_tensor_maps()
        with mock.patch.object(jax_private, "supports_tensor_maps", return_value=supported):
            found = measure()
        versions = {name: importlib.metadata.version(name) for name in ("jax", "triton")}
        print(json.dumps({"versions": versions, "descriptors": supported, "results": found}))
        return
    os.environ.setdefault("PYTHONPATH", str(ROOT / "src"))
    ways = [("", False), *((folder, False) for folder in options.beside), ("", True)]
    runs = [[run(*way) for way in ways] for _ in range(options.rounds)]
    entries = []
    for index in range(len(ways)):
        each = [turn[index] for turn in runs]
        figures = {}
        for name, first in runs[0][0]["results"].items():
            results = [one["results"][name] for one in each]
            right = all(abs(r["size"] / first["size"] - 1) < 1e-2 for r in results)
            us = statistics.median(r["median_us"] for r in results)
            figures[name] = us if right else None  # a wrong result has no speed
            print(each[0]["versions"], each[0]["descriptors"], name, figures[name], flush=True)
        entries.append({**each[0], "results": figures})
    record.write(options.output, rounds=options.rounds, entries=entries)


if __name__ == "__main__":
    main()
