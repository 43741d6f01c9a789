"""Runs `_exchange_rows_kernel` on several GPUs at once: each program is a process, interpreted.

    python -m tests.moe.expert_parallel.programs_of_gpus DEVICES SEED

The processes share the GPUs' memory, whose accesses take a random time; they come in one order for
all, so that a release or acquire that is missing is not seen. Epochs start close to where a signed
number wraps around, as after weeks. Prints the rows that are wrong, and how all ended.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from multiprocessing import get_context

import numpy as np

from triax.binding.launch import ArrayType
from triax.compat import peer_memory
from triax.compat import triton_interpreter as compat
from triax.interpreting import inside, memory, run
from triax.moe.expert_parallel.kernels import _exchange_rows_kernel

EXCHANGES, READERS, ROOM = 5, 2, 1
FIRST = 2**31 - 1  # the epoch before: no flag has been raised since the job began
BLOCKS = {"BLOCK_ROWS": 2, "BLOCK_WIDTH": 2, "BLOCK_TOKENS": 4}
UNIT = peer_memory.PLACES["UNIT"]
FORK = get_context("fork")


def shared(array):
    """A copy in memory that forked processes share."""
    data = np.frombuffer(mmap.mmap(-1, max(array.nbytes, 1)), np.uint8)[: array.nbytes]
    data[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return data.view(array.dtype).reshape(array.shape)


class Memory(memory.Memory):
    """The memory that one program sees: the regions of all GPUs, and the arrays of its launch."""

    def __init__(self, regions, arrays, lock, slow, rng):
        buffers = [
            memory.Buffer(
                name, ArrayType(array.shape, array.dtype), array.reshape(-1).view(np.uint8), True
            )
            for name, array in [*((f"region {i}", r) for i, r in enumerate(regions)), *arrays]
        ]
        super().__init__("exchange_rows", buffers)
        self._lock, self._slow, self._rng = lock, slow, rng

    def _before(self, access, order, values=None):
        if access.buffer.name.startswith("region"):
            slow = order is None and access.action == self._slow
            time.sleep(self._rng.random() * (0.05 if slow else 0.002))

    def update(self, *arguments):
        with self._lock:
            return super().update(*arguments)


def draw(rng, devices, sums):
    """An exchange: of each device, the kernel's arrays, and the rows that it should get."""
    tokens, width, slots = int(rng.integers(1, 9)), int(rng.integers(1, 6)), min(devices, 2)
    row_of = np.full((devices, tokens, slots), -1, np.int32)
    source = np.full((devices, devices * tokens), -1, np.int32)
    filled = np.zeros((devices, devices), np.int32)  # from, to
    for sender, token in np.ndindex(devices, tokens):
        for slot, receiver in enumerate(rng.permutation(devices)[:slots]):
            if rng.random() < 0.7:
                row = receiver * tokens + filled[sender, receiver]
                row_of[sender, token, slot], source[sender, row] = row, token
                filled[sender, receiver] += 1
    x = rng.standard_normal((devices, 3 * tokens if sums else tokens, width)).astype(np.float32)
    if not sums:
        arrays = {"x": x, "source": source, "filled": filled, "received": filled.T}
        made = [np.where(source[d][:, None] >= 0, x[d][source[d]], 0) for d in range(devices)]
    else:
        terms = rng.integers(-1, x.shape[1], (devices, devices * tokens, 2)).astype(np.int32)
        weights = rng.random(terms.shape).astype(np.float32)
        arrays = {"x": x, "terms": terms, "weights": weights, "row_of": row_of}
        arrays |= {"filled": filled.T, "received": filled}
        factors = np.where(terms >= 0, weights, 0)[..., None]
        made = [np.sum(x[d][terms[d]] * factors[d], axis=1) for d in range(devices)]
    made = np.stack(made).reshape(devices, devices, tokens, width).swapaxes(0, 1)
    if not sums:
        exists = np.arange(tokens) < filled.T[..., None]
        expected = np.where(exists[..., None], made, np.nan).reshape(devices, -1, width)
    else:
        made = made.reshape(devices, -1, width)
        there = (row_of >= 0)[..., None]
        expected = np.sum(
            [np.where(there[d], made[d][row_of[d]], 0) for d in range(devices)], axis=2
        )
    arrays["rows"] = np.full(expected.shape, np.nan, np.float32)
    return {name: shared(array) for name, array in arrays.items()}, expected, tokens


def run_program(device, program, launches, regions, lock, barrier, rng):
    """Runs one program of a GPU in all launches, each between two barriers of the GPU."""
    machine, devices, known = run._machine(), len(regions), compat.type_from_name
    for arrays, _, capacity in launches:
        own = {name: array[device] for name, array in arrays.items()}
        addresses = [Memory.address(machine, index) for index in range(devices + len(own) + 2)]
        starts = [address // UNIT for address in addresses[:devices]]
        own["peers"] = np.array([*starts, ROOM], np.int32)
        own["position"] = np.array([device], np.int32)
        slow = ("load" if program < READERS else "") if device == 0 else "store"
        seen = Memory(regions, own.items(), lock, slow, rng)
        arguments = dict.fromkeys(_exchange_rows_kernel.arg_names)
        for (name, array), address in zip(own.items(), addresses[devices:], strict=True):
            dtype = known("*fp32" if array.dtype == np.float32 else "*i32")
            arguments[f"{name}_ptr"] = inside.number(address, dtype)
        sizes = {"capacity": capacity, "num_tokens": len(own["rows"]), "num_terms": len(own["x"])}
        for name, size in sizes.items():
            arguments[name] = inside.number(size, known("i32"))
        constants = {"WIDTH": own["x"].shape[1], "DEVICES": devices, "READERS": READERS}
        constants |= {"TERMS": own["terms"].shape[1] if "terms" in own else 0}
        constants |= {"SUMMED": own["row_of"].shape[1] if "row_of" in own else 0}
        grid = READERS + devices * -(-capacity // BLOCKS["BLOCK_ROWS"])
        barrier.wait()
        if program < grid:
            with machine.running(seen) as rewriter:
                for name, value in {**constants, **BLOCKS, **peer_memory.PLACES}.items():
                    arguments[name] = rewriter.inside(value)
                machine.builder.set_grid_dim(grid, 1, 1)
                machine.builder.set_grid_idx(program, 0, 0)
                seen.enter((program, 0, 0))
                rewriter.function(_exchange_rows_kernel)(**arguments)
        barrier.wait()


def main(devices, seed):
    rng = np.random.default_rng(seed)
    regions = [shared(np.zeros((1 + 2 * ROOM) * UNIT // 4, np.int32)) for _ in range(devices)]
    places = [peer_memory.PLACES[name] for name in ("EPOCH", "ABORT", "ENDED", "BUSY")]
    come = peer_memory.PLACES["COME"] + peer_memory.PLACES["SPACING"] * np.arange(devices)
    for region in regions:
        region[[places[0], *come]] = FIRST
    launches = [draw(rng, devices, sums=bool(number % 2)) for number in range(EXCHANGES)]
    chunks = max(-(-capacity // BLOCKS["BLOCK_ROWS"]) for *_, capacity in launches)
    programs, lock = READERS + devices * chunks, FORK.Lock()
    processes = []
    for device in range(devices):
        barrier = FORK.Barrier(programs)
        for program, stream in enumerate(rng.spawn(programs)):
            given = device, program, launches, regions, lock, barrier, stream
            processes.append(FORK.Process(target=run_program, args=given))
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = {process.exitcode for process in processes}
    for process in processes:
        process.kill()
    for number, (arrays, expected, _) in enumerate(launches):
        if not np.allclose(arrays["rows"], expected, 1e-5, 1e-5, equal_nan=True):
            print(f"exchange {number}: {arrays['rows']} is not {expected}")
    for region in regions:
        region[places[:1]] -= FIRST  # which wraps around, too
    print(f"exit codes {codes}, {[region[places].tolist() for region in regions]}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)
