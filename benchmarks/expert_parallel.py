"""How fast `dispatch` and `combine` are on all GPUs of this host, and the layer with them.

Each GPU has 16,384 tokens of DeepSeek-V3's width, 8 of 256 experts each. Against them stands what
one would write by hand: `permute` to a row per (token, expert), two `all_to_all`s of these rows in
equal parts, `unpermute`. Times are the host's, of many calls after one another, in milliseconds.
Triax's results are checked before anything is timed. The same is timed where all tokens choose
experts of one GPU, for which there is no such way by hand: parts are not equal.

"all_to_all" is what Triax does where no kernel can write to the other GPUs.

Of 8-bit tokens with their scales `dispatch` alone is timed, against bfloat16.

The layer with its experts spread over the GPUs is profiled, in one part and with its tokens in two,
so that one part could be exchanged while experts work on the other. The layer with its tokens
sharded over an explicit axis, and all experts on each GPU, is compared with one GPU that has all
tokens. The record is `expert_parallel_N.json`, of N GPUs.

    python -m benchmarks.expert_parallel [--output FILE]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness import inputs, record
from benchmarks.harness.inputs import LAYERS
from benchmarks.harness.timing import kernels, wall_ms
from triax import moe
from triax.moe.expert_parallel import exchange

TOKENS, EXPERTS = 16384, 256
_, HIDDEN, _, TOP_K, WIDTH = LAYERS["deepseek-v3"]
ROUTER = moe.Router(TOP_K, normalize=True)
LAYER_EXPERTS = 64  # of the whole layer: what the GPUs can hold with gradients
CALLS = 8
WAYS = "triax", "all_to_all"  # by the kernel, and as on GPUs that cannot write to each other
AXIS = "expert"


def swap(rows):
    return jax.lax.all_to_all(rows, AXIS, split_axis=0, concat_axis=0, tiled=True)


def by_hand(x, weights, experts):
    """One row per (token, expert), as if every GPU got as many."""
    plan = moe.make_plan(experts, EXPERTS)
    rows = swap(moe.permute(x, plan))
    rows = swap(jax.lax.optimization_barrier(rows))
    return moe.unpermute(rows, plan, weights)


def by_triax(most=None):
    def run(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, AXIS, num_rows=most)
        rows = jax.lax.optimization_barrier(sent.rows)
        return moe.combine(rows, sent.plan, weights=sent.weights)

    return run


def way_of(name):
    """A context in which programs are lowered to exchange in this way."""
    if name != "all_to_all":
        return contextlib.nullcontext()
    return mock.patch.object(exchange, "_between_gpus", return_value=None)


def num_rows(tokens):
    """A fiftieth more than a GPU gets on average, which even choices never reach."""
    return tokens * TOP_K * 51 // 50


def with_gradients(function, fixed=0):
    """The function, and the gradients of its operands but the last `fixed`."""

    def run(*operands):
        *operands, gradient = operands
        moving = len(operands) - fixed
        y, pull = jax.vjp(lambda *some: function(*some, *operands[moving:]), *operands[:moving])
        return y, *pull(gradient)

    return run


def layer(parts):
    """The layer, one part of the tokens after the other."""

    def run(x, logits, w_gate_up, w_down):
        weights, experts = moe.route(logits, ROUTER)
        rows = num_rows(len(x))
        sent = moe.dispatch(x, weights, experts, LAYER_EXPERTS, AXIS, num_rows=rows)
        h = moe.glu(moe.ragged_dot(sent.rows, w_gate_up, sent.group_sizes), sent.weights)
        y = moe.ragged_dot(h, w_down, sent.group_sizes)
        return moe.combine(y, sent.plan, weights=None)

    def run_parts(x, logits, w_gate_up, w_down):
        pairs = zip(jnp.split(x, parts), jnp.split(logits, parts), strict=True)
        return jnp.concatenate([run(*pair, w_gate_up, w_down) for pair in pairs])

    return run_parts


def whole_layer(x, logits, w_gate_up, w_down):
    """With all experts on each GPU."""
    return moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), ROUTER).tokens


time_ms = functools.partial(wall_ms, samples=7, calls=CALLS)


def profile_ms(program, *operands):
    """Of a call, how long the first GPU exchanges, how long it does other work, how long both."""
    spans = {True: [], False: []}
    for name, start, end in kernels(program, *operands, calls=CALLS):
        name = name.lower().replace("_", "")
        spans["nccl" in name or "exchangerows" in name].append((start, end))
    exchange, work = (length(found) * 1e-6 / CALLS for found in (spans[True], spans[False]))
    either = length(spans[True] + spans[False]) * 1e-6 / CALLS
    return {"exchange": exchange, "work": work, "both": exchange + work - either}


def length(spans):
    """Of all spans together; what they share counts once."""
    found, end = 0, 0
    for first, last in sorted(spans):
        found += max(0, last - max(first, end))
        end = max(end, last)
    return found


def measure_8_bits(on_all, x, weights, experts):
    """Dispatch of tokens that were quantized before, with their scales, against bfloat16."""

    def send(x, weights, experts):
        how = {"num_rows": num_rows(TOKENS)}
        return moe.dispatch(x, weights, experts, EXPERTS, AXIS, **how).rows

    program = on_all(send)
    found = {"bfloat16": {"ms": (whole_ms := time_ms(program, x, weights, experts)), "ratio": 1.0}}
    for name, block in {"a scale for each token": None, "for each 128 numbers": 128}.items():
        x8 = on_all(lambda x, block=block: moe.quantize(x, block=(1, block)))(x)
        rows = program(x8, weights, experts).dequantize("bfloat16")
        wanted = program(x8.dequantize("bfloat16"), weights, experts)
        record.check(f"dispatch of 8 bits, {name}", rows, wanted)
        del rows, wanted
        ms = time_ms(program, x8, weights, experts)
        found[name] = {"ms": ms, "ratio": ms / whole_ms}
    return found


def measure():
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    normal = functools.partial(inputs.normal, out_shardings=NamedSharding(mesh, P(AXIS)))

    def on_all(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))

    x, gradient = (normal(seed, count * TOKENS, HIDDEN) for seed in (0, 1))
    route = on_all(lambda logits: tuple(moe.route(logits, ROUTER)))
    weights, experts = route(normal(2, count * TOKENS, EXPERTS, dtype="float32"))

    def compare(functions, *operands):
        """Their times, and their shares of the last one's."""
        times = {}
        for key, function in functions.items():
            with way_of(key):
                times[key] = time_ms(on_all(function), *operands)
        *_, by_hand_ms = times.values()
        return {key: {"ms": ms, "ratio": ms / by_hand_ms} for key, ms in times.items()}

    def check(name, function, *operands):
        """Weights that sum up to 1 give the tokens back."""
        record.check(name, on_all(function)(x, *operands), x, 0.02)

    rows = num_rows(TOKENS)
    functions = {name: by_triax(rows) for name in WAYS}
    for name, function in functions.items():
        with way_of(name):
            check(name, function, weights, experts)
    functions["by hand"] = by_hand
    yield "forward", compare(functions, x, weights, experts)
    functions = {name: with_gradients(function, fixed=1) for name, function in functions.items()}
    yield "forward and backward", compare(functions, x, weights, experts, gradient)
    all_to_one = route(normal(7, count * TOKENS, EXPERTS // count, dtype="float32"))
    for way in WAYS:
        name, function = f"all tokens to one GPU, {way}", by_triax()
        both = with_gradients(function, fixed=1)
        with way_of(way):
            check(name, function, *all_to_one)
            forward_ms = time_ms(on_all(function), x, *all_to_one)
            both_ms = time_ms(on_all(both), x, *all_to_one, gradient)
        yield name, {"forward_ms": forward_ms, "forward_and_backward_ms": both_ms}
    yield "dispatch of 8 bits", measure_8_bits(on_all, x, weights, experts)
    rows = normal(3, count * count * TOKENS, HIDDEN)
    yield "exchange_of_tokens_ms", time_ms(on_all(swap), rows)

    gate_up = normal(4, LAYER_EXPERTS, HIDDEN, 2 * WIDTH, scale=HIDDEN**-0.5)
    down = normal(5, LAYER_EXPERTS, WIDTH, HIDDEN, scale=WIDTH**-0.5)
    logits = normal(6, count * TOKENS, LAYER_EXPERTS, dtype="float32")
    operands = x, logits, gate_up, down, gradient
    for way, parts in itertools.product(WAYS, (1, 2)):
        program = on_all(with_gradients(layer(parts)))
        with way_of(way):
            times = {"ms": time_ms(program, *operands)}
        times["profile_ms"] = profile_ms(program, *operands)
        yield f"layer in {parts} parts, {way}, forward and backward", times

    explicit = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Explicit,))
    specs = P(AXIS), P(AXIS), P(), P(), P(AXIS)
    cut = [
        jax.device_put(operand, NamedSharding(explicit, spec))
        for operand, spec in zip(operands, specs, strict=True)
    ]
    one = jax.device_put(operands, jax.devices()[0])
    whole = lambda a: jax.device_put(a, NamedSharding(explicit, P())).addressable_data(0)
    for name, function, number in (
        ("tokens cut, forward", whole_layer, 4),
        ("tokens cut, forward and backward", with_gradients(whole_layer), 5),
    ):
        program = jax.jit(function)
        results = jax.tree.map(whole, program(*cut[:number]))
        record.check(name, results, program(*one[:number]), 0.03)
        del results
        cut_ms, one_ms = (time_ms(program, *given[:number]) for given in (cut, one))
        yield name, {"ms": cut_ms, "one_gpu_ms": one_ms, "speedup": one_ms / cut_ms}


def main():
    options = record.parse(record.parser(__file__, __doc__))
    count = jax.device_count()
    output = options.output
    if output == Path(__file__).with_suffix(".json"):
        output = output.with_name(f"expert_parallel_{count}.json")
    shape = {"tokens": TOKENS, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K}
    record.keep(output, measure(), gpus=count, **shape, layer_experts=LAYER_EXPERTS)


if __name__ == "__main__":
    main()
