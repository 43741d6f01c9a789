"""Every named case of every op, by each of its aspects: one driver for all.

Results and gradients are those of the oracle, on each path, alone, batched and in forms of
programs; gradients are those of differences, in both modes and twice.
"""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.moe.case import widths
from tests.moe.cases import NAMED

paths = pytest.mark.parametrize("path", ["xla", "interpret"])
each_case = pytest.mark.parametrize("name", NAMED)


def made(name, path):
    """A case, whose draws are its own."""
    case = NAMED[name](path)
    case.seed = zlib.crc32(name.encode())
    return case


def judge(case, batch, results):
    for arrays, found in zip(batch, results, strict=True):
        text = case.judge(arrays, found)
        assert text is None, f"{case.call}: {text}"


def check(case, runs):
    batch = [case.inputs(run) for run in range(runs)]
    judge(case, batch, case.run(batch))


@each_case
def test_kernels(name):
    check(made(name, "interpret"), runs=2)


@pytest.mark.sampled(16, 16)  # most of their time is XLA's
@each_case
def test_plain_jax(name):
    check(made(name, "xla"), runs=16)


def floats(case, dtype=None):
    """The arrays of a case, with ordinary numbers in those that it is differentiated by."""
    rng = np.random.default_rng(1)
    arrays = case.inputs(0)
    normal = lambda array: rng.standard_normal(array.shape).astype(dtype or array.dtype)
    return arrays | {name: normal(arrays[name]) for name in case.gradients}


DIFFERENTIATED = [
    name for name, of in NAMED.items() if (case := of("xla")).gradients and case.is_derivative
]
each_differentiated = pytest.mark.parametrize("name", DIFFERENTIATED)


@pytest.mark.sampled(1, 8)
@paths
@each_differentiated
def test_gradients_are_those_of_differences(name, path):
    """By all arrays at once, twice, and by each alone: what is held has no tangent."""
    case = made(name, path)
    with jax.enable_x64(True):
        arrays = floats(case, np.float64)
        moving = {name: arrays[name] for name in case.gradients}
        function = lambda moving: jax.tree.map(jnp.sin, case.forward(arrays | moving)[0])
        check = functools.partial(check_grads, atol=1e-6, rtol=1e-6)
        check(jax.jit(function), (moving,), 2)
        for name in case.gradients:
            check(jax.jit(lambda one: function(moving | {name: one})), (moving[name],), 1)  # noqa: B023


@pytest.mark.sampled(2, 6)
@paths
@each_differentiated
def test_what_has_no_gradient(name, path):
    """Integers are differentiated by, too: their gradients have no elements."""
    case = made(name, path)
    arrays = case.inputs(0)
    given = {name: a for name, a in arrays.items() if not name.startswith("g_")}

    def loss(given):
        results = case.forward(arrays | given)[0]
        return sum(jnp.vdot(arrays[f"g_{name}"], a) for name, a in results.items())

    with widths(given):
        found = jax.jit(jax.grad(loss, allow_int=True))(given)
    for name, gradient in found.items():
        is_float = jnp.issubdtype(given[name].dtype, jnp.floating)
        assert gradient.dtype == (given[name].dtype if is_float else jax.dtypes.float0)


@pytest.mark.sampled(2, 6)
@paths
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("shared", [0, 1])
@each_case
def test_batched(name, shared, axis, path):
    """Every second array is shared by the batch."""
    case = made(name, path)
    members = [case.inputs(run) for run in range(2)]
    axes = {n: axis if i % 2 == shared else None for i, n in enumerate(members[0])}
    if set(axes.values()) == {None}:
        pytest.skip("it has one array")
    members[1] |= {n: members[0][n] for n in axes if axes[n] is None}
    stacked = {
        n: members[0][n] if of is None else np.stack([m[n] for m in members], of)
        for n, of in axes.items()
    }
    with widths(stacked):
        found = jax.device_get(jax.jit(jax.vmap(case.everything, (axes,)))(stacked))
    found = {n: a for part in found.values() for n, a in part.items()}
    judge(case, members, [{n: a[i] for n, a in found.items()} for i in range(2)])
