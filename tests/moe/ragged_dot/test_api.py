"""What ragged_dot refuses, and in which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, DifferentiationError

X = jnp.ones((6, 4))
W = jnp.ones((2, 4, 3))
SIZES = jnp.array([2, 3])

MISTAKES = {
    "rows": (([1.0], W, SIZES), {}, "`rows` must be an array of shape"),
    "rank": ((X, W[0], SIZES), {}, r"`weights` must have shape \[groups, depth, columns\]"),
    "depth": ((X, W[:, :3], SIZES), {}, "`weights` must have the depth of `rows`, 4"),
    "groups": ((X, W, jnp.array([1, 2, 3])), {}, "one size for each of the 2 groups"),
    "sizes": ((X, W, jnp.array([1.0, 2.0])), {}, "`group_sizes` must have an integer dtype"),
    "row scales": ((X, W, SIZES), {"row_scales": jnp.ones(5)}, "for each of the 6 rows"),
    "group scales": ((X, W, SIZES), {"group_scales": jnp.ones(3)}, "for each of the 2 groups"),
    "implementation": ((X, W, SIZES), {"implementation": "cuda"}, "`implementation` must be one"),
    "integers": (
        (X.astype(int), W.astype(int), SIZES),
        {"implementation": "triton"},
        "`rows` must be a float of at most 32 bits",
    ),
    "one of 8 bits": (
        (X.astype("float8_e5m2"), W, SIZES),
        {},
        "must both be 8-bit floats, or neither; got float8_e5m2 and float32",
    ),
    "result": (
        (X, W, SIZES),
        {"implementation": "interpret", "preferred_element_type": jnp.int32},
        "`preferred_element_type` must be a float",
    ),
}


@pytest.mark.parametrize(("args", "kwargs", "match"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(args, kwargs, match):
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=match):
        moe.ragged_dot(*args, **kwargs)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_eight_bits_have_no_gradient(implementation):
    def loss(x):
        rows, weights = x.astype(jnp.float8_e4m3fn), W.astype(jnp.float8_e4m3fn)
        out = moe.ragged_dot(
            rows, weights, SIZES, preferred_element_type=jnp.float32, implementation=implementation
        )
        return jnp.sum(out)

    with pytest.raises(DifferentiationError, match="float8_e4m3fn has no derivative"):
        jax.grad(loss)(X)
