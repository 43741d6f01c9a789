"""gpt-oss-120b's own layer (biases, limits, interleaved columns) against the same one without them.

Forward and backward, in bfloat16, with 16,384 tokens that choose 4 of the 16 experts of one of
eight GPUs, and with 8,192 that choose 4 of all 128. `matmuls` are dense ones of as many operations.
Each is timed in turn, in bursts after a rest and then at the GPU's power limit. Before, results of
the kernels are checked against a JAX function's. Writes `benchmarks/gpt_oss.json`.

    python benchmarks/gpt_oss.py [--output FILE]
"""

from __future__ import annotations

import functools
import sys

import gpu_record
import jax
import jax.numpy as jnp

from triax import moe

HIDDEN = WIDTH = 2880
TOP_K = 4
SHAPES = {"16 experts": (16384, 16), "128 experts": (8192, 128)}
CLAMPED = moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0)


def normal(seed, *shape, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype("bfloat16")


def clamped(gate, up):
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def layer(given, biased=True, **options):
    options |= {name: given[name] for name in ("b_gate_up", "b_down") if biased}
    experts = moe.Experts(given["w_gate_up"], given["w_down"], **options)
    router = moe.Router(TOP_K, normalize=True)
    return moe.feed_forward(given["x"], given["logits"], experts, router).tokens


def matmuls(given):
    """The layer's six products, of rows that all have the weights of one expert."""
    rows = jnp.repeat(given["x"], TOP_K, axis=0)
    up, down = given["w_gate_up"][0], given["w_down"][0]
    wide = rows @ up
    narrow = wide[:, :WIDTH]
    return wide @ up.T, rows.T @ wide, rows @ down.T, narrow @ down, narrow.T @ rows


@functools.partial(jax.jit, static_argnames="function")
def with_gradients(given, function):
    """The result and the gradients, which start from the result: it has to be there before."""
    out, pull = jax.vjp(function, given)
    return out, pull(out)[0]


WAYS = {
    "swiglu, no biases": lambda given: layer(given, biased=False),
    "gpt-oss": lambda given: layer(given, activation=CLAMPED, interleaved=True),
    "gpt-oss, a JAX function": lambda given: layer(given, activation=clamped, interleaved=True),
}


def figures(way, us, limited):
    plain = "swiglu, no biases"
    return {
        "ms": us[way] / 1000,
        "of_plain": us[way] / us[plain],
        "of_matmuls": us["matmuls"] / us[way],
        "limited_ms": limited[way] / 1000,
        "limited_of_plain": limited[way] / limited[plain],
        "limited_of_matmuls": limited["matmuls"] / limited[way],
    }


def main():
    output = gpu_record.output(__doc__, __file__)
    found = {}
    for name, (tokens, experts) in SHAPES.items():
        given = {
            "x": normal(0, tokens, HIDDEN),
            "logits": normal(1, tokens, experts).astype("float32"),
            "w_gate_up": normal(2, experts, HIDDEN, 2 * WIDTH, scale=HIDDEN**-0.5),
            "w_down": normal(3, experts, WIDTH, HIDDEN, scale=WIDTH**-0.5),
            "b_gate_up": normal(4, experts, 2 * WIDTH),
            "b_down": normal(5, experts, HIDDEN),
        }
        programs = {
            way: functools.partial(with_gradients, function=run) for way, run in WAYS.items()
        }
        programs["matmuls"] = jax.jit(matmuls)
        actual, expected = (programs[way](given) for way in list(WAYS)[1:])
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            a, b = a.astype("float32").ravel(), b.astype("float32").ravel()
            error = jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
            if not error <= 0.01:
                sys.exit(f"{name}: the kernel and the function differ by {error}")
        del actual, expected
        timed = {way: (program, given) for way, program in programs.items()}
        us = gpu_record.in_turn(timed, rounds=16, bursts=True)
        limited = gpu_record.in_turn(timed, rounds=12, target_ms=60.0)
        found[name] = {way: figures(way, us, limited) for way in us}
        for way, of in found[name].items():
            print(name, way, {key: round(value, 3) for key, value in of.items()})
    shape = {"hidden": HIDDEN, "width": WIDTH, "top_k": TOP_K}
    gpu_record.write(output, **shape, results=found)


if __name__ == "__main__":
    main()
