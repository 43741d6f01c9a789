"""Compiling a program's kernels side by side: when threads start, and that nothing else changes."""

import ast
import os
import threading
import time
import warnings

import jax
import numpy as np
import pytest
import triton
import triton.language as tl

from tests import kernels
from tests.cases import blockwise
from tests.interrupts import run_program
from triax import testing
from triax.compat import jax_private, triton_private
from triax.compiling import ahead, compiler, threads
from triax.emitting.reading import triton_calls
from triax.errors import CompilationError

pytestmark = pytest.mark.cuda_plugin
X = np.arange(300, dtype=np.float32)
BLOCKS = (32, 64, 128, 256)


@triton.jit
def picky_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 64, "sixty-four is not for us")
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def copy(x, block, kernel=kernels.copy_kernel, **options):
    return blockwise(kernel, x, BLOCK=block, tuning="off", **options)


def program(x):
    """One call for each of `BLOCKS`, each of another kernel."""
    for block in BLOCKS:
        x = copy(x, block)
    return x


def trace(function=program, x=X):
    jax.clear_caches()  # of what was traced and lowered before
    return jax.jit(function).trace(x)


def entries(traced):
    return [call.entries for call in triton_calls(traced.lower(lowering_platforms=("cuda",)))]


def finish():
    ahead._drop()
    threads.join(ahead._threads)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch, tmp_path):
    """As if the process had just started, with four cores and nothing cached."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    finish()
    compiler.clear_cache()
    yield
    finish()
    compiler.clear_cache()


class Compilations:
    """Which threads have Triton compile, and how many at a time; `before` is run in each first."""

    def __init__(self):
        self.threads, self.in_background, self.at_once, self._running = [], [], 0, 0
        self.before = lambda: None
        self._lock = threading.Lock()
        self._compile = triton_private.compile_to_ptx

    def __call__(self, *args, **kwargs):
        with self._lock:
            self.threads.append(threading.current_thread())
            if in_background():
                self.in_background.append(threading.current_thread())
            self._running += 1
            self.at_once = max(self.at_once, self._running)
        try:
            self.before()
            return self._compile(*args, **kwargs)
        finally:
            with self._lock:
                self._running -= 1


@pytest.fixture
def compilations(monkeypatch):
    spy = Compilations()
    monkeypatch.setattr(triton_private, "compile_to_ptx", spy)
    return spy


def in_background():
    """Whether nobody has asked yet for what this thread compiles."""
    return threading.current_thread() in ahead._threads


class TestThreads:
    def test_compile_side_by_side_what_lowering_has_yet_to_meet(self, compilations):
        two = threading.Barrier(2)
        together = threading.Event()

        def meet():
            if in_background() and not together.is_set():
                two.wait(20)  # the second thread is here too
                together.set()

        compilations.before = meet
        found = entries(trace())
        assert together.is_set()
        assert compilations.at_once > 1
        assert len(compilations.threads) == len(BLOCKS)  # each once
        assert len(compilations.in_background) >= 2
        assert len({name for (name,) in found}) == len(BLOCKS)

    def test_start_where_the_disk_cache_has_nothing(self, compilations):
        first = entries(trace())
        assert compilations.in_background
        compilations.threads.clear()
        compilations.in_background.clear()
        compiler.clear_cache()
        assert entries(trace()) == first
        assert len(compilations.threads) == len(BLOCKS)
        assert compilations.in_background == []

    @pytest.mark.parametrize(
        ("cores", "most", "threads"),
        [(None, 16, 1), (2, 16, 2), (64, 16, len(BLOCKS)), (64, 3, 3)],
    )
    def test_are_no_more_than_cores_and_calls(self, monkeypatch, cores, most, threads):
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(ahead, "_MAX_THREADS", most)
        release = threading.Event()
        monkeypatch.setattr(ahead, "_work", lambda _: release.wait(20))
        trace()
        ahead._start(90)
        ahead._start(90)
        assert len(ahead._threads) == threads
        release.set()
        finish()
        ahead._threads.clear()

    def test_may_be_refused(self, monkeypatch, compilations):
        def refuse(thread):
            raise RuntimeError("can't start new thread")

        traced = trace()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert len(entries(traced)) == len(BLOCKS)
        assert compilations.in_background == []

    def test_end_when_nothing_is_left(self):
        entries(trace())
        deadline = time.monotonic() + 20
        while ahead._threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not ahead._threads
        assert not ahead._waiting


class TestSameAsWithout:
    def test_bytes(self, monkeypatch):
        together = entries(trace())
        compiler.clear_cache()
        monkeypatch.setattr(ahead, "expect", lambda *_: None)
        assert entries(trace()) == together

    def test_errors(self):
        def f(x):
            return copy(copy(x, 32), 64, kernel=picky_kernel)

        with pytest.raises(CompilationError, match="'picky_kernel' does not compile"):
            entries(trace(f))

    def test_a_failure_of_a_thread_alone_is_none(self, compilations):
        """Whoever waits for a thread that fails compiles for itself."""

        def fail():
            if in_background():
                time.sleep(0.2)  # lowering is waiting by then
                raise RuntimeError("only here")

        compilations.before = fail
        assert len(entries(trace())) == len(BLOCKS)
        assert compilations.in_background

    def test_parsing_is_done_one_at_a_time(self, monkeypatch):
        """CPython may raise a SystemError where two threads parse at once."""
        at_once, most, threads, failed = 0, 0, set(), []
        parse = ast.parse

        def spy(*args, **kwargs):
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            threads.add(threading.current_thread())
            time.sleep(0.02)  # to let others in
            at_once -= 1
            if not failed:  # as if a thread elsewhere had parsed
                failed.append(1)
                raise SystemError("AST constructor recursion depth mismatch")
            return parse(*args, **kwargs)

        monkeypatch.setattr(ast, "parse", spy)
        assert len(entries(trace())) == len(BLOCKS)
        assert len(threads) > 1
        assert most == 1

    def test_interpreting_meanwhile(self, compilations):
        compilations.before = lambda: time.sleep(0.1)
        expected = np.asarray(copy(X, 16, implementation="interpret"))
        traced = trace()
        ahead._start(90)
        testing.assert_same_bits(copy(X, 16, implementation="interpret"), expected)
        assert len(entries(traced)) == len(BLOCKS)

    def test_warnings_of_other_threads(self, monkeypatch):
        """Triton's code generator would change the filters of the whole process."""

        def changed(*_, **__):
            raise AssertionError("warnings are changed for all threads")

        traced = trace()
        waiting = list(ahead._waiting)
        with monkeypatch.context() as patch:
            patch.setattr(warnings, "catch_warnings", changed)
            patch.setattr(warnings, "simplefilter", changed)
            results = compiler.compile_all(waiting, 90)
        assert not [result for result in results if isinstance(result, Exception)]
        entries(traced)


class TestLeftOut:
    def waiting(self, function):
        traced = trace(function)
        return traced, len(ahead._waiting)

    def test_several_configs(self):
        def f(x):
            return blockwise(kernels.autotuned_add_kernel, x, x)

        assert self.waiting(f)[1] == 0
        assert self.waiting(program)[1] == len(BLOCKS)

    def test_interpreted_and_empty_calls(self):
        def f(x):
            return copy(x, 32, implementation="interpret") + copy(x, 32, grid=0)

        assert self.waiting(f)[1] == 0

    @pytest.mark.parametrize(
        ("platform", "architecture", "count"),
        [("cpu", "", 0), (None, "", 0), ("cpu", "nonsense", 0), ("gpu", "", 4), ("cpu", "90", 4)],
    )
    def test_programs_that_are_not_for_a_gpu(self, monkeypatch, platform, architecture, count):
        monkeypatch.setattr(jax_private, "default_platform", lambda: platform)
        monkeypatch.setenv("TRIAX_CUDA_ARCH", architecture)
        assert self.waiting(program)[1] == count

    def test_calls_that_are_lowered_for_the_cpu(self):
        traced, count = self.waiting(program)
        assert count == len(BLOCKS)
        traced.lower(lowering_platforms=("cpu",))
        assert not ahead._waiting

    def test_the_oldest_of_many_that_are_never_lowered(self, monkeypatch):
        monkeypatch.setattr(ahead, "_MAX_WAITING", 3)
        trace()
        assert [dict(w.constants)["BLOCK"] for w in ahead._waiting] == list(BLOCKS[1:])


@pytest.mark.slow("its processes take seconds")
def test_the_end_of_a_process_waits_for_what_has_begun_and_no_more(tmp_path):
    program = (
        "import os, threading\n"
        "from tests.compiling import test_ahead\n"
        "from triax.compiling import ahead\n"
        "from triax.compat import triton_private\n"
        "begun, said = threading.Event(), threading.Event()\n"
        "original = triton_private.compile_to_ptx\n"
        "def compile_to_ptx(*args):\n"
        "    begun.set()\n"
        "    said.wait(60)\n"
        "    result = original(*args)\n"
        "    print('compiled')\n"
        "    return result\n"
        "triton_private.compile_to_ptx = compile_to_ptx\n"
        "os.cpu_count = lambda: 1\n"
        "test_ahead.trace()\n"
        "ahead._start(90)\n"
        "begun.wait(60)\n"
        "print('done')\n"
        "said.set()\n"
    )
    done = run_program(program, timeout=60, TRITON_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "done\ncompiled\n"), done.stderr
