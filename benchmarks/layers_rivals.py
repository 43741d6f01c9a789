"""An MoE layer, forward and backward, by Triax and by what users would pick instead.

- SonicMoE, ScatterMoE and torch's `grouped_mm` are `benchmarks/harness/torch_layers.py`'s. They run
  as CUDA graphs; one that cannot be captured runs without, and its time is then also the host's.
- tokamax and `jax.lax.ragged_dot` multiply in place of `moe.ragged_dot`, inside Triax's layer.
- "dense" is what the layer's products take as dense ones: a limit.

All have the router's logits, SwiGLU, bfloat16 and all gradients, and are timed in turn, in bursts
after a rest. Results are compared before. `peak_bytes` are temporaries and results; `over_triax` is
a time over Triax's. `left_out` says why a rival has no time: it is not installed, or its result is
wrong. SonicMoE 0.1.2.post1 asks for an older PyTorch than it needs, so it is installed alone:

    pip install --no-deps sonic-moe==0.1.2.post1 quack-kernels==0.4.1 nvidia-cutlass-dsl==4.4.2
    pip install nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi torch-c-dlpack-ext einops tokamax
    python -m benchmarks.layers_rivals [--shapes S ...] [--add] [--output FILE]
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import statistics
import time
from typing import Any, NamedTuple

import jax

from benchmarks.harness import record, rivals, torch_layers
from benchmarks.harness.inputs import LAYERS
from benchmarks.ops import checks
from benchmarks.ops.cases import OPS, Case, Inputs
from benchmarks.ops.competitors import DENSE, OWN, Competitor, competitors, dense
from benchmarks.ops.report import entry
from triax.benchmark import CallTiming, time_bursts

ROUNDS = 3
SLOW_US, SLOW_CALLS = 100_000, 3  # longer than a burst: the GPU is at its power limit anyway


class Way(NamedTuple):
    """What is timed: a call of JAX or of torch, and the bytes that it has in memory at its peak."""

    call: rivals.Call
    is_own: bool
    peak_bytes: int
    outputs: Any


def by_jax(competitor: Competitor, inputs: Inputs) -> Way:
    """A program of JAX, compiled, after its first run."""
    given = jax.block_until_ready(competitor.prepare(inputs))
    compiled = jax.jit(competitor.program).lower(given).compile()
    memory: Any = compiled.memory_analysis()
    call = functools.partial(compiled, given)
    peak_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Way(call, True, peak_bytes, jax.block_until_ready(call()))


def by_torch(layer: torch_layers.TorchLayer, inputs: Inputs) -> Way:
    """A layer of torch as a CUDA graph, where it can be one."""
    import torch

    call = torch_layers.call_of(layer, [inputs[name] for name in OPS["layer"].inputs.split()])
    call()  # compiles and tunes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    del out
    try:
        call = rivals.as_graph(call)
    except RuntimeError as error:
        print(f"not a CUDA graph: {record.reason(error)}", flush=True)
    *others, gate_up, down = rivals.result(call())
    return Way(call, False, peak_bytes, (*others, *layer.stored(gate_up, down, back=True)))


def ways_of(case: Case, inputs: Inputs) -> tuple[dict[str, Way], dict[str, str]]:
    """All whose results are right, and why others are left out."""
    ways, left_out = {}, {}
    wanted = checks.expected(case, inputs)
    makers: dict[str, Any] = {OWN: lambda: by_jax(Competitor(case.program()), inputs)}
    for name, make in torch_layers.LAYERS.items():
        makers[name] = lambda make=make: by_torch(make(case.top_k), inputs)
    makers[DENSE] = lambda: by_jax(dense(case), inputs)
    for name, rival in competitors(case).items():
        if isinstance(rival, str):
            left_out[name] = rival
        else:
            makers[name] = lambda rival=rival: by_jax(rival, inputs)
    for name, make in makers.items():
        start, found = time.perf_counter(), "ready"
        try:
            way = make()
            if name != DENSE and (wrong := checks.problem(case, inputs, way.outputs, wanted)):
                raise ArithmeticError(wrong)
            ways[name] = way._replace(outputs=None)
        except Exception as error:  # out of memory, or anything in a library
            left_out[name] = found = record.reason(error)
        print(f"{case.preset}, {name}, {time.perf_counter() - start:.0f} s: {found}", flush=True)
        gc.collect()  # a cycle somewhere may still hold arrays of gigabytes
    return ways, left_out


def timed(way: Way) -> CallTiming:
    """In bursts after a rest, or a few calls of what is slow."""
    clock = rivals.clock(way.is_own)
    for index in range(SLOW_CALLS + 1):
        clock.record(index, way.call())
    each_us = [clock.between_us(index, index + 1) for index in range(SLOW_CALLS)]
    if min(each_us) > SLOW_US:
        return CallTiming.of(each_us, "events")
    return time_bursts(way.call, clock)


def measure(case: Case) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The results of one layer, as `make bench` has them, and what is left out."""
    ways, left_out = ways_of(case, case.make_inputs())
    timings: dict[str, list[CallTiming]] = {name: [] for name in ways}
    names = [*ways]
    for _ in range(ROUNDS):
        for name in names:
            timings[name].append(timed(ways[name]))
        names.append(names.pop(0))
    us = {name: statistics.median(t.median_us for t in found) for name, found in timings.items()}
    results = []
    for name, found in timings.items():
        samples = sum(timing.samples for timing in found)
        timing = CallTiming.of([t.median_us for t in found], found[0].method, samples)
        times = dataclasses.asdict(timing) | {"graph_us": None}
        more = {"peak_bytes": ways[name].peak_bytes}
        more |= {"over_triax": us[name] / us[OWN]} if OWN in us else {}
        more |= {"fraction_of_dense": us[DENSE] / us[name]} if DENSE in us else {}
        results.append(entry(case, name, times, None, None) | more)
    return results, left_out


def case_of(name: str) -> Case:
    tokens, hidden, experts, top_k, width = LAYERS[name]
    return Case("layer", name, tokens, hidden, experts, top_k, "bfloat16", "uniform", width)


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # ragged_dot needs much of it
    parser = record.parser(__file__, __doc__ or "")
    parser.add_argument("--shapes", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--add", action="store_true", help="keep the record's other results")
    options = record.parse(parser)
    kept = record.known(options.output) if options.add else {"results": [], "left_out": {}}
    results = [r for r in kept["results"] if r["preset"] not in options.shapes]
    left_out = {name: of for name, of in kept["left_out"].items() if name not in options.shapes}
    for name in options.shapes:
        found, left_out[name] = measure(case_of(name))
        results = sorted(results + found, key=lambda r: [*LAYERS].index(r["preset"]))
        for r in found:
            figures = r["median_us"] / 1e3, r.get("over_triax", 0), r["peak_bytes"] / 1e9
            print(name, r["implementation"], *(f"{x:.4g}" for x in figures), r["seconds_method"])
        record.write(options.output, results=results, left_out=left_out)


if __name__ == "__main__":
    main()
