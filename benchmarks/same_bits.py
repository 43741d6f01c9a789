"""Which batches give a row the same bits, and what it takes that with `triax.same_bits` all do.

A case of tests/gpu/test_batch_invariance.py has the numbers of rows for each group, or of tokens,
in lists of those that give the same bits; and, if kernels depend on them, times of products by the
number of tokens. `example` has the differences of log-probabilities of examples/same_bits.py.

    python -m benchmarks.same_bits [--output FILE] [--only CASE …]
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tests.gpu import test_batch_invariance as cases

import triax
from benchmarks.harness import record
from benchmarks.harness.inputs import normal
from benchmarks.harness.timing import in_turn
from triax import moe

WAYS = {"without": False, "with": True}
CASES = {name: cases.SAME[name] for name in ("ragged_dot, bfloat16", "feed_forward, bfloat16")}
CASES |= cases.NEARLY
PRICED = [name for name in CASES if name.startswith("8 bits") or name.endswith("tiles")]
PRICED += ["weights of int8", "weights of float8_e4m3fn in blocks"]
EXAMPLES = "bfloat16", "8 bits", "MXFP4"
EXPERTS, TOP_K = 32, 4
TOKENS = {1: 8, 8: 3, 128: 3, 4096: 1}  # and the products of a program
SHAPES = {"MXFP4": (2880, 5760), "others": (7168, 4096)}  # of gpt-oss, of DeepSeek-V3


def bits(name):
    """The numbers of rows or tokens that give the same bits, first and last in their batch."""
    run, counts, *options = CASES[name]
    found = {way: {} for way in WAYS}
    for way, count in ((way, count) for way in WAYS for count in counts):
        with triax.same_bits(WAYS[way]):
            out = [run(cases.Batch(count, last), *options) for last in (False, True)]
        key = b"".join(np.asarray(of).tobytes() for of in jax.tree.leaves(out))
        found[way].setdefault(key, []).append(count)
    return {way: list(of.values()) for way, of in found.items()}


def sizes_of(tokens):
    """The sizes of some products' groups; each has other experts for a token."""
    drawn = np.tile(np.arange(EXPERTS), (tokens, 1))
    drawn = np.random.default_rng(0).permuted(drawn, axis=1).reshape(tokens, -1, TOP_K)
    drawn = [drawn[:, i].ravel() for i in range(TOKENS[tokens])]
    return np.array([np.bincount(of, minlength=EXPERTS) for of in drawn], np.int32)


def last_rows(rows, sizes):
    """The last row of each group; zeros of those that have none."""
    return rows[np.maximum(np.cumsum(sizes) - 1, 0)] * (sizes > 0)[:, None]


def case(name, tokens):
    """Rows, weights, and sizes; and the last rows of the first product's groups."""
    run, _, *options = CASES[name]
    depth, columns = SHAPES.get(options[0], SHAPES["others"])
    rows, sizes = normal(0, tokens * TOP_K, depth), sizes_of(tokens)
    weights = normal(1, EXPERTS, depth, columns, scale=depth**-0.5)
    if run is cases.eight_bits:
        rows, weights = cases.in_8_bits(rows, weights, options[0])
    else:
        weights = cases.narrowed(weights, *options)
    wide = rows.dequantize("bfloat16") if run is cases.eight_bits else rows
    wide = last_rows(wide, sizes[0]), weights.dequantize("bfloat16")
    return (rows, weights, jnp.asarray(sizes)), jnp.einsum("ek,ekn->en", *wide)


def compiled(name, tokens):
    """A program that makes the case, and its products both ways."""
    run, _, *options = CASES[name]
    precision = options[1] if run is cases.eight_bits else None
    dot = functools.partial(moe.ragged_dot, precision=precision, preferred_element_type="bfloat16")
    products = lambda given: [dot(*given[:2], sizes) for sizes in given[2]]
    make, found = jax.jit(functools.partial(case, name, tokens)).lower(), {}
    for way, on in WAYS.items():
        with triax.same_bits(on):
            found[way] = jax.jit(products).lower(make.out_info[0]).compile()
    return make.compile(), found


def compile_all(name):
    for tokens in TOKENS:
        compiled(name, tokens)


def price(name, tokens):
    """The time of a product without `same_bits` and with it, and their ratio."""
    make, ways = compiled(name, tokens)
    given, right = make()
    for way, program in ways.items():
        found = last_rows(np.asarray(program(given)[0], np.float32), sizes_of(tokens)[0])
        record.check(f"{name}, {tokens} tokens, {way}", found, right, 2e-2)
    ways = {way: (program, given) for way, program in ways.items()}
    us = in_turn(ways, rounds=5, target_ms=20.0)
    us = {way: each / TOKENS[tokens] for way, each in us.items()}
    return {"median_us": us, "ratio": us["with"] / us["without"]}


def difference(name):
    """The greatest one of log-probabilities in serving and in training, of 256 tokens."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    example, found = importlib.import_module("same_bits"), {}
    for way, on in WAYS.items():
        with triax.same_bits(on):
            found[way] = example.difference(name, 8, 320, 32)
    return found


def prepare(cache):
    """Has this process share with others what it compiles."""
    warnings.filterwarnings("ignore", "ragged_dot dequantizes its weights")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def measure(names, examples):
    """Compiles and compares in processes, and times when they are done."""
    with tempfile.TemporaryDirectory() as cache:
        prepare(cache)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(None, spawn, prepare, (cache,)) as pool:
            found, example = pool.map(bits, names), pool.map(difference, examples)
            list(pool.map(compile_all, [name for name in names if name in PRICED]))
        if examples:
            yield "example", dict(zip(examples, example, strict=True))
        for name, same_bits in zip(names, found, strict=True):
            prices = {tokens: price(name, tokens) for tokens in TOKENS if name in PRICED}
            yield name, {"same_bits": same_bits, "prices": prices}


def main():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, help="the others stay as they are")
    options = record.parse(parser)
    known = record.known(options.output)["results"] if options.only else {}
    found = measure(options.only or CASES, () if options.only else EXAMPLES)
    record.keep(options.output, found, known, experts=EXPERTS, top_k=TOP_K, shapes=SHAPES)


if __name__ == "__main__":
    main()
