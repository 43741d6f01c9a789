"""The real worker process and its client, over an imaginary driver.

A candidate is named after the first dimension of its grid, which is what the driver goes by.
"""

import os
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import triton

from tests.interrupts import ROOT, run_program
from triax.devices import Device
from triax.errors import TuningError
from triax.tuning import measure
from triax.tuning.progress import Progress
from triax.tuning.worker import client, messages
from triax.tuning.worker import driver as worker_driver

DEVICE = Device(0, "Imaginary GPU")


def make_job(*grids, timeout_s=5.0, budget_s=20.0, buffers=(), limit_bytes=None):
    return messages.Job(
        buffers=tuple(buffers),
        candidates=tuple(
            messages.CompiledCandidate(
                label=f"grid={grid}",
                cubin=b"machine code",
                entry="kernel",
                grid=(grid, 1, 1),
                num_warps=4,
                num_ctas=1,
                shared_bytes=0,
                scratch_bytes=0,
                parameters=tuple(messages.Pointer(i) for i in range(len(buffers))),
            )
            for grid in grids
        ),
        limit_bytes=limit_bytes,
        timeout_s=timeout_s,
        budget_s=budget_s,
    )


def run(job):
    """The timings by grid."""
    timings = {}
    measure.measure(job, DEVICE, Progress("kernel", 1), timings)
    return {candidate.grid[0]: timings.pop(candidate.label) for candidate in job.candidates}


def times(job):
    """Milliseconds by grid, None where a candidate has no time; and the reasons for that."""
    found = run(job)
    return (
        {grid: timing.median_ms for grid, timing in found.items()},
        {grid: timing.error for grid, timing in found.items() if timing.error},
    )


def best(found):
    return min((g for g in found if found[g] is not None), key=found.get)


def test_each_has_its_time(driver):
    driver(ms={"1": 30, "2": 3, "3": 10})
    found, reasons = times(make_job(1, 2, 3))
    assert reasons == {}
    for grid, expected in ((1, 30), (2, 3), (3, 10)):
        assert expected <= found[grid] < 2 * expected + 5
    assert best(found) == 2


def test_the_first_run_which_loads_the_code_does_not_count(driver):
    log = driver()
    assert run(make_job(1))[1].runs == log.read_text().count("launch 1") - 1


@pytest.mark.slow("processes are the same on every Python")
def test_more_configs_than_there_is_time_for(driver, caplog):
    """The best of those tried, in little more than the budget, and nobody is blamed for time."""
    driver(ms={str(grid): 100 + 10 * ((7 * grid) % 30) for grid in range(1, 31)})
    start = time.monotonic()
    found, reasons = times(make_job(*range(1, 31), timeout_s=10, budget_s=2.5))
    assert time.monotonic() - start < 30
    tried = [grid for grid in found if found[grid] is not None]
    assert 3 < len(tried) < 20
    assert tried == list(range(1, len(tried) + 1))
    assert best(found) == min(tried, key=lambda grid: (7 * grid) % 30)
    assert all("not tried" in reasons[grid] for grid in range(len(tried) + 1, 31))
    assert f"{30 - len(tried)} of 30 configs were not tried" in caplog.text
    assert "grid=30" in caplog.text
    assert "config dropped" not in caplog.text
    assert "tuning kernel: " in caplog.text  # the progress


def test_some_config_is_tried_however_little_time_there_is(driver):
    driver()
    found, reasons = times(make_job(1, 2, 3, budget_s=0))
    assert found[1] is not None
    assert [*reasons] == [2, 3]


def test_a_second_worker_has_what_is_left(driver, monkeypatch):
    """The candidates that were not timed, and the rest of the time."""
    driver(die=[2])
    send, sent = client.Worker.send, []
    monkeypatch.setattr(client.Worker, "send", lambda w, job: (sent.append(job), send(w, job))[1])
    times(make_job(1, 2, 3))
    assert [[c.grid[0] for c in job.candidates] for job in sent] == [[1, 2, 3], [3]]
    first, second = (job.budget_s for job in sent)
    assert 0 < second < first - 0.01 < 20


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize(
    ("what", "grids", "reason"),
    [
        ("fault", {"3": "ILLEGAL_ADDRESS"}, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("refused", {"3": "LAUNCH_OUT_OF_RESOURCES"}, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        ("die", [3], "while it was running, the tuning worker ended"),
        ("hang", [3], "did not end within 1 s"),
    ],
)
def test_a_bad_config_costs_itself_alone(driver, what, grids, reason, caplog):
    driver(**{what: grids}, ms={"5": 0.5})
    found, reasons = times(make_job(1, 2, 3, 4, 5, timeout_s=1.0))
    assert list(reasons) == [3]
    assert reason in reasons[3]
    assert f"config [grid=3]: {reasons[3]}" in caplog.text
    assert all(found[grid] is not None for grid in (1, 2, 4, 5))


@pytest.mark.slow("processes are the same on every Python")
def test_a_worker_that_cannot_even_watch_itself(driver, monkeypatch):
    monkeypatch.setattr(measure, "_GRACE_S", 1.0)
    driver(stuck=[2])
    found, reasons = times(make_job(1, 2, 3, timeout_s=1.0))
    assert list(reasons) == [2]
    assert "said nothing for 2 s" in reasons[2]
    assert found[1] is not None
    assert found[3] is not None


def test_what_was_timed_survives_a_death_in_the_final_round(driver):
    """Close calls run again, in turns: one dies there, the other keeps its time."""
    log = driver(ms={"1": 2.0, "2": 2.1}, die_later={"2": 20})
    found, reasons = times(make_job(1, 2))
    assert found[1] is not None
    assert list(reasons) == [2]
    assert log.read_text().count("launch 1") > 16


def stopped(job):
    """Why the machine could not measure all of a job, and the timings until then."""
    timings = {}
    with pytest.raises(TuningError) as caught:
        measure.measure(job, DEVICE, Progress("kernel", 1), timings)
    return str(caught.value), timings


def test_what_was_found_is_known_where_nothing_can_go_on(driver):
    """The second worker finds too little memory: the first one's context still holds it."""
    driver(die=[2], later={"free_bytes": 100})
    reason, timings = stopped(make_job(1, 2, 3))
    assert "the tuning worker could not begin: measuring needs" in reason
    assert timings["grid=1"].median_ms is not None
    assert "the tuning worker ended" in timings["grid=2"].error
    assert "grid=3" not in timings


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (
            {"refused": {"2": "OUT_OF_MEMORY"}},
            "cuLaunchKernelEx: CUDA_ERROR_OUT_OF_MEMORY (XLA_PYTHON_CLIENT_MEM_FRACTION sets",
        ),
        ({"modules": 1}, "cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY"),
        (
            {"refused": {"2": "DEVICE_UNAVAILABLE"}},
            "cuLaunchKernelEx: CUDA_ERROR_DEVICE_UNAVAILABLE",
        ),
        ({"fault": {"2": "ECC_UNCORRECTABLE"}}, "cuEventRecord: CUDA_ERROR_ECC_UNCORRECTABLE"),
    ],
)
def test_no_config_is_blamed_for_the_machine(driver, caplog, says, reason):
    """Its own failure would let the others win."""
    driver(**says)
    found, timings = stopped(make_job(1, 2, 3))
    assert f"the tuning worker could not go on with config [grid=2]: {reason}" in found
    assert timings["grid=1"].median_ms is not None
    assert timings["grid=2"].out_of_time
    assert "grid=3" not in timings
    assert "config dropped" not in caplog.text
    assert times(make_job(1))[1] == {}  # the next job


def test_errors_about_the_machine_are_the_drivers():
    header = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"
    assert {*header.read_text().split()} >= worker_driver._ABOUT_THE_MACHINE


def test_a_descriptor_has_its_last_dimension_first():
    cu = mock.MagicMock(cuuint32_t=int, cuuint64_t=int)
    cu.cuTensorMapEncodeTiled = lambda *arguments: (0, arguments)
    bench = types.SimpleNamespace(cu=cu, addresses=[4096])
    sizes = {"shape": (5, 6, 64), "strides": (1024, 128, 1), "block_shape": (1, 2, 32)}
    descriptor = messages.TensorMapParameter(0, 7, 2, 3, **sizes, nan_fill=False)
    encoded = worker_driver.Bench.tensor_map(bench, descriptor)
    assert encoded[1:6] == (3, 4096, [64, 6, 5], [256, 2048], [32, 2, 1])


def test_a_worker_that_somebody_kills(driver):
    """Another does its work, once; no config is blamed."""
    driver(killed=[2], later={"killed": [3]})
    assert times(make_job(1, 2))[1] == {}


def test_a_worker_that_somebody_kills_again(driver):
    driver(killed=[2])
    reason, timings = stopped(make_job(1, 2, 3))
    assert "the tuning worker ended: another program or the system killed it" in reason
    assert [*timings] == ["grid=1"]


def test_killing_does_not_wait_for_who_holds_the_pipe(driver):
    driver(grandchild=True)
    worker = client.start(0)
    worker.ready()
    start = time.monotonic()
    worker.kill()
    assert time.monotonic() - start < 20


FORKING = """
import os, sys, threading, time
from triax.tuning import policy
from triax.tuning.worker import client
client.start(0).ready()
held = threading.Event()
def hold():
    with policy._lock, client._lock:
        held.set()
        time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
if os.fork() == 0:
    with policy._lock, client._lock:
        pass
    client.start(0).ready()
    sys.exit(7)  # through what is registered for the end
_, status = os.wait()
os._exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow("its processes take seconds")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_measures_and_ends(driver):
    driver()
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
    assert run_program(FORKING, timeout=60, PYTHONPATH=path).returncode == 7


def test_all_bad(driver):
    driver(fault={"1": "ILLEGAL_ADDRESS", "2": "LAUNCH_FAILED"}, die=[3])
    found, reasons = times(make_job(1, 2, 3))
    assert set(found.values()) == {None}
    assert sorted(reasons) == [1, 2, 3]


@pytest.mark.slow("its processes take seconds")
def test_configs_longer_than_one_run_may_take_are_late_not_bad(driver):
    driver(ms={"1": 60_000, "2": 60_000})
    found = run(make_job(1, 2, timeout_s=0.5))
    assert [timing.out_of_time for timing in found.values()] == [True, True]


def test_memory(driver):
    log = driver(free_bytes=1 << 20)
    big = messages.BufferSpec(1 << 20)
    with pytest.raises(TuningError, match=r"needs 1\d{6} bytes .* may use 524288 "):
        run(make_job(1, buffers=[big]))
    both = messages.BufferSpec(1000, restored=True)
    with pytest.raises(TuningError, match=r"needs 10192 bytes .* may use 1000 "):  # 8192: flush
        run(make_job(1, buffers=[both], limit_bytes=1000))
    first = client.start(0)
    times(make_job(1, 2, buffers=[messages.BufferSpec(1000, restored=True)]))
    assert client.start(0) is first  # it is no reason to end the worker
    lines = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    for thing in ("module", "buffer"):
        came, went = (sum(line.startswith(f"{s}{thing}") for line in lines) for s in "+-")
        assert came == went > 0


def test_memory_that_is_not_there_after_all(driver):
    log = driver(really_free_bytes=5000)
    with pytest.raises(TuningError, match="could not begin: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        run(make_job(1, buffers=[messages.BufferSpec(4000)] * 2))
    lines = log.read_text()
    assert lines.count("+buffer") == lines.count("-buffer") == 1
    assert client.start(0).alive


def test_operands_travel_without_a_file_system(driver, monkeypatch):
    """Whatever /dev/shm and the temporary folder hold, or how much fits there."""
    driver()
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    array = np.arange(2000, dtype=np.float32).reshape(20, 100).T[::2]
    with measure.operand_files([array, None]) as (path, nothing):
        assert nothing is None
        np.testing.assert_array_equal(np.fromfile(path, np.float32), array.ravel())
        buffers = [messages.BufferSpec(4000, path=path), messages.BufferSpec(4000)]
        found, _ = times(make_job(1, buffers=buffers))
    assert found[1] is not None
    assert not os.path.exists(path)


def test_operands_that_cannot_be_read(driver):
    driver()
    buffers = [messages.BufferSpec(4000, path="/nonexistent/operand")]
    with pytest.raises(TuningError, match=r"could not begin: .*No such file"):
        run(make_job(1, buffers=buffers))


def test_a_driver_that_does_not_start(driver):
    driver(broken_start=True)
    with pytest.raises(TuningError, match=r"ended: (?s:.*)CUDA_ERROR_UNKNOWN"):
        run(make_job(1))


@pytest.mark.parametrize(("executable", "reason"), [("", "no Python"), ("/no/python", "No such")])
def test_a_python_that_cannot_be_started(driver, monkeypatch, executable, reason):
    driver()
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(TuningError, match=f"cannot be started: .*{reason}"):
        run(make_job(1))


def test_ends_without_work_and_is_started_anew(driver, monkeypatch):
    driver()
    monkeypatch.setattr(client, "_IDLE_S", 0.5)
    times(make_job(1))
    worker = client.start(0)
    deadline = time.monotonic() + 10
    while worker.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.alive
    assert times(make_job(1, 2))[1] == {}
    assert client.start(0) is not worker


def test_work_that_comes_in_the_moment_it_ends(driver, monkeypatch):
    """Nobody reads the job: a second worker does it, once. A third is not tried."""
    driver()
    send = client.Worker.send
    deaths = [1]

    def to_nobody(worker, job):
        if deaths and deaths.pop():
            worker._process.kill()
            worker._process.wait()
        send(worker, job)

    monkeypatch.setattr(client.Worker, "send", to_nobody)
    assert times(make_job(1, 2))[1] == {}
    deaths.extend([1, 1])
    with pytest.raises(TuningError, match="the tuning worker ended"):
        run(make_job(1, 2))


@pytest.mark.slow("processes are the same on every Python")
def test_goes_with_its_parent(driver, tmp_path):
    driver(hang=[1])
    code = (
        "from tests.tuning.worker import test_worker as t\n"
        "from triax.tuning.worker import client\n"
        "client.start(0)\n"
        "print('started', flush=True)\n"
        "t.run(t.make_job(1, timeout_s=60.0))\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "TRIAX_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "started\n"
    (pid,) = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    time.sleep(0.2)
    program.kill()
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
