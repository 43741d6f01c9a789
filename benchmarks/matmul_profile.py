"""What NVIDIA's profiler says of ragged_dot and its gradients, beside cuBLAS's dense matmuls.

Runs itself under `ncu`, one kernel at a time at the clocks that the GPU chooses. cuBLAS is called
through PyTorch.

    python -m benchmarks.matmul_profile [--output FILE]
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import subprocess
import sys

import jax
import jax.numpy as jnp

from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS, normal
from triax import moe

SHAPES = ("deepseek-v3", "gpt-oss-120b", "fine-grained")
KERNELS = "regex:ragged_dot_kernel|group_outer_kernel|nvjet|gemm|cutlass"
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats")
METRICS = {
    "Duration": "duration",
    "SM Frequency": "sm_frequency",
    "Compute (SM) Throughput": "compute_throughput",
    "DRAM Throughput": "dram_throughput",
    "L2 Cache Throughput": "l2_throughput",
    "L2 Hit Rate": "l2_hit_rate",
    "Registers Per Thread": "registers",
    "Dynamic Shared Memory Per Block": "shared_memory",
}


def run(preset):
    """The three products, by Triax and then by cuBLAS: what the profiler looks at."""
    import torch

    tokens, depth, groups, top_k, columns = LAYERS[preset]
    rows = tokens * top_k
    x, gradient = normal(0, rows, depth), normal(2, rows, columns)
    w = normal(1, groups, depth, columns)
    sizes = jnp.full(groups, rows // groups, jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def product(number, x, w, gradient):
        y, pull = jax.vjp(lambda x, w: moe.ragged_dot(x, w, sizes), x, w)
        return (y, *pull(gradient))[number]  # what is not returned is not computed

    for number in range(3):
        jax.block_until_ready(product(number, x, w, gradient))
    a, b, c = (torch.from_dlpack(array) for array in (x, w[0], gradient))
    for left, right in ((a, b), (c, b.T), (a.T, c)):
        torch.mm(left, right)
    torch.cuda.synchronize()


def profile(preset):
    """The metrics of each kernel: forward, rows' and weights' gradient, then the dense ones."""
    command = ["ncu", "--csv", "--clock-control", "none", "--kernel-name", KERNELS]
    command += [word for name in SECTIONS for word in ("--section", name)]
    command += [sys.executable, "-m", "benchmarks.matmul_profile", "--run", preset]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    kernels = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            value = float(row["Metric Value"].replace(",", ""))
            kernel[f"{METRICS[row['Metric Name']]} ({row['Metric Unit']})"] = value
    if len(kernels) != 6:
        raise RuntimeError(f"six kernels were expected:\n{done.stdout[-4000:]}\n{done.stderr}")
    return [{"preset": preset, **kernel} for kernel in kernels.values()]


def main():
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--run", choices=SHAPES, help=argparse.SUPPRESS)
    options = record.parse(parser)
    if options.run:
        return run(options.run)
    found = [kernel for preset in SHAPES for kernel in profile(preset)]
    for kernel in found:
        print(*(f"{name}: {value}" for name, value in kernel.items()), sep="; ")
    record.write(options.output, kernels=found)


if __name__ == "__main__":
    main()
