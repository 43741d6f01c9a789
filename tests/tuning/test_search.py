"""From a program to a stored record: the real compiler, the real worker, an imaginary driver."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.tuning.conftest import DEVICE, explain
from triax.compiling import compiler
from triax.errors import ArgumentTypeError, CompilationError
from triax.tuning import measure, policy, store
from triax.tuning.worker import client

pytestmark = pytest.mark.cuda_plugin

GRIDS = (16, 4, 1)  # of the three configs


@pytest.fixture
def gpu(driver, monkeypatch):
    monkeypatch.setattr("triax.devices.for_tuning", lambda *_: DEVICE)
    return driver


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("best", GRIDS)
def test_the_fastest_wins(gpu, best):
    gpu(ms={str(best): 2, **{str(g): 9 for g in GRIDS if g != best}})
    call = explain()
    assert call.source == "measured now"
    assert call.grid == ((best, 1, 1),)
    assert 2 <= min(t.median_ms for t in call.timings) < 6


@pytest.mark.slow("its processes take seconds")
def test_kernels_that_only_take_long_still_run(gpu, monkeypatch, caplog):
    """Two of twelve seconds where a run may take ten: the fallback, with a log line."""
    monkeypatch.setenv("TRIAX_TUNING_TIMEOUT", "0.3")
    gpu(ms={str(g): 12_000 for g in GRIDS})
    call = explain()
    assert call.source == "first config (mode auto)"
    assert call.grid == ((16, 1, 1),)
    assert "no config could be timed" in caplog.text
    assert "TRIAX_TUNING_TIMEOUT" in caplog.text
    assert store.user_store().paths() == []


def test_the_fallback_is_none_that_is_known_to_fault(gpu, monkeypatch):
    monkeypatch.setenv("TRIAX_TUNING_TIMEOUT", "0.3")
    gpu(ms={"4": 12_000, "1": 12_000}, fault={"16": "ILLEGAL_ADDRESS"})
    assert explain().grid == ((4, 1, 1),)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("says", "chosen"),
    [
        ({"refused": {str(grid): "OUT_OF_MEMORY" for grid in GRIDS}}, 4),  # it stops at the first
        ({"refused": {"16": "OUT_OF_MEMORY"}}, 4),
        ({"refused": {"1": "OUT_OF_MEMORY"}}, 16),
        ({"fault": {"16": "ILLEGAL_ADDRESS"}, "refused": {"4": "OUT_OF_MEMORY"}}, 1),
        ({"modules": 2}, 16),
        ({"fault": {"4": "ECC_UNCORRECTABLE"}}, 16),
    ],
)
def test_a_full_gpu_is_a_reason_to_fall_back(gpu, caplog, says, chosen):
    """The program gets no config that failed, if possible none that ran out of memory either."""
    gpu(**says)
    call = explain()
    assert (call.source, call.grid) == ("first config (mode auto)", ((chosen, 1, 1),))
    assert "none is measured: the tuning worker could not go on with config [BLOCK=" in caplog.text
    assert store.user_store().paths() == []


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(28, "No space left on device")])
def test_what_one_config_lacked_to_be_compiled(gpu, monkeypatch, caplog, error):
    compile_, gone = compiler._compile, [error]

    def compile_one_less(launch, *arguments, **options):
        if launch.candidate.grid[0] == 4 and gone:
            raise gone.pop()
        if launch.candidate.grid[0] == 1:  # which is the kernel's
            raise CompilationError("it needs too much shared memory")
        return compile_(launch, *arguments, **options)

    gpu()
    monkeypatch.setattr(compiler, "_compile", compile_one_less)
    call = explain()
    assert (call.source, call.grid) == ("first config (mode auto)", ((16, 1, 1),))
    assert f"{type(error).__name__}: {error}" in caplog.text
    assert store.user_store().paths() == []


def test_a_program_needs_no_machine_code(gpu, monkeypatch):
    """A machine that cannot make it measures nothing, and the program gets a config."""
    compile_ = compiler._compile

    def compile_no_further(*arguments, machine_code, **options):
        if machine_code:
            raise OSError(8, "Exec format error")
        return compile_(*arguments, **options)

    gpu()
    monkeypatch.setattr(compiler, "_compile", compile_no_further)
    call = explain()
    assert (call.source, call.grid) == ("first config (mode auto)", ((16, 1, 1),))


def test_what_was_not_tried_goes_before_what_never_ended(gpu, monkeypatch):
    """Two configs hang until the time for measuring is over: the program is not given one."""
    monkeypatch.setenv("TRIAX_TUNING_TIMEOUT", "0.4")
    monkeypatch.setattr(measure, "_BUDGET_S", 0.6)
    gpu(hang=[16, 4])
    call = explain()
    assert (call.source, call.grid) == ("first config (mode auto)", ((1, 1, 1),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("multiprocessing.Pipe", OSError(24, "Too many open files")),
        ("os.memfd_create", OSError(28, "No space left on device")),
        ("subprocess.Popen", OSError(7, "Argument list too long")),
        ("fcntl.flock", OSError(37, "No locks available")),
        ("multiprocessing.connection.Connection.send", ValueError("no name for it")),
        ("tempfile.NamedTemporaryFile", OSError(28, "No space left on device")),
    ],
)
def test_what_the_system_refuses_is_a_reason_to_fall_back(gpu, monkeypatch, caplog, fault, error):
    gpu()
    client.stop_all()
    compiler.clear_cache()  # with the machine code that other tests had made

    popen = subprocess.Popen

    def refuse(*arguments, **options):
        if fault == "subprocess.Popen" and "worker" not in str(arguments):
            return popen(*arguments, **options)  # Triton's own, if it compiles for the first time
        raise error

    monkeypatch.setattr(fault, refuse)
    call = explain(tuning_inputs=zeros)
    assert call.source == "first config (mode auto)"
    assert str(error) in caplog.text


def zeros(*shapes):
    return [jnp.zeros(shape.shape) for shape in shapes]


def test_a_system_without_files_in_memory(gpu, monkeypatch, caplog):
    gpu()
    monkeypatch.delattr("os.memfd_create")
    assert explain(tuning_inputs=zeros).source == "first config (mode auto)"
    assert "this Python lacks os.memfd_create" in caplog.text


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out")],
)
def test_no_memory_for_tuning_inputs(gpu, caplog, error):
    def inputs(*shapes):
        raise error

    gpu()
    assert explain(tuning_inputs=inputs).source == "first config (mode auto)"
    assert f"no memory for its operands: {error}" in caplog.text


def test_a_mistake_in_tuning_inputs_is_an_error(gpu):
    gpu()
    with pytest.raises(ZeroDivisionError) as caught:
        explain(tuning_inputs=lambda *shapes: 1 / 0)
    of_kernel = "`tuning_inputs` of kernel 'add_kernel'"
    assert f"Raised by argument {of_kernel}." in caught.value.__notes__
    message = f"Argument {of_kernel} is called with the shapes of the operands, 2 jax.Shape.*cannot"
    with pytest.raises(ArgumentTypeError, match=message):
        explain(tuning_inputs=lambda x: x)


@pytest.mark.parametrize("name", ["cuda.py", "cuda/__init__.py"])
def test_a_program_with_a_file_called_cuda(monkeypatch, tmp_path, caplog, name):
    """A file that is not a package is not run to look at it."""
    monkeypatch.setattr("triax.devices.for_tuning", lambda *_: DEVICE)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit\n" if name == "cuda.py" else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [m for m in sys.modules if m.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, module)
    assert explain().source == "first config (mode auto)"
    assert f"`import cuda` finds {file}, which is not of cuda-bindings; rename it" in caplog.text
    sys.modules.pop("cuda", None)


def test_a_driver_that_fails_before_measuring(gpu, caplog):
    gpu(broken_start=True)
    assert explain().source == "first config (mode auto)"
    assert "waiting for the GPU failed: cuInit" in caplog.text


def test_an_interrupt_ends_the_worker(gpu, monkeypatch):
    gpu()
    explain()
    worker = client.start(0)

    def interrupt(self, timing):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure._Measurement, "_note", interrupt)
    policy.forget()
    for path in store.user_store().paths():
        path.unlink()
    with pytest.raises(KeyboardInterrupt):
        explain()
    assert not worker.alive
