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


@pytest.mark.slow("the store is files and the standard library")
def test_four_processes_write_the_same_keys(tmp_path):
    writers = [start("writers.py", tmp_path, seed, 20) for seed in range(4)]
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


@pytest.mark.slow("the store is files and the standard library")
def test_killed_in_the_middle_of_writing(tmp_path):
    """100 times kill -9: every file there is parses, and what was there before is not lost."""
    process = start("killed.py", tmp_path, 100)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output == "100 killed\n"
    assert len(Store(tmp_path, "test").paths()) == 5


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run_job(count, seed, tmp_path, *, dies=-1, shared=()):
    """The configs each process chose. Processes in `shared` start with the first one's store."""
    address = free_address()
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
@pytest.mark.parametrize(("count", "seed"), [(2, 1), (4, 3)])
def test_a_job_agrees_on_every_config(count, seed, tmp_path):
    results = run_job(count, seed, tmp_path)
    assert len(results) == count
    assert len(results[0]) == 6
    assert all(result == results[0] for result in results)


@pytest.mark.cuda_plugin
@pytest.mark.slow("others agree through the same service")
def test_different_stores_to_begin_with(tmp_path):
    """Half of the processes know configs of another day; the job still uses one for each key."""
    run_job(1, 7, tmp_path)
    (tmp_path / "store-0").rename(tmp_path / "before")
    results = run_job(4, 8, tmp_path, shared=(1, 3))
    assert all(result == results[0] for result in results)


@pytest.mark.cuda_plugin
@pytest.mark.slow("others agree through the same service")
def test_a_process_that_dies_before_publishing_blocks_nobody(tmp_path):
    start_time = time.monotonic()
    results = run_job(4, 5, tmp_path, dies=2)
    assert len(results) == 3
    assert all(result == results[0] for result in results)
    assert time.monotonic() - start_time < 60


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("delays", [(2, 0), (0, 2)])
def test_one_that_cannot_measure_runs_what_the_other_measured(tmp_path, driver, delays):
    """Whoever comes first. The second has no cuda-bindings."""
    driver(ms={"16": 30, "4": 3, "1": 30})
    results = run_kernel(tmp_path, delays, [with_driver(tmp_path), {}])
    assert [r["source"] for r in results] == ["measured now", "another process of this job"]
    assert [r["grid"] for r in results] == [4, 4]


@pytest.mark.cuda_plugin
def test_processes_that_can_all_measure_do_it_once(tmp_path, driver):
    driver(ms={"16": 30, "4": 3, "1": 30})
    results = run_kernel(tmp_path, (0, 0, 0), [with_driver(tmp_path)] * 3)
    assert sorted(r["source"] for r in results) == [
        *["another process of this job"] * 2,
        "measured now",
    ]
    assert {r["grid"] for r in results} == {4}


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("delays", [(0, 2), (2, 0)])
def test_cached_with_stores_that_differ(tmp_path, driver, delays):
    """What one process knows, all use, also where one that knows nothing comes first."""
    driver(ms={"16": 30, "4": 3, "1": 30})
    run_kernel(tmp_path, (0,), [with_driver(tmp_path)])
    cached = {"TRIAX_AUTOTUNE": "cached"}
    results = run_kernel(tmp_path, delays, [cached, cached])
    assert [r["source"] for r in results] == ["user store", "another process of this job"]
    assert [r["grid"] for r in results] == [4, 4]


def with_driver(tmp_path):
    path = f"{tmp_path / 'driver'}:{ROOT / 'src'}:{ROOT}"
    return {"FAKE_DRIVER": os.environ["FAKE_DRIVER"], "PYTHONPATH": path}


def run_kernel(tmp_path, delays, environments):
    """What each process of a job says of one kernel; each has a store of its own."""
    address = free_address()
    processes = [
        start(
            "one_kernel.py",
            address,
            len(delays),
            index,
            delay,
            **{
                "TRIAX_CUDA_ARCH": "90",
                "TRIAX_CACHE_DIR": str(tmp_path / f"store-{index}"),
                **environment,
            },
        )
        for index, (delay, environment) in enumerate(zip(delays, environments, strict=True))
    ]
    lines = [process.stdout.readline() for process in processes]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert all(lines), "\n".join(errors)
    return [json.loads(line) for line in lines]
