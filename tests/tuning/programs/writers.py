"""Four processes write the same records into one store; then writers are killed, over and over.

After each, everything must still be found.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.tuning.records import key, record
from triax.tuning.store import Store

store = Store(Path(sys.argv[1]), "test")


def fork(rounds, time=0):
    """A process that writes all records `rounds` times: a fork, which starts at once."""
    pid = os.fork()
    if pid == 0:
        for round_ in range(rounds):
            for index in range(5):
                store.put(record(index, time=time + round_))
        os._exit(0)
    return pid


def find_all():
    for index in range(5):
        found = store.find(key(index))
        assert found is not None, index
        assert found.config == "BLOCK=64"


for pid in [fork(20, seed) for seed in range(4)]:
    assert os.waitpid(pid, 0)[1] == 0
find_all()
assert len(list(store.folder.iterdir())) == 5  # and nothing else is left
for killed in range(int(sys.argv[2])):
    pid = fork(10**6)
    time.sleep(0.002 + 0.0001 * (killed % 50))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    find_all()
print(f"{killed + 1} killed")
