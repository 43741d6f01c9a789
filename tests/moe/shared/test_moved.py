"""Calls with 0.2's keywords: the error shows a call that runs."""

from __future__ import annotations

import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.errors import ArgumentTypeError

RNG = np.random.default_rng(0)
X, LOGITS = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 8), (6, 4)))
W_GATE_UP, W_DOWN = (RNG.normal(size=s).astype(np.float32) for s in ((4, 8, 16), (4, 8, 8)))
B_DOWN, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 8), (4,)))
WEIGHTS, EXPERTS = moe.route(LOGITS, moe.Router(2))
VALUES = {
    "moe": moe,
    "x": X,
    "logits": LOGITS,
    "w_gate_up": W_GATE_UP,
    "w_down": W_DOWN,
    "b_down": B_DOWN,
    "bias": BIAS,
    "weights": WEIGHTS,
    "experts": EXPERTS,
}

# The keywords of 0.2's signatures, those included that the functions still have.
_OF_BOTH = (
    *("top_k", "score", "bias", "num_groups", "top_groups", "group_score", "normalize", "scale"),
    *("expert_scale", "logits", "implementation"),
)
OF_0_2 = {
    "route": (*_OF_BOTH, "experts"),
    "feed_forward": (
        *_OF_BOTH,
        *("x", "w_gate_up", "w_down", "routing", "b_gate_up", "b_down", "activation"),
        *("interleaved", "transpose_weights", "weights_on", "capacity", "align_size"),
        *("axis_name", "recipe", "keep"),
    ),
}

CASES = {
    "top_k": (
        lambda: moe.feed_forward(X, LOGITS, W_GATE_UP, W_DOWN, top_k=2),
        "Argument `top_k` of `moe.feed_forward` is in `moe.Router` now.",
        "moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), moe.Router(2))",
    ),
    "options of all": (
        lambda: moe.feed_forward(
            *(X, LOGITS, W_GATE_UP, W_DOWN),
            activation="geglu",
            b_down=B_DOWN,
            top_k=2,
            normalize=True,
            bias=BIAS,
            transpose_weights=False,
            num_groups=2,
            top_groups=1,
        ),
        "Argument `activation` of `moe.feed_forward` is in `moe.Experts` now.",
        "moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down, activation='geglu', "
        "b_down=b_down, transposed=False), moe.Router(2, normalize=True, num_groups=2, "
        "top_groups=1), bias=bias)",
    ),
    "all by keyword": (
        lambda: moe.feed_forward(
            x=X, logits=LOGITS, w_gate_up=W_GATE_UP, w_down=W_DOWN, top_k=2, score="sigmoid"
        ),
        "Argument `logits` of `moe.feed_forward` is in `logits_or_routing` now.",
        "moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), "
        "moe.Router(2, score='sigmoid'))",
    ),
    "routing": (
        lambda: moe.feed_forward(
            X, None, W_GATE_UP, W_DOWN, routing=(WEIGHTS, EXPERTS), capacity=3
        ),
        "Argument `routing` of `moe.feed_forward` is in `moe.Routing` now.",
        "moe.feed_forward(x, moe.Routing(weights, experts), moe.Experts(w_gate_up, w_down), "
        "capacity=3)",
    ),
    "route by keyword": (
        lambda: moe.route(LOGITS, top_k=2),
        "Argument `top_k` of `moe.route` is in `moe.Router` now.",
        "moe.route(logits, moe.Router(2))",
    ),
    "route by position": (
        lambda: moe.route(LOGITS, 2, score="sigmoid", scale=2.5, bias=BIAS),
        "Argument `score` of `moe.route` is in `moe.Router` now.",
        "moe.route(logits, moe.Router(2, score='sigmoid', scale=2.5), bias=bias)",
    ),
}


@pytest.mark.parametrize(("call", "reason", "now"), CASES.values(), ids=CASES)
def test_error_shows_the_call_of_today(call, reason, now):
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, ArgumentTypeError)
    assert str(caught.value) == f"{reason} Write `{now}`."
    out = eval(now, dict(VALUES))
    assert jnp.isfinite(out[0]).all()


@pytest.mark.parametrize(
    ("function", "keyword"), [(name, word) for name, words in OF_0_2.items() for word in words]
)
def test_every_keyword_of_0_2_is_an_argument_or_names_its_place(function, keyword):
    function = getattr(moe, function)
    if keyword not in inspect.signature(function).parameters:
        message = rf"^Argument `{keyword}` of .* (now\. Write|is gone\. Leave it out)"
        with pytest.raises(ArgumentTypeError, match=message):
            function(**{keyword: None})


def test_what_is_gone_comes_before_what_moved():
    """The call that is shown for `top_k` would leave out the weights on the tokens."""
    with pytest.raises(ArgumentTypeError, match=r"`weights_on` of `moe\.feed_forward` is gone"):
        moe.feed_forward(X, LOGITS, W_GATE_UP, W_DOWN, top_k=1, weights_on="input")
    with pytest.raises(ArgumentTypeError, match=r"`align_size` of `moe\.dispatch` is gone\. Leave"):
        moe.dispatch(X, WEIGHTS, EXPERTS, 4, "d", align_size=8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
        moe.dispatch(X, WEIGHTS, EXPERTS, 4, "d", top_k=2)


def test_weights_on_the_tokens_as_the_error_writes_it():
    with pytest.raises(ArgumentTypeError) as caught:
        moe.feed_forward(X, LOGITS, None, moe.Router(1), weights_on="input")
    routing, call = re.findall("`(?:routing = )?(moe[^`]*\\))`", str(caught.value))
    experts, router = moe.Experts(W_GATE_UP, W_DOWN), moe.Router(1, score="sigmoid")
    values = VALUES | {"experts": experts, "router": router, "jnp": jnp}
    values["routing"] = eval(routing, dict(values))
    found = eval(call, values).tokens
    chosen, weights = LOGITS.argmax(1), 1 / (1 + np.exp(-LOGITS.max(1)))
    rows = X * weights[:, None]
    gate, up = np.split(np.einsum("th,thc->tc", rows, W_GATE_UP[chosen]), 2, axis=1)
    wanted = np.einsum("tw,twh->th", gate / (1 + np.exp(-gate)) * up, W_DOWN[chosen])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_an_unknown_keyword_is_as_in_any_function():
    with pytest.raises(TypeError, match=re.escape("unexpected keyword argument 'topk'")) as caught:
        moe.route(LOGITS, topk=2)
    assert not isinstance(caught.value, ArgumentTypeError)


def test_signature_is_the_function_s_own():
    assert "top_k" not in inspect.signature(moe.route).parameters
    assert [*inspect.signature(moe.route).parameters][:2] == ["logits", "router"]
