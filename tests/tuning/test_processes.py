"""Several processes: one store written by many and killed, one job that must agree."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tuning.records import key
from triax.tuning.store import Store

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


def start(program, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "JAX_PLATFORMS": "cpu",
            **environment,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_processes_write_the_same_keys(tmp_path):
    writers = [start("writers.py", tmp_path, seed, 20) for seed in range(8)]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    store = Store(tmp_path, "test")
    records = list(store.records())
    assert len(records) == 5
    assert all(r is not None for _, r in records)
    for index in range(5):
        found = store.find(key(index))
        assert found is not None
        assert found.config == "BLOCK=64"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p, _ in records)


def test_killed_in_the_middle_of_writing(tmp_path):
    """200 times kill -9: every file there is parses, and what was there before is not lost."""
    process = start("killed.py", tmp_path, 200)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output == "200 killed\n"
    assert len(Store(tmp_path, "test").paths()) == 5


def run_job(count, seed, tmp_path, *, dies=-1, shared=()):
    """The configs each process chose. Processes in `shared` start with the first one's store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        start(
            "job.py",
            address,
            count,
            index,
            seed,
            dies,
            TRIAX_CUDA_ARCH="90",
            TRIAX_CACHE_DIR=str(tmp_path / f"store-{index}"),
            TRIAX_CACHE_PATH=str(tmp_path / "before") if index in shared else "",
        )
        for index in range(count)
    ]
    lines = [process.stdout.readline() for process in processes]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        if process is processes[dies] and dies >= 0:
            assert process.returncode == 9, errors
    return [json.loads(line) for index, line in enumerate(lines) if index != dies]


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("count", "seed"), [(2, 1), (2, 2), (4, 3)])
def test_a_job_agrees_on_every_config(count, seed, tmp_path):
    results = run_job(count, seed, tmp_path)
    assert len(results) == count
    assert len(results[0]) == 6
    assert all(result == results[0] for result in results)


@pytest.mark.cuda_plugin
def test_different_stores_to_begin_with(tmp_path):
    """Half of the processes know configs of another day; the job still uses one for each key."""
    run_job(1, 7, tmp_path)
    (tmp_path / "store-0").rename(tmp_path / "before")
    results = run_job(4, 8, tmp_path, shared=(1, 3))
    assert all(result == results[0] for result in results)


@pytest.mark.cuda_plugin
def test_a_process_that_dies_before_publishing_blocks_nobody(tmp_path):
    start_time = time.monotonic()
    results = run_job(4, 5, tmp_path, dies=2)
    assert len(results) == 3
    assert all(result == results[0] for result in results)
    assert time.monotonic() - start_time < 60
