"""Every kind of call: run under jit in the interpreter, and lowered for CUDA."""

import contextlib

import jax
import numpy as np
import pytest

import triax
from tests.cases import CASES, cuda_calls
from triax import testing
from triax.compat import versions

PARAMETERS = [pytest.param(case, id=case.name) for case in CASES]


def x64(case):
    return jax.enable_x64(True) if case.x64 else contextlib.nullcontext()


@pytest.mark.parametrize("case", PARAMETERS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_runs_on_cpu(case, jit):
    inputs = case.inputs(np.random.default_rng(7))
    with x64(case):
        arrays = [jax.numpy.asarray(x) for x in inputs]
        function = jax.jit(case.function) if jit else case.function
        case.check(function(*arrays), inputs)
        # The caller's arrays are as they were: an alias does not reach outside the program.
        for array, given in zip(arrays, inputs, strict=True):
            testing.assert_same_bits(array, given)


@pytest.mark.parametrize("case", [case for case in PARAMETERS if case.values[0].x64])
def test_64_bits_outside_enable_x64(case):
    """As in a thread of XLA's, which runs what has to wait for its operands."""
    inputs = case.inputs(np.random.default_rng(7))
    with x64(case):
        arrays = [jax.numpy.asarray(x) for x in inputs]
        program = jax.jit(case.function).lower(*arrays).compile()
    case.check(program(*arrays), inputs)


def lower(case, mode):
    inputs = case.inputs(np.random.default_rng(7))
    with x64(case), triax.tuning_mode(mode):
        return cuda_calls(case.function, *inputs)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("case", PARAMETERS)
def test_lowers_for_cuda(case):
    calls = lower(case, "off")
    assert len(calls) == case.calls
    for call in calls:
        new = versions.FFI_TARGET.passes(versions.gated_version())
        assert call.target == ("triton_kernel_call_ffi" if new else "triton_kernel_call")
        assert call.aliases == case.aliases
        assert len(call.entries) == 1
        assert ".target sm_90" in call.ptx[0]
        assert ".version 8.6" in call.ptx[0]
        assert f".entry {call.entries[0]}(" in call.ptx[0]


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("heuristics", "autotuned_accumulate")]
)
def test_runtime_mode_hands_over_all_configs(case):
    if not versions.RUNTIME_AUTOTUNING.passes(versions.gated_version()):
        with pytest.warns(UserWarning, match="tuning at run time needs jaxlib 0.9.3"):
            (call,) = lower(case, "runtime")
        assert len(call.entries) == 1
        return
    (call,) = lower(case, "runtime")
    assert call.target == "triton_kernel_call"
    size = case.inputs(np.random.default_rng(7))[0].size
    assert call.grid == tuple((-(-size // block), 1, 1) for block in (64, 256, 1024))
    assert len(set(call.entries)) == 3
    inputs = len(call.operands)
    assert call.saved == tuple((i, inputs + o, 4 * size) for i, o in case.aliases)
