"""Every named case of every op, by each of its aspects: one driver for all.

Results and gradients are those of the oracle, on each path, alone, batched, and over two devices;
gradients are those of differences, in both modes and twice.
"""

from __future__ import annotations

import functools
import gc
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads

from tests.moe.case import widths
from tests.moe.cases import LARGE, NAMED, ORDINARY, SLOW, UNUSUAL

paths = pytest.mark.parametrize("path", ["xla", "interpret"])


def made(name, path):
    """A case, whose draws are its own."""
    case = (NAMED | LARGE)[name](path)
    case.seed = zlib.crc32(name.encode())
    return case


def judge(case, batch, results):
    for arrays, found in zip(batch, results, strict=True):
        text = case.judge(arrays, found)
        assert text is None, f"{case.call}: {text}"


def flat(found):
    """What `Case.everything` returns, by name."""
    return {name: a for part in jax.device_get(found).values() for name, a in part.items()}


def check(case, runs):
    batch = [case.inputs(run) for run in range(runs)]
    judge(case, batch, case.run(batch))


def marked(names, slow):
    """Names of cases as parameters of a test, some of them slow."""
    slowly = pytest.mark.slow("others have the same parts")
    return [pytest.param(name, marks=slowly if name in slow else ()) for name in names]


@pytest.mark.parametrize("name", marked(NAMED, SLOW))
def test_kernels(name):
    check(made(name, "interpret"), runs=2)


@pytest.mark.parametrize("name", ORDINARY)
def test_plain_jax(name):
    check(made(name, "xla"), runs=16)


@pytest.mark.sampled(8, 24)  # most of their time is XLA's
@pytest.mark.parametrize("name", [name for name in NAMED if name not in ORDINARY])
def test_plain_jax_of_hostile_inputs(name):
    check(made(name, "xla"), runs=16)


# --- transformations -----------------------------------------------------------------------------


def each(holds=lambda case: True):
    """Names of cases for which something holds; the quick ones are ordinary."""
    names = [name for name in ORDINARY + UNUSUAL if holds(NAMED[name]("xla"))]
    return pytest.mark.parametrize("name", marked(names, UNUSUAL))


each_derivative = each(lambda case: case.gradients and case.is_derivative)


@pytest.fixture(autouse=True)
def _no_leaks(request):
    """Fails if an array of a trace outlives it, as one that a cached function holds does."""
    if "name" not in request.fixturenames or request.node.function in (
        test_kernels,
        test_plain_jax,
        test_plain_jax_of_hostile_inputs,
    ):
        yield
        return
    gc.freeze()  # JAX collects garbage at the end of each trace: objects from before take no time
    with jax.checking_leaks():
        yield
    gc.unfreeze()


def normal(case, dtype=None):
    return case.normal(case.inputs(0), np.random.default_rng(1), dtype)


@pytest.mark.sampled(None, 8)
@paths
@each_derivative
def test_forward_mode_is_the_transpose_of_the_gradient(name, path):
    case = made(name, path)
    arrays = normal(case)
    moving = {name: arrays[name] for name in case.gradients}

    @jax.jit
    def both(moving):
        function = lambda moving: case.forward(arrays | moving)[0]
        wide = functools.partial(jnp.asarray, dtype=jnp.float32)
        dot = lambda a, b: sum(
            jax.tree.leaves(jax.tree.map(lambda x, y: jnp.vdot(wide(x), wide(y)), a, b))
        )
        tangents = jax.tree.map(lambda a: jnp.cos(3 * wide(a)).astype(a.dtype), moving)
        out, moved = jax.jvp(function, (moving,), (tangents,))
        gradients = jax.tree.map(lambda a: jnp.sin(5 * wide(a)).astype(a.dtype), out)
        (pulled,) = jax.vjp(function, moving)[1](gradients)
        return dot(moved, gradients), dot(pulled, tangents)

    forward, backward = map(float, both(moving))
    eps = max(float(jnp.finfo(a.dtype).eps) for a in moving.values())
    np.testing.assert_allclose(forward, backward, rtol=max(1e-4, 4 * eps), atol=8 * eps)


@pytest.mark.sampled(1, 8)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=pytest.mark.slow("unusual") if name in UNUSUAL else ())
        for name in ORDINARY + UNUSUAL
        for path in ("xla", "interpret")
        if (case := NAMED[name](path)).gradients
        and case.is_derivative
        and (path == "xla" or case.widest == "float64")
    ],
)
def test_gradients_are_those_of_differences(name, path):
    """In float64, by all arrays at once, twice, and by each alone: what is held has no tangent."""
    case = made(name, path)
    with jax.enable_x64(True):
        arrays = normal(case, np.float64)
        moving = {name: arrays[name] for name in case.gradients}
        function = lambda moving: jax.tree.map(jnp.sin, case.forward(arrays | moving)[0])
        # Routers compute in float32, of which larger steps drown the rounding.
        tolerance, eps = (2e-3, 1e-3) if case.widest == "float32" else (1e-5, None)
        near = functools.partial(check_grads, atol=tolerance, rtol=tolerance, eps=eps)
        near(jax.jit(function), (moving,), 2)
        for name, array in moving.items():
            near(jax.jit(lambda one: function(moving | {name: one})), (array,), 1)  # noqa: B023


@pytest.mark.sampled(2, 4)
@each(lambda case: case.gradients and case.widest == "float32")
def test_second_derivatives_of_kernels(name):
    """Through a checkpointed step, as those of plain JAX, whose differences are taken above."""

    def second(path):
        case = made(name, path)
        arrays = normal(case)
        moving = {name: arrays[name] for name in case.gradients}
        step = jax.checkpoint(lambda moving: case.forward(arrays | moving)[0])
        total = lambda tree: sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(tree))
        first = jax.grad(lambda moving: total(step(moving)))
        return jax.jit(jax.grad(lambda moving: total(first(moving))))(moving)

    for a, b in zip(*(second(path).values() for path in ("interpret", "xla")), strict=True):
        scale = np.max(np.abs(b)) + 1e-6
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-5)


@pytest.mark.sampled(2, 6)
@paths
@each(lambda case: case.gradients)
def test_integers_have_no_gradient(name, path):
    """They are differentiated by, too: their gradients have no elements."""
    case = made(name, path)
    arrays = case.inputs(0)
    is_given = lambda name, a: name in case.gradients or not jnp.issubdtype(a.dtype, jnp.floating)
    given = {name: a for name, a in arrays.items() if is_given(name, a)}

    def loss(given):
        results = case.forward(arrays | given)[0]
        return sum(jnp.vdot(arrays[f"g_{name}"], a) for name, a in results.items())

    with widths(given):
        found = jax.jit(jax.grad(loss, allow_int=True))(given)
    for name, gradient in found.items():
        is_float = jnp.issubdtype(given[name].dtype, jnp.floating)
        assert gradient.dtype == (given[name].dtype if is_float else jax.dtypes.float0)


def halves(case, shared):
    """Inputs of two runs, every second array the same in both, and the names of these."""
    members = [case.inputs(run) for run in range(2)]
    same = [n for i, n in enumerate(members[0]) if i % 2 == shared and not n.startswith("g_")]
    members[1] |= {name: members[0][name] for name in same}
    return members, same


@pytest.mark.sampled(4, 8)
@paths
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("shared", [0, 1, None])
@each()
def test_batched(name, shared, axis, path):
    """Under vmap, over any axis: the results, and the gradients."""
    case = made(name, path)
    members, same = halves(case, shared)
    axes = {n: None if n in same else axis for n in members[0]}
    if set(axes.values()) == {None}:
        pytest.skip("it has one array")
    stacked = {
        n: members[0][n] if of is None else np.stack([m[n] for m in members], of)
        for n, of in axes.items()
    }
    spmd = {"spmd_axis_name": "d"} if same else {}
    with widths(stacked):
        found = flat(jax.jit(jax.vmap(case.everything, (axes,), **spmd))(stacked))
    judge(case, members, [{n: a[i] for n, a in found.items()} for i in range(2)])


@pytest.mark.sampled(2, 8)
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@paths
@pytest.mark.parametrize("shared", [0, 1, None])
@each(lambda case: case.gradients)
def test_shard_map_is_local(name, shared, path):
    """Each device works on its own rows; the gradients of what is replicated are summed."""
    case = made(name, path)
    members, same = halves(case, shared)
    members = [
        m | {n: np.nan_to_num(m[n], posinf=1, neginf=1) for n in case.gradients} for m in members
    ]
    joined = {
        n: a if n in same else np.concatenate([m[n] for m in members])
        for n, a in members[0].items()
    }
    split, whole = PartitionSpec("d"), PartitionSpec()
    specs = {n: whole if n in same else split for n in joined}
    with widths(joined):
        alone = [flat(jax.jit(case.everything)(m)) for m in members]
    run = lambda arrays: {
        n: jnp.atleast_1d(a) for part in case.everything(arrays).values() for n, a in part.items()
    }
    over = jax.shard_map(
        run,
        mesh=Mesh(np.array(jax.devices()[:2]), ("d",)),
        in_specs=(specs,),
        out_specs={n: whole if n[:2] == "d_" and n[2:] in same else split for n in alone[0]},
    )
    with widths(joined):
        found = jax.device_get(jax.jit(over)(joined))
    for name, a in found.items():
        first, second = (np.atleast_1d(of[name]) for of in alone)
        is_sum = name[:2] == "d_" and name[2:] in same
        with np.errstate(invalid="ignore"):  # NaNs with payloads
            wanted = first + second if is_sum else np.concatenate([first, second])
            np.testing.assert_allclose(a.astype(float), wanted.astype(float), 1e-4, 1e-4)
