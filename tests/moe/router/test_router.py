"""`Router` as a value: frozen, hashable, static under jit, and checked where it is made."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError

GROUPED = moe.Router(8, score="sigmoid", num_groups=8, top_groups=4, normalize=True, scale=2.5)


def test_equal_ones_are_one_key():
    """Numbers of NumPy and of Python are the same, and so are a 1-norm and the sum."""
    numpy = moe.Router(np.int32(8), num_groups=np.int64(8), top_groups=4, normalize=np.True_)
    assert {numpy: "found"}[moe.Router(8, num_groups=8, top_groups=4, normalize=1)] == "found"
    assert type(numpy.top_k) is type(numpy.num_groups) is int
    assert moe.Router(2, normalize=2) != moe.Router(2, normalize=True) != moe.Router(2)
    assert dataclasses.replace(GROUPED, scale=np.float32(2.5)) == GROUPED


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GROUPED.top_k = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional argument"):
        moe.Router(2, "sigmoid")  # type: ignore[misc]


def test_it_is_static_under_jit():
    """As an argument it has no leaves, and equal ones are traced once."""
    traced = []

    @jax.jit
    def run(logits, router):
        traced.append(router)
        return moe.route(logits, router)

    logits = np.random.default_rng(0).standard_normal((6, 16), np.float32)
    for top_k in (2, np.int64(2), 1):
        run(logits, moe.Router(top_k, normalize=1))
    assert traced == [moe.Router(2, normalize=True), moe.Router(1, normalize=True)]
    assert not jax.tree.leaves(GROUPED)
    assert jax.tree.map(jnp.zeros_like, {"router": GROUPED}) == {"router": GROUPED}
    batched = jax.jit(jax.vmap(moe.route, in_axes=(0, None)))(np.stack([logits, logits]), GROUPED)
    np.testing.assert_array_equal(np.asarray(batched.experts)[1], run(logits, GROUPED).experts)


of_type, of_value = ArgumentTypeError, ArgumentValueError
WRONG = [
    ({"top_k": True}, of_type, "`top_k` must be a Python int"),
    ({"top_k": jnp.int32(2)}, of_type, "`top_k` must be a Python int"),
    ({"score": "relu"}, of_value, "`score` must be one of 'softmax', 'sigmoid', 'sqrtsoftplus', "),
    ({"normalize": jnp.ones(())}, of_type, "a bool, or a Python number, the p of a norm; got flo"),
    ({"normalize": 0}, of_value, "`normalize` must be a bool, or a finite p of at least"),
    ({"normalize": 0.5}, of_value, "(the 1-norm of scores is their sum); got 0.5"),
    ({"normalize": float("inf")}, of_value, "a finite p of at least 1 (the 1-norm"),
    ({"normalize": 1e39}, of_value, "(the 1-norm of scores is their sum); got 1e+39"),
    ({"normalize": float("nan")}, of_value, "at least 1 (the 1-norm of scores is"),
    ({"normalize": 2, "score": "none"}, of_value, 'a bool with score "none"; got 2. Divide the'),
    ({"scale": jnp.ones(())}, of_type, "`scale` must be a Python number"),
    ({"scale": float("inf")}, of_value, "`scale` must be finite in float32; got inf"),
    ({"scale": 10**400}, of_value, "`scale` must be finite in float32; got 1000"),
    ({"scale": -1e39}, of_value, "`scale` must be finite in float32; got -1e+39"),
    ({"top_groups": 4}, of_value, "`top_groups` is given and `num_groups` is not"),
    ({"top_k": 0}, of_value, "`top_k` must be at least 1"),
    ({"top_k": 2.0}, of_type, "`top_k` must be a Python int"),
    ({"num_groups": 4}, of_value, "`num_groups` is given and `top_groups` is not"),
    ({"num_groups": 4, "top_groups": 5}, of_value, "at most `num_groups`, 4; got 5"),
    ({"num_groups": 4, "top_groups": 0}, of_value, "`top_groups` must be at least 1"),
    ({"group_score": "mean"}, of_value, "`group_score` must be one of 'top2', 'max'; got 'mean'"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_mistakes_are_named_where_it_is_made(options, error, text):
    with pytest.raises(error) as caught:
        moe.Router(**{"top_k": 2} | options)
    assert text in str(caught.value)


@pytest.mark.parametrize("router", [2, None, "softmax", {"top_k": 2}, moe.Router])
def test_what_is_no_router(router):
    with pytest.raises(ArgumentTypeError, match=r"`router` must be a moe\.Router, which says how"):
        moe.route(jnp.zeros((4, 12)), router)
