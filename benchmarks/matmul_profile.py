"""What NVIDIA's profiler says of ragged_dot and its gradients, beside cuBLAS's dense matmuls.

Runs itself under `ncu`, one kernel at a time at the clocks that the GPU chooses, and writes
`benchmarks/matmul_profile.json`. cuBLAS is called through PyTorch.

    python benchmarks/matmul_profile.py [--output FILE]
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import subprocess
import sys
from pathlib import Path

import gpu_record

# Rows, depth, columns, groups.
SHAPES = {
    "deepseek-v3": (65536, 7168, 2048, 32),
    "gpt-oss-120b": (65536, 2880, 2880, 16),
    "fine-grained": (65536, 2560, 1280, 64),
}
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
    import jax
    import jax.numpy as jnp
    import torch

    from triax import moe

    rows, depth, columns, groups = SHAPES[preset]
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, depth), jnp.bfloat16)
    w = jax.random.normal(keys[1], (groups, depth, columns), jnp.bfloat16)
    gradient = jax.random.normal(keys[2], (rows, columns), jnp.bfloat16)
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
    command += [sys.executable, __file__, "--run", preset]
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--run", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run(options.run)
    if problem := gpu_record.missing_gpu():
        sys.exit(problem)
    found = [kernel for preset in SHAPES for kernel in profile(preset)]
    for kernel in found:
        print(*(f"{name}: {value}" for name, value in kernel.items()), sep="; ")
    gpu_record.write(options.output, kernels=found)


if __name__ == "__main__":
    main()
