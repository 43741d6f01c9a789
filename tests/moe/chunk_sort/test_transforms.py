"""The chunk sort under JAX's transformations, and in programs for other platforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import triax
from triax import moe
from triax.testing import assert_same_bits

PATHS = ["xla", "interpret", None]


def some_batches(oracle, count, *shape):
    cases = [oracle.make_case(seed, *shape) for seed in range(count)]
    stack = lambda name: jnp.stack([getattr(case, name) for case in cases])
    return tuple(stack(name) for name in ("x", "sizes", "indices", "probs"))


def check_equal(oracle, actual, expected):
    jax.tree.map(oracle.assert_same_bits, actual, expected)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("batched", [(0, 0, 0, 0), (0, None, None, None), (1, 0, None, 0)])
def test_vmap_is_the_loop(oracle, implementation, batched):
    args = some_batches(oracle, 3, 9, 4, 3)
    op = functools.partial(moe.sort_chunks_by_index, implementation=implementation)
    operands = [
        arg if axis is not None else arg[0] for arg, axis in zip(args, batched, strict=True)
    ]
    loop = [
        op(*(a[i] if axis is not None else a for a, axis in zip(operands, batched, strict=True)))
        for i in range(3)
    ]
    operands = [jnp.moveaxis(a, 0, axis or 0) for a, axis in zip(operands, batched, strict=True)]
    actual = jax.vmap(op, batched)(*operands)
    check_equal(oracle, actual, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop))


@pytest.mark.parametrize("implementation", PATHS)
def test_vmap_of_grad_is_the_loop(oracle, implementation):
    x, sizes, indices, _ = some_batches(oracle, 2, 9, 4, 3)
    x = jnp.nan_to_num(x, posinf=0, neginf=0)

    def loss(x, sizes, indices):
        rows = moe.sort_chunks_by_index(x, sizes, indices, implementation=implementation).rows
        return jnp.sum(rows * jnp.arange(9.0)[:, None])

    actual = jax.jit(jax.vmap(jax.grad(loss)))(x, sizes, indices)
    loop = [jax.grad(loss)(*args) for args in zip(x, sizes, indices, strict=True)]
    check_equal(oracle, actual, jnp.stack(loop))


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("jit", [False, True])
def test_forward_mode_moves_the_tangents(implementation, jit):
    """Of rows, of probs, and of probs beside rows of integers."""
    sizes, indices = jnp.array([2, 0, 3]), jnp.array([2, 0, 1])
    sort = lambda x, probs: moe.sort_chunks_by_index(
        x, sizes, indices, probs, implementation=implementation
    )
    wrap = jax.jit if jit else lambda f: f
    x, probs = jnp.arange(12.0).reshape(6, 2), jnp.arange(6.0) / 7
    moved = jax.jvp(wrap(sort), (x, probs), (jnp.sin(x), jnp.sin(probs)))[1]
    jax.tree.map(assert_same_bits, moved, sort(jnp.sin(x), jnp.sin(probs)))
    alone = jax.jvp(wrap(lambda x: sort(x, probs)), (x,), (jnp.sin(x),))[1]
    assert_same_bits(alone.rows, moved.rows)
    assert not alone.probs.any()
    numbers = x.astype(int)
    alone = jax.jvp(wrap(lambda probs: sort(numbers, probs)), (probs,), (jnp.sin(probs),))[1]
    assert alone.rows.dtype == jax.dtypes.float0
    assert_same_bits(alone.probs, moved.probs)


@pytest.mark.parametrize("implementation", PATHS)
def test_remat_scan_and_second_derivative(oracle, implementation):
    case = oracle.make_case(1, 9, 4, 3)
    x = jnp.asarray(np.random.default_rng(0).random((9, 4), np.float32))
    weights = jnp.arange(9.0)[:, None]
    forward = oracle.sources(case.sizes, case.indices, 9)

    def moved(x):
        return moe.sort_chunks_by_index(
            x, jnp.array(case.sizes), jnp.array(case.indices), implementation=implementation
        ).rows

    def taken(x):
        return x[forward]

    def loss(move, x):
        step = jax.checkpoint(lambda rows, _: (move(rows) * weights, None))
        rows, _ = jax.lax.scan(step, x, length=2)
        return jnp.sum(rows**2)

    for derivative in (jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))):
        actual = jax.jit(derivative(functools.partial(loss, moved)))(x)
        expected = jax.jit(derivative(functools.partial(loss, taken)))(x)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("donate", [False, True])
def test_donation_changes_nothing(oracle, implementation, donate):
    case = oracle.make_case(2, 9, 4, 3)
    op = jax.jit(
        lambda x: (
            moe.sort_chunks_by_index(
                x, case.sizes, case.indices, implementation=implementation
            ).rows
        ),
        donate_argnums=(0,) if donate else (),
    )
    expected = case.x[oracle.sources(case.sizes, case.indices, 9)]
    oracle.assert_same_bits(op(jnp.array(case.x)), expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("replicated", [(), (3,), (1, 2), (0,)], ids=str)
def test_shard_map_is_local(oracle, implementation, replicated):
    """Whichever operands are the same everywhere, each device sorts its own rows."""
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    args = list(some_batches(oracle, 2, 9, 4, 3))
    args[0] = jnp.nan_to_num(args[0], posinf=0, neginf=0) % 8
    for position in replicated:
        args[position] = jnp.stack([args[position][0]] * 2)
    joined = [
        arg[0] if position in replicated else arg.reshape(-1, *arg.shape[2:])
        for position, arg in enumerate(args)
    ]
    split = PartitionSpec("d")
    specs = tuple(PartitionSpec() if i in replicated else split for i in range(4))
    weights = jnp.arange(9.0)

    def local(x, sizes, indices, probs):
        return moe.sort_chunks_by_index(x, sizes, indices, probs, implementation=implementation)

    def weigh(x, probs, sizes, indices):
        out = local(x, sizes, indices, probs)
        return jnp.sum(out.rows * weights[:, None]) + jnp.sum(out.probs * weights)

    over_devices = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs)
    actual = jax.jit(over_devices(local, out_specs=moe.Sorted(split, split)))(*joined)
    loop = [local(*(arg[i] for arg in args)) for i in range(2)]
    check_equal(oracle, actual, jax.tree.map(lambda *a: jnp.concatenate(a), *loop))

    def total(x, probs, sizes, indices):
        each = over_devices(
            lambda x, s, i, p: jax.lax.psum(weigh(x, p, s, i), "d"), out_specs=PartitionSpec()
        )
        return each(x, sizes, indices, probs)

    x, sizes, indices, probs = joined
    d_x, d_probs = jax.jit(jax.grad(total, (0, 1)))(x, probs, sizes, indices)
    grads = [jax.grad(weigh, (0, 1))(*(args[k][i] for k in (0, 3, 1, 2))) for i in range(2)]
    merge = lambda k, leaves: sum(leaves) if k in replicated else jnp.concatenate(leaves)
    np.testing.assert_array_equal(d_x, merge(0, [g[0] for g in grads]))
    np.testing.assert_array_equal(d_probs, merge(3, [g[1] for g in grads]))


def lowered_text(platform, implementation=None):
    types = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [((40, 8), "float32"), ((5,), "int32"), ((5,), "int32")]
    ]

    def value_and_gradient(x, sizes, indices):
        op = lambda x: (
            moe.sort_chunks_by_index(x, sizes, indices, implementation=implementation).rows
        )
        rows, pull = jax.vjp(op, x)
        return rows, pull(rows)

    traced = jax.jit(value_and_gradient).trace(*types)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_cpu_gets_plain_jax_alone():
    text = lowered_text("cpu")
    assert "triton" not in text
    assert "callback" not in text


@pytest.mark.cuda_plugin
def test_cuda_gets_kernels_alone(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    text = lowered_text("cuda")
    assert text.count("@triton_kernel_call") == 3  # the maps, the move, the move back
    assert "stablehlo.gather" not in text
    assert "callback" not in text


@pytest.mark.cuda_plugin
def test_new_sizes_compile_nothing(monkeypatch):
    from triax.compiling import compiler

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")

    def lower(num_rows, num_chunks):
        op = lambda x, sizes, indices: moe.sort_chunks_by_index(x, sizes, indices)
        ids = jax.ShapeDtypeStruct((num_chunks,), jnp.int32)
        x = jax.ShapeDtypeStruct((num_rows, 48), jnp.float32)
        jax.jit(op).trace(x, ids, ids).lower(lowering_platforms=("cuda",))

    lower(1, 1)
    before = compiler.compile_count()
    for num_rows in (2, 16, 17, 4096, 4097, 2**31 - 1):
        for num_chunks in (1, 2, 16, 1000):
            lower(num_rows, num_chunks)
    assert compiler.compile_count() == before


@pytest.mark.cuda_plugin
def test_export_for_both_platforms_runs_on_the_cpu(oracle, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    case = oracle.make_case(3, 9, 4, 3)
    op = jax.jit(lambda x, sizes, indices: moe.sort_chunks_by_index(x, sizes, indices).rows)
    args = (jnp.array(case.x), jnp.array(case.sizes), jnp.array(case.indices))
    exported = jax.export.export(
        op, platforms=("cpu", "cuda"), disabled_checks=triax.export_checks()
    )(*args)
    assert "triton_kernel_call" in exported.mlir_module()
    expected = case.x[oracle.sources(case.sizes, case.indices, 9)]
    oracle.assert_same_bits(exported.call(*args), expected)
