"""Threads that compile: how a program ends, and a fork, while they are at it."""

import json
import threading
import time

import pytest
import triton
import triton.language as tl
from packaging.version import Version

from tests.interrupts import run_program
from triax.compiling import threads

pytestmark = pytest.mark.cuda_plugin

LAUNCHES = """
import os
import numpy as np
from tests import kernels
from tests.interpreting.conftest import make_launch
from triax.compiling import compiler; from triax.compiling import threads as workers
from triax.binding.launch import Result

def launch_of(block, kernel=kernels.copy_kernel):
    arguments = {"x_ptr": np.zeros(300, np.float32), "out_ptr": Result(0), "n": 300}
    outputs = [((300,), np.float32)]
    return make_launch(kernel, arguments, outputs, grid=(10, 1, 1), BLOCK=block)
"""

INTERRUPTED = (
    LAUNCHES
    + """
launch, _ = launch_of(64)
lock, left = compiler._cache_lock, 0

class Interrupts:
    \"\"\"A lock; a signal comes right after one of the times that it is given back.\"\"\"

    def __enter__(self):
        lock.acquire()

    def __exit__(self, *error):
        global left
        lock.release()
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

compiler._cache_lock = Interrupts()
for left in range(1, 10):
    compiler.clear_cache()
    which = left
    try:
        compiler.compile_in_turn(launch, 90)
    except KeyboardInterrupt:
        print("interrupted", which)
        compiler.compile_in_turn(launch, 90)
    else:
        break
"""
)


def test_an_interrupt_leaves_no_kernel_that_others_wait_for_for_ever(tmp_path):
    """In the program's own thread, which compiles if no other can be started."""
    done = run_program(INTERRUPTED, timeout=60, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("interrupted 1\n")


FAILING = (
    LAUNCHES
    + """
from tests.compiling.test_threads import failing_kernel

launch, _ = launch_of(64, failing_kernel)
before = compiler.compile_count()
for result in [*compiler.compile_all([launch] * 8, 90), *compiler.compile_all([launch], 90)]:
    print("not a multiple of 7" in repr(result))
print(compiler.compile_count() - before)
"""
)


@triton.jit
def failing_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK % 7 == 0, "not a multiple of 7")


def test_a_kernel_that_does_not_compile_fails_each_time(tmp_path):
    """For those that wait while another thread compiles it, too, and for those that come later."""
    done = run_program(FAILING, timeout=60, TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout == "True\n" * 9 + "9\n", done.stderr


STUCK = (
    LAUNCHES
    + """
import atexit, itertools, sys
from triax.compat import triton_private

atexit.register(print, "others end too")
workers._EXIT_TIMEOUT_S = 0.2
os.cpu_count = lambda: 4
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
compile_once = triton_private.compile_to_ptx

def compile_to_ptx(*args):
    while True:
        compile_once(*args)

triton_private.compile_to_ptx = compile_to_ptx
launches = [launch_of(block)[0] for block in (32, 64, 128, 256)]
for result in compiler.compile_all(launches, 90, timeout_s=1):
    print(result)
"""
)


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_compilation_that_never_ends_leaves_the_programs_end_alone(tmp_path, end, status):
    """A daemon thread in the middle of C++ would abort the process."""
    done = run_program(STUCK + end, TRITON_CACHE_DIR=str(tmp_path), timeout=60)
    assert done.returncode == status, done.stderr
    late = "it was not compiled after 1 s\n"
    assert done.stdout == 4 * late + "others end too\n"
    assert "terminate" not in done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")


def test_another_thread_takes_the_place_of_one_that_is_late():
    second, waited = threading.Event(), []

    def compile_(launch):
        if launch == "the first":
            waited.append(second.wait(20))
        else:
            second.set()
        return launch

    found = threads.each(compile_, ["the first", "the second"], timeout_s=0.3, size=1)
    threads.join(threads._all)
    assert str(found[0]) == "it was not compiled after 0.3 s"
    assert (found[1], waited) == ("the second", [True])


def test_an_interrupt_waits_for_what_is_being_compiled_and_begins_nothing():
    begun = []

    def compile_(launch):
        begun.append(launch)
        time.sleep(0.1 * (launch > 0))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.each(compile_, range(20), on_each=interrupt, size=2)
    assert not any(thread.is_alive() for thread in threads._all)
    assert len(begun) < 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_within_a_thread_is_no_result(error):
    def compile_(launch):
        raise error

    with pytest.raises(error):
        threads.each(compile_, ["launch"])


def test_threads_that_cannot_be_started_are_asked_for_once(monkeypatch):
    asked = []

    def refused(thread):
        asked.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert threads.each(str, [1, 2, 3], size=3) == ["1", "2", "3"]
    assert len(asked) == 1
    assert not {*asked} & {*threads._all}  # which are joined at the end


def test_threads_that_have_ended_are_forgotten():
    for _ in range(4):
        threads.each(str, [1, 2], size=2)
        threads.join(threads._all)
    assert len(threads._all) <= 2


FORKS = (
    LAUNCHES
    + """
import faulthandler, random, sys, threading, time, warnings
from triax.interpreting.run import run

warnings.simplefilter("ignore")  # of JAX and Python: the process has threads
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
stop = threading.Event()
failures = []

def again_and_again(work):
    try:
        while not stop.is_set():
            work()
    except BaseException as error:
        failures.append(error)

def compile_some():
    compiler.clear_cache()
    results = compiler.compile_all([launch_of(block)[0] for block in (16, 32, 64)], 90)
    names = {result.name for result in results}
    assert len(names) == 3, results

def interpret():
    launch, operands = launch_of(64)
    operands[0][...] = 7
    (out,) = run(launch, operands)
    assert (out == 7).all()

def child():
    faulthandler.dump_traceback_later(200, exit=True)  # of one that waits for ever
    try:
        first, second = random.sample([compile_some, interpret], 2)
        first()
        second()
        status = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        status = 1
    os._exit(status)

interpret()
compile_some()
threads = [
    threading.Thread(target=again_and_again, args=(work,))
    for work in (compile_some, interpret, interpret)
]
for thread in threads:
    thread.start()
random.seed(int(sys.argv[1]))
statuses = []
for _ in range(int(sys.argv[2])):
    time.sleep(random.uniform(0, 0.1))
    pid = os.fork()
    if pid == 0:
        child()
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
for thread in threads:
    thread.join(60)
print(statuses.count(0), statuses, failures)
"""
)


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
def test_a_forked_child_compiles_and_interprets_while_other_threads_do(tmp_path):
    done = run_program(FORKS, 1, 8, TRITON_CACHE_DIR=str(tmp_path), timeout=900)
    assert done.stdout == f"8 {[0] * 8} []\n", done.stderr


HELD = (
    LAUNCHES
    + """
import functools, signal, sys, threading, time
import triton
from triax.binding.launch import Launch

inside = threading.Event()

def slow(function, lock):
    def slowed(*args):
        if lock == current:
            inside.set()
            time.sleep(0.5)
        return function(*args)
    return slowed

class SlowLock:
    def __init__(self):
        self.lock = threading.RLock()
    def __enter__(self):
        self.lock.acquire()
        inside.set()
        time.sleep(0.5)
    def __exit__(self, *_):
        self.lock.release()

def prepare(lock):
    if lock == "of a kernel's hash":
        kernels.copy_kernel._hash_lock = SlowLock()
    else:
        owner, name = {
            "of a launch": (Launch, "named_leaves"),
            "of Triton's parameters": (triton.runtime.jit.KernelParam, "annotation"),
            "of Triton's tuples": (triton.language.core.tuple_type, "name"),
        }[lock]
        known = vars(owner)[name]
        known.func = slow(known.func, lock)

def use(lock):
    if lock == "of Triton's parameters":
        launch_of(16, triton.jit(kernels.copy_kernel.fn))
    elif lock == "of Triton's tuples":
        str(triton.language.core.tuple_type([triton.language.int32]))
    else:
        compiler.compile_launch(launch_of(16)[0], 90)

compiler.compile_launch(launch_of(16)[0], 90)
for lock in sys.argv[1:]:
    current = lock
    compiler.clear_cache()
    prepare(lock)
    inside.clear()
    thread = threading.Thread(target=use, args=(lock,))
    thread.start()
    inside.wait(60)
    if lock == "of a kernel's hash":
        time.sleep(0.75)  # it is needed more than once in a compilation
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        workers.start = lambda *_: False  # a new thread may get the identity of one that is gone
        use(lock)
        os._exit(0)
    print(lock, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    thread.join()
"""
)


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
def test_a_forked_child_does_not_wait_for_a_lock_that_another_thread_held(tmp_path):
    """`functools.cached_property` holds a lock before Python 3.12, a kernel's hash always."""
    locks = ["of a launch", "of Triton's parameters", "of a kernel's hash"]
    if Version(triton.__version__) >= Version("3.7"):
        locks.insert(0, "of Triton's tuples")
    done = run_program(HELD, *locks, TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout == "".join(f"{lock} 0\n" for lock in locks), done.stderr


CANDIDATES = (
    LAUNCHES
    + """
import sys
import triton
from tests.interpreting import test_isolation
from tests.interrupts import Storm
from triax.interpreting.run import run

def compile_candidates():
    kernel = triton.jit(kernels.copy_kernel.fn)  # one that Triton has not hashed yet
    compiler.clear_cache()
    launches = [launch_of(block, kernel)[0] for block in (32, 64, 128, 256)]
    results = compiler.compile_all(launches, 90, machine_code=True)
    assert all(result.cubin for result in results), results

def interpret():
    launch, operands = launch_of(64)
    operands[0][...] = 7
    (out,) = run(launch, operands)
    assert (out == 7).all()

interpret()
compile_candidates()
before = test_isolation.snapshot()
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
storm = Storm(seed=3)
for count in range(int(sys.argv[1])):
    burst = 1 + count % 3
    storm.hit(compile_candidates, within_s=0.2, burst=burst)
    if burst == 1:  # the second of two is for those who do not want to wait
        assert not [thread for thread in workers._all if thread.is_alive()]
        test_isolation.assert_same(before, test_isolation.snapshot())
    interpret()
    test_isolation.assert_same(before, test_isolation.snapshot())
compile_candidates()
"""
)


def entries(folder):
    """For each key of a disk cache that a later process would find, what it would find."""
    found = {}
    for group in folder.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text())["child_paths"].values()
        found[group.parent.name] = {
            path.name: path.read_bytes() for path in map(folder.joinpath, paths)
        }
    return found


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
def test_interrupted_candidates_leave_triton_and_its_disk_cache_as_they_should_be(tmp_path):
    for name, count in (("calm", 0), ("stormy", 12)):
        done = run_program(CANDIDATES, count, TRITON_CACHE_DIR=str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    calm, stormy = entries(tmp_path / "calm"), entries(tmp_path / "stormy")
    assert len(calm) == 4
    assert stormy == calm
