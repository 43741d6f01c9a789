"""Several processes: one job that must agree."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run_job(count, seed, tmp_path, *, dies=-1):
    """The configs each process chose."""
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
        )
        for index in range(count)
    ]
    lines = [process.stdout.readline() for process in processes]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        if process is processes[dies] and dies >= 0:
            assert process.returncode == 9, errors
    return [json.loads(line) for index, line in enumerate(lines) if index != dies]


@pytest.mark.slow("its processes take seconds")
@pytest.mark.cuda_plugin
def test_a_job_agrees_on_every_config(tmp_path):
    results = run_job(3, 3, tmp_path)
    assert len(results) == 3
    assert len(results[0]) == 6
    assert all(result == results[0] for result in results)


@pytest.mark.cuda_plugin
@pytest.mark.slow("others agree through the same service")
def test_a_process_that_dies_before_publishing_blocks_nobody(tmp_path):
    results = run_job(3, 5, tmp_path, dies=2)
    assert len(results) == 2
    assert results[0] == results[1]


@pytest.mark.slow("others agree through the same service")
@pytest.mark.cuda_plugin
def test_one_that_cannot_measure_runs_what_the_other_measured(tmp_path, driver):
    """The second, which comes first, has no cuda-bindings."""
    driver(ms={"16": 30, "4": 3, "1": 30})
    (tmp_path / "without" / "cuda").mkdir(parents=True)
    (tmp_path / "without" / "cuda" / "__init__.py").touch()  # instead of what may be installed
    without = {"PYTHONPATH": f"{tmp_path / 'without'}:{ROOT / 'src'}:{ROOT}"}
    results = run_kernel(tmp_path, (2, 0), [with_driver(tmp_path), without])
    assert [r["source"] for r in results] == ["measured now", "another process of this job"]
    assert [r["grid"] for r in results] == [4, 4]


@pytest.mark.slow("others agree through the same service")
@pytest.mark.cuda_plugin
def test_processes_that_can_all_measure_do_it_once(tmp_path, driver):
    driver(ms={"16": 30, "4": 3, "1": 30})
    results = run_kernel(tmp_path, (0, 0), [with_driver(tmp_path)] * 2)
    assert sorted(r["source"] for r in results) == ["another process of this job", "measured now"]
    assert {r["grid"] for r in results} == {4}


def with_driver(tmp_path):
    path = f"{tmp_path / 'driver'}:{ROOT / 'src'}:{ROOT}"
    return {"FAKE_DRIVER": os.environ["FAKE_DRIVER"], "PYTHONPATH": path}


def run_kernel(tmp_path, delays, environments):
    """What each process of a job says of one kernel; each has its own store."""
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
