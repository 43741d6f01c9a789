"""The bridge on a GPU: every kind of call, run-time tuning, aliases, descriptors, exports."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from tests import descriptors, kernels
from tests.binding import test_hooks, test_scalars
from tests.cases import CASES, argsort_then_gather, autotuned_accumulate, blockwise, gather
from tests.emitting.test_custom_call import check_mixed
from tests.primitives import accumulate, sum_and_accumulate
from triax import testing

pytestmark = pytest.mark.gpu

MODES = ["off", "runtime"]


def x64(case):
    return jax.enable_x64(True) if case.x64 else contextlib.nullcontext()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    inputs = case.inputs(np.random.default_rng(7))
    with x64(case):
        arrays = [jnp.asarray(x) for x in inputs]
        function = jax.jit(case.function)
        for _ in range(3):
            testing.poison(1 << 22)
            case.check(function(*arrays), inputs)
        for array, given in zip(arrays, inputs, strict=True):
            testing.assert_same_bits(array, given)


def test_interpreter_in_a_gpu_program():
    """implementation="interpret" on a GPU is a host callback, with the same result."""

    def f(x, implementation):
        return blockwise(kernels.copy_kernel, x, BLOCK=256, implementation=implementation)

    x = np.arange(1000, dtype=np.float32)
    testing.assert_same_bits(jax.jit(lambda x: f(x, "interpret"))(x), x)
    testing.assert_same_bits(jax.jit(lambda x: f(x, "triton"))(x), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("size", [1003, 1 << 20])
def test_autotuned_update_in_place(mode, donated, size):
    """Timing configs on live buffers must not add x more than once."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(size).astype(np.float32) for _ in range(2))

    def update(x, y):  # a fresh function: a trace keeps its mode
        return autotuned_accumulate(x, y)

    with triax.tuning_mode(mode):
        function = jax.jit(update, donate_argnums=(1,) if donated else ())
        for _ in range(3):
            given = jnp.asarray(y)
            testing.assert_same_bits(function(jnp.asarray(x), given), y + x)
            assert given.is_deleted() == donated
            if not donated:
                testing.assert_same_bits(given, y)


@pytest.mark.parametrize("mode", MODES)
def test_argsort_then_autotuned_gather(mode):
    """Indices computed in the same program: tuning before they exist reads garbage addresses."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4099, 513)).astype(np.float32)
    keys = rng.permutation(4099).astype(np.float32)
    with triax.tuning_mode(mode):
        function = jax.jit(lambda x, keys: argsort_then_gather(x, keys))
        for _ in range(5):
            testing.poison(1 << 26)
            testing.assert_same_bits(function(x, keys), x[np.argsort(keys)])


@pytest.mark.parametrize("mode", MODES)
def test_argsort_then_gather_in_scan(mode):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((257, 65)).astype(np.float32)
    keys = rng.standard_normal((6, 257)).astype(np.float32)
    with triax.tuning_mode(mode):
        step = lambda x, keys: (argsort_then_gather(x, keys), None)
        actual, _ = jax.jit(lambda x, keys: jax.lax.scan(step, x, keys))(x, keys)
    expected = x
    for row in keys:
        expected = expected[np.argsort(row)]
    testing.assert_same_bits(actual, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grid_kind", ["int", "tuple", "callable"])
def test_own_primitive(mode, grid_kind):
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(1003).astype(np.float32) for _ in range(2))
    function = functools.partial(sum_and_accumulate, grid_kind=grid_kind, tuning=mode)
    total, updated = jax.jit(function, donate_argnums=1)(jnp.asarray(x), jnp.asarray(y))
    testing.assert_same_bits(total, x + y)
    testing.assert_close(updated, y.astype(float) + 2.0 * x, terms=2)


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
def test_own_primitive_with_one_pointer_for_an_aliased_pair(donated):
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(1003).astype(np.float32) for _ in range(2))
    function = jax.jit(accumulate, donate_argnums=(1,) if donated else ())
    for _ in range(3):
        given = jnp.asarray(y)
        testing.assert_same_bits(function(jnp.asarray(x), given), y + x)
        assert given.is_deleted() == donated


def test_cost_estimate_is_kept_in_the_program():
    """Profilers read it from the custom call; XLA's own cost analysis does not."""

    def f(x):
        costs = {"flops": 12345, "bytes_accessed": 8000, "transcendentals": 0}
        return blockwise(kernels.copy_kernel, x, BLOCK=256, cost_estimate=costs)

    x = jnp.arange(1000, dtype=jnp.float32)
    compiled = jax.jit(f).lower(x).compile()
    testing.assert_same_bits(compiled(x), np.asarray(x))
    assert "12345" in compiled.as_text()


def test_outputs_aliases_and_keywords_in_any_order():
    check_mixed()


@pytest.mark.parametrize("kind", descriptors.KINDS)
def test_descriptors(kind):
    descriptors.check(kind)


@pytest.mark.parametrize("way", test_hooks.WAYS)
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_block_shapes_of_a_config(way, mode):
    x = jnp.asarray(test_hooks.X)
    function = functools.partial(test_hooks.doubled, **test_hooks.WAYS[way], tuning=mode)
    testing.assert_same_bits(jax.jit(function)(x), 2 * test_hooks.X)


@pytest.mark.parametrize("rows", [16, 64])
def test_a_hook_zeroes_on_every_run(rows):
    x = test_hooks.X
    function = jax.jit(functools.partial(test_hooks.column_sums, rows=(rows,)))
    for _ in range(5):
        testing.poison(1 << 22)
        testing.assert_close(function(x), x.sum(axis=0, dtype=np.float64), terms=48)


@pytest.mark.parametrize("kernel", test_scalars.KERNELS, ids=test_scalars.name)
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_scalars_of_an_annotated_type(kernel, mode):
    test_scalars.check(kernel, tuning=mode)


def test_vmap():
    case = next(c for c in CASES if c.name == "gather")
    x, index = case.inputs(np.random.default_rng(7))
    xs = np.stack([x, x + 1, x * 2])
    one = functools.partial(gather, vmap_method="sequential")
    actual = jax.jit(jax.vmap(one, in_axes=(0, None)))(xs, index)
    testing.assert_same_bits(actual, xs[:, index])
