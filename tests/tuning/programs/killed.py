"""Kills a writer in the middle of its work, over and over, and looks up what is left."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.tuning.records import key, record
from triax.tuning.store import Store

store = Store(Path(sys.argv[1]), "test")
for index in range(5):
    store.put(record(index))
for killed in range(int(sys.argv[2])):
    pid = os.fork()  # a fork starts in no time, and writes at once
    if pid == 0:
        while True:
            for index in range(5):
                store.put(record(index, time=killed))
    time.sleep(0.002 + 0.0001 * (killed % 50))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for index in range(5):
        assert store.find(key(index)) is not None, index
print(f"{killed + 1} killed")
