"""Two processes of four devices, through `jax.distributed`, compute what one of eight does."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests import jobs
from tests.moe.expert_parallel import one_of_a_job
from triax.testing import assert_close

ROOT = Path(__file__).parents[3]


def compare_with_two_processes(folder, num_gpus=0, **environment):
    """Two processes, each with half of the GPUs if there are some, and this one, with all."""
    with jobs.address() as address:
        return _compare(folder, num_gpus, address, environment)


def _compare(folder, num_gpus, address, environment):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
    targets = [folder / str(index) for index in range(2)]
    half = num_gpus // 2
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, one_of_a_job.__file__, address, str(index), str(target)),
                *map(str, range(index * half, (index + 1) * half)),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, target in enumerate(targets)
    ]
    try:
        one = one_of_a_job.run()
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.stderr.close()
    two = {key: value for t in targets for key, value in pickle.loads(t.read_bytes()).items()}
    assert one.keys() == two.keys()
    assert len(one) == 5 * (num_gpus or 8)
    for key, value in one.items():
        assert_close(two[key], value)
    return errors


@pytest.mark.slow("two more processes that import JAX and compile layers")
def test_two_processes_are_as_good_as_one(tmp_path):
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    compare_with_two_processes(tmp_path, XLA_FLAGS=flags)
