"""Every op under JAX's transformations, and in programs for other platforms: one suite for all."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import triax
from triax import moe
from triax.emitting import reading
from triax.errors import UnsupportedError
from triax.moe import transformer_engine as te

# By default the platform decides; on the CPU that is plain JAX.
PLAIN = pytest.param(None, marks=pytest.mark.slow("the kernels' path has the same rules"))
PATHS = ["interpret", PLAIN]
EXPERTS = 3
FLOATS = jnp.floating


@dataclasses.dataclass
class Op:
    """An op, and what it is called with.

    Attributes:
      run: ``run(*args, implementation=…)`` returns arrays whose first axis is that of tokens.
      draw: ``draw(seed)`` returns the args, floats first.
      axes: which axes of the args `vmap` maps.
      replicated: which args are the same on all devices, for `shard_map`.
      kernels: in the program of the op and its gradients, on CUDA.
    """

    run: Callable[..., Any]
    draw: Callable[[int], tuple[Any, ...]]
    axes: list[tuple[int | None, ...]]
    replicated: list[tuple[int, ...]]
    kernels: list[str]

    @property
    def num_floats(self):
        return sum(jnp.issubdtype(arg.dtype, FLOATS) for arg in self.draw(0))

    def both_ways(self, implementation=None, over=lambda run: run):
        """The op and its gradients, as one function: returns gradients, results."""
        run = over(functools.partial(self.run, implementation=implementation))
        loss = lambda *args: (total(results := run(*args)), results)
        return jax.grad(loss, tuple(range(self.num_floats)), has_aux=True)


def total(results):
    floats = [out for out in jax.tree.leaves(results) if jnp.issubdtype(out.dtype, FLOATS)]
    return sum(jnp.sum(out**2) for out in floats)


def close(actual, expected):
    check = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(check, actual, expected)


def normal(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


# --- the ops ---------------------------------------------------------------------------------


def permutation(x, weights, ids, implementation=None):
    """Plan, permute, something for the experts to do, unpermute."""
    plan = moe.make_plan(ids, EXPERTS, align_size=4, implementation=implementation)
    out = moe.permute(x, plan, weights=weights, implementation=implementation)
    rows = jnp.tanh(out.rows) * out.weights[:, None]
    y = moe.unpermute(rows, plan, weights, implementation=implementation)
    return y, plan.row_of, plan.group_counts


def draw_permutation(seed):
    ids = np.random.default_rng(seed).integers(0, EXPERTS, (9, 2))
    return *normal(seed, (9, 4), (9, 2)), ids.astype(np.int32)


def chunk_sort(x, probs, sizes, indices, implementation=None):
    return moe.sort_chunks_by_index(x, sizes, indices, probs, implementation=implementation)


def draw_chunks(seed):
    sizes = np.array([[4, 0, 3], [2, 6, 1]], np.int32)
    indices = np.array([[2, 0, 1], [1, 2, 0]], np.int32)
    return *normal(seed, (9, 4), (9,)), sizes[seed % 2], indices[seed % 2]


def ragged_dot(rows, weights, sizes, implementation=None):
    return moe.ragged_dot(rows, weights, sizes, implementation=implementation)


def draw_products(seed):
    sizes = np.array([[11, 0, 15], [0, 20, 7]], np.int32)
    return *normal(seed, (30, 16), (3, 16, 16)), sizes[seed % 2]


GROUP = np.repeat(np.arange(3), [11, 0, 15])  # the first of these sizes
GROUPS = {"num_groups": 3, "top_groups": 2}
ROUTER = moe.Router(3, score="sigmoid", normalize=True, scale=2.5, **GROUPS)


def route(logits, bias, implementation=None):
    return moe.route(logits, ROUTER, bias=bias, implementation=implementation)


def feed_forward(x, logits, w_gate_up, w_down, implementation=None):
    how = {"capacity": 9, "implementation": implementation}
    out = moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), moe.Router(2), **how)
    return out.tokens, out.group_counts


def draw_layer(seed):
    x, logits, w_gate_up, w_down = normal(seed, (9, 16), (9, EXPERTS), (3, 16, 32), (3, 16, 16))
    return x, logits, w_gate_up / 4, w_down / 4


OPS = {
    "permutation": Op(
        permutation,
        draw_permutation,
        axes=[(0, 0, 0), (0, None, None), (None, 0, 0)],
        replicated=[(), (0,), (1,), (1, 2)],
        kernels=["place_few_pairs", "permute", "unpermute", "unpermute_grad", "unpermute"],
    ),
    "chunk sort": Op(
        chunk_sort,
        draw_chunks,
        axes=[(0, 0, 0, 0), (0, None, None, None), (1, 0, 0, None)],
        replicated=[(), (1,), (2, 3), (0,)],
        kernels=["chunk_maps", "move_rows", "move_rows"],
    ),
    "ragged_dot": Op(
        ragged_dot,
        draw_products,
        axes=[(0, None, 0), (0, 0, 0), (0, None, None)],
        replicated=[(1,)],
        kernels=["ragged_dot", "ragged_dot_transposed", "group_outer"]
        + ["ragged_dot_schedule"] * 3,
    ),
    "router": Op(
        route,
        lambda seed: tuple(normal(seed, (6, 12), (12,))),
        axes=[(0, None), (0, 0), (None, 0)],
        replicated=[(1,)],
        kernels=["route", "route_grad"],
    ),
    "feed_forward": Op(
        feed_forward,
        draw_layer,
        axes=[(0, 0, None, None)],
        replicated=[(2, 3)],
        kernels=[],  # tests/moe/layer has them
    ),
}


def chosen(logits, bias, implementation=None, **options):
    """Logits that their experts' weights add to."""
    how = {"bias": bias, "implementation": implementation}
    weights = moe.route(logits, moe.Router(3, **options), **how).weights
    return jnp.sin((weights @ jnp.arange(3.0))[:, None] * logits)


def chosen_plainly(logits, bias, score, normalize):
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    experts = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), 3)[1]
    weights = jnp.take_along_axis(scores, experts, 1)
    if normalize:
        weights = weights / weights.sum(1, keepdims=True)
    return jnp.sin((weights @ jnp.arange(3.0))[:, None] * logits)


# Of two arrays of floats, like the first: the arrays, the layer, and the same in plain JAX.
LAYERS = {
    "permutation": (
        draw_permutation(0)[:2],
        lambda x, w, implementation: permutation(x, w, draw_permutation(0)[2], implementation)[0],
        lambda x, w: jnp.tanh(x) * jnp.sum(w**2, axis=1, keepdims=True),
    ),
    "chunk sort": (
        draw_chunks(0)[:2],
        lambda x, probs, implementation: jnp.sin(
            chunk_sort(x, probs, *draw_chunks(0)[2:], implementation).rows * probs[:, None]
        ),
        lambda x, probs: jnp.sin(x[jnp.array([4, 5, 6, 0, 1, 2, 3, 7, 8])] * probs[:, None]),
    ),
    "ragged_dot": (
        draw_products(0)[:2],
        lambda x, w, implementation: jnp.tanh(
            ragged_dot(x, w, draw_products(0)[2], implementation)
        ),
        lambda x, w: jnp.tanh(
            jnp.zeros((30, 16)).at[:26].set(jnp.einsum("rk,rkn->rn", x[:26], w[GROUP]))
        ),
    ),
} | {
    f"{score} router": (
        normal(0, (6, 12), (12,)),
        functools.partial(chosen, score=score, normalize=normalize),
        functools.partial(chosen_plainly, score=score, normalize=normalize),
    )
    for score, normalize in (("sigmoid", True), ("softmax", False))
}


def each(field):
    """Cases for each op and each entry of a field; of the plain path, whose rules are the same, for
    the first entry alone."""
    more = pytest.mark.slow("the first entry of each op has the same rules")
    cases = [
        case
        for name, op in OPS.items()
        for first, *others in [getattr(op, field)]
        for case in (
            pytest.param(name, first, "interpret"),
            *(pytest.param(name, entry, "interpret", marks=more) for entry in others),
            pytest.param(name, first, *PLAIN.values, marks=PLAIN.marks),
        )
    ]
    return pytest.mark.parametrize(("name", "entry", "implementation"), cases, ids=str)


of_each_op = pytest.mark.parametrize("name", OPS)


@pytest.fixture
def no_leaks():
    """Fails if an array of a trace outlives it, as one that a cached function holds does."""
    gc.freeze()  # JAX collects garbage at the end of each trace: objects from before take no time
    with jax.checking_leaks():
        yield
    gc.unfreeze()


leaves_no_tracers = pytest.mark.usefixtures("no_leaks")


# --- the laws --------------------------------------------------------------------------------


@leaves_no_tracers
@pytest.mark.sampled(2, 2)
@each("axes")
def test_vmap_is_the_loop(name, entry, implementation):
    """The results, and the gradients."""
    op, axes = OPS[name], entry
    batches = [op.draw(seed) for seed in range(2)]
    pick = lambda i: [batches[0 if axis is None else i][k] for k, axis in enumerate(axes)]
    stacked = [
        batches[0][k] if axis is None else np.stack([args[k] for args in batches], axis)
        for k, axis in enumerate(axes)
    ]
    function = jax.jit(op.both_ways(implementation))
    loop = [function(*pick(i)) for i in range(2)]
    axis_name = "d" if None in axes else None
    close(
        jax.jit(jax.vmap(function, axes, spmd_axis_name=axis_name))(*stacked),
        jax.tree.map(lambda *leaves: np.stack(leaves), *loop),
    )


def masks(x, mask, implementation=None):
    """Masks of bools and of floats, and what else takes no part in a layer above."""
    plan = moe.make_plan_from_mask(mask, 2, capacity=5, align_size=4, implementation=implementation)
    rows = moe.permute(x, plan, scales=x.astype(jnp.float8_e4m3fn), implementation=implementation)
    out = moe.unpermute(rows.rows, plan, implementation=implementation)
    balance = moe.load_balancing_loss(x, plan.group_counts, score="sigmoid")
    there, _, row_id_map, *_ = te.token_dispatch(x, mask.astype(jnp.int32), plan.num_rows)
    back = te.token_combine(there, row_id_map, merging_probs=jnp.abs(x))
    return out, (balance + moe.router_z_loss(x)).astype(x.dtype), back


def exchanged(x, weights, ids, implementation=None):
    """There and back between two devices, by tokens and by choices."""
    how = {"implementation": implementation}

    def run(x, weights, ids):
        total = jnp.zeros_like(x)
        for options in ({"capacity": 4}, {"exchange": "ragged"}, {"scheme": "choice"}):
            sent = moe.dispatch(x, weights, ids, 4, "d", **options, **how)
            total += moe.combine(sent.rows, sent.plan, weights=sent.weights, **how)
        return total

    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = PartitionSpec("d")
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(x, weights, ids)


STRICT = OPS | {
    "masks": Op(
        masks,
        lambda seed: (*normal(seed, (9, 4)), normal(seed, (9, 4))[0] > 0),
        axes=[],
        replicated=[],
        kernels=[],
    ),
    "expert parallel": Op(
        exchanged,
        lambda seed: tuple(np.repeat(a[:8], 2, 0) for a in draw_permutation(seed)),
        axes=[],
        replicated=[],
        kernels=[],
    ),
}


@leaves_no_tracers
@pytest.mark.sampled(2, 5)
@pytest.mark.parametrize("implementation", ["interpret", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STRICT)
def test_jaxs_strict_modes(name, dtype, implementation):
    """No op relies on JAX to promote dtypes or ranks, in either way or on any platform."""
    if name == "expert parallel" and jax.device_count() < 2:
        pytest.skip("needs two devices")
    floats = lambda a: jnp.asarray(a, dtype) if jnp.issubdtype(a.dtype, FLOATS) else jnp.asarray(a)
    args = [floats(arg) for arg in STRICT[name].draw(0)]
    both = STRICT[name].both_ways(implementation)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(both).lower(*args)


@leaves_no_tracers
@pytest.mark.sampled(1, 2)
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@each("replicated")
def test_shard_map_is_local(name, entry, implementation):
    """Each device works on its own rows; the gradients of what is replicated are summed."""
    op, replicated = OPS[name], entry
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    split, whole = PartitionSpec("d"), PartitionSpec()
    draws = [op.draw(seed) for seed in range(2)]
    args = [[draws[0 if k in replicated else i][k] for k in range(len(draws[0]))] for i in range(2)]
    specs = tuple(whole if k in replicated else split for k in range(len(args[0])))

    def join(parts, replicate):
        return [
            replicate(*both) if k in replicated else np.concatenate(both)
            for k, both in enumerate(zip(*parts, strict=True))
        ]

    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=split)
    joined = join(args, lambda first, _: first)
    gradients, results = jax.jit(op.both_ways(implementation, over))(*joined)
    alone = jax.jit(op.both_ways(implementation))
    each_gradients, loop = zip(*(alone(*each) for each in args), strict=True)
    close(results, jax.tree.map(lambda *leaves: np.concatenate(leaves), *loop))
    close(list(gradients), join(each_gradients, np.add))


@leaves_no_tracers
@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", PATHS)
@of_each_op
def test_forward_mode_is_the_transpose_of_the_gradient(name, implementation):
    op = OPS[name]
    floats, integers = op.draw(0)[: op.num_floats], op.draw(0)[op.num_floats :]

    def run(*floats):
        results = jax.tree.leaves(op.run(*floats, *integers, implementation=implementation))
        return [out for out in results if jnp.issubdtype(out.dtype, FLOATS)]

    @jax.jit
    def forward_and_backward(*floats):
        tangents = tuple(jnp.cos(3 * arg) for arg in floats)
        out, moved = jax.jvp(run, floats, tangents)
        gradients = [jnp.sin(5 * a) for a in out]
        pulled = jax.vjp(run, *floats)[1](gradients)
        return sum(map(jnp.vdot, moved, gradients)), sum(map(jnp.vdot, pulled, tangents))

    np.testing.assert_allclose(*forward_and_backward(*floats), rtol=1e-4)


@leaves_no_tracers
@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("name", LAYERS)
def test_remat_scan_and_second_derivatives(name, implementation):
    args, layer, plain = LAYERS[name]

    def loss(layer, x, weights):
        step = jax.checkpoint(lambda x, _: (x + layer(x, weights), None))
        return jnp.sum(jax.lax.scan(step, x, length=2)[0] ** 2)

    def derivatives(layer):
        first = jax.grad(functools.partial(loss, layer), (0, 1))
        squares = lambda *args: (total(found := first(*args)), found)
        return jax.jit(jax.grad(squares, (0, 1), has_aux=True))(*args)

    actual = derivatives(functools.partial(layer, implementation=implementation))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(derivatives(plain)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        scale = np.max(np.abs(b)) + 1e-6
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-5)


# --- programs --------------------------------------------------------------------------------


def lowered(name, platform):
    """The program of an op and its gradients."""
    op = OPS[name]
    return jax.jit(op.both_ways()).trace(*op.draw(0)).lower(lowering_platforms=(platform,))


WITH_KERNELS = [name for name in OPS if OPS[name].kernels]


@leaves_no_tracers
@pytest.mark.sampled(2, 3)
@of_each_op
def test_cpu_gets_plain_jax_alone(name):
    text = lowered(name, "cpu").as_text()
    assert "triton" not in text
    assert "callback" not in text


@leaves_no_tracers
@pytest.mark.sampled(1, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, "90") for name in WITH_KERNELS]
    # ragged_dot has its own test for these: tests/moe/products/test_programs.py.
    + [
        pytest.param(name, arch, marks=pytest.mark.slow("Triton is the same"))
        for name in WITH_KERNELS
        if name != "ragged_dot"
        for arch in ("80", "100")
    ],
)
def test_cuda_gets_kernels_alone(name, arch, monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", arch)
    program = lowered(name, "cuda")
    assert sorted(call.kernel for call in reading.triton_calls(program)) == sorted(
        OPS[name].kernels
    )
    text = program.as_text()
    for other in ("dot_general", "gather", "scatter", "sort", "top_k", "transpose", "callback"):
        assert f"stablehlo.{other}" not in text


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_export_for_both_platforms_runs_on_the_cpu(name):
    op = OPS[name]
    run = jax.jit(lambda *args: jax.tree.leaves(op.run(*args)))
    args = op.draw(0)
    exported = jax.export.export(
        run, platforms=("cpu", "cuda"), disabled_checks=triax.export_checks()
    )(*args)
    assert "triton_kernel_call" in exported.mlir_module()
    close(exported.call(*args), run(*args))


SYMBOLIC = {"router"}  # exported with sizes left open, as plain JAX


@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_export_of_symbolic_sizes_works_or_is_refused(name, implementation):
    op = OPS[name]
    args = op.draw(0)
    (tokens,) = jax.export.symbolic_shape("tokens")
    shapes = [(tokens, *a.shape[1:]) if a.shape[0] == args[0].shape[0] else a.shape for a in args]
    run = jax.jit(lambda *args: jax.tree.leaves(op.run(*args, implementation=implementation)))
    export = jax.export.export(run, platforms=("cpu",))
    types = [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, args, strict=True)]
    if name in SYMBOLIC and implementation == "xla":
        close(export(*types).call(*args), run(*args))
        return
    remedy = ", or pass `implementation='xla'`" if name in SYMBOLIC else ""
    with pytest.raises(UnsupportedError, match=rf"\[tokens, \d+\]\. Export once .* size{remedy}\."):
        export(*types)


NEW_SIZES = {
    "chunk sort": (
        lambda rows, chunks: (
            [((rows, 48), "float32"), ((rows,), "float32")] + 2 * [((chunks,), "int32")]
        ),
        [(1, 1)],
        [(16, 16), (17, 1000), (2**31 - 1, 1)],
    ),
    "permutation": (
        lambda tokens: [
            ((tokens, 48), "float32"),
            ((tokens, 4), "float32"),
            ((tokens, 4), "int32"),
        ],
        [(1,), (4096,)],  # many pairs have kernels of their own
        [(16,), (17,), (513,), (4097,)],
    ),
    "ragged_dot": (
        lambda rows: [((rows, 64), "bfloat16"), ((5, 64, 96), "bfloat16"), ((5,), "int32")],
        [(640,)],
        [(641,), (100_001,), (2**30,)],
    ),
    "router": (
        lambda tokens: [((tokens, 48), "float32"), ((48,), "float32")],
        [(1,)],
        [(16,), (17,), (4097,)],
    ),
}


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("name", NEW_SIZES)
def test_new_sizes_compile_nothing(name):
    from triax.compiling import compiler

    types, before, after = NEW_SIZES[name]

    def lower(sizes):
        args = [jax.ShapeDtypeStruct(*each) for each in types(*sizes)]
        jax.jit(OPS[name].both_ways()).trace(*args).lower(lowering_platforms=("cuda",))

    for sizes in before:
        lower(sizes)
    count = compiler.compile_count()
    assert count
    for sizes in after:
        lower(sizes)
    assert compiler.compile_count() == count
