"""Compiling: unique names, bytes that are the same everywhere, caches, what does not fit."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.backends.nvidia.compiler as nvidia
import triton.compiler.code_generator as code_generator
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager

import triax
from tests import kernels
from tests.cases import blockwise, tuple_of_arrays
from tests.cases import cuda_calls as lower
from tests.same_name import first, second
from triax.binding.launch import ArrayType
from triax.compat import triton_private
from triax.compat.triton_lock import TRITON
from triax.compiling import compiled_kernel, compiler, threads
from triax.errors import CompilationError, CompilationTimeout, SettingError

pytestmark = pytest.mark.cuda_plugin
ROOT = Path(__file__).parents[2]


def copy(x, BLOCK=64, kernel=kernels.copy_kernel, **options):
    return blockwise(kernel, x, BLOCK=BLOCK, **options)


X = np.zeros(300, np.float32)


def test_kernels_of_the_same_name_have_different_entries():
    def f(x):
        return copy(copy(x, kernel=first.scale_kernel), kernel=second.scale_kernel)

    one, two = lower(f, X)
    assert one.kernel == two.kernel == "scale_kernel"
    assert one.entries != two.entries
    for call in (one, two):
        assert call.entries[0].startswith("scale_kernel_")
        assert f".visible .entry {call.entries[0]}(" in call.ptx[0]


def test_every_specialisation_has_its_own_entry():
    def f(x):
        a = copy(x, BLOCK=64)
        b = copy(a, BLOCK=128)
        c = copy(b, num_warps=8)
        return copy(c.astype(jnp.bfloat16)).astype(x.dtype) + copy(c, BLOCK=64)

    entries = [call.entries[0] for call in lower(f, X)]
    assert len(entries) == 5
    assert len(set(entries)) == 4  # the first and the last are the same


def test_every_architecture_has_code_of_its_own():
    for capability in (80, 90):
        (call,) = lower(lambda x, of=capability: copy(x, compute_capability=of), X)
        assert f".target sm_{capability}" in call.ptx[0]


def test_arrays_in_tuples_are_known_to_be_aligned():
    (equation,) = jax.make_jaxpr(tuple_of_arrays)(X, X).eqns
    call, array = equation.params["call"], ArrayType(X.shape, X.dtype)
    launch = call.launch(call.candidates[0], (array, array), (array,))
    parameters = compiler.compile_launch(launch, 90).parameters
    assert [index for index, known in parameters if known is True] == [0, 1, 4]


def test_a_kernel_named_like_an_instruction():
    (call,) = lower(lambda x: copy(x, kernel=first.add), X)
    ptx = call.ptx[0]
    assert f".visible .entry {call.entries[0]}(" in ptx
    assert "add.s" in ptx  # the instructions kept their names
    assert f"{call.entries[0]}_param_0" in ptx


def test_nothing_of_the_source_file_is_in_the_bytes():
    (call,) = lower(copy, X)
    ptx = call.ptx[0]
    assert ".loc" not in ptx
    assert ".file" not in ptx
    assert "kernels.py" not in ptx
    assert b"kernels.py" not in call.opaque


@pytest.mark.parametrize("size", [2, 17, 4096, 4097])
def test_sizes_that_are_not_specialised_compile_once(size):
    def f(x):
        return copy(x, kernel=first.unspecialised_kernel)

    (one,) = lower(f, np.zeros(1, np.float32))
    before = compiler.compile_count()
    (other,) = lower(f, np.zeros(size, np.float32))
    assert compiler.compile_count() == before
    assert one.entries == other.entries


@pytest.mark.parametrize("fused", [True, False])
def test_products_are_fused_with_sums_unless_the_caller_forbids_it(fused):
    options = {} if fused else {"backend_options": {"enable_fp_fusion": False}}
    kernel = kernels.fused_multiply_kernel
    (call,) = lower(lambda x: blockwise(kernel, x, x, BLOCK=64, **options), X)
    assert ("fma.rn.f32" in call.ptx[0]) == fused


PROGRAM = """
import json, sys
import jax, numpy as np, triton
from tests.cases import CASES
from triax.emitting.reading import triton_calls
hits, calls = [], {}
triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
for case in CASES:
    if case.name in ("tuple_of_arrays", "outputs_first", "autotuned_accumulate", "heuristics"):
        inputs = case.inputs(np.random.default_rng(7))
        lowered = jax.jit(case.function).trace(*inputs).lower(lowering_platforms=("cuda",))
        calls[case.name] = [(c.opaque.hex(), c.entries) for c in triton_calls(lowered)]
        case.function(*inputs)
assert "torch" not in sys.modules
try:
    import torch
except SystemExit as exit:
    assert exit.code == "torch was imported"
    print(json.dumps([hits, calls]))
"""


@pytest.mark.slow("processes are the same on every Python")
def test_other_processes(tmp_path):
    """The same bytes for XLA, or what the disk cache has; and torch is left alone."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    results = []
    for seed, cache in (("1", "a"), ("2", "b"), ("3", "a")):
        folder = tmp_path / seed
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, tmp_path))),
            "PYTHONHASHSEED": seed,
            "TRITON_CACHE_DIR": str(tmp_path / cache),
            "JAX_PLATFORMS": "cpu",
        }
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    (hits, calls), (hits_elsewhere, calls_elsewhere), (hits_again, calls_again) = results
    assert len(calls) == 4
    assert calls == calls_elsewhere == calls_again
    assert set(hits) == set(hits_elsewhere) == {False}
    assert set(hits_again) == {True}


class TestMachineCode:
    """XLA makes its own of the PTX; Triton is asked for it only where kernels are measured."""

    @pytest.fixture
    def launch(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        compiler.clear_cache()
        found = []
        original = compiler.compile_launch

        def compile_launch(launch, *args, **kwargs):
            found.append(launch)
            return original(launch, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(compiler, "compile_launch", compile_launch)
            lower(lambda x: copy(x, num_warps=2), X)
        (launch,) = found
        return launch

    def test_only_where_it_is_asked_for(self, launch, tmp_path):
        plain = compiler.compile_launch(launch, 90)
        assert plain.cubin is None
        (found,) = compiler.compile_all([launch], 90, machine_code=True)
        assert found.cubin.startswith(b"\x7fELF")
        assert found.name.encode() in found.cubin
        (again,) = compiler.compile_all([launch], 90, machine_code=True)
        assert again is found  # not assembled once more
        assert compiler.compile_launch(launch, 90).ptx == plain.ptx == found.ptx
        assert {path.stat().st_size for path in tmp_path.rglob("*.cubin")} == {0}

    def test_storing_only_binaries_keeps_the_ptx(self, launch, monkeypatch, tmp_path):
        expected = compiler.compile_launch(launch, 90).name
        monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "fresh"))
        for _ in range(2):  # compiled, and from disk
            compiler.clear_cache()
            assert compiler.compile_launch(launch, 90).name == expected

    def test_what_others_compile_meanwhile_has_it(self, launch):
        """Threads outside Triax share Triton's disk cache, and need the machine code."""
        signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        options = {"num_warps": 2, "ptx_version": 86, "enable_fp_fusion": True}

        def compile_both():
            source = lambda: ASTSource(kernels.copy_kernel, signature, {(3,): 64})
            backend = triton_private.backend_for(90)
            mine = triton_private.compile_to_ptx(source(), backend, options, lambda: "code")
            target = GPUTarget("cuda", 90, 32)
            return mine, triton.compile(source(), target=target, options=options)

        mine, theirs = TRITON.shared(compile_both)
        assert theirs.asm["ptx"] == mine.ptx
        assert theirs.asm["cubin"].startswith(b"\x7fELF")

    def test_a_dump_has_it(self, launch, monkeypatch, tmp_path):
        monkeypatch.setenv("TRITON_KERNEL_DUMP", "1")
        monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path / "dump"))
        monkeypatch.setattr("triton.compiler.compiler.get_sass", lambda cubin: str(len(cubin)))
        compiler.clear_cache()
        compiler.compile_launch(launch, 90)
        (cubin,) = (tmp_path / "dump").rglob("*.cubin")
        assert cubin.stat().st_size > 0


def test_triton_is_left_as_it_was(monkeypatch):
    """Settings and functions of Triton are other ones while Triax compiles."""
    monkeypatch.setattr(triton.knobs.compilation, "disable_line_info", False)
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)
    watched = [
        (triton.knobs.compilation, ("disable_line_info", "store_binary_only")),
        (nvidia, ("get_ptxas_version",)),
        (nvidia.CUDABackend, ("make_cubin",)),
        (code_generator, ("ast", "warnings")),
        (triton.runtime.jit, ("ast",)),
    ]

    def state():
        return [getattr(owner, name, None) for owner, names in watched for name in names]

    before = state(), dict(vars(triton.knobs.compilation)), dict(os.environ)

    def compiling():
        assert triton.knobs.compilation.disable_line_info
        assert state() != before[0]
        assert dict(os.environ) == before[2]
        return True

    assert TRITON.shared(lambda: TRITON.shared(compiling) and compiling())
    assert (state(), dict(vars(triton.knobs.compilation)), dict(os.environ)) == before


class TestTritonsCache:
    """The error names the folder and what to do, whichever file could not be written."""

    @staticmethod
    def check(monkeypatch, folder, reason):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        compiler.clear_cache()
        message = rf"cannot write its cache in {folder} \({reason}.*set TRITON_CACHE_DIR"
        with pytest.raises(CompilationError, match=message):
            lower(lambda x: copy(x), X)

    def test_cannot_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        self.check(monkeypatch, tmp_path / "file" / "cache", "Not a directory")

    def test_is_full(self, monkeypatch, tmp_path):
        def put(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(FileCacheManager, "put", put)
        self.check(monkeypatch, tmp_path, "No space left on device.*Make room there")

    def test_is_not_blamed_for_other_files(self, monkeypatch, tmp_path):
        def make_ir(*args, **kwargs):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere")

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(ASTSource, "make_ir", make_ir)
        compiler.clear_cache()
        with pytest.raises(CompilationError, match="No such file or directory: '/elsewhere'"):
            lower(lambda x: copy(x), X)


class TestWhatAKernelNames:
    """Its helpers and constants may change: a notebook's cell that is run again."""

    @staticmethod
    def change(monkeypatch, name):
        value = {"FACTOR": tl.constexpr(99), "helper": second.helper, "inner": second.inner}[name]
        monkeypatch.setattr(first, name, value)

    @pytest.mark.parametrize("name", ["FACTOR", "helper", "inner"])
    def test_is_compiled_as_it_is_now(self, monkeypatch, name):
        run = lambda x: copy(x, kernel=first.calling_kernel)
        (before,) = lower(lambda x: run(x), X)
        with monkeypatch.context() as patch:
            self.change(patch, name)
            (after,) = lower(lambda x: run(x), X)
            assert after.entries != before.entries
            compiler.clear_cache()  # from Triton's disk cache
            assert lower(lambda x: run(x), X)[0].entries == after.entries
        assert lower(lambda x: run(x), X)[0].entries == before.entries
        assert first.calling_kernel.used_global_vals  # Triton's own record is left to it

    def test_an_old_trace_in_a_new_program_has_it(self, monkeypatch):
        inner = jax.jit(lambda x: copy(x, kernel=first.calling_kernel))
        (before,) = lower(lambda x: inner(x), X)
        self.change(monkeypatch, "helper")
        (after,) = lower(lambda x: inner(x), X)
        assert after.entries != before.entries

    @pytest.mark.parametrize(
        ("kernel", "constants"),
        [(first.calling_kernel, {}), (first.given_kernel, {"FUNCTION": first.helper})],
    )
    def test_an_eager_call_is_not_found_under_the_old(self, monkeypatch, kernel, constants):
        """Eager calls are compiled by `jax.jit`, with the call as a static argument."""
        call = lambda: jax.make_jaxpr(lambda x: copy(x, kernel=kernel, **constants))(X)
        before = call().eqns[0].params["call"]
        assert call().eqns[0].params["call"] == before
        self.change(monkeypatch, "inner")
        assert call().eqns[0].params["call"] != before

    def test_a_helper_that_is_a_constant_counts_too(self, monkeypatch):
        call = lambda x: copy(x, kernel=first.given_kernel, FUNCTION=first.helper)
        (before,) = lower(lambda x: call(x), X)
        self.change(monkeypatch, "inner")
        (after,) = lower(lambda x: call(x), X)
        assert after.entries != before.entries

    def test_a_change_while_it_compiles_is_an_error(self, monkeypatch):
        compiler.clear_cache()
        make_ir = ASTSource.make_ir

        def change_meanwhile(*args, **kwargs):
            self.change(monkeypatch, "helper")
            return make_ir(*args, **kwargs)

        monkeypatch.setattr(ASTSource, "make_ir", change_meanwhile)
        with pytest.raises(CompilationError, match="changed while it was compiled; call it again"):
            lower(lambda x: copy(x, kernel=first.calling_kernel, num_warps=1), X)


@pytest.mark.parametrize(
    ("capability", "most", "past", "said"),
    [
        (89, {"shared_bytes": 101376}, 101377, "101377 bytes of shared memory .* has 101376"),
        (90, {"shared_bytes": 232448}, 232449, "232449 bytes of shared memory .* has 232448"),
        (89, {"num_warps": 32}, 33, "33 warps, and a block has at most 32"),
        (89, {"num_ctas": 1}, 2, "clusters of 2 blocks .* clusters need 90"),
        (90, {"num_ctas": 8}, 9, "clusters of 9 blocks .* at most 8"),
        (90, {"profile_scratch_bytes": 0}, 1, "compiled for Triton's profiler"),
    ],
)
def test_what_a_kernel_may_take(capability, most, past, said):
    fields = {"shared_bytes": 0, "num_warps": 4, "num_ctas": 1, "profile_scratch_bytes": 0} | most
    launch = types.SimpleNamespace(sanitizer=None)
    compiled_kernel.check_fits(launch, types.SimpleNamespace(**fields), capability)
    over = types.SimpleNamespace(**fields | dict.fromkeys(most, past))
    with pytest.raises(CompilationError, match=said):
        compiled_kernel.check_fits(launch, over, capability)


@pytest.mark.parametrize("kind", ["is_im2col", "fp4_padded"])
def test_descriptors_that_nothing_encodes(kind):
    meta = {"block_size": [16, 32], "elem_type": 7, "swizzle": 3, "is_im2col": False}
    found = compiled_kernel._tensor_map(meta)
    assert (found.block_shape, found.element_type, found.swizzle) == ((16, 32), 7, 3)
    with pytest.raises(CompilationError, match=f"descriptor of kind {kind}, which XLA's"):
        compiled_kernel._tensor_map(meta | {kind: True})


@triton.jit
def row_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def test_sizes_that_16_divides_compile_apart():
    """Rows of 256 begin at multiples of 16 bytes, and are loaded by as much at once."""

    def rows(x):
        for n in (256, 257, 258):
            x = triax.triton_call(x, n=n, BLOCK=256, kernel=row_kernel, out_type=x, grid=2)
        return x

    first, *others = lower(rows, X)
    assert len({call.entries for call in others}) == 1
    assert first.entries != others[0].entries
    assert "ld.global.v2" in first.ptx[0]
    assert "ld.global.v2" not in others[0].ptx[0]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(SettingError("TRIAX_X"), SettingError), (OSError("no space"), CompilationError)],
)
def test_an_error_that_is_not_the_kernels_is_not_said_to_be(monkeypatch, error, raised):
    def refused(launch, capability, **options):
        raise error

    monkeypatch.setattr(compiler, "_compile", refused)
    with pytest.raises(raised, match=str(error)):
        lower(lambda x: copy(x, BLOCK=16), X[:77])


def test_repeated_requests_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr(compiler, "_MOST_LAUNCHED", 2)
    compiler.clear_cache()
    for block in (16, 32, 64, 16):
        lower(lambda x: copy(x, BLOCK=block), X)  # noqa: B023
        assert 1 <= len(compiler._launched) <= 2
    count = compiler.compile_count()
    compiler.clear_cache()
    lower(lambda x: copy(x, BLOCK=16), X)
    assert compiler.compile_count() == count + 1


def test_pointers_that_are_not_those_of_the_code_are_an_error(monkeypatch):
    monkeypatch.setattr(compiled_kernel.writes, "origins", lambda module: (3, []))
    compiler.clear_cache()
    with pytest.raises(CompilationError, match="which arguments the kernel writes: 2 arrays, 3 IR"):
        lower(lambda x: copy(x, BLOCK=16), X)


class TestConfigsThatFail:
    @staticmethod
    def call(x, configs, **options):
        @triton.jit
        def picky_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
            tl.static_assert(BLOCK != 32, "thirty-two is not for us")
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + offsets, mask=offsets < n)
            tl.store(out_ptr + offsets, values, mask=offsets < n)

        kernel = triton.autotune([triton.Config({"BLOCK": b}) for b in configs], key=[])(
            picky_kernel
        )
        return blockwise(kernel, x, **options)

    @pytest.mark.parametrize("mode", ["off", "auto", "cached", "runtime"])
    @pytest.mark.filterwarnings("ignore:.*tuning at run time needs:UserWarning")
    def test_are_dropped_with_a_log_line(self, mode, caplog):
        (call,) = lower(lambda x: self.call(x, (32, 64), tuning=mode), X)
        assert [grid[0] for grid in call.grid] == [5]
        assert any(
            "config dropped" in r.message and "BLOCK=32" in r.message for r in caplog.records
        )

    def test_all_failing_lists_each_reason(self):
        with pytest.raises(
            CompilationError, match=r"(?s)None of the 2 configs.*BLOCK=32.*BLOCK=33"
        ):
            lower(lambda x: self.call(x, (32, 33), tuning="off"), X)


@triton.constexpr_function
def width_of(mode):
    try:
        return {"narrow": 1}[mode]
    except KeyError as error:
        raise ValueError("no such mode") from error


@triton.jit
def checked(x, MODE: tl.constexpr):
    if MODE == "sum":
        return tl.sum(x, axis=1)
    elif MODE == "width":
        return x * width_of(MODE)
    tl.static_assert(MODE == "ok", "mode must be ok")
    return x


@triton.jit
def checked_twice(x, MODE: tl.constexpr):
    return checked(x, MODE) + checked(x, MODE)


@triton.jit
def calls_helpers(x_ptr, out_ptr, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, checked_twice(values, MODE), mask=offsets < n)


CALLS = """
Called by `checked_twice`, in line 2: return checked(x, MODE) + checked(x, MODE)
Called by `calls_helpers`, in line 4: tl.store(out_ptr + offsets, checked_twice(values, MODE), """


class TestErrorsOfHelpers:
    @staticmethod
    def message(mode, kernel=calls_helpers, **options):
        with pytest.raises(CompilationError) as caught:
            lower(lambda x: copy(x, kernel=kernel, MODE=mode, **options), X)
        return str(caught.value)

    def test_the_reason_comes_first_then_its_line_and_who_called(self):
        message = self.message("bad")
        assert message.startswith(
            "Kernel 'calls_helpers' does not compile with config [default]: "
            "CompileTimeAssertionFailure: mode must be ok\nat 6:4:\ndef checked("
        )
        assert f'    tl.static_assert(MODE == "ok", "mode must be ok")\n    ^{CALLS}' in message
        assert message.endswith("\nThe kernel's constexprs are BLOCK=64, MODE='bad'.")

    def test_in_tritons_own_library(self):
        message = self.message("sum")
        assert message.startswith(
            "Kernel 'calls_helpers' does not compile with config [default]: CompilationError: "
            "invalid axis 1. "
        )
        assert "\nCalled by `checked`, in line 3: return tl.sum(x, axis=1)" + CALLS in message

    def test_a_cause_that_the_error_itself_does_not_say(self):
        message = self.message("width")
        assert "CompilationError: no such mode\nat 5:" in message
        assert message.count("no such mode") == 1
        assert "\nBecause of KeyError: 'width'" in message

    def test_of_configs_that_all_fail(self):
        tuned = triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=[])
        with pytest.raises(CompilationError) as caught:
            lower(lambda x: blockwise(tuned(calls_helpers), x, MODE="bad", tuning="off"), X)
        assert str(caught.value).count("CompileTimeAssertionFailure: mode must be ok") == 2
        assert str(caught.value).count(CALLS) == 2


def test_unique_entry_needs_an_entry():
    with pytest.raises(CompilationError, match="has no entry named 'missing'"):
        compiled_kernel.unique_entry(".visible .entry other(\n)", "missing")


class TestTimeLimits:
    """Two of six candidates take too long, on any number of cores."""

    @pytest.fixture
    def compile_all(self):
        release = threading.Event()

        def run(launches, late, timeout_s=0.3, size=None):
            def compile_one(launch):
                if launch in late:
                    release.wait(30)
                time.sleep(0.05)
                return launch

            steps = []
            on_each = lambda: steps.append(1)
            return threads.each(compile_one, launches, timeout_s, on_each, size), len(steps)

        yield run
        release.set()

    def test_the_others_are_compiled(self, compile_all):
        found, steps = compile_all("abcdef", "ab", size=2)
        assert found[2:] == list("cdef")
        assert steps == 4
        assert all("not compiled after 0.3 s" in str(error) for error in found[:2])

    def test_not_for_ever(self, compile_all):
        found, _ = compile_all("abcdef", "abcdef", size=1)
        assert [str(error)[:15] for error in found] == [
            *["it was not comp"] * 2,
            *["it was not wait"] * 4,
        ]
        assert all(isinstance(error, CompilationTimeout) for error in found)

    def test_without_a_limit(self, compile_all):
        assert compile_all("abc", "", None) == (list("abc"), 3)
