"""The lock between compiling and interpreting."""

import os
import threading
import time
import warnings

import pytest

from tests.interrupts import run_program
from triax.compat.triton_lock import SharedLock


def make_lock(prepare=lambda: None, undo=lambda: None):
    return SharedLock(prepare, undo)


def test_shared_threads_run_together_and_alone_means_alone():
    lock = make_lock()
    inside, worst, alone = [], [0], []
    guard = threading.Lock()

    def share():
        with guard:
            inside.append(1)
            worst[0] = max(worst[0], len(inside))
        time.sleep(0.02)
        with guard:
            inside.pop()

    def exclude():
        alone.append(not inside)
        inside.append(1)
        time.sleep(0.01)
        inside.pop()
        alone.append(not inside)

    shared = threading.Thread, lambda: lock.shared(share)
    excluding = threading.Thread, lambda: lock.alone(exclude)
    threads = [make(target=f) for make, f in [shared] * 6 + [excluding] * 3 + [shared] * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert worst[0] > 1
    assert alone == [True] * 6


def test_what_is_shared_is_prepared_once_and_undone_when_all_have_left():
    events = []
    lock = make_lock(lambda: events.append("prepare"), lambda: events.append("undo"))
    inside, leave = threading.Event(), threading.Event()

    def work():
        inside.set()
        assert leave.wait(10)

    worker = threading.Thread(target=lambda: lock.shared(work))

    def share():
        worker.start()
        assert inside.wait(10)

    lock.shared(share)
    assert events == ["undo", "prepare"]  # the worker still shares
    leave.set()
    worker.join(10)
    assert events == ["undo", "prepare", "undo"]


def test_who_comes_later_does_not_pass_a_thread_that_waits_to_be_alone():
    lock = make_lock()
    order, begun, leave = [], threading.Event(), threading.Event()

    def work(name):
        order.append(name)
        if name == "first":
            begun.set()
            assert leave.wait(10)

    def start(run, name):
        thread = threading.Thread(target=lambda: run(lambda: work(name)))
        thread.start()
        return thread

    threads = [start(lock.shared, "first")]
    assert begun.wait(10)
    threads.append(start(lock.alone, "alone"))
    while not lock._entry.locked():
        time.sleep(0.001)
    threads.append(start(lock.shared, "shared"))
    time.sleep(0.05)
    assert order == ["first"]  # the third could share with the first, but would pass the second
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "alone", "shared"]


def test_a_thread_that_leaves_has_undone_before_another_is_alone():
    events, inside, leaving, go_on = [], threading.Event(), threading.Event(), threading.Event()

    def undo():
        if threading.current_thread() is sharing and inside.is_set():
            leaving.set()
            assert go_on.wait(10)
            events.append("undone")

    lock = make_lock(undo=undo)
    sharing = threading.Thread(target=lambda: lock.shared(inside.set))
    alone = threading.Thread(target=lambda: lock.alone(lambda: events.append("alone")))
    sharing.start()
    assert leaving.wait(10)
    alone.start()
    time.sleep(0.05)
    go_on.set()
    for thread in (sharing, alone):
        thread.join(10)
    assert events == ["undone", "alone"]


def test_results_and_exceptions_are_those_of_the_work():
    lock = make_lock()
    assert lock.alone(lambda: 1) == 1
    assert lock.shared(lambda: 2) == 2
    for run in (lock.alone, lock.shared):
        with pytest.raises(RuntimeError, match="mine"):
            run(raise_mine)
    assert lock.alone(lambda: 3) == 3


def raise_mine():
    raise RuntimeError("mine")


def test_what_cannot_be_prepared_is_undone():
    undone = []
    lock = make_lock(raise_mine, lambda: undone.append(1))
    with pytest.raises(RuntimeError, match="mine"):
        lock.shared(lambda: None)
    assert len(undone) == 2  # before and after
    assert lock.alone(lambda: 1) == 1


@pytest.mark.parametrize("how", ["shared", "alone"])
def test_in_a_forked_child_everything_is_undone_at_once(how):
    """It may use Triton without this lock."""
    replaced = []
    lock = make_lock(undo=replaced.clear)

    def fork():
        replaced.append("a function of Triton")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other threads, which the child does not wait for
            child = os.fork()
        if child == 0:
            os._exit(len(replaced))
        assert replaced
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert getattr(lock, how)(fork) == 0


INTERRUPTED = """
import threading, sys
from tests.interrupts import Storm
from triax.compat.triton_lock import SharedLock

value = None                       # what is replaced; None where nothing is
originals = []

def put(new):
    global value
    originals.append(value)
    value = new

def undo():
    global value
    while originals:
        value = originals[-1]
        originals.pop()

lock = SharedLock(lambda: put("shared"), undo)

def share():
    assert value == "shared", value

def exclude():
    assert value is None, value
    put("alone")
    assert value == "alone", value

def both():
    lock.shared(share)
    lock.alone(exclude)

stop = threading.Event()
failures = []

def work():
    try:
        while not stop.is_set():
            both()
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
storm = Storm(seed=1)
for count in range(300):
    storm.hit(both, within_s=2e-3, burst=1 + count % 3)
stop.set()
for thread in threads:
    thread.join(30)
    assert not thread.is_alive()
assert not failures, failures
both()
assert value is None and not originals
print("held")
"""


@pytest.mark.slow("its processes take seconds")
def test_interrupts_at_any_instruction_leave_nothing_taken():
    """The main thread and two others take turns, and the main thread is hit again and again."""
    done = run_program(INTERRUPTED)
    assert done.stdout == "held\n", done.stderr
