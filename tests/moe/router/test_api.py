"""What route and the losses refuse, and in which words."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import flat
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError

LOGITS, ROUTER = jnp.zeros((4, 12)), moe.Router(2)
route = jax.jit(moe.route)
of_type, of_value = ArgumentTypeError, ArgumentValueError
WRONG = [
    ({"logits": [[1.0, 2.0]]}, of_type, "`logits` must be an array of shape"),
    ({"logits": jnp.zeros(12)}, of_value, "must have shape [tokens, experts]; got (12,)"),
    ({"logits": jnp.zeros((4, 12), int)}, of_type, "must have a floating-point dtype"),
    ({"logits": jnp.zeros((4, 0))}, of_value, "at least one expert; got shape (4, 0)"),
    ({"top_k": 13}, of_value, "`router.top_k` must be at most the 12 experts of `logits`; got 13"),
    (
        {"bias": jnp.zeros(11)},
        of_value,
        "`bias` must have shape (12,) to go with `logits`",
    ),
    ({"bias": jnp.zeros(12, int)}, of_type, "`bias` must have a floating-point dtype"),
    ({"num_groups": 5, "top_groups": 1}, of_value, "`router.num_groups` must divide"),
    ({"num_groups": 12, "top_groups": 3}, of_value, "must leave each group at least two"),
    ({"num_groups": 4, "top_groups": 1, "top_k": 4}, of_value, "at most the 3 experts of the ch"),
    ({"num_groups": 2, "top_groups": 1, "top_k": 7}, of_value, "at most the 6 experts of the ch"),
    ({"implementation": "cuda"}, of_value, "`implementation` must be one of"),
    (
        {"logits": jnp.zeros((1, 1025)), "implementation": "interpret"},
        of_value,
        "at most 1024 experts for the kernel; got 1025",
    ),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_what_is_wrong_is_named(change, error, text):
    arguments = {"logits": LOGITS, "top_k": 2, **change}
    with pytest.raises(error) as caught:
        flat.route(**arguments)
    assert text in str(caught.value)


def test_all_groups_are_no_limit():
    """Also where each group has one expert only, and has no two best."""
    logits = np.arange(12, dtype=np.float32)[None]
    routed = route(logits, moe.Router(3, num_groups=12, top_groups=12))
    assert routed.experts.tolist() == [[11, 10, 9]]


def test_more_experts_than_the_kernel_takes():
    routed = route(np.arange(1500, dtype=np.float32)[None], moe.Router(2))
    assert routed.experts.tolist() == [[1499, 1498]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            functools.partial(moe.load_balancing_loss, LOGITS, jnp.zeros(11, int)),
            ArgumentValueError,
            "`group_counts` must have shape (12,) to go with `logits`; got (11,)",
        ),
        (
            functools.partial(moe.load_balancing_loss, LOGITS, jnp.zeros(12)),
            ArgumentTypeError,
            "`group_counts` must have an integer dtype",
        ),
        (
            functools.partial(moe.load_balancing_loss, LOGITS, jnp.zeros(12, int), score="tanh"),
            ArgumentValueError,
            "`score` must be one of 'softmax', 'sigmoid', 'sqrtsoftplus', 'none'; got 'tanh'",
        ),
        (
            functools.partial(moe.router_z_loss, jnp.zeros(3)),
            ArgumentValueError,
            "`logits` must have shape [tokens, experts]; got (3,)",
        ),
    ],
)
def test_what_losses_refuse(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("experts", [None, jnp.zeros((4, 2), int)])
def test_a_dtype_that_kernels_lack(experts):
    """Plain JAX takes it; kernels that are asked for do not, also where none would be launched."""
    logits = LOGITS.astype("float8_e3m4")
    assert route(logits, ROUTER, experts=experts).weights.shape == (4, 2)
    with pytest.raises(ArgumentTypeError, match="`logits` has dtype float8_e3m4"):
        moe.route(logits, ROUTER, experts=experts, implementation="interpret")


def test_a_bias_of_a_dtype_that_kernels_lack():
    bias = jnp.zeros(12, "float8_e3m4")
    assert route(LOGITS, ROUTER, bias=bias).weights.shape == (4, 2)
    with pytest.raises(ArgumentTypeError, match="`bias` has dtype float8_e3m4"):
        moe.route(LOGITS, ROUTER, bias=bias, implementation="interpret")


def test_gradient_of_the_bias_alone():
    """The bias only chooses: it moves no weight."""
    weigh = jax.jit(lambda bias: moe.route(LOGITS, ROUTER, bias=bias).weights)
    weights, moved = jax.jvp(weigh, [np.arange(12, dtype=np.float32)], [np.ones(12, np.float32)])
    assert weights.shape == moved.shape
    assert not np.any(moved)


def test_experts_that_are_given():
    """The first and the last are experts like others; those that there are not weigh nothing."""
    logits = np.float32([[3, 0, 1, 2], [0, 1, 2, 3]])
    for how in ({}, {"normalize": True, "scale": 2.5}, {"normalize": 2, "scale": 3.0}):
        router = moe.Router(2, **how)
        chosen = route(logits, router)
        assert chosen.experts.tolist() == [[0, 3], [3, 2]]
        weights = np.asarray(route(logits, router, experts=chosen.experts).weights)
        assert np.allclose(weights, chosen.weights, rtol=1e-6)
        assert weights.min() > 0
    assert np.allclose((weights**2).sum(1), 9, rtol=1e-6)
    given = np.array([[0, -1], [4, 3]], np.int32)
    router = moe.Router(2, normalize=True, scale=2.0)
    weights = route(logits, router, experts=given).weights
    assert weights.tolist() == [[2, 0], [0, 2]]
