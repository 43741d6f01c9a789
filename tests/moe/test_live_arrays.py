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
from tests.moe.case import ModelSizes
from tests.moe.cases import SIZED
from triax import moe
from triax.moe.activations.functions import closes_over_arrays
from triax.moe.activations.options import resolve

SIZES = ModelSizes(tokens=8, hidden=4, width=6, experts=3, top_k=2)
FEW, MANY = 2, 30


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


# --- what is differentiated: a function, arrays that it is differentiated by, and others ------


def of_case(made):
    case, rng = made(None, SIZES), np.random.default_rng(0)
    drawn = case.normal({n: a for n, a in case.draw(rng).items() if n[:2] != "g_"}, rng)
    names = sorted(drawn, key=lambda name: name not in case.gradients)
    run = lambda *args: case.forward(dict(zip(names, args, strict=True)))[1]
    args = [drawn[name] for name in names]
    return run, args[: len(case.gradients)], args[len(case.gradients) :]


def group_outer(x, w, sizes):
    """The gradient of the weights, whose own gradient is taken."""
    return jax.grad(lambda w: total(moe.ragged_dot(x, w, sizes)))(w)


LAYERS = {
    "no recipe": {},
    "rows": {"recipe": "rows"},
    "blocks": {"recipe": "blocks"},
    "gradients of weights": {"recipe": moe.Recipe(weight_gradient="rows")},
    "gradients of rows alone": {"recipe": moe.Recipe(forward=None)},
    "kept": {"keep": ("triax_glu", "triax_permuted_rows")},
}
OF_LAYERS = [(8, 4), (8, 3), (3, 4, 12), (3, 6, 4)]


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


CASES = {
    name: functools.partial(of_case, made)
    for name, made in SIZED.items()
    if ("," not in name or name.startswith("ragged_dot")) and made(None, SIZES).gradients
}
CASES |= {
    f"layer: {name}": lambda options=options: (
        functools.partial(layer, **options),
        arrays(*OF_LAYERS),
        [],
    )
    for name, options in LAYERS.items()
}
CASES["group_outer"] = lambda: (
    group_outer,
    arrays((16, 4), (3, 4, 6)),
    [np.array([5, 0, 3], np.int32)],
)
CASES["sharded"] = lambda: (
    triax.sharded(lambda x, w: x * w, "t h, h -> t h", cut="t"),
    arrays((8, 4), (4,)),
    [],
)


# --- the tests -------------------------------------------------------------------------------


def total(results):
    floats = [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)]
    return sum(jnp.sum(a**2) for a in floats)


def eager(run, moving, others):
    """Closes over arrays that it is not differentiated by."""
    jax.grad(lambda *moving: total(run(*moving, *others)), tuple(range(len(moving))))(*moving)


def jitted(run, moving, others):
    """Closes over all arrays but the first."""
    jax.jit(jax.grad(lambda x: total(run(x, *moving[1:], *others))))(moving[0])


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


def new(run, moving, others):
    return run, *([jnp.array(a) for a in of] for of in (moving, others))


def of(quick):
    more = pytest.mark.slow("all derivatives are made by the same function")
    cases = [name if name in quick else pytest.param(name, marks=more) for name in CASES]
    return pytest.mark.parametrize("name", cases)


@of(quick={"ragged_dot", "layer: rows"})
def test_eager_gradients_leave_no_arrays(name):
    case = CASES[name]()
    assert left_by(lambda: eager(*new(*case))) == 0


@of(quick={"ragged_dot"})
def test_jitted_gradients_that_close_over_arrays_leave_none(name):
    case = CASES[name]()
    assert left_by(lambda: jitted(*new(*case)), many=6) == 0


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
    scale, row = jnp.ones((1, SIZES.width)), jnp.ones((2, SIZES.width))
    closing = lambda gate, up: jax.nn.gelu(gate) * up * scale
    plain = lambda gate, up: jax.nn.gelu(gate) * up * np.float32(2)
    assert closes_over_arrays(resolve(CLOSING[how](closing)), row, row)
    assert not closes_over_arrays(resolve(CLOSING[how](plain)), row, row)


@pytest.mark.slow("more ways to close over arrays")
@pytest.mark.parametrize("how", CLOSING)
@pytest.mark.parametrize("step", [eager, jitted])
def test_activations_that_close_over_arrays_leave_none(step, how):
    case = functools.partial(scaled, CLOSING[how]), arrays(*OF_LAYERS, (1, SIZES.width)), []
    assert left_by(lambda: step(*new(*case)), many=6) == 0
