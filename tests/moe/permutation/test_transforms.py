"""Plan, permute and unpermute under JAX's transformations, and in programs for other platforms."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import triax
from tests.moe import oracle
from triax import moe
from triax.testing import assert_same_bits

PATHS = ["xla", "interpret", None]
TOKENS, TOP_K, EXPERTS, WIDTH = 9, 2, 3, 4


def route(x, ids, weights, implementation=None, align_size=4):
    """Plan, permute, something for the experts to do, unpermute."""
    plan = moe.make_plan(ids, EXPERTS, align_size=align_size, implementation=implementation)
    out = moe.permute(x, plan, weights=weights, implementation=implementation)
    rows = jnp.tanh(out.rows) * out.weights[:, None]
    return moe.unpermute(rows, plan, weights, implementation=implementation), plan


def batches(count):
    rng = np.random.default_rng(0)
    ids = np.stack([oracle.draw_ids(rng, TOKENS, TOP_K, EXPERTS, "any") for _ in range(count)])
    return (
        jnp.array(rng.standard_normal((count, TOKENS, WIDTH)), jnp.float32),
        jnp.array(ids),
        jnp.array(rng.random((count, TOKENS, TOP_K)), jnp.float32),
    )


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def check_equal(actual, expected):
    """The same integers, bit by bit; floats but for what XLA's own fusions change."""

    def check(actual, expected):
        if jnp.issubdtype(expected.dtype, jnp.integer):
            assert_same_bits(actual, expected)
        else:
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    ("batched", "axis_name"),
    [((0, 0, 0), None), ((0, 0, 0), "d"), ((0, None, None), None), ((None, 0, 0), "d")],
    ids=str,
)
def test_vmap_is_the_loop(implementation, batched, axis_name):
    args = batches(3)
    op = jax.jit(functools.partial(route, implementation=implementation))
    pick = lambda i: [a[0] if axis is None else a[i] for a, axis in zip(args, batched, strict=True)]
    operands = [a[0] if axis is None else a for a, axis in zip(args, batched, strict=True)]
    actual = jax.vmap(op, batched, spmd_axis_name=axis_name)(*operands)
    check_equal(actual, stack([op(*pick(i)) for i in range(3)]))


@pytest.mark.parametrize("implementation", PATHS)
def test_vmap_of_grad_is_the_loop(implementation):
    args = batches(3)

    def loss(x, weights, ids):
        return jnp.sum(route(x, ids, weights, implementation)[0] ** 2)

    grad = jax.jit(jax.grad(loss, (0, 1)))
    order = args[0], args[2], args[1]
    check_equal(
        jax.jit(jax.vmap(grad))(*order), stack([grad(*(a[i] for a in order)) for i in range(3)])
    )


@pytest.mark.parametrize("implementation", PATHS)
def test_a_batched_plan_goes_through_vmap(implementation):
    x, ids, _ = batches(2)
    make = functools.partial(moe.make_plan, num_experts=EXPERTS, implementation=implementation)
    plans = jax.vmap(make)(ids)
    assert plans.row_of.shape == ids.shape
    assert plans.num_dropped.shape == (2,)
    op = lambda x, plan: moe.permute(x, plan, implementation=implementation)
    loop = [op(x[i], make(ids[i])) for i in range(2)]
    assert_same_bits(jax.vmap(op)(x, plans), jnp.stack(loop))


@pytest.mark.parametrize("implementation", PATHS)
def test_remat_scan_and_second_derivative(implementation):
    x, ids, weights = (a[0] for a in batches(1))

    def routed(x):
        return route(x, ids, weights, implementation)[0]

    def plain(x):
        return (jnp.tanh(x)[:, None] * weights[..., None] ** 2).sum(1)

    def loss(layer, x):
        step = jax.checkpoint(lambda x, _: (x + layer(x), None))
        y, _ = jax.lax.scan(step, x, length=2)
        return jnp.sum(y**2)

    for derivative in (jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))):
        actual = jax.jit(derivative(functools.partial(loss, routed)))(x)
        expected = jax.jit(derivative(functools.partial(loss, plain)))(x)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("saved", ["triax_permuted_rows", "triax_unpermuted_tokens", None])
def test_names_for_checkpoint_policies(saved, capsys):
    """A policy that names what was routed keeps it, and nothing else is kept."""
    x, ids, weights = (a[0] for a in batches(1))
    policy = jax.checkpoint_policies.save_only_these_names(*([saved] if saved else []))
    layer = jax.checkpoint(lambda x: jnp.sin(route(x, ids, weights, "xla")[0]), policy=policy)
    jax.ad_checkpoint.print_saved_residuals(layer, x)
    lines = capsys.readouterr().out.splitlines()
    kept = [line for line in lines if "argument" not in line and "constant" not in line]
    num_rows = (TOKENS * TOP_K + EXPERTS * 3) // 4 * 4
    shapes = {"triax_permuted_rows": (num_rows, WIDTH), "triax_unpermuted_tokens": (TOKENS, WIDTH)}
    assert len(kept) == (saved is not None)
    if saved is not None:
        assert kept[0].startswith("f32[{},{}]".format(*shapes[saved]))


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("donate", [(), (0,), (0, 2)], ids=str)
def test_donation_changes_nothing(implementation, donate):
    expected = route(*(a[0] for a in batches(1)), implementation)
    op = jax.jit(functools.partial(route, implementation=implementation), donate_argnums=donate)
    args = [jnp.array(a[0]) for a in batches(1)]
    actual = op(*args)
    check_equal(actual, expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    ("implementation", "replicated"),
    [("xla", ()), ("xla", (1, 2)), ("interpret", (0,)), ("interpret", (2,)), (None, (0,))],
    ids=str,
)
def test_shard_map_is_local(implementation, replicated):
    """Whichever operands are the same everywhere, each device routes its own tokens."""
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    split, whole = PartitionSpec("d"), PartitionSpec()
    x, ids, weights = batches(2)
    args = [a[:1].repeat(2, 0) if i in replicated else a for i, a in enumerate([x, ids, weights])]
    joined = [a[0] if i in replicated else a.reshape(-1, a.shape[-1]) for i, a in enumerate(args)]
    specs = tuple(whole if i in replicated else split for i in range(3))

    def local(x, ids, weights):
        y, plan = route(x, ids, weights, implementation)
        return y, plan.row_of, plan.group_counts

    over_devices = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs)
    actual = jax.jit(over_devices(local, out_specs=(split, split, split)))(*joined)
    loop = [jax.jit(local)(*(a[i] for a in args)) for i in range(2)]
    check_equal(actual, jax.tree.map(lambda *a: jnp.concatenate(a), *loop))

    def total(x, weights, ids):
        each = lambda *args: jax.lax.psum(jnp.sum(local(*args)[0] ** 2), "d")
        return over_devices(each, out_specs=whole)(x, ids, weights)

    def loss(x, weights, ids):
        return jnp.sum(local(x, ids, weights)[0] ** 2)

    gradients = jax.jit(jax.grad(total, (0, 1)))(joined[0], joined[2], joined[1])
    each = [jax.grad(loss, (0, 1))(args[0][i], args[2][i], args[1][i]) for i in range(2)]
    for position, index in ((0, 0), (2, 1)):
        parts = [gradient[index] for gradient in each]
        expected = sum(parts) if position in replicated else jnp.concatenate(parts)
        np.testing.assert_allclose(gradients[index], expected, rtol=1e-5, atol=1e-6)


def lowered_text(platform, num_tokens=96, top_k=4, num_experts=40, width=48, num_rows=None):
    """The program of both ops and their gradients, from ids."""
    types = [
        jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, top_k), jnp.float32),
    ]

    def program(ids, x, weights):
        plan = moe.make_plan(ids, num_experts, num_rows=num_rows)
        out, pull = jax.vjp(lambda x, w: moe.permute(x, plan, weights=w), x, weights)
        y, pull_y = jax.vjp(lambda r, w: moe.unpermute(r, plan, w), out.rows, weights)
        return out, pull(out), y, pull_y(y), plan

    return jax.jit(program).trace(*types).lower(lowering_platforms=(platform,)).as_text()


def shapes_of(text):
    found = re.findall(r"tensor<((?:\d+x)*)[a-z]\w*>", text)
    shapes = {tuple(int(size) for size in shape.split("x")[:-1]) for shape in found}
    return {shape for shape in shapes if len(shape) != 1 or shape[0] > 2}  # those of attributes


def test_cpu_gets_plain_jax_alone():
    text = lowered_text("cpu", num_rows=400)
    assert "triton" not in text
    assert "callback" not in text


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("num_tokens", "plan_calls", "workspaces"),
    [(96, 1, set()), (600, 3, {(19, 40)})],  # of parts; there are as many blocks
)
def test_cuda_gets_kernels_alone(num_tokens, plan_calls, workspaces, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    text = lowered_text("cuda", num_tokens=num_tokens, num_rows=400)
    # Those of the plan, permute and its gradient, unpermute and its gradient.
    assert text.count("@triton_kernel_call") == plan_calls + 4
    for other in ("gather", "scatter", "sort", "callback"):
        assert f"stablehlo.{other}" not in text
    allowed = {
        "tokens": (num_tokens, 48),
        "rows": (400, 48),
        "weights of rows": (400,),
        "pairs": (num_tokens, 4),
        "experts": (40,),
        "scalars": (),
    }
    assert shapes_of(text) <= set(allowed.values()) | workspaces


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_plugin)])
def test_nothing_is_expert_wide_or_copied_for_every_slot(platform, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    shapes = shapes_of(lowered_text(platform, num_rows=400))
    assert (400, 48) in shapes
    for shape in shapes:
        assert math.prod(shape) <= 400 * 48, shape
        assert math.prod(shape) < 96 * 40 or 48 in shape, shape
        assert shape[:2] not in ((96, 40), (384, 40)), shape
        assert shape not in ((384, 48), (96, 4, 48)), shape


@pytest.mark.cuda_plugin
def test_new_sizes_compile_nothing(monkeypatch):
    from triax.compiling import compiler

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    lowered_text("cuda", num_tokens=1)
    lowered_text("cuda", num_tokens=4096)  # many pairs have kernels of their own
    before = compiler.compile_count()
    for num_tokens in (2, 16, 17, 512, 513, 4097):
        lowered_text("cuda", num_tokens=num_tokens)
        lowered_text("cuda", num_tokens=num_tokens, num_rows=num_tokens * 4 + 13)
    assert compiler.compile_count() == before


@pytest.mark.cuda_plugin
def test_export_for_both_platforms_runs_on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    args = tuple(a[0] for a in batches(1))
    exported = jax.export.export(
        jax.jit(lambda *args: route(*args)[0]),
        platforms=("cpu", "cuda"),
        disabled_checks=triax.export_checks(),
    )(*args)
    assert "triton_kernel_call" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(*args), route(*args)[0], rtol=1e-6)
