"""route under JAX's transformations, and in programs for other platforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import triax
from triax import moe
from triax.emitting import reading
from triax.testing import assert_same_bits

PATHS = ["xla", "interpret", None]
TOKENS, EXPERTS, TOP_K = 6, 12, 3
OPTIONS = {"score": "sigmoid", "normalize": True, "num_groups": 3, "top_groups": 2, "scale": 2.5}


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected
    )


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)], ids=str)
def test_vmap_is_the_loop(axes, implementation):
    logits, bias = draw(4, TOKENS, EXPERTS), draw(4, EXPERTS) * 0.1

    def op(logits, bias):
        def loss(logits):
            routed = moe.route(logits, TOP_K, bias=bias, implementation=implementation, **OPTIONS)
            return jnp.sum(routed.weights**2), routed

        return jax.grad(loss, has_aux=True)(logits)

    args = [a if axis == 0 else a[0] for a, axis in zip((logits, bias), axes, strict=True)]
    actual = jax.jit(jax.vmap(op, axes))(*args)
    pick = lambda i: [a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
    loop = [jax.jit(op)(*pick(i)) for i in range(4)]
    close(actual, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop))


@pytest.mark.parametrize("implementation", PATHS)
def test_forward_mode_is_the_transpose_of_the_gradient(implementation):
    logits, tangent, gradient = draw(TOKENS, EXPERTS), draw(EXPERTS, TOKENS).T, draw(TOKENS, TOP_K)
    op = lambda x: moe.route(x, TOP_K, implementation=implementation, **OPTIONS).weights
    forward = jnp.vdot(jax.jvp(op, [logits], [tangent])[1], gradient)
    backward = jnp.vdot(jax.vjp(op, logits)[1](gradient)[0], tangent)
    np.testing.assert_allclose(forward, backward, rtol=1e-4)


@pytest.mark.parametrize(
    ("normalize", "score", "implementation"),
    [
        (False, "softmax", "xla"),
        (True, "sigmoid", "xla"),
        (True, "softmax", "interpret"),
        (False, "sigmoid", "interpret"),
    ],
)
def test_second_derivatives_inside_scan_and_checkpoint(normalize, score, implementation):
    mix = draw(TOP_K)

    def plain(logits):
        scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
        weights = jax.lax.top_k(scores, TOP_K)[0]
        return weights / weights.sum(1, keepdims=True) if normalize else weights

    def ours(logits):
        options = {"score": score, "normalize": normalize, "implementation": implementation}
        return moe.route(logits, TOP_K, **options).weights

    def loss(weights_of, logits):
        step = jax.checkpoint(lambda x, _: (x + (weights_of(x) @ mix)[:, None] * x, None))
        return jnp.sum(jax.lax.scan(step, logits, length=2)[0] ** 2)

    logits = draw(TOKENS, EXPERTS)
    for derivative in (jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))):
        actual, expected = (
            jax.jit(derivative(functools.partial(loss, weights_of)))(logits)
            for weights_of in (ours, plain)
        )
        scale = jnp.abs(expected).max()
        np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-5)


def test_a_policy_keeps_the_routing(capsys):
    policy = jax.checkpoint_policies.save_only_these_names("triax_routing")
    layer = lambda x: jnp.sin(moe.route(x, TOP_K, implementation="xla").weights)
    jax.ad_checkpoint.print_saved_residuals(
        jax.checkpoint(layer, policy=policy), draw(TOKENS, EXPERTS)
    )
    lines = capsys.readouterr().out.splitlines()
    kept = {line.split()[0] for line in lines if "argument" not in line and "constant" not in line}
    assert kept == {f"f32[{TOKENS},{TOP_K}]", f"i32[{TOKENS},{TOP_K}]"}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_shard_map_is_local(with_bias, implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    split, whole = PartitionSpec("d"), PartitionSpec()
    logits, bias = draw(2 * TOKENS, EXPERTS), draw(EXPERTS) * 0.1

    def local(logits, bias):
        bias = bias if with_bias else None
        return moe.route(logits, TOP_K, bias=bias, implementation=implementation, **OPTIONS)

    def total(logits, bias):
        return jax.lax.psum(jnp.sum(local(logits, bias).weights ** 2), "d")

    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, whole))
    close(jax.jit(over(local, out_specs=split))(logits, bias), local(logits, bias))
    gradient = jax.jit(jax.grad(over(total, out_specs=whole), (0, 1)))(logits, bias)
    whole_loss = lambda logits, bias: jnp.sum(local(logits, bias).weights ** 2)
    close(gradient, jax.grad(whole_loss, (0, 1))(logits, bias))


def lowered(platform, num_tokens=96, **options):
    def program(logits, bias, d_weights):
        routed, pull = jax.vjp(lambda x: moe.route(x, 8, bias=bias, **options), logits)
        none = np.zeros(routed.experts.shape, jax.dtypes.float0)
        return routed, pull(moe.Routed(d_weights, none))

    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((num_tokens, 160), (160,), (num_tokens, 8))
    ]
    return jax.jit(program).trace(*types).lower(lowering_platforms=(platform,))


def test_cpu_gets_plain_jax_alone():
    text = lowered("cpu").as_text()
    assert "triton" not in text
    assert "callback" not in text


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("arch", ["80", "89", "90", "100"])
def test_cuda_gets_one_kernel_there_and_one_back(arch, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", arch)
    program = lowered("cuda", num_groups=8, top_groups=3, score="sigmoid", normalize=True)
    calls = reading.triton_calls(program)
    assert [call.kernel for call in calls] == ["route", "route_grad"]
    text = program.as_text()
    for other in ("gather", "scatter", "sort", "top_k", "callback", "reduce"):
        assert f"stablehlo.{other}" not in text


@pytest.mark.cuda_plugin
def test_new_sizes_compile_nothing(monkeypatch):
    from triax.compiling import compiler

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    lowered("cuda", num_tokens=1, scale=2.5)
    before = compiler.compile_count()
    for num_tokens in (2, 16, 17, 4096):
        lowered("cuda", num_tokens=num_tokens, scale=num_tokens / 7)
    assert compiler.compile_count() == before


@pytest.mark.cuda_plugin
def test_export_for_both_platforms_runs_on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    op = jax.jit(functools.partial(moe.route, top_k=TOP_K, **OPTIONS))
    logits = draw(TOKENS, EXPERTS)
    exported = jax.export.export(
        jax.jit(lambda x: tuple(op(x))),
        platforms=("cpu", "cuda"),
        disabled_checks=triax.export_checks(),
    )(logits)
    assert "triton_kernel_call" in exported.mlir_module()
    jax.tree.map(assert_same_bits, exported.call(logits), tuple(op(logits)))
