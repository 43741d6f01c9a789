"""The lock between compiling and interpreting."""

import contextlib
import threading
import time

import pytest

from triax.bridge.exclusion import Exclusion


def test_shared_threads_run_together_and_exclusive_alone():
    lock = Exclusion()
    inside, worst, alone = [], [0], []
    guard = threading.Lock()

    def share():
        with lock.shared():
            with guard:
                inside.append(1)
                worst[0] = max(worst[0], len(inside))
            time.sleep(0.02)
            with guard:
                inside.pop()

    def exclude():
        with lock.exclusive():
            alone.append(not inside)
            time.sleep(0.01)
            alone.append(not inside)

    threads = [threading.Thread(target=t) for t in [share] * 6 + [exclude] * 3 + [share] * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert worst[0] > 1
    assert alone == [True] * 6


def test_the_scope_spans_the_whole_shared_period():
    events = []

    @contextlib.contextmanager
    def scope():
        events.append("enter")
        yield
        events.append("leave")

    lock = Exclusion(scope)
    inside, leave = threading.Event(), threading.Event()

    def work():
        with lock.shared():
            inside.set()
            leave.wait(10)

    worker = threading.Thread(target=work)
    with lock.shared():
        worker.start()
        assert inside.wait(10)
    assert events == ["enter"]  # the worker still shares
    leave.set()
    worker.join(10)
    assert events == ["enter", "leave"]


def test_an_exception_releases_both_sides():
    lock = Exclusion()
    with pytest.raises(RuntimeError), lock.exclusive():
        raise RuntimeError
    with pytest.raises(RuntimeError), lock.shared():
        raise RuntimeError
    with lock.exclusive():
        pass
