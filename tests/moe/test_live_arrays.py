"""Gradients outside `jit`, or of functions that close over arrays, leave none in JAX's caches.

JAX keeps the parameters of thousands of primitives, so one that holds an array keeps its memory.
"""

from __future__ import annotations

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from triax import moe
from triax.moe.activations.functions import closes_over_arrays
from triax.moe.activations.options import resolve

TOKENS, EXPERTS, HIDDEN, WIDTH = 8, 3, 4, 6
FEW, MANY = 2, 30


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


# --- what is differentiated: a function of arrays, floats first, and these arrays -------------

IDS = np.arange(2 * TOKENS, dtype=np.int32).reshape(TOKENS, 2) % EXPERTS
SIZES = np.array([5, 0, 3], np.int32)
X, ROWS, PROBS, LOGITS, W, BIAS, BIAS_WEIGHTS = arrays(
    *((TOKENS, HIDDEN), (2 * TOKENS, HIDDEN), (TOKENS, 2), (TOKENS, EXPERTS)),
    *((EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH), (TOKENS,)),
)
plan = functools.partial(moe.make_plan, num_experts=EXPERTS)


def group_outer(x, w, sizes):
    """The gradient of the weights, whose own gradient is taken."""
    return jax.grad(lambda w: total(moe.ragged_dot(x, w, sizes)))(w)


def quantized_weights(x, w, sizes):
    w = moe.quantize(jax.lax.stop_gradient(w), "int8", block=(1, None, 1))
    return moe.ragged_dot(x, w, sizes)


OPS = {
    "permute": (lambda x, probs, ids: moe.permute(x, plan(ids), weights=probs), (X, PROBS, IDS)),
    "unpermute": (
        lambda rows, weights, ids: moe.unpermute(rows, plan(ids), weights),
        (ROWS, PROBS, IDS),
    ),
    "ragged_dot": (
        lambda x, w, bias, weights, sizes: moe.ragged_dot(
            x, w, sizes, bias=bias, bias_weights=weights
        ),
        (X, W, BIAS, BIAS_WEIGHTS, SIZES),
    ),
    "group_outer": (group_outer, (X, W, SIZES)),
    "glu": (moe.glu, (X, BIAS_WEIGHTS)),
    "interleaved": (
        lambda x, weights: moe.glu(x.astype("bfloat16"), weights, interleaved=True),
        (X, BIAS_WEIGHTS),
    ),
    "route": (lambda logits: moe.route(logits, moe.Router(2)), (LOGITS,)),
    "sort_chunks_by_index": (
        lambda x, probs, sizes, indices: moe.sort_chunks_by_index(x, sizes, indices, probs),
        (X, BIAS_WEIGHTS, SIZES, np.array([2, 0, 1], np.int32)),
    ),
    "quantized weights": (quantized_weights, (X, W, SIZES)),
    "sharded": (triax.sharded(lambda x, w: x * w, "t h, h -> t h", cut="t"), (X, X[0])),
}

LAYERS = {
    "no recipe": {},
    "rows": {"recipe": "rows"},
    "blocks": {"recipe": "blocks"},
    "gradients of weights": {"recipe": moe.Recipe(weight_gradient="rows")},
    "gradients of rows alone": {"recipe": moe.Recipe(forward=None)},
    "kept": {"keep": ("triax_glu", "triax_permuted_rows")},
}
# Of the arrays that a function closes over, their derivatives keep none as they are.
KEEP_NO_OPERAND = {"permute", "route", "sort_chunks_by_index"}
OF_LAYERS = [(TOKENS, HIDDEN), (TOKENS, EXPERTS), (3, HIDDEN, 2 * WIDTH), (3, WIDTH, HIDDEN)]


def layer(x, logits, w_gate_up, w_down, activation="swiglu", **options):
    experts = moe.Experts(w_gate_up, w_down, activation=activation)
    return moe.feed_forward(x, logits, experts, moe.Router(2), **options).tokens


def scaled(wrap, x, logits, w_gate_up, w_down, scale):
    """A layer whose activation closes over an array."""
    return layer(x, logits, w_gate_up, w_down, wrap(lambda gate, up: gate * up * scale))


def calling(inner):
    return lambda gate, up: inner(gate, up)


CLOSING = {
    "itself": lambda function: function,
    "jit": jax.jit,
    "calls jit": lambda function: calling(jax.jit(function)),
    "checkpoint of jit": lambda function: jax.checkpoint(jax.jit(function)),
}


CASES = OPS | {
    f"layer: {name}": (functools.partial(layer, **options), tuple(arrays(*OF_LAYERS)))
    for name, options in LAYERS.items()
}


# --- the tests -------------------------------------------------------------------------------


def total(results):
    floats = [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)]
    return sum(jnp.sum(a**2) for a in floats)


def loss(run, args):
    """A function of the floats of `args` that closes over the other arrays, and these floats."""
    floats = [a for a in args if jnp.issubdtype(a.dtype, jnp.floating)]
    others = args[len(floats) :]
    return lambda *floats: total(run(*floats, *others)), floats


def eager(run, args):
    function, floats = loss(run, args)
    jax.grad(function, tuple(range(len(floats))))(*floats)


def jitted(run, args):
    """Closes over all arrays but the first."""
    jax.jit(jax.grad(lambda x: total(run(x, *args[1:]))))(args[0])


def left_by(step, many=MANY):
    """How many more arrays are alive after `many` steps than after few, each with new arrays."""
    earlier = jax.live_arrays()  # held, so that none of them dies meanwhile
    counts = []
    for steps in (FEW, many - FEW):
        for _ in range(steps):
            step()
        gc.collect()
        counts.append(len(jax.live_arrays()))
    del earlier
    return counts[1] - counts[0]


def new(name):
    run, args = CASES[name]
    return run, tuple(map(jnp.array, args))


def of(names, quick):
    more = pytest.mark.slow("all derivatives are made by the same function")
    cases = [name if name in quick else pytest.param(name, marks=more) for name in names]
    return pytest.mark.parametrize("name", cases)


@of(CASES, quick={"ragged_dot", "layer: rows"})
def test_eager_gradients_leave_no_arrays(name):
    assert left_by(lambda: eager(*new(name))) == 0


@of([name for name in CASES if name not in KEEP_NO_OPERAND], quick={"ragged_dot"})
def test_jitted_gradients_that_close_over_arrays_leave_none(name):
    assert left_by(lambda: jitted(*new(name)), many=6) == 0


@pytest.fixture(params=["constants", "literals"])
def held_as(request):
    """How JAX holds the arrays that a traced function closes over."""
    option = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, option)
    jax.config.update(option, request.param == "literals")
    yield
    jax.config.update(option, before)


@pytest.mark.usefixtures("held_as")
@pytest.mark.parametrize("how", CLOSING)
def test_activations_that_close_over_arrays_are_seen(how):
    scale, row = jnp.ones((1, WIDTH)), jnp.ones((2, WIDTH))
    closing = lambda gate, up: jax.nn.gelu(gate) * up * scale
    plain = lambda gate, up: jax.nn.gelu(gate) * up * np.float32(2)
    assert closes_over_arrays(resolve(CLOSING[how](closing)), row, row)
    assert not closes_over_arrays(resolve(CLOSING[how](plain)), row, row)


@pytest.mark.slow("more ways to close over arrays")
@pytest.mark.parametrize("how", CLOSING)
@pytest.mark.parametrize("step", [eager, jitted])
def test_activations_that_close_over_arrays_leave_none(step, how):
    args = arrays(*OF_LAYERS, (1, WIDTH))
    run = functools.partial(scaled, CLOSING[how])
    assert left_by(lambda: step(run, tuple(map(jnp.array, args))), many=6) == 0
