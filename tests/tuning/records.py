"""Records to write and look up."""

import dataclasses

import triton

from triax.tuning.key import FORMAT, Key
from triax.tuning.store import Record, Timing


def key(index):
    return Key(
        format=FORMAT,
        kernel=f"kernel_{index}",
        source="0" * 20,
        arguments={"n": str(index)},
        dtypes={"x_ptr.0": "float32"},
        candidates=tuple(f"BLOCK={64 << i}" for i in range(40)),
        options={},
        gpu="Imaginary GPU",
        compute_capability=90,
        triton=triton.__version__,
        moved_bytes=4096,
    )


def record(index, time=1.0):
    timings = [Timing(name, time + i, 10) for i, name in enumerate(key(index).candidates)]
    found = Record.now(key(index), "BLOCK=64", timings, "random floats")
    return dataclasses.replace(found, date="2026-01-01T00:00:00+00:00")
