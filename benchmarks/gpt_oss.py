"""gpt-oss-120b's own layer (biases, limits, interleaved columns) against the same one without them.

Forward and backward, in bfloat16, with 16,384 tokens that choose 4 of the 16 experts of one of
eight GPUs, and with 8,192 that choose 4 of all 128. `matmuls` are dense ones of as many operations.
Each is timed in turn, in bursts after a rest and then at the GPU's power limit. Before, results of
the kernels are checked against a JAX function's.

    python -m benchmarks.gpt_oss [--output FILE]
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS, dense_products, normal, with_gradients
from benchmarks.harness.timing import in_turn
from triax import moe

OWN = LAYERS["gpt-oss-120b"]
SHAPES = {"16 experts": OWN, "128 experts": OWN._replace(tokens=8192, experts=128)}
ROUTER = moe.Router(OWN.top_k, normalize=True)
CLAMPED = moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0)


def clamped(gate, up):
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def layer(given, **layout):
    x, logits, experts = given
    return moe.feed_forward(x, logits, dataclasses.replace(experts, **layout), ROUTER).tokens


PLAIN = "swiglu, no biases"
WAYS = {
    PLAIN: lambda given: layer(given, b_gate_up=None, b_down=None),
    "gpt-oss": functools.partial(layer, activation=CLAMPED, interleaved=True),
    "gpt-oss, a JAX function": functools.partial(layer, activation=clamped, interleaved=True),
}


def figures(way, us, limited):
    return {
        "ms": us[way] / 1000,
        "of_plain": us[way] / us[PLAIN],
        "of_matmuls": us["matmuls"] / us[way],
        "limited_ms": limited[way] / 1000,
        "limited_of_plain": limited[way] / limited[PLAIN],
        "limited_of_matmuls": limited["matmuls"] / limited[way],
    }


def measure():
    for name, shape in SHAPES.items():
        given = shape.inputs()
        biases = {
            "b_gate_up": normal(4, shape.experts, 2 * shape.width),
            "b_down": normal(5, shape.experts, shape.hidden),
        }
        given = given._replace(experts=dataclasses.replace(given.experts, **biases))
        programs = {way: jax.jit(with_gradients(run)) for way, run in WAYS.items()}
        programs["matmuls"] = jax.jit(lambda given: dense_products(given, OWN.top_k))
        record.check(name, *(programs[way](given) for way in list(WAYS)[1:]), 0.01)
        timed = {way: (program, given) for way, program in programs.items()}
        us = in_turn(timed, rounds=16, bursts=True)
        limited = in_turn(timed, rounds=12, target_ms=60.0)
        yield name, {way: figures(way, us, limited) for way in us}


if __name__ == "__main__":
    record.main(measure, hidden=OWN.hidden, width=OWN.width, top_k=OWN.top_k)
