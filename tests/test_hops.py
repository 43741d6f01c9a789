"""How many calls of Triax's own functions a user's call takes, when it is traced and lowered."""

import collections
import inspect
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
from triax import moe

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


def takes(value, array):
    """Whether an argument is an array, or a tuple, list or dict that has it."""
    if type(value) is dict:
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(takes(of, array) for of in value)
    return value is array


def test_calls_that_take_the_tokens_of_a_layer():
    """From `feed_forward` to the primitive: tokens are checked once, and handed on."""
    tokens, walk = [], []

    def profile(frame, event, argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
        count = (
            code.co_argcount + code.co_kwonlyargcount + sum(code.co_flags & f > 0 for f in flags)
        )
        values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if code.co_name not in NOT_CALLS and takes(values, tokens[-1]):
            walk.append(f"{Path(code.co_filename).name}: {code.co_qualname}")

    def layer(x, logits, w_gate_up, w_down):
        tokens.append(x)
        experts = moe.Experts(w_gate_up, w_down)
        walk.clear()
        sys.setprofile(profile)
        try:
            return moe.feed_forward(x, logits, experts, moe.Router(2)).tokens
        finally:
            sys.setprofile(None)

    shapes = (64, 128), (64, 8), (8, 128, 256), (8, 128, 128)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    for _ in range(2):  # the first call has more that is done once
        jax.jit(lambda *args: layer(*args)).trace(*args)
    assert "api.py: feed_forward" in walk
    assert walk[-1] == "jax_private.py: insert_varying_casts"  # of the op of the experts
    assert len(walk) <= 18, walk
    twice = {name for name, count in collections.Counter(walk).items() if count > 1}
    assert twice <= {"explicit.py: explicit_mesh"}  # of the layer, and of the op
