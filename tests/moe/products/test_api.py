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
    "depth": ((X, W[:, :3], SIZES), {}, r"`weights` must have the depth of `rows`, 4.*3, 3\)\.$"),
    "torch's layout": ((X, jnp.ones((2, 3, 4)), SIZES), {}, "that is `transpose_weights`"),
    "groups": (
        (X, W, jnp.array([1, 2, 3])),
        {},
        r"`group_sizes` must have shape \(2,\) to go",
    ),
    "sizes": ((X, W, jnp.array([1.0, 2.0])), {}, "`group_sizes` must have an integer dtype"),
    "weights of no bias": ((X, W, SIZES), {"bias_weights": jnp.ones(6)}, "without `bias`"),
    "implementation": ((X, W, SIZES), {"implementation": "cuda"}, "`implementation` must be one"),
    "integers": (
        (X.astype(int), W.astype(int), SIZES),
        {"implementation": "triton"},
        "`rows` must be a float of at most 32 bits",
    ),
    "one of 8 bits": (
        (X.astype("float8_e5m2"), W, SIZES),
        {},
        "both 8-bit floats or both integers; got float8_e5m2 and float32. Cast one",
    ),
    "quantised weights": (
        (X.astype("bfloat16"), W.astype("int8"), SIZES),
        {},
        "got bfloat16 and int8. Integers are not converted: cast them",
    ),
    "integer rows": ((X.astype("int32"), W, SIZES), {}, "got int32 and float32. Integers are"),
    "bool": ((X.astype(bool), W.astype(bool), SIZES), {}, "`rows` must be floats or integers; got"),
    "complex": ((X, W.astype("complex64"), SIZES), {}, "`weights` must be floats or.*complex64"),
    "scaled integers": (
        (moe.quantize(X, "int8", block=(1, None)), W.astype("int8"), SIZES),
        {"preferred_element_type": "int8"},
        "`preferred_element_type` must be a float; got int8",
    ),
    "integers that no dtype holds": (
        (X.astype("uint32"), W.astype("int32"), SIZES),
        {},
        "got uint32 and int32. No dtype holds both",
    ),
    "integers of floats": (
        (X, W, SIZES),
        {"preferred_element_type": "int8", "implementation": "xla"},
        "`preferred_element_type` must be a float; got int8 for operands of float32",
    ),
    "no dtype": (
        (X, W, SIZES),
        {"preferred_element_type": "float33"},
        "`preferred_element_type` must be a dtype such as jnp.float32; got 'float33'",
    ),
    "precision": ((X, W, SIZES), {"precision": "exact"}, "`precision` must be a jax.lax.Precis"),
    "precisions": ((X, W, SIZES), {"precision": ("high", "high")}, "`precision` must be a jax"),
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


@pytest.mark.parametrize(("rows", "weights"), [("bfloat16", "float32"), ("float32", "float16")])
def test_a_product_in_float32_of_shorter_operands_is_told(rows, weights):
    with pytest.warns(UserWarning, match=f"{rows} rows by {weights} weights in float32") as told:
        moe.ragged_dot(X.astype(rows), W.astype(weights), SIZES)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_eight_bits_have_no_gradient(implementation):
    def loss(x):
        rows, weights = (array.astype(jnp.float8_e4m3fn) for array in (x, jnp.ones((2, 32, 24))))
        out = moe.ragged_dot(
            rows, weights, SIZES, preferred_element_type=jnp.float32, implementation=implementation
        )
        return jnp.sum(out)

    # XLA's CPU compiler of JAX 0.8 has no smaller products of bfloat16.
    with pytest.raises(DifferentiationError, match="no derivative by numbers of float8_e4m3fn"):
        jax.grad(loss)(jnp.ones((24, 32)))


def test_what_is_true_transposes():
    same = [moe.ragged_dot(X, jnp.ones((2, 3, 4)), SIZES, transpose_weights=t) for t in (True, 2)]
    assert (same[0] == same[1]).all()
