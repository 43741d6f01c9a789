"""What the layer and its kernels take with other versions of JAX and Triton, and without TMA.

    python benchmarks/versions.py [--beside FOLDER …] [--rounds N] [--output FILE]

A FOLDER has other versions of JAX and Triton, as `pip install --target` leaves them. Each version
runs in processes of its own, in turn; the last one runs the first version's kernels as on a JAX
that encodes no TMA descriptors (0.10, which is what Python 3.11 gets). Results are compared with
the first version's before a time counts. Writes `benchmarks/versions.json`.
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

import gpu_record
import jax
import jax.numpy as jnp
import numpy as np

from triax import moe
from triax.bench.timing import time_program
from triax.compat import jax_private

# Tokens, choices, experts, hidden, width.
LAYERS = {"DeepSeek-V3": (8192, 8, 32, 7168, 2048), "64 small experts": (16384, 4, 64, 2560, 1280)}
DECODE_GROUPS, DECODE_DEPTH, DECODE_COLUMNS = 32, 7168, 4096
STORED = ("float8_e4m3fn", "int8", "int4", "float4_e2m1fn")


def normal(seed, *shape, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype("bfloat16")


def layers():
    for name, (tokens, top_k, experts, hidden, width) in LAYERS.items():
        weights = (
            normal(2, experts, hidden, 2 * width, scale=hidden**-0.5),
            normal(3, experts, width, hidden, scale=width**-0.5),
        )
        logits = jax.random.normal(jax.random.key(1), (tokens, experts))
        given = normal(0, tokens, hidden), logits, moe.Experts(*weights)
        recipes = (None, "rows", "blocks") if name == "DeepSeek-V3" else (None,)
        for recipe in recipes:

            def run(given, top_k=top_k, recipe=recipe):
                how = moe.Router(top_k)
                op = lambda *args: moe.feed_forward(*args, how, recipe=recipe).tokens
                out, pull = jax.vjp(op, *given)
                return out, pull(out)

            yield f"layer, {name}{f', {recipe}' if recipe else ''}", run, given
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
    """Few rows times weights in 8 and 4 bits: 8 and 32 rows an expert, and 128."""
    shape = DECODE_GROUPS, DECODE_COLUMNS, DECODE_DEPTH
    w = normal(2, *shape, scale=DECODE_DEPTH**-0.5).swapaxes(1, 2)
    for dtype in STORED:
        how = {"block": (1, None, 1)}
        if dtype == "float4_e2m1fn":
            how = {"block": (1, 32, 1), "scale_dtype": "float8_e8m0fnu"}
        weights = jax.jit(lambda w, d=dtype, h=how: moe.quantize(w, d, transposed=True, **h))(w)
        for rows in (8, 32, 128):
            x = normal(7, DECODE_GROUPS * rows, DECODE_DEPTH)
            sizes = jnp.full(DECODE_GROUPS, rows, "int32")
            name = f"{rows} rows an expert, weights in {dtype}"
            yield name, lambda given: moe.ragged_dot(*given), (x, weights, sizes)


def measure():
    """Times of this process's versions, and a figure of each result."""
    found = {}
    for name, function, given in (*layers(), *decoding()):
        program = jax.jit(function)
        leaves = jax.tree.leaves(program(given))
        size = float(np.sqrt(sum(float(jnp.sum(jnp.square(a.astype("float32")))) for a in leaves)))
        us = time_program(program, given, target_ms=40.0, bursts=name.startswith("layer")).median_us
        found[name] = {"median_us": us, "size": size}
    return found


def run(folder, pointers):
    """`measure` in a process with other versions."""
    paths = [folder] if folder else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ["PYTHONPATH"]])}
    command = [sys.executable, __file__, "--worker", *["--pointers"] * pointers]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{folder or 'the first version'} failed")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pointers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if problem := gpu_record.missing_gpu():
        sys.exit(problem)
    if options.worker:
        supported = not options.pointers and jax_private.supports_tensor_maps()
        with mock.patch.object(jax_private, "supports_tensor_maps", return_value=supported):
            found = measure()
        versions = {name: importlib.metadata.version(name) for name in ("jax", "triton")}
        print(json.dumps({"versions": versions, "descriptors": supported, "results": found}))
        return
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parents[1] / "src"))
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
    gpu_record.write(options.output, rounds=options.rounds, entries=entries)


if __name__ == "__main__":
    main()
