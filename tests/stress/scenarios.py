"""The scenarios. Each takes the seconds that it may go on and a `random.Random`, and returns how
much it did and what it found wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import triax
from tests import cases
from tests.interrupts import ROOT
from tests.stress import work

CHILD = "1,6,0,5"  # programs with tuned and other kernels
CHILD_SECONDS = 120


def in_threads(count, seconds, step):
    """Runs ``step(random)`` in threads until the time is over: how often, and what they found."""
    end, findings, done = time.monotonic() + seconds, [], [0] * count

    def loop(thread):
        rng = random.Random(thread)
        while time.monotonic() < end and len(findings) < 5:
            try:
                problem = step(rng)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is not None:
                findings.append(problem[:500])
            done[thread] += 1

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"count": sum(done), "findings": findings}


def threads(seconds, rng):
    """16 threads trace, compile, call and differentiate programs of many shapes."""
    expected = work.Expected()
    return in_threads(16, seconds, lambda rng: expected.wrong(rng.choice(expected.numbers)))


def cleared_caches(seconds, rng):
    """`jax.clear_caches()` while eight threads call."""
    expected = work.Expected()

    def step(rng):
        if rng.random() < 0.05:
            jax.clear_caches()
        return expected.wrong(rng.choice(expected.numbers))

    return in_threads(8, seconds, step)


def donated(seconds, rng):
    """Arguments that are donated to kernels which write in their place, in eight threads."""
    program = jax.jit(cases.accumulate_by_alias, donate_argnums=1)

    def step(rng):
        n = rng.choice((64, 1000, 4097))
        x = jnp.arange(n, dtype=jnp.float32)
        start = jnp.full(n, float(rng.randrange(100)))
        y = start + 0
        for _ in range(10):
            y = program(x, y)
        same = np.array_equal(y, np.asarray(start) + 10 * np.asarray(x))
        return None if same else f"ten sums in place of {n} numbers are wrong"

    return in_threads(8, seconds, step)


def kernels_by_thousand(seconds, rng):
    """2,000 kernels in one process, made by eight threads."""
    x = jnp.arange(1000, dtype=jnp.float32)
    numbers = itertools.count(1)
    made = []

    def step(rng):
        number = next(numbers)
        if number > 2000:
            time.sleep(0.1)
            return None
        program = jax.jit(lambda x: work.scaled(x, float(number)))
        if work.on_gpu():
            if not np.array_equal(program(x), np.asarray(x) * number):
                return f"kernel {number} is wrong"
        elif "triton" not in program.trace(x).lower(lowering_platforms=("cuda",)).as_text():
            return f"kernel {number} is missing"
        made.append(number)
        return None

    found = in_threads(8, seconds, step)
    return found | {"count": len(made)}


def resident_bytes():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory_over_time(seconds, rng):
    """Programs that are made, run and dropped again: memory goes back to where it was."""
    expected = work.Expected(10)
    end, count, seen, findings = time.monotonic() + seconds, 0, [], []
    while time.monotonic() < end and not findings:
        findings += filter(None, map(expected.wrong, expected.numbers))
        jax.clear_caches()
        count += 1
        device = jax.devices()[0].memory_stats() or {}
        seen.append((resident_bytes(), device.get("bytes_in_use", 0)))
    half, last = seen[len(seen) // 2], seen[-1]
    if last[0] > 1.05 * half[0]:
        findings.append(f"the process has {last[0]:,} bytes; half way it had {half[0]:,}")
    if last[1] > half[1]:
        findings.append(f"the GPU's memory has {last[1]:,} bytes in use; half way {half[1]:,}")
    return {"count": count, "findings": findings, "bytes": last[0], "half_way": half[0]}


def little_memory(seconds, rng):
    """A GPU's memory that is nearly full: an error where it ends, and nothing wrong after."""
    if not work.on_gpu():
        return {"count": 0, "findings": [], "skipped": "it needs a GPU"}
    expected = work.Expected(10)
    device = jax.devices()[0]
    free = device.memory_stats()["bytes_limit"] - device.memory_stats()["bytes_in_use"]
    findings, count, end = [], 0, time.monotonic() + seconds
    x = jnp.ones((free // 8,), jnp.float32)  # half of what is free
    while time.monotonic() < end and not findings:
        try:
            kept = [work.scaled(x, 2.0) for _ in range(3)]
            jax.block_until_ready(kept)
            findings.append("more memory was given than there is")
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                findings.append(str(error)[:500])
        kept = None
        findings += filter(None, map(expected.wrong, expected.numbers))
        count += 1
    if not np.array_equal(np.asarray(work.scaled(x[:100], 2.0)), np.full(100, 2.0)):
        findings.append("the large array is wrong")
    return {"count": count, "findings": findings}


def _digest_elsewhere(numbers):
    return work.digest(numbers)


def forks(seconds, rng):
    """Forked children that end while threads compile; then processes that are spawned."""
    expected, numbers = work.Expected(10), (0, 1, 6)
    in_turn = threading.Lock()  # filelock, which JAX's caches use, refuses two forks at once
    wanted = work.digest(numbers)

    def step(rng):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX's, of forks
            child = None
            if rng.random() < 0.2:
                with in_turn:
                    child = os.fork()
        if child == 0:
            os._exit(7 if triax.triton_call else 1)
        problem = expected.wrong(rng.choice(expected.numbers))
        if child and os.waitpid(child, 0)[1] >> 8 != 7:
            return "a forked child did not end as it should"
        return problem

    found = in_threads(4, seconds, step)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        for digest in pool.map(_digest_elsewhere, [numbers] * 2):
            if digest != wanted:
                found["findings"].append("a spawned process has other results")
    return found


def child(cache, **environment):
    """Starts a process that computes `CHILD` with its caches in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stress.work", CHILD],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TRIAX_CACHE_DIR": str(Path(cache, "triax")),
            "TRITON_CACHE_DIR": str(Path(cache, "triton")),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, wanted=None):
    """Waits for a child: what is wrong with its end, or None."""
    try:
        out, errors = process.communicate(timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"a child did not end within {CHILD_SECONDS} s"
    if wanted is None or (process.returncode == 0 and wanted in out):
        return None
    return f"a child ended with {process.returncode}: {out[-200:]} {errors[-2000:]}"


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        yield path


def _wanted():
    """The digest of an undisturbed child, and how long it takes."""
    with folder() as cache:
        start = time.monotonic()
        process = child(cache)
        out, errors = process.communicate(timeout=CHILD_SECONDS)
        if process.returncode:
            raise RuntimeError(errors[-2000:])
        return out.splitlines()[-1], time.monotonic() - start


def interrupted(seconds, rng):
    """Ctrl-C and SIGKILL at random moments of tuning and compiling; then caches that are whole."""
    wanted, takes = _wanted()
    end, count, findings = time.monotonic() + seconds, 0, []
    while time.monotonic() < end and not findings:
        with folder() as cache:
            for _ in range(3):
                process = child(cache)
                time.sleep(rng.uniform(0.2, 1.1) * takes)
                process.send_signal(rng.choice((signal.SIGINT, signal.SIGKILL)))
                findings += filter(None, [ended(process)])
                count += 1
            findings += filter(None, [ended(child(cache), wanted)])
    return {"count": count, "findings": findings}


def together(seconds, rng):
    """Three processes that tune and compile the same with one cache."""
    wanted, _ = _wanted()
    end, count, findings = time.monotonic() + seconds, 0, []
    while time.monotonic() < end and not findings:
        with folder() as cache:
            processes = [child(cache) for _ in range(3)]
            findings += filter(None, [ended(process, wanted) for process in processes])
            count += len(processes)
    return {"count": count, "findings": findings}


def full_disk(seconds, rng):
    """Caches on a file system of 64 KiB, or where that cannot be mounted, of files of 1 KiB.

    Without room for tuned configs results are right all the same; Triton cannot compile without
    room for its own cache, and then an error has to say so.
    """
    wanted, _ = _wanted()
    end, count, findings, way = time.monotonic() + seconds, 0, [], "file system"
    while time.monotonic() < end and not findings:
        with folder() as full, folder() as roomy:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={64 << 10}", "tmpfs", full]
            mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
            limits = {} if mounted else {"STRESS_FILE_BYTES": "1024"}
            way = "file system" if mounted else "limit of file sizes"
            Path(full, "filled").write_bytes(bytes(60 << 10 if mounted else 0))
            try:
                if mounted:  # a limit would hold for Triton's cache, too
                    problem = ended(child(full, TRITON_CACHE_DIR=roomy), wanted)
                    findings += filter(None, [problem])
                problem = ended(child(full, **limits), wanted)
                if problem and "set TRITON_CACHE_DIR" not in problem:
                    findings.append(problem)
                count += 2
            finally:
                if mounted:
                    subprocess.run(["umount", "-l", full], check=False)
    return {"count": count, "findings": findings, "way": way}


def clock(seconds, rng):
    """A clock that jumps by days, and cache files from the past and the future."""
    wanted, _ = _wanted()
    end, count, findings = time.monotonic() + seconds, 0, []
    with folder() as cache:
        while time.monotonic() < end and not findings:
            for path in Path(cache).rglob("*"):
                day = rng.uniform(-1000, 1000) * 86400
                os.utime(path, (time.time() + day, time.time() + day))
            jumping = child(cache, STRESS_CLOCK="1")
            findings += filter(None, [ended(jumping, wanted)])
            count += 1
    return {"count": count, "findings": findings}


def planted_wrong(seconds, rng):
    """A result that is wrong, which must be found."""
    expected = work.Expected(1)
    expected._results[0][0] = expected._results[0][0] + 1
    return in_threads(1, seconds, lambda rng: expected.wrong(0))


def planted_hang(seconds, rng):
    """A thread that waits for ever, which must be found."""
    threading.Event().wait()


PLANTED = {"planted_wrong": planted_wrong, "planted_hang": planted_hang}
SCENARIOS = {
    function.__name__: function
    for function in (
        *(threads, cleared_caches, donated, kernels_by_thousand, memory_over_time, little_memory),
        *(forks, interrupted, together, full_disk, clock),
    )
}
