"""Tuning before the program runs: look-up order, measuring, storing, and what explain says."""

import contextlib
import dataclasses
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from tests import descriptors, kernels
from tests.cases import blockwise, gather
from tests.primitives import add_in_blocks
from tests.tuning.conftest import DEVICE, X, add, explain
from triax.binding.launch import ArrayType
from triax.compat import versions
from triax.compiling import compiler, threads
from triax.errors import (
    ArgumentTypeError,
    CompilationError,
    CompilationTimeout,
    SettingError,
    TuningError,
    VersionError,
)
from triax.tuning import agree, measure, policy, store
from triax.tuning.key import make_key
from triax.tuning.request import Request
from triax.tuning.store import Store
from triax.tuning.worker import messages

pytestmark = pytest.mark.cuda_plugin

ELEMENT_TYPES = {"FLOAT32": 7, "TFLOAT32": 11}  # of CUtensorMapDataType
LABELS = (
    "BLOCK=64, num_warps=1, num_stages=3, num_ctas=1",
    "BLOCK=256, num_warps=2, num_stages=3, num_ctas=1",
    "BLOCK=1024, num_warps=4, num_stages=3, num_ctas=1",
)


X4 = np.zeros(1004, np.float32)


def fastest(label):
    return lambda other: 0.5 if other == label else 1.0


@pytest.mark.parametrize("best", LABELS)
def test_the_fastest_is_chosen_and_its_grid_with_it(measurer, best):
    measurer.times = fastest(best)
    call = explain()
    assert call.source == "measured now"
    block = int(best.split(",")[0].split("=")[1])
    assert call.grid == ((-(-1003 // block), 1, 1),)
    assert call.target.startswith("triton_kernel_call")
    assert [t.median_ms for t in call.timings] == [0.5 if name == best else 1.0 for name in LABELS]
    assert policy.decision(call.key).config == best


def test_a_block_in_constexprs_does_not_keep_a_primitive_from_being_tuned(measurer):
    measurer.times = fastest(LABELS[1])

    filled = []

    def ones(*shapes):
        filled.append(shapes)
        return [np.ones(s.shape, s.dtype) for s in shapes]

    def explain(mode):
        (call,) = triax.explain(lambda x: add_in_blocks(x, x, tuning=mode, tuning_inputs=ones), X)
        return call

    assert explain("off").grid == ((512, 1, 1),)
    assert explain("cached").grid == ((512, 1, 1),)
    assert measurer.jobs == []
    policy.forget()
    call = explain("auto")
    (job,) = measurer.jobs
    assert len(filled) == 1
    assert [c.label for c in job.candidates] == list(LABELS)
    assert [c.grid for c in job.candidates] == [(64, 1, 1), (256, 1, 1), (1024, 1, 1)]
    assert (call.source, call.grid) == ("measured now", ((256, 1, 1),))
    for mode in ("cached", "strict"):
        assert explain(mode).grid == ((256, 1, 1),)


@triton.autotune(
    configs=[triton.Config({"BLOCK": b, "WAY": w}) for b in (64, 128) for w in (1, 1)], key=[]
)
@triton.jit
def repeated_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, WAY: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def test_equal_configs_are_measured_once(measurer):
    call = triax.explain(lambda x: add(x, x, kernel=repeated_kernel), X)[0]
    (job,) = measurer.jobs
    assert len(job.candidates) == len(call.timings) == 2


def test_ties_go_to_the_first(measurer):
    assert explain().grid == ((16, 1, 1),)


def test_measured_once_per_process_and_once_per_store(measurer):
    explain()
    assert explain().source == "measured now"
    assert len(measurer.jobs) == 1
    policy.forget()
    assert explain().source == "user store"
    assert explain("strict").source == "user store"
    assert explain("cached").source == "user store"
    assert len(measurer.jobs) == 1


def test_off_and_one_config_never_measure(measurer):
    assert explain("off").source == "first config (mode off)"
    assert explain(BLOCK=256).source == "only config"
    assert measurer.jobs == []


def test_key_decides_what_is_measured_again(measurer):
    for size in (1003, 1003, 1004):
        explain(x=np.zeros(size, np.float32))
    assert len(measurer.jobs) == 2  # `n` is in the key
    explain(x=np.zeros(1003, np.float16))
    assert len(measurer.jobs) == 3  # and so are the dtypes


def chosen(call):
    return policy.decision(call.key).config


_CONFIGS = kernels.autotuned_add_kernel.configs
_SIZELESS = triton.autotune(configs=_CONFIGS, key=[])(kernels.add_kernel)


class TestSizes:
    """What `key` does not name does not count, except for how much a call moves."""

    @staticmethod
    def explain(size):
        return explain(x=np.zeros(size, np.float32), kernel=_SIZELESS)

    def test_within_a_factor_of_four_a_decision_holds(self, measurer):
        first = self.explain(1000)
        for size in (4000, 251, 1001):
            call = self.explain(size)
            assert call.source == "measured now"
            assert call.measured_bytes == 12_000
            assert call.key != first.key
            assert call.key.endswith(f"-{12 * size}")
            assert "measured on 12000 bytes" in str(call)
        assert len(measurer.jobs) == 1

    @pytest.mark.parametrize("size", [4001, 249, 1 << 20])
    def test_beyond_it_is_another_key(self, measurer, size):
        """A smoke test at batch 1 does not choose for a training run, in this process or later."""
        measurer.times = fastest(LABELS[2])
        self.explain(1000)
        measurer.times = fastest(LABELS[1])
        assert chosen(self.explain(size)) == LABELS[1]
        assert len(measurer.jobs) == 2
        policy.forget()
        assert chosen(self.explain(1000)) == LABELS[2]
        assert len(store.user_store().paths()) == 2

    def test_the_store_holds_to_it_too_and_takes_the_nearest(self, measurer):
        for size, best in ((1000, 2), (9000, 1)):
            measurer.times = fastest(LABELS[best])
            self.explain(size)
        for size, best, known in ((2000, 2, 1000), (3500, 1, 9000), (36_000, 1, 9000)):
            policy.forget()
            call = self.explain(size)
            assert (call.source, chosen(call)) == ("user store", LABELS[best])
            assert call.measured_bytes == 12 * known
        policy.forget()
        assert self.explain(36_001).source == "measured now"

    @pytest.mark.parametrize("sizes", [(1000, 9000), (9000, 1000)])
    def test_of_two_that_were_measured_the_nearest_counts(self, measurer, sizes):
        for size in sizes:
            measurer.times = fastest(LABELS[1 if size == 9000 else 2])
            self.explain(size)
        assert chosen(self.explain(2900)) == LABELS[2]
        assert chosen(self.explain(3100)) == LABELS[1]
        assert len(measurer.jobs) == 2

    def test_from_what_was_measured_not_from_call_to_call(self, measurer):
        self.explain(1000)
        policy.forget()
        assert self.explain(4000).source == "user store"
        assert self.explain(16_000).source == "measured now"
        assert len(measurer.jobs) == 2

    def test_explain_does_not_mix_up_sizes_that_share_a_config(self, measurer):
        def both(x, y):
            return add(x, x, kernel=_SIZELESS), add(y, y, kernel=_SIZELESS)

        measurer.times = lambda label: 1.0 + len(measurer.jobs)
        small, large = triax.explain(both, np.zeros(64, np.float32), np.zeros(1 << 16, np.float32))
        assert {t.median_ms for t in small.timings} == {2.0}
        assert {t.median_ms for t in large.timings} == {3.0}
        assert small.entries == large.entries


def test_a_string_in_the_key(measurer):
    kernel = triton.autotune(configs=_CONFIGS, key=["MODE"])(mode_kernel)
    for mode in ("one", "two", "one"):
        explain(kernel=kernel, MODE=mode)
    assert len(measurer.jobs) == 2


@triton.jit
def mode_kernel(x_ptr, y_ptr, out_ptr, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if MODE == "two":
        x += tl.load(y_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


def test_the_key_holds_the_version_of_the_triton_that_is_imported(measurer, monkeypatch):
    """Torch's build of it is another distribution."""
    original = versions.installed
    monkeypatch.setattr(versions, "installed", lambda n: None if n == "triton" else original(n))
    explain()
    ((_, record),) = store.user_store().records()
    assert record.key.triton == triton.__version__


def test_fresh_tuning_inputs_leave_equal_calls_equal():
    first, second = (
        jax.make_jaxpr(lambda x: add(x, x, tuning_inputs=lambda x, y: (x, y)))(X).eqns[0]
        for _ in range(2)
    )
    assert first.params["call"] == second.params["call"]
    assert hash(first.params["call"]) == hash(second.params["call"])


def test_a_failing_config_is_dropped(measurer):
    measurer.times = lambda label: "launch: CUDA_ERROR_X" if label == LABELS[0] else 1.0
    call = explain()
    assert call.grid == ((4, 1, 1),)
    assert call.timings[0].error == "launch: CUDA_ERROR_X"


def test_the_worker_gets_machine_code_of_what_xla_gets(measurer):
    call = explain()
    (job,) = measurer.jobs
    assert [c.cubin[:4] for c in job.candidates] == [b"\x7fELF"] * len(LABELS)
    assert call.entries[0] == job.candidates[0].entry
    for candidate in job.candidates:
        assert candidate.entry.encode() in candidate.cubin


def test_the_worker_is_told_what_a_launch_takes(measurer):
    call = jax.make_jaxpr(lambda x: add(x, x))(X).eqns[0].params["call"]
    array = ArrayType(X.shape, X.dtype)
    launch = call.launch(call.candidates[0], (array, array), (array,))
    (kernel,) = compiler.compile_all([launch], 90, machine_code=True)
    kernel = dataclasses.replace(
        kernel, num_warps=3, num_ctas=2, shared_bytes=5, global_scratch_bytes=7
    )
    (told,) = measure.make_job(call, [(launch, kernel)], [None, None]).candidates
    fields = {"num_warps": 3, "num_ctas": 2, "shared_bytes": 5, "scratch_bytes": 7}
    assert {name: getattr(told, name) for name in fields} == fields
    assert (told.grid, told.entry, told.cubin) == (launch.grid, kernel.name, kernel.cubin)


@triton.jit
def refused_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if BLOCK == 64:
        x = tl.inline_asm_elementwise(
            "no.such.instruction $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    tl.store(out_ptr + offsets, x, mask=offsets < n)


def test_a_config_that_ptxas_refuses_is_dropped(measurer, caplog):
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128, 256)]
    call = explain(kernel=triton.autotune(configs, key=[])(refused_kernel))
    assert call.grid == ((8, 1, 1),)
    assert "config dropped" in caplog.text
    assert "ptxas" in caplog.text


def test_the_fallback_is_none_that_ptxas_refused(measurer, caplog):
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128, 256)]
    kernel = triton.autotune(configs, key=[])(refused_kernel)
    measurer.error = TuningError("measuring needs 9 bytes, but may use 4")
    assert explain(kernel=kernel).grid == ((8, 1, 1),)


@triton.jit
def uncompilable_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


def test_all_failing_is_an_error_with_each_reason(measurer):
    """What faults in the worker would fault in the program: no config is used in its place."""
    measurer.times = lambda label: f"launch: CUDA_ERROR_X with {label[:10]}"
    with pytest.raises(CompilationError) as caught:
        explain()
    for reason in ("None of the 3 configs", "CUDA_ERROR_X with BLOCK=64", "with BLOCK=1024"):
        assert reason in str(caught.value)
    assert store.user_store().paths() == []


def test_explain_sees_the_mode_in_force_and_not_that_of_an_older_trace(measurer):
    function = lambda x: add(x, x)
    triax.explain(function, X)
    policy.forget()
    with triax.tuning_mode("off"):
        (call,) = triax.explain(function, X)
    assert call.source == "first config (mode off)"


def test_too_large_falls_back_and_says_how_to_tune(measurer, caplog):
    measurer.error = TuningError("measuring needs 9 bytes, but may use 4")
    assert explain().source == "first config (mode auto)"
    assert explain().source == "first config (mode auto)"
    assert len(measurer.jobs) == 1  # tried once in a process
    assert "measuring needs 9 bytes" in caplog.text
    assert "triax tune FILE:FUNCTION" in caplog.text


def test_missing_cuda_bindings_falls_back_and_says_so(measurer, monkeypatch, caplog):
    monkeypatch.setattr(measure, "unavailable", lambda: "cuda-bindings is not installed")
    assert explain().source == "first config (mode auto)"
    assert "cuda-bindings is not installed" in caplog.text


def test_cached_does_not_measure_and_strict_refuses(measurer):
    assert explain("cached").source == "first config (mode cached)"
    with pytest.raises(
        TuningError, match=r"no tuned one is known for.*triax tune FILE:FUNCTION.*--into"
    ):
        explain("strict")
    assert measurer.jobs == []


def test_read_only_stores_are_read_and_never_written(measurer, monkeypatch, tmp_path):
    measurer.times = fastest(LABELS[2])
    explain()
    policy.forget()
    shared = tmp_path / "shared"
    store.user_store().folder.rename(shared)
    before = {p: p.stat().st_mtime_ns for p in shared.iterdir()}
    monkeypatch.setenv("TRIAX_CACHE_PATH", f"{tmp_path / 'nothing'}:{shared}")
    call = explain("strict")
    assert call.source == f"store {shared}"
    assert call.grid == ((1, 1, 1),)
    explain(x=np.zeros(7, np.float32))
    assert {p: p.stat().st_mtime_ns for p in shared.iterdir()} == before


def test_a_store_that_cannot_be_written_is_no_obstacle(measurer, monkeypatch, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TRIAX_CACHE_DIR", str(file / "below"))
    assert explain().source == "measured now"
    assert "could not be stored" in caplog.text
    assert "; set TRIAX_CACHE_DIR" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRIAX_CACHE_DIR", "tuned"),
        ("TRIAX_CACHE_PATH", "tuned"),
        ("TRIAX_CUDA_ARCH", "1e10"),
        ("TRIAX_TUNING_BYTES", "inf"),
        ("TRIAX_TUNING_TIMEOUT", "inf"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error_at_its_first_use(measurer, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name} must .*; got '{value}'"):
        explain()
    monkeypatch.setenv(name, "90" if name == "TRIAX_CUDA_ARCH" else "")
    if name != "TRIAX_CACHE_DIR":  # its default is the user's own
        assert explain().source == "measured now"


def test_a_user_without_a_home_tunes_and_keeps_nothing(measurer, monkeypatch, caplog):
    monkeypatch.setattr("triax.settings.cache_folder", lambda: None)
    assert explain().source == "measured now"
    assert "could not be stored: this user has no home folder" in caplog.text
    assert "set TRIAX_CACHE_DIR" in caplog.text


def test_unusable_files_are_misses(measurer, caplog):
    explain()
    (path,) = store.user_store().paths()
    path.write_text("{")
    policy.forget()
    assert explain().source == "measured now"
    assert "is not usable and is ignored: Expecting property name" in caplog.text
    assert len(measurer.jobs) == 2


def test_records_are_readable(measurer):
    measurer.times = fastest(LABELS[1])
    explain()
    (path,) = store.user_store().paths()
    data = json.loads(path.read_text())
    assert path.name.startswith("add_kernel-")
    assert data["config"] == LABELS[1]
    assert data["key"]["gpu"] == DEVICE.name
    assert data["key"]["arguments"] == {"n": "1003"}
    assert [t["config"] for t in data["timings"]] == list(LABELS)
    assert data["versions"]["jax"] == jax.__version__
    assert Store(path.parent, "x").find(store.Record.from_json(path.read_text()).key) is not None


class TestInputs:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_filling_by_dtype(self, measurer, dtype):
        x = np.ones((9, 5), jnp.dtype(dtype))
        with triax.tuning_mode("auto"):
            triax.explain(lambda x, i: gather(x, i), x, np.ones(9, np.int32))
        (job,) = measurer.jobs
        values = np.frombuffer(job.buffers[0].pattern, x.dtype).astype(np.float32)
        assert len(np.unique(values)) > 10
        assert np.abs(values).max() <= 1
        assert job.buffers[1].pattern == b"\0"
        assert [b.nbytes for b in job.buffers] == [x.nbytes, 36, x.nbytes]

    def test_tuning_inputs_are_written_out(self, measurer, monkeypatch):
        seen = []
        original = measurer.measure

        def spy(job, *arguments):
            seen.extend(np.fromfile(b.path, np.float32) for b in job.buffers if b.path)
            original(job, *arguments)

        monkeypatch.setattr(measure, "measure", spy)
        explain(tuning_inputs=lambda x, y: (jnp.full(x.shape, 3.0), jnp.full(y.shape, 4.0)))
        assert [set(a) for a in seen] == [{3.0}, {4.0}]

    @pytest.mark.parametrize(
        ("inputs", "got"),
        [
            (jnp.zeros(2), r"float32\[2\]"),
            ([X[:7], X], r"float32\[7\], float32\[1003\]"),
            ([X, X.astype(np.int32)], r"float32\[1003\], int32\[1003\]"),
            ([X, X, X], r"float32\[1003\], float32\[1003\], float32\[1003\]"),
        ],
    )
    def test_tuning_inputs_of_other_types(self, measurer, inputs, got):
        with pytest.raises(
            ArgumentTypeError,
            match=rf"`tuning_inputs`.*: float32\[1003\], float32\[1003\]; got {got}\.",
        ):
            explain(tuning_inputs=lambda x, y: inputs)

    @pytest.mark.parametrize(
        ("shape", "dtype", "nbytes"),
        [
            ((3,), "float32", 12),
            ((5,), "bfloat16", 10),
            ((1 << 19,), "float32", 1 << 20),
            ((0,), "float32", 1),
            ((9,), "int32", 1),
            ((9,), "bool", 1),
        ],
    )
    def test_a_pattern_is_of_whole_elements_and_no_longer_than_its_array(
        self, shape, dtype, nbytes
    ):
        pattern = measure._pattern(ArrayType(shape, jnp.dtype(dtype)))
        assert len(pattern) == nbytes
        assert (pattern == b"\0") == (nbytes == 1)

    def test_a_record_says_what_it_was_measured_on(self, measurer):
        for size, given in ((1003, None), (1004, lambda x, y: [x * 0 + 1 for x in (X4, X4)])):
            explain(x=np.zeros(size, np.float32), tuning_inputs=given)
        texts = [record.inputs for _, record in store.user_store().records()]
        assert sorted(texts) == ["random floats, zeros for integers", "tuning_inputs"]

    @pytest.mark.parametrize("named", [False, True])
    def test_changed_operands_are_restored(self, measurer, named):
        """Those that outputs are aliased to, and those that the kernel's author names."""
        configs = [triton.Config({"BLOCK": b}) for b in (64, 128)]
        kernel = triton.autotune(configs, key=[], restore_value=["x_ptr"] * named)
        kernel = kernel(kernels.accumulate_kernel)
        with triax.tuning_mode("auto"):
            triax.explain(lambda *xy: blockwise(kernel, *xy, input_output_aliases={1: 0}), X, X)
        (job,) = measurer.jobs
        assert [b.restored for b in job.buffers] == [named, True]

    def test_reset_to_zero_starts_from_zero(self, measurer):
        kernel = triton.autotune(
            configs=[triton.Config({"BLOCK": b}) for b in (64, 128)],
            key=[],
            reset_to_zero=["out_ptr"],
        )(kernels.add_kernel)
        explain(kernel=kernel)
        (job,) = measurer.jobs
        assert (job.buffers[2].pattern, job.buffers[2].restored) == (b"\0", True)

    @pytest.mark.parametrize(
        ("padding", "tf32", "element"), [("zero", False, "FLOAT32"), ("nan", True, "TFLOAT32")]
    )
    def test_what_the_worker_is_told_of_a_descriptor(self, measurer, padding, tf32, element):
        configs = [triton.Config({"BM": 16, "BN": bn}) for bn in (32, 16)]
        kernel = triton.autotune(configs, key=[], restore_value=["desc"])(descriptors.host_kernel)

        def call(x):
            descriptor = triax.TensorDescriptor.from_array(
                x,
                lambda meta: (meta["BM"], meta["BN"]),
                padding=padding,
                round_f32_to_tf32=tf32,
            )
            how = {"n_cols": 96, "kernel": kernel, "grid": (3, 6)}
            return triax.triton_call(
                descriptor, out_type=jax.ShapeDtypeStruct((48, 96), np.float32), **how
            )

        if tf32 and not versions.TF32_DESCRIPTORS.passes(triton.__version__):
            pytest.skip("this Triton does not round to tf32")
        with triax.tuning_mode("auto"), contextlib.suppress(VersionError):  # of older jaxlibs
            triax.explain(call, np.zeros((35, 44), np.float32))
        (job,) = measurer.jobs
        assert [buffer.restored for buffer in job.buffers] == [True, False]
        for candidate, width in zip(job.candidates, (32, 16), strict=True):
            told, *others = candidate.parameters
            assert told == messages.TensorMapParameter(
                index=0,
                element_type=ELEMENT_TYPES[element],
                itemsize=4,
                swizzle=3 if width == 32 else 2,
                shape=(35, 44),
                strides=(44, 1),
                block_shape=(16, width),
                nan_fill=padding == "nan",
            )
            assert others == [messages.Pointer(1), messages.Number(96, "i32")]
            assert candidate.grid == (3, 6, 1)

    def test_zeroed_outputs_are_zeroed_before_each_run(self, measurer):
        explain(zeroed_outputs=(0,))
        (job,) = measurer.jobs
        for candidate in job.candidates:
            pointers = [p for p in candidate.parameters if isinstance(p, messages.Pointer)]
            assert [p.zeroed for p in pointers] == [0, 0, X.nbytes]


def test_the_worker_and_the_compiler_have_the_limits_of_the_settings(measurer, monkeypatch):
    monkeypatch.setenv("TRIAX_TUNING_TIMEOUT", "3")
    monkeypatch.setenv("TRIAX_TUNING_BYTES", "123456")
    each, limits = threads.each, []
    monkeypatch.setattr(threads, "each", lambda *of: (limits.append(of[2]), each(*of))[1])
    explain()
    (job,) = measurer.jobs
    assert (job.timeout_s, job.limit_bytes, job.budget_s) == (3, 123456, measure._BUDGET_S)
    assert 18 in limits  # compiling takes longer than a run


class TestRealOperands:
    """What `triax.tune` does for each call that it meets."""

    @staticmethod
    def choose():
        (equation,) = jax.make_jaxpr(lambda x: add(x, x))(X).eqns
        call = equation.params["call"]
        array = ArrayType(X.shape, X.dtype)
        launches = [call.launch(c, (array, array), (array,)) for c in call.candidates]
        request = Request(call, launches, 90, compiler.compile_all, DEVICE, inputs=[X, X])
        (launch,) = policy.choose(request).launches
        return launch

    @pytest.mark.parametrize("mode", ["cached", "off"])
    def test_are_measured_even_if_a_config_is_known(self, measurer, mode):
        measurer.times = fastest(LABELS[0])
        explain()
        measurer.times = fastest(LABELS[2])
        with triax.tuning_mode(mode):  # which only holds back what nobody asked for
            assert self.choose().grid == (1, 1, 1)
        assert len(measurer.jobs) == 2
        ((_, record),) = store.user_store().records()
        assert (record.inputs, record.config) == ("real operands", LABELS[2])
        assert explain().grid == ((1, 1, 1),)

    def test_that_cannot_be_measured_are_an_error(self, measurer):
        measurer.error = TuningError("measuring needs 9 bytes, but may use 4")
        with pytest.raises(TuningError, match="measuring needs 9 bytes"):
            self.choose()

    def test_without_cuda_bindings_are_an_error(self, measurer, monkeypatch):
        monkeypatch.setattr(measure, "unavailable", lambda: "cuda-bindings is not installed")
        with pytest.raises(TuningError, match="cannot be tuned: cuda-bindings is not installed"):
            self.choose()


class TestAgreement:
    class Service:
        process, num_processes = 0, 1

        def __init__(self):
            self.values = {}

        def find(self, key):
            return self.values.get(key)

        def set_first(self, key, value, timeout_ms):
            return self.values.setdefault(key, value)

        def claim(self, key, value):
            return self.values.setdefault(key, value)

        def delete(self, key):
            del self.values[key]

        def count(self, folder):
            return sum(key.startswith(f"{folder}/") for key in self.values)

        @property
        def configs(self):
            return {k: v for k, v in self.values.items() if k.startswith("triax/config/")}

    @pytest.fixture
    def service(self, monkeypatch):
        service = self.Service()
        monkeypatch.setattr("triax.compat.jax_private.key_value_client", lambda: service)
        return service

    def test_what_is_published_first_decides(self, measurer, service):
        measurer.times = fastest(LABELS[0])
        explain()
        ((key, value),) = service.configs.items()
        assert value == LABELS[0]
        service.values[key] = LABELS[2]
        policy.forget()
        call = explain()  # found in the store, and overruled
        assert (call.source, call.grid) == ("another process of this job", ((1, 1, 1),))

    def test_another_process_saves_the_measuring(self, measurer, service):
        measurer.times = fastest(LABELS[1])
        explain()
        for path in store.user_store().paths():
            path.unlink()
        policy.forget()
        assert explain().source == "another process of this job"
        assert len(measurer.jobs) == 1

    def test_fallbacks_agree_too(self, measurer, service):
        explain("cached")
        assert list(service.configs.values()) == [LABELS[0]]
        policy.forget()
        measurer.times = fastest(LABELS[2])
        assert explain("auto").config[0].startswith("BLOCK=64")

    def test_another_program_is_an_error(self, measurer, service):
        explain()
        (key,) = service.configs
        service.values[key] = "BLOCK=77"
        policy.forget()
        with pytest.raises(TuningError, match=r"uses config \[BLOCK=77\].*the same program"):
            explain()

    def test_the_fallback_that_is_published_is_one_that_compiles(self, measurer, service):
        configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
        kernel = triton.autotune(configs, key=[])(uncompilable_kernel)
        assert explain("cached", kernel=kernel).grid == ((8, 1, 1),)
        (published,) = service.configs.values()
        assert published.startswith("BLOCK=128")
        policy.forget()
        assert explain("cached", kernel=kernel).grid == ((8, 1, 1),)

    def test_sizes_near_each_other_are_agreed_on_too(self, measurer, service):
        """One process may know of another size, and the others not."""
        measurer.times = fastest(LABELS[1])
        sizes = {size: TestSizes.explain(size) for size in (1000, 2000)}
        assert len(measurer.jobs) == 1
        assert [v for _, v in sorted(service.configs.items())] == [LABELS[1]] * 2
        service.values[f"triax/config/{sizes[2000].key[:-5]}36000"] = LABELS[2]
        assert chosen(TestSizes.explain(3000)) == LABELS[2]

    def test_what_another_process_decided_is_for_that_size_alone(self, measurer, service):
        """It may be a fallback: only who measured it knows for which sizes it holds."""
        first = TestSizes.explain(1000)
        policy.forget()
        for path in store.user_store().paths():
            path.unlink()
        service.values[f"triax/config/{first.key}"] = LABELS[2]
        assert TestSizes.explain(1000).source == "another process of this job"
        measurer.times = fastest(LABELS[1])
        assert chosen(TestSizes.explain(1500)) == LABELS[1]

    def test_the_own_fallback_stays_a_fallback(self, measurer, service):
        assert explain("cached").source == "first config (mode cached)"
        assert explain("cached").source == "first config (mode cached)"

    def test_a_claim_is_taken_back_where_measuring_ends_in_an_error(self, measurer, service):
        """Else the others would wait for a result that never comes."""
        measurer.times = lambda label: "launch: CUDA_ERROR_X"
        with pytest.raises(CompilationError):
            explain()
        assert service.values == {}

    def test_waits_for_the_process_that_measures(self, measurer, service, monkeypatch):
        """One that cannot measure, and came first."""
        monkeypatch.setattr(measure, "unavailable", lambda: "cuda-bindings is not installed")
        service.num_processes = 2
        name = self.key_name()

        def other():
            time.sleep(0.3)
            service.values[f"triax/claim/{name}"] = "1"
            time.sleep(0.5)
            service.values[f"triax/config/{name}"] = LABELS[2]

        thread = threading.Thread(target=other)
        thread.start()
        call = explain()
        thread.join()
        assert (call.source, call.grid) == ("another process of this job", ((1, 1, 1),))

    @staticmethod
    def key_name():
        with triax.tuning_mode("off"):
            (equation,) = jax.make_jaxpr(lambda x: add(x, x))(X).eqns
        call = equation.params["call"]
        array = ArrayType(X.shape, X.dtype)
        launches = [call.launch(c, (array, array), (array,)) for c in call.candidates]
        return make_key(call, launches, 90, DEVICE).name

    def test_alone_there_is_nothing_to_agree_on(self):
        assert agree.published("x") is None
        assert agree.agree("x", "config") == "config"


def test_unmeasurable_devices_look_up_but_do_not_measure(measurer, monkeypatch):
    explain()
    policy.forget()
    frozen = dataclasses.replace(DEVICE, measurable=False)
    monkeypatch.setattr("triax.devices.for_tuning", lambda *_: frozen)
    assert explain().source == "user store"
    assert explain(x=np.zeros(8, np.float32)).source == "nearest known config (user store)"
    assert explain(x=np.zeros(8, np.float16)).source == "nearest known config (user store)"


def test_what_this_process_measured_is_near_without_a_store(measurer):
    explain()
    for path in store.user_store().paths():
        path.unlink()
    assert explain("cached", x=X[:8]).source == "nearest known config (measured now)"


def test_where_nothing_is_measured_slow_configs_come_last(measurer, monkeypatch):
    measurer.times = fastest(LABELS[0])
    explain(x=X[:8])  # even if they are the nearest record's best
    original = compiler._compile

    def compile_slowly(launch, capability, *, machine_code=False, **options):
        if machine_code and launch.candidate.grid[0] == 16:
            raise CompilationTimeout("it was not compiled after 60 s")
        return original(launch, capability, machine_code=machine_code, **options)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    measurer.error = TuningError("the worker has died")
    call = explain()
    assert (call.source, call.grid) == ("first config (mode auto)", ((4, 1, 1),))
