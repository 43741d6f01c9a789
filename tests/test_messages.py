"""What messages say of values: a type and a shape, and never what arrays hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import messages, moe


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3 of type int"),
        (None, "None of type NoneType"),
        (np.float32(1.5), "np.float32(1.5) of type float32"),
        (np.zeros((8, 4), np.int8), "int8[8,4] of type ndarray"),
        (jnp.ones(()), "float32[] of type jax.Array"),
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), "bfloat16[2] of type ShapeDtypeStruct"),
        ([1, [2.0, np.ones(9)]], "[1, [2.0, float64[9]]] of type list"),
        ({"a": (jnp.ones(9),)}, "{'a': (float32[9],)} of type dict"),
        (list(range(1000)), "[0, 1, 2, 3, ...] of type list"),
        (np.float32, "<class 'numpy.float32'> of type type"),
    ],
)
def test_shown(value, expected):
    assert messages.shown(value) == expected


def test_a_plan():
    plan = jax.jit(lambda: moe.make_plan(np.zeros((3, 2), np.int32), 4))()
    assert messages.shown(plan) == "Plan(...) of type Plan"


def test_a_traced_value():
    found = []
    jax.jit(lambda x: found.append(messages.shown(x)))(3)
    assert found == ["traced int32[] of type jax.Array"]


def test_long_texts_are_cut():
    assert messages.short("x" * 5000) == f"'{'x' * 37}...{'x' * 38}'"


def test_near_misses():
    known = ("BLOCK", "n", "x_ptr")
    assert messages.near_misses("BLOK", known) == " Did you mean `BLOCK`?"
    assert messages.near_misses("block", known) == " Did you mean `BLOCK`?"
    assert messages.near_misses("num_wraps", known, ["num_warps"]) == " Did you mean `num_warps`?"
    assert messages.near_misses("speed", known, ["grid"]) == " Known: BLOCK, n, x_ptr."
