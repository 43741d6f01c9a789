"""What the ops' primitives ask of JAX, outside `jit`: nothing is compiled twice."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from triax import moe
from triax.moe.shared.ops import Op
from triax.sharding import explicit, linear

EVENTS: list[str] = []
monitoring.register_event_duration_secs_listener(lambda event, *_, **__: EVENTS.append(event))

X = jnp.ones((8, 4))
W, SIZES = jnp.ones((2, 4, 6)), jnp.array([3, 5])
IDS = np.arange(16).reshape(8, 2) % 4
plan = functools.cache(lambda: moe.make_plan(IDS, 4, implementation="xla"))
CALLS = {
    "ragged_dot": lambda x: moe.ragged_dot(x, W, SIZES),
    "glu": lambda x: moe.glu(x, jnp.ones(8)),
    "route": lambda x: moe.route(x, moe.Router(2)).weights,
    "permute": lambda x: moe.permute(x, plan()),
    "unpermute": lambda x: moe.unpermute(moe.permute(x, plan()), plan(), jnp.ones((8, 2))),
    "sort_chunks_by_index": lambda x: moe.sort_chunks_by_index(x, SIZES, jnp.array([1, 0])).rows,
    "make_plan": lambda x: x * moe.make_plan(plan().expert_of, 4).num_dropped,
}


@pytest.mark.parametrize(
    "name",
    [
        "unpermute",
        *(
            pytest.param(name, marks=pytest.mark.slow("all ops are made by the same function"))
            for name in CALLS
            if name != "unpermute"
        ),
    ],
)
def test_calls_outside_jit_compile_once(name):
    call = CALLS[name]
    gradient = jax.grad(lambda x: jnp.sum(call(x) ** 2))
    for _ in range(2):
        call(X), gradient(X)
    EVENTS.clear()
    for _ in range(3):
        call(X), gradient(X)
    assert not [event for event in EVENTS if "backend_compile" in event]
    jax.jit(lambda x: x * 3)(X)
    assert [event for event in EVENTS if "backend_compile" in event], "JAX tells it otherwise now"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_derivative_of_another_dtype_is_named(reverse):
    def doubled(_, moving):
        return 2 * moving["x"].astype("float32")

    def halved(_, cotangent):
        return {"x": cotangent.astype("float32")}

    x = jnp.ones(3, jnp.bfloat16)
    right = lambda _, moving: moving["x"]
    function, transposed = (right, jax.linear_transpose) if reverse else (doubled, lambda f, _: f)
    run = transposed(lambda x: linear.call(function, halved, None, {"x": x}, x), x)
    with pytest.raises(TypeError, match=r"(doubled|halved) returned float32\[3\] instead of bf"):
        run(x)


@pytest.mark.parametrize("reverse", [False, True])
def test_functions_that_close_over_arrays_are_refused(reverse):
    """JAX's caches would keep the arrays."""

    @jax.jit
    def run(x, scale):
        named = {"scale": scale}
        good = lambda scale, of: {"x": of["x"] * scale}
        bad = lambda _, of: {"x": of["x"] * named["scale"]}
        both = (good, bad) if reverse else (bad, good)
        return linear.call(*both, scale, {"x": x}, {"x": x})

    with pytest.raises(TypeError, match=r"<lambda> closes over float32\[8,4\]; it must take"):
        run(X, X)


def scaled(scale, saved, of):
    return {"x": of["x"] * scale}


def with_default(saved, of, scale=X):
    return {"x": of["x"] * scale}


def with_keyword_default(saved, of, *, scale=X):
    return {"x": of["x"] * scale}


HOLDING = {
    "partial": functools.partial(scaled, X),
    "partial's keywords": functools.partial(with_default, scale=[X]),
    "partial of partial": functools.partial(functools.partial(scaled, X)),
    "partial of a closure": functools.partial(lambda saved, of, held=X: of),
    "bound method": types.MethodType(scaled, X),
    "default": with_default,
    "default by keyword": with_keyword_default,
}


@pytest.mark.parametrize("how", HOLDING)
def test_functions_that_hold_arrays_otherwise_are_refused(how):
    with pytest.raises(TypeError, match=r"\S+ closes over float32\[8,4\]; it must take"):
        linear.call(HOLDING[how], lambda _, of: of, None, {"x": X}, {"x": X})


def test_functions_that_hold_no_array():
    """Nor one that closes over a variable which gets its value later."""

    def doubled(saved, of, by=2):
        return {"x": by * of["x"]} if of else later

    bound = functools.partial(doubled, by=3)
    for function, wanted in ((doubled, 2), (bound, 3)):
        found = linear.call(function, function, None, {"x": X}, {"x": X})
        np.testing.assert_array_equal(found["x"], wanted * X)
    later = None


def test_sizes_that_clash_are_named():
    add = lambda a, b, implementation: jnp.sum(a, 1)
    op = Op("op", arguments=("rk", "rn"), results="r", shardable="r", kernels=None, xla=add)
    with pytest.raises(TypeError, match=r"\(3, 5\) is declared as 'rn', where 'r' is 4"):
        jax.jit(op.of("xla"))(jnp.ones((4, 2)), jnp.ones((3, 5)))


def test_tangents_that_are_zero_beside_others():
    """Of two arrays that a function is linear in, one moves."""

    def weighted(a, b):
        return linear.call(
            lambda _, of: 3 * of["a"] + 5 * of["b"],
            lambda _, out: {"a": 3 * out, "b": 5 * out},
            None,
            {"a": a, "b": b},
            a,
        )

    found = jax.jvp(lambda a: weighted(a, X), (X,), (2 * X,))
    np.testing.assert_array_equal(found[0], 8 * X)
    np.testing.assert_array_equal(found[1], 6 * X)


def test_residuals_that_move_beside_others_that_do_not():
    """As in second derivatives, where integers have no tangent."""
    last_first = jnp.arange(len(X))[::-1]

    def product(a, b):
        times = lambda held, of: held[0][held[1]] * of
        return linear.call(
            lambda held, of: times(held, of["b"]),
            lambda held, out: {"b": times(held, out)},
            (a, last_first),
            {"b": b},
            b,
        )

    tangent = jnp.arange(8.0)[:, None] * X
    moved = jax.jvp(lambda a: product(a, 3 * X), (X,), (tangent,))[1]
    np.testing.assert_array_equal(moved, 3 * tangent[::-1])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_an_array_is_gathered_where_its_type_is_not_sharded():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    array = jax.device_put(X, NamedSharding(mesh, PartitionSpec("a")))
    whole = explicit.cast(array, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert jax.typeof(whole).sharding.spec == PartitionSpec(None, None)
