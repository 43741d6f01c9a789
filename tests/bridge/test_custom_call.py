"""The order in which buffers are passed, and what jaxlib is told of them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from triax import testing
from triax.bridge.custom_call import order_buffers
from triax.bridge.inspect import describe
from triax.bridge.launch import Alias, ArrayType, Operand, Result, Scalar, Static

A = ArrayType((4,), np.dtype(np.float32))


def launch(leaves, aliases=(), results=0):
    """As much of a Launch as the order of buffers depends on."""
    return types.SimpleNamespace(
        leaves=lambda: iter(leaves), aliases=aliases, results=(A,) * results
    )


I, O, S = Operand, Result, Scalar(Static(3))  # noqa: E741


@pytest.mark.parametrize(
    ("leaves", "aliases", "results", "expected"),
    [
        ([I(0), I(1), S, O(0)], (), 1, ((I(0), I(1)), (0,), ())),
        # Keywords may bind operands in another order than they were flattened in.
        ([I(1), S, I(0), O(1), O(0)], (), 2, ((I(1), I(0)), (1, 0), ())),
        # An aliased output has no parameter; it must not take the place of one that has.
        ([I(0), I(1), O(1)], (Alias(1, 0),), 2, ((I(0), I(1)), (1, 0), ((1, 1),))),
        # Outputs before operands go in as uninitialised operands.
        ([O(0), I(0), O(1)], (), 2, ((O(0), I(0)), (1, 0), ((0, 1),))),
        ([O(0), I(0), O(1), I(1)], (), 2, ((O(0), I(0), O(1), I(1)), (0, 1), ((0, 0), (2, 1)))),
        ([O(0)], (), 1, ((), (0,), ())),
        # triton_call_lowering: the aliased output keeps a parameter of its own.
        ([I(0), I(1), O(0), O(1)], (Alias(1, 1),), 2, ((I(0), I(1)), (0, 1), ((1, 1),))),
    ],
)
def test_order(leaves, aliases, results, expected):
    order = order_buffers(launch(leaves, aliases, results))
    assert (order.operands, order.results, order.aliases) == expected


@triton.jit
def mixed_kernel(first_ptr, x_ptr, y_ptr, last_ptr, n, BLOCK: tl.constexpr):
    """first = x + y; last = x - y; y += 1"""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(first_ptr + offsets, x + y, mask=mask)
    tl.store(last_ptr + offsets, x - y, mask=mask)
    tl.store(y_ptr + offsets, y + 1, mask=mask)


def mixed(x, y):
    """The aliased output stands between the two others in out_type."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triax.triton_call(
        y_ptr=y,
        x_ptr=x,
        n=x.size,
        BLOCK=64,
        kernel=mixed_kernel,
        out_type=(like, like, like),
        input_output_aliases={"y_ptr": 1},
        grid=1,
    )


def check_mixed():
    x, y = np.arange(50, dtype=np.float32), np.arange(50, dtype=np.float32) ** 2
    first, updated, last = jax.jit(mixed)(x, y)
    testing.assert_same_bits(first, x + y)
    testing.assert_same_bits(last, x - y)
    testing.assert_same_bits(updated, y + 1)


def test_outputs_aliases_and_keywords_in_any_order():
    check_mixed()


@pytest.mark.cuda_plugin
def test_zeroed_bytes_reach_the_right_parameter(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    like = jax.ShapeDtypeStruct((50,), jnp.float32)

    def f(x, y):
        return triax.triton_call(
            y_ptr=y,
            x_ptr=x,
            n=50,
            BLOCK=64,
            kernel=mixed_kernel,
            out_type=(like, like, like),
            input_output_aliases={"y_ptr": 1},
            zeroed_outputs=(1, 2),
            grid=1,
        )

    x = np.zeros(50, np.float32)
    (call,) = describe(jax.jit(f).trace(x, x).lower(lowering_platforms=("cuda",)))
    assert call.payload.calls[0].zeroed_bytes == (0, 0, 200, 200)
