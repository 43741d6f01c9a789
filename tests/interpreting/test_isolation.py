"""The interpreter leaves no trace: Triton, the user's module, other threads."""

import sys
import threading

import numpy as np
import pytest
import triton
import triton.language as tl
from tests.interrupts import run_program
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import cuda, libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import JITFunction
from triton.runtime import interpreter as stock

from triax.binding.launch import Result
from triax.compat.triton_lock import TRITON
from triax.compiling import compiler
from triax.errors import CompilationError
from triax.interpreting.run import run


@triton.jit
def fill(o_ptr, value, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.zeros([BLOCK], tl.int32) + shifted(value))


@triton.jit
def shifted(value):
    return value + OFFSET


@triton.jit
def fail(o_ptr, n):
    for i in range(n):
        tl.store(o_ptr + i, tl.sum(tl.arange(0, 16), 0))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def reduce_and_scan(o_ptr, COMBINE: tl.constexpr):
    x = tl.associative_scan(tl.arange(0, 16), 0, COMBINE)
    tl.store(o_ptr, tl.reduce(x, 0, COMBINE))


OFFSET = tl.constexpr(1000)

HOLDERS = (
    tl,
    tl.core,
    tl.math,
    tl.standard,
    tl.semantic,
    tl.core.tensor,
    tl.core.dtype,
    tl.core.block_type,
    tl.core.tensor_descriptor_base,
    tl.core.tensor_descriptor,
    tl.core.condition,
    tl.core.constexpr,
    tl.core.tuple,
    cuda,
    tl.extra.cuda,  # not the module that is imported under this name
    cuda_libdevice,
    libdevice,
    stock,
    JITFunction,
)


def snapshot():
    return [dict(vars(holder)) for holder in HOLDERS]


def assert_same(before, after):
    for holder, old, new in zip(HOLDERS, before, after, strict=True):
        assert old.keys() == new.keys(), holder
        assert [name for name in old if old[name] is not new[name]] == [], holder


def compile_to_ptx(kernel, signature, **constants):
    source = ASTSource(kernel, signature, constexprs=constants)
    target, options = GPUTarget("cuda", 90, 32), {"enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options).asm["ptx"]


def test_triton_is_restored(interpret):
    before = snapshot()
    interpret(fill, {"o_ptr": Result(0), "value": 1}, [((16,), np.int32)], BLOCK=16)
    assert_same(before, snapshot())
    with pytest.raises(IndexError):
        interpret(fail, {"o_ptr": Result(0), "n": 5}, [((4,), np.int32)])
    assert_same(before, snapshot())


def test_what_others_patched_stays(interpret, monkeypatch):
    marker = lambda x: x
    monkeypatch.setattr(tl, "cdiv", marker)
    monkeypatch.setattr(tl, "extra_name", marker, raising=False)
    interpret(fill, {"o_ptr": Result(0), "value": 1}, [((16,), np.int32)], BLOCK=16)
    assert tl.cdiv is marker
    assert tl.extra_name is marker


def test_compiling_works_before_and_after(interpret):
    signature = {"o_ptr": "*i32", "value": "i32", "BLOCK": "constexpr"}
    before = compile_to_ptx(fill, signature, BLOCK=64)
    interpret(fill, {"o_ptr": Result(0), "value": 1}, [((64,), np.int32)], BLOCK=64)
    with pytest.raises(IndexError):
        interpret(fail, {"o_ptr": Result(0), "n": 5}, [((4,), np.int32)])
    assert compile_to_ptx(fill, signature, BLOCK=64) == before
    fresh = compile_to_ptx(fail, {"o_ptr": "*i32", "n": "i32"})
    assert ".entry fail" in fresh


def test_the_users_module_and_kernel_are_untouched(interpret):
    module = dict(vars(sys.modules[__name__]))
    function, kernel = dict(vars(fill.fn)), dict(vars(fill))
    interpret(fill, {"o_ptr": Result(0), "value": 1}, [((16,), np.int32)], BLOCK=16)
    assert vars(sys.modules[__name__]) == module
    assert vars(fill.fn) == function
    assert vars(fill).keys() == kernel.keys()
    assert [name for name in kernel if vars(fill)[name] is not kernel[name]] == []


def test_combine_functions_are_untouched(interpret):
    before = dict(vars(larger))
    (out,) = interpret(reduce_and_scan, {"o_ptr": Result(0)}, [((1,), np.int32)], COMBINE=larger)
    assert out == 15
    after = dict(vars(larger))
    assert {name for name in before if before[name] is not after[name]} == set()


def test_globals_are_those_of_the_moment(interpret, monkeypatch):
    arguments = {"o_ptr": Result(0), "value": 1}
    for offset in (5, 6):
        monkeypatch.setattr(sys.modules[__name__], "OFFSET", tl.constexpr(offset))
        (out,) = interpret(fill, arguments, [((16,), np.int32)], BLOCK=16)
        np.testing.assert_array_equal(out, np.full(16, 1 + offset))


STEP = 3


def plain(value):
    return value + 1


NOTHING = None


@triton.jit
def reads_number(o_ptr, READS: tl.constexpr):
    tl.static_assert(o_ptr.dtype.is_ptr(), f"{STEP}")
    value = tl.load(o_ptr) * 0
    if READS:
        value += STEP
    if NOTHING is None:
        tl.store(o_ptr, max(value, 0))


@triton.jit
def reads_function(o_ptr, READS: tl.constexpr):
    tl.store(o_ptr, plain(0))


OUTSIDE = {
    "number": (reads_number, r"reads `STEP`, which .* Python int: .* `STEP = tl.constexpr\(…\)`"),
    "function": (reads_function, r"reads `plain`, which .* Python function: .* `@triton.jit`"),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_does_not_compile_is_not_interpreted(interpret, monkeypatch, kind):
    kernel, message = OUTSIDE[kind]
    arguments = {"o_ptr": Result(0)}, [((1,), np.int32)]
    with pytest.raises(CompilationError, match=message) as raised:
        interpret(kernel, *arguments, READS=True)
    assert raised.traceback[-1].name == kernel.fn.__name__
    monkeypatch.setattr(triton.knobs.compilation, "allow_non_constexpr_globals", True)
    interpret(kernel, *arguments, READS=True)


def test_what_compiles_is_interpreted(interpret):
    """A branch that is not taken, the message of an assertion, None."""
    (out,) = interpret(reads_number, {"o_ptr": Result(0)}, [((1,), np.int32)], READS=False)
    assert out == 0


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_triton_agrees_on_what_compiles():
    def compiled(kernel, reads):
        source = ASTSource(kernel, {"o_ptr": "*i32", "READS": "constexpr"}, {(1,): reads})
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))

    assert "st.global" in compiled(reads_number, False).asm["ptx"]
    with pytest.raises(Exception, match="Cannot access global variable STEP"):
        compiled(reads_number, True)
    with pytest.raises(Exception, match="Unsupported function referenced"):
        compiled(reads_function, True)


def test_tracebacks_point_into_the_kernel(interpret):
    with pytest.raises(IndexError) as raised:
        interpret(fail, {"o_ptr": Result(0), "n": 5}, [((4,), np.int32)])
    lines = {entry.lineno + 1 for entry in raised.traceback if entry.name == "fail"}
    assert lines == {fail.fn.__code__.co_firstlineno + 3}


def test_a_kernel_is_interpreted_alone(launch_of):
    launch, operands = launch_of(
        fill, {"o_ptr": Result(0), "value": 1}, [((16,), np.int32)], BLOCK=16
    )
    done = threading.Event()
    thread = threading.Thread(target=lambda: (run(launch, operands), done.set()))

    def compile_meanwhile():
        thread.start()
        return done.wait(0.2)

    assert not TRITON.shared(compile_meanwhile)
    assert done.wait(30)
    thread.join()


INTERRUPTED = """
import threading, time
import numpy as np
from tests.interpreting import test_isolation as here
from tests.interpreting.conftest import make_launch
from tests.interrupts import Storm
from triax.interpreting.run import run
from triax.binding.launch import Result

launch, operands = make_launch(
    here.fill, {"o_ptr": Result(0), "value": 1}, [((64,), np.int32)], grid=(4, 1, 1), BLOCK=16
)

def interpret():
    (out,) = run(launch, operands)
    assert (out == 1001).all(), out

here.compile_by_triax(launch)  # fills some of Triton's own caches
before = here.snapshot()
storm = Storm(seed=2)
for count in range(60):
    began = time.monotonic()
    interpret()
    burst = 1 + count % 3
    storm.hit(interpret, within_s=2 * (time.monotonic() - began), burst=burst)
    if burst == 1:
        here.assert_same(before, here.snapshot())
    elsewhere = threading.Thread(target=interpret, daemon=True)
    elsewhere.start()
    elsewhere.join(30)
    assert not elsewhere.is_alive()
    here.assert_same(before, here.snapshot())
interpret()
storm.hit(interpret, within_s=1e-2, burst=3)
signature = {"o_ptr": "*i32", "value": "i32", "BLOCK": "constexpr"}
here.compile_by_triax(launch)
here.assert_same(before, here.snapshot())
assert ".entry fill" in here.compile_to_ptx(here.fill, signature, BLOCK=16)
print("as before")
"""


def compile_by_triax(launch):
    compiler.clear_cache()
    (compiled,) = compiler.compile_all([launch], 90)
    assert compiled.name.startswith("fill_"), compiled


@pytest.mark.slow("its processes take seconds")
def test_an_interrupted_kernel_leaves_triton_as_it_was(tmp_path):
    """At once after one interrupt; where more tear the clean-up too, for whoever is next."""
    done = run_program(INTERRUPTED, TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout == "as before\n", done.stderr
