"""Writes the same records into one store over and over; killed by its test."""

import sys
from pathlib import Path

from tests.tuning.records import record
from triax.tuning.store import Store

folder, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = Store(Path(folder), "test")
print("ready", flush=True)
for round_ in range(rounds):
    for index in range(5):
        store.put(record(index, time=seed + round_))
