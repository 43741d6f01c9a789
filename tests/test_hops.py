"""How many calls of Triax's own functions a user's call takes, when it is traced and lowered."""

import collections
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton

import triax
from tests import kernels
from tests.cases import blockwise

SOURCE = str(Path(triax.__file__).parent)
NOT_CALLS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
X = jax.ShapeDtypeStruct((4096,), jnp.float32)


def counted(work):
    """What `work` returns, and how often it called each function of Triax, in all threads."""
    calls = collections.Counter()

    def profile(frame, event, argument):
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(SOURCE)
            and code.co_name not in NOT_CALLS
        ):
            calls[f"{Path(code.co_filename).name}: {code.co_qualname}"] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        found = work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found, calls


def trace_and_lower(kernel, *arrays):
    """The calls of each, of a function that JAX has not seen."""
    function = jax.jit(lambda *arrays: blockwise(kernel, *arrays, BLOCK=1024))
    traced, tracing = counted(lambda: function.trace(*arrays))
    _, lowering = counted(lambda: traced.lower(lowering_platforms=("cuda",)))
    return tracing, lowering


@pytest.mark.cuda_plugin
def test_calls_of_a_triton_call(tmp_path, monkeypatch):
    """At most 60 for each of tracing and lowering, and 230 where the kernel is new."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    trace_and_lower(kernels.copy_kernel, X)  # what is done once in a process
    new = triton.jit(kernels.add_kernel.fn)
    cold = sum(trace_and_lower(new, X, X), collections.Counter())
    del cold["triton_patches.py: <lambda>"]  # Triton before 3.7 calls it for each node of a kernel
    assert 100 < cold.total() <= 230, cold.most_common()
    tracing, lowering = trace_and_lower(new, X, X)
    assert 10 < tracing.total() <= 60, tracing.most_common()
    assert 10 < lowering.total() <= 60, lowering.most_common()
