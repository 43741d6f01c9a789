"""ragged_dot under JAX's transformations, and in programs for other platforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import triax
from tests.moe.ragged_dot import oracle
from triax import moe
from triax.compat import jax_private, triton_proto
from triax.emitting import reading

PATHS = ["interpret", "xla", None]


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("axes", [(0, None, 0), (0, 0, 0), (0, None, None)])
def test_vmap_is_the_loop(implementation, axes):
    cases = [oracle.draw(seed, 16, 24, "float32", 40, 3) for seed in range(2)]
    sizes = [jnp.array(s) for s in ([10, 0, 20], [0, 30, 10])]
    args = [[c.rows, c.weights, s] for c, s in zip(cases, sizes, strict=True)]
    for axis, name in zip(axes, range(3), strict=True):
        if axis is None:
            args[1][name] = args[0][name]
    op = functools.partial(moe.ragged_dot, implementation=implementation)
    stacked = [
        jnp.stack([a[i] for a in args]) if axes[i] is not None else args[0][i] for i in range(3)
    ]

    def grads(x, w, s):
        return jax.grad(lambda x, w: jnp.sum(op(x, w, s) ** 2), (0, 1))(x, w)

    for function in (op, grads):
        actual = jax.jit(jax.vmap(function, axes))(*stacked)
        for i in range(2):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                jax.tree.map(lambda a, i=i: a[i], actual),
                function(*args[i]),
            )


@pytest.mark.parametrize("implementation", PATHS)
def test_second_derivatives(implementation):
    case = oracle.draw(1, 16, 24, "float32", 40, 3)
    sizes = jnp.array([11, 0, 25])
    group = np.repeat(np.arange(3), [11, 0, 25])

    def plain(x, w):
        return jnp.zeros((40, 24)).at[:36].set(jnp.einsum("rk,rkn->rn", x[:36], w[group]))

    def ragged(x, w):
        return moe.ragged_dot(x, w, sizes, implementation=implementation)

    def second(op):
        loss = lambda x, w: jnp.sum(jnp.sin(op(x, w) * case.gradient))
        inner = lambda x, w: sum(jnp.sum(jnp.cos(g)) for g in jax.grad(loss, (0, 1))(x, w))
        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.grad(inner, (0, 1)))(case.rows, case.weights)

    for actual, expected in zip(second(ragged), second(plain), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("implementation", PATHS)
def test_forward_mode_is_the_transpose_of_the_gradient(implementation):
    case = oracle.draw(4, 16, 24, "float32", 40, 3)
    sizes = jnp.array([11, 0, 25])
    op = functools.partial(moe.ragged_dot, group_sizes=sizes, implementation=implementation)
    tangents = [jnp.cos(case.rows), jnp.sin(case.weights)]
    out, tangent = jax.jvp(op, [case.rows, case.weights], tangents)
    _, pull = jax.vjp(op, case.rows, case.weights)
    np.testing.assert_array_equal(out, op(case.rows, case.weights))
    forward = jnp.vdot(tangent, case.gradient)
    backward = sum(map(jnp.vdot, pull(case.gradient), tangents))
    np.testing.assert_allclose(forward, backward, rtol=1e-4)


@pytest.mark.parametrize("implementation", PATHS)
def test_remat_and_scan(implementation):
    case = oracle.draw(2, 24, 24, "float32", 40, 3)
    sizes = jnp.array([11, 0, 25])

    def loss(op, x, w):
        step = jax.checkpoint(lambda x, _: (jnp.tanh(op(x, w)), None))
        return jnp.sum(jax.lax.scan(step, x, length=3)[0])

    ours = functools.partial(moe.ragged_dot, group_sizes=sizes, implementation=implementation)
    theirs = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    actual = jax.jit(jax.grad(functools.partial(loss, ours), (0, 1)))(case.rows, case.weights)
    expected = jax.jit(jax.grad(functools.partial(loss, theirs), (0, 1)))(case.rows, case.weights)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("implementation", PATHS)
def test_shard_map_is_local(implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    cases = [oracle.draw(seed, 16, 24, "float32", 40, 3) for seed in range(2)]
    sizes = [jnp.array(s) for s in ([10, 0, 20], [0, 30, 10])]
    weights = cases[0].weights
    split, whole = PartitionSpec("d"), PartitionSpec()

    def local(x, w, s):
        return moe.ragged_dot(x, w, s, implementation=implementation)

    def total(x, w, s):
        each = jax.shard_map(
            lambda x, w, s: jax.lax.psum(jnp.sum(local(x, w, s) ** 2), "d"),
            mesh=mesh,
            in_specs=(split, whole, split),
            out_specs=whole,
        )
        return each(x, w, s)

    x, s = jnp.concatenate([c.rows for c in cases]), jnp.concatenate(sizes)
    d_x, d_w = jax.jit(jax.grad(total, (0, 1)))(x, weights, s)
    grads = [
        jax.grad(lambda x, w, s=s: jnp.sum(local(x, w, s) ** 2), (0, 1))(c.rows, weights)
        for c, s in zip(cases, sizes, strict=True)
    ]
    np.testing.assert_allclose(d_x, jnp.concatenate([g[0] for g in grads]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_w, grads[0][1] + grads[1][1], rtol=1e-4, atol=1e-4)


def lowered_text(*args):
    return lowered(*args).as_text()


def lowered(platform, num_rows=400, depth=64, columns=96, dtype="bfloat16"):
    types = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in [
            ((num_rows, depth), dtype),
            ((5, depth, columns), dtype),
            ((5,), "int32"),
            ((num_rows, columns), dtype),
        ]
    ]

    def value_and_gradient(x, w, sizes, gradient):
        out, pull = jax.vjp(lambda x, w: moe.ragged_dot(x, w, sizes), x, w)
        return out, pull(gradient)

    traced = jax.jit(value_and_gradient).trace(*types)
    return traced.lower(lowering_platforms=(platform,))


def test_cpu_gets_plain_jax_alone():
    text = lowered_text("cpu")
    assert "triton" not in text
    assert "callback" not in text


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "dtype", "num_rows", "widths"),
    [
        (80, "bfloat16", 40, (512, 1024)),
        (80, "float32", 4000, (33, 21)),
        (89, "bfloat16", 4000, (512, 1024)),
        (90, "float32", 40, (512, 1024)),
        (90, "bfloat16", 4000, (512, 1024)),
        (90, "bfloat16", 4000, (33, 21)),
        (100, "float32", 4000, (512, 1024)),
    ],
)
def test_cuda_gets_kernels_alone(monkeypatch, arch, dtype, num_rows, widths):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    text = lowered_text("cuda", num_rows, *widths, dtype)
    # Three products, and the schedule of each.
    assert text.count("@triton_kernel_call") == 6
    for other in ("dot_general", "gather", "transpose", "callback"):
        assert f"stablehlo.{other}" not in text


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("arch", "num_rows"), [(80, 200), (90, 4000), (100, 200)])
def test_tf32_compiles(monkeypatch, arch, num_rows):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    with jax.default_matmul_precision("tensorfloat32"):
        assert "triton_kernel_call" in lowered_text("cuda", num_rows, 512, 1024, "float32")


@pytest.mark.cuda_plugin
def test_descriptors_where_the_gpu_and_jaxlib_have_them(monkeypatch):
    ptx = {}
    for arch in (80, 90):
        monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
        calls = reading.triton_calls(lowered("cuda", 4000))
        ptx[arch] = [triton_proto.decode(call.opaque).calls[0].ptx for call in calls]
    assert not any("cp.async.bulk.tensor" in text for text in ptx[80])
    uses = sum("cp.async.bulk.tensor" in text for text in ptx[90])
    assert uses == (3 if jax_private.supports_tensor_maps() else 0)
    assert sum("wgmma" in text for text in ptx[90]) == 3


@pytest.mark.cuda_plugin
def test_new_rows_compile_nothing(monkeypatch):
    from triax.compiling import compiler

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    lowered_text("cuda", 640)
    before = compiler.compile_count()
    for num_rows in (641, 1000, 4096, 100_001, 2**30):
        lowered_text("cuda", num_rows)
    assert compiler.compile_count() == before


@pytest.mark.cuda_plugin
def test_export_for_both_platforms_runs_on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    case = oracle.draw(3, 16, 24, "float32", 40, 3)
    args = (case.rows, case.weights, jnp.array([10, 5, 20]))
    exported = jax.export.export(
        jax.jit(moe.ragged_dot), platforms=("cpu", "cuda"), disabled_checks=triax.export_checks()
    )(*args)
    assert "triton_kernel_call" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(*args), moe.ragged_dot(*args), rtol=1e-6)
