"""Functions of the user's that get arguments by name: what an error in one of them says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

X = jnp.arange(100, dtype=jnp.float32)
OUT = jax.ShapeDtypeStruct((100,), jnp.float32)
CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 128)]


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offsets < n) | EVEN
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


def call(kernel=kernel, **changes):
    arguments = {"n": 100, "out_type": OUT, "grid": 1} | changes
    return triax.triton_call(X, kernel=kernel, **arguments)


def descriptor(block_shape):
    x = triax.TensorDescriptor.from_array(jnp.zeros((8, 8)), block_shape)
    return triax.triton_call(x, kernel=kernel, n=1, out_type=OUT, grid=1, BLOCK=16)


def heuristic(function, **changes):
    return call(triton.heuristics({"EVEN": function})(kernel), BLOCK=64, **changes)


def pruned(**prune):
    return call(triton.autotune(CONFIGS, key=[], prune_configs_by=prune)(kernel))


def hooked(hook):
    return call(triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=hook)], key=[])(kernel))


READERS = {
    "argument `grid`": lambda f: call(BLOCK=64, grid=f),
    "argument `zeroed_outputs`": lambda f: call(BLOCK=64, zeroed_outputs=f),
    "the `block_shape` of a descriptor": descriptor,
    "the heuristic for `EVEN`": heuristic,
    "the `early_config_prune`": lambda f: pruned(early_config_prune=lambda c, meta, **_: f(meta)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_is_not_there(reader):
    with pytest.raises(KeyError) as caught:
        READERS[reader](lambda meta: meta["nn"])
    start = (
        f"{reader[0].upper()}{reader[1:]} of kernel 'kernel' reads `nn`, which the call does not"
    )
    assert str(caught.value).startswith(f"{start} have. Did you mean `n`? It may read ")
    assert "n, out_ptr, x_ptr." in str(caught.value)
    assert isinstance(caught.value, ArgumentValueError)


def test_a_name_that_is_not_there_in_a_hook():
    with pytest.raises(
        UnsupportedError,
        match=r"The `pre_hook` of config \[BLOCK=64, .*\] of kernel 'kernel' reads `BLOK`, which "
        r"the call does not have\. Did you mean `BLOCK`\?",
    ):
        hooked(lambda arguments: arguments["BLOK"])


def test_a_function_may_catch_it():
    def grid(meta):
        try:
            return meta["BLOK"]
        except KeyError:
            return 2

    np.testing.assert_array_equal(call(BLOCK=64, grid=grid), X)


@pytest.mark.parametrize("inside", ["configs", "a heuristic"])
def test_a_value_that_is_set_further_in(inside):
    inner = triton.autotune(CONFIGS, key=[])(kernel)
    if inside == "a heuristic":
        inner = triton.heuristics({"BLOCK": lambda args: 64})(kernel)
    outer = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(inner)
    with pytest.raises(
        KeyError,
        match=r"^The heuristic for `EVEN` of kernel 'kernel' reads `BLOCK`, which an inner "
        r"decorator sets only later\. Put `@triton\.heuristics` next to `@triton\.jit`, below that "
        r"decorator\. It may read n, out_ptr, x_ptr\.$",
    ):
        call(outer)


@pytest.mark.parametrize("reader", READERS)
def test_other_errors_say_where_they_are_from(reader):
    with pytest.raises(ZeroDivisionError) as caught:
        READERS[reader](lambda meta: 1 // 0)
    assert caught.value.__notes__ == [f"Raised by {reader} of kernel 'kernel'."]


def test_errors_of_a_perf_model_say_where_they_are_from():
    with pytest.raises(ZeroDivisionError) as caught:
        pruned(perf_model=lambda **_: 1 // 0, top_k=1)
    assert caught.value.__notes__ == ["Raised by the `perf_model` of kernel 'kernel'."]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda: heuristic(lambda: True),
            "The heuristic for `EVEN` of kernel 'kernel' is called with one dictionary, the meta-",
        ),
        (
            lambda: call(BLOCK=64, zeroed_outputs=lambda: ()),
            "Argument `zeroed_outputs` of kernel 'kernel' is called with one dictionary",
        ),
        (
            lambda: descriptor(lambda: (8, 8)),
            "The `block_shape` of a descriptor of kernel 'kernel'",
        ),
        (
            lambda: pruned(early_config_prune=lambda configs: configs),
            "The `early_config_prune` of kernel 'kernel' is called with the configs, the",
        ),
        (
            lambda: pruned(perf_model=lambda BLOCK: BLOCK, top_k=1),
            "The `perf_model` of kernel 'kernel' is called with the arguments of the call and of",
        ),
    ],
)
def test_functions_that_take_something_else(mistake, message):
    with pytest.raises(ArgumentTypeError, match=rf"^{re.escape(message)}.*; got .*cannot be: "):
        mistake()


def test_a_hook_that_takes_something_else():
    with pytest.raises(UnsupportedError, match=r"'kernel' is called with one dictionary, .*cannot"):
        hooked(lambda: None)
