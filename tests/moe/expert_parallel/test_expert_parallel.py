"""Expert parallelism on eight virtual devices equals one device that has all tokens and experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from packaging.version import Version

from tests.cases import cuda_calls
from triax import devices, moe
from triax.compat import peer_memory
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.expert_parallel import exchange, tokens
from triax.testing import assert_same_bits

MESHES = {
    "8": ({"expert": 8}, "expert"),
    "4x2": ({"data": 4, "expert": 2}, "expert"),
    "2x2x2": ({"data": 2, "expert": 2, "tensor": 2}, "expert"),
    "both axes": ({"rows": 4, "columns": 2}, ("rows", "columns")),
}
BETWEEN_GPUS = exchange._between_gpus
EXPERTS, TOP_K, TOKENS, HIDDEN, WIDTH = 16, 3, 9, 20, 12
COMPILES = pytest.mark.skipif(
    jax.__version__ == "0.11.2" and jax.default_backend() == "cpu",
    reason="XLA's CPU compiler of JAX 0.11.2 crashes on this program",
)


@pytest.fixture(autouse=True, scope="module")
def _as_on_a_gpu():
    """Rows are exchanged as the kernel does it; those without a token may be anything."""

    def between_gpus(target, axis_name, x, weights, plan, ways, *, of_tokens, to_tokens):
        filled, received, capacity = ways.filled, ways.received, ways.capacity
        source = ways.source if of_tokens else None
        row_of = ways.sent.row_of if to_tokens else None
        terms = None if plan is None else plan.row_of
        if x.size == 0 or capacity == 0:
            return None
        if terms is not None:
            values = jnp.where((terms >= 0)[..., None], x[terms], 0).astype(jnp.float32)
            values *= 1 if weights is None else jnp.where(terms >= 0, weights, 0)[..., None]
            x = jnp.sum(values, axis=1).astype(x.dtype)
        if source is not None:
            x = jnp.where((source >= 0)[:, None], x[source], jnp.zeros_like(x[:1]))
        poison = jnp.asarray(77 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.nan, x.dtype)

        def poisoned(rows, filled):
            kept = jnp.arange(capacity)[None] < filled[:, None]
            return jnp.where(kept.reshape(-1, 1), rows, poison)

        swapped = jax.lax.all_to_all(poisoned(x, filled), axis_name, 0, 0, tiled=True)
        rows = poisoned(swapped, received)
        if row_of is None:
            return rows
        terms = jnp.where((row_of >= 0)[..., None], rows[row_of], 0)
        return jnp.sum(terms, axis=1, dtype=jnp.float32).astype(x.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_between_gpus", between_gpus)
        forget()
        yield
    forget()


def forget():
    """The ops, with which their traces are kept."""
    for op in (tokens.send, tokens.combine, tokens._collect):
        op._calls.cache_clear()


def draw_experts(kind, count):
    rng = np.random.default_rng(3)
    experts = rng.integers(0, EXPERTS, (count, TOP_K))
    if kind == "skewed":
        experts[rng.random(experts.shape) < 0.8] = 1
    elif kind == "few experts":
        experts = experts % 3 + 5
    elif kind == "not routed":  # a shard without tokens, others with ids out of range
        experts[: count // 8] = -1
        experts[rng.random(experts.shape) < 0.3] = EXPERTS + 7
    elif kind == "one device":
        experts %= 2
    return experts.astype(np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def uniform(seed, *shape):
    return np.random.default_rng(seed).random(shape, np.float32)


def operands(kind, devices):
    count = devices * TOKENS
    return {
        "x": normal(0, count, HIDDEN),
        "weights": uniform(1, count, TOP_K),
        "up": normal(2, EXPERTS, HIDDEN, WIDTH) * np.float32(HIDDEN**-0.5),
        "down": normal(3, EXPERTS, WIDTH, HIDDEN) * np.float32(WIDTH**-0.5),
    }, draw_experts(kind, count)


def run_experts(rows, group_sizes, up, down):
    return moe.ragged_dot(jnp.sin(moe.ragged_dot(rows, up, group_sizes)), down, group_sizes)


def on_one_device(o, experts):
    plan = moe.make_plan(experts, EXPERTS)
    rows = moe.permute(o["x"], plan)
    rows = run_experts(rows, plan.group_sizes, o["up"], o["down"])
    return moe.unpermute(rows, plan, o["weights"])


def on_all(mesh, axis):
    tensor = "tensor" if "tensor" in mesh.axis_names else None
    tokens = P(tuple(name for name in mesh.axis_names if name != "tensor"))
    specs = {"x": tokens, "weights": tokens, "up": P(axis, None, tensor), "down": P(axis, tensor)}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
    def run(o, experts):
        sent = moe.dispatch(o["x"], o["weights"], experts, EXPERTS, axis)
        rows = run_experts(sent.rows, sent.group_sizes, o["up"], o["down"])
        y = moe.combine(rows, sent.plan, weights=sent.weights)
        return y if tensor is None else jax.lax.psum(y, tensor)

    return run


@functools.cache
def program(mesh_name=None):
    """Forward and backward, by one device or by all of a mesh."""
    function = on_one_device if mesh_name is None else on_all(*make_mesh(mesh_name))

    @jax.jit
    def run(o, experts):
        y, pull = jax.vjp(lambda o: function(o, experts), o)
        return y, pull(jnp.asarray(normal(9, *y.shape)))

    return run


def make_mesh(name):
    sizes, axis = MESHES[name]
    devices = np.array(jax.devices()[:8]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes)), axis


def assert_equals_one_device(kind, mesh_name):
    o, experts = operands(kind, 8)
    results = (run(o, experts) for run in (program(mesh_name), program()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), *results)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["uniform", "skewed", "few experts", "not routed", "one device"])
def test_equals_one_device(kind):
    assert_equals_one_device(kind, "8")


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize(
    ("mesh_name", "kind"),
    [("4x2", "skewed"), ("2x2x2", "uniform"), ("2x2x2", "not routed"), ("both axes", "uniform")],
)
def test_equals_one_device_on_meshes_of_more_axes(mesh_name, kind):
    assert_equals_one_device(kind, mesh_name)


def local_mesh(count=4):
    return Mesh(np.array(jax.devices()[:count]), ("d",))


def dispatched(mesh, *arguments, experts=EXPERTS, scales=None, back=False, only=None, **options):
    """`Dispatched` of all devices, in NumPy: for the plan the tokens back from unchanged rows, if
    these are to come `back`; if `only` some fields are wanted, None for the others."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def run(x, weights, selected, scales):
        sent = moe.dispatch(x, weights, selected, experts, "d", scales=scales, **options)
        y = moe.combine(sent.rows, sent.plan, weights=sent.weights) if back else None
        sent = sent._replace(plan=y, num_dropped=sent.num_dropped[None])
        left_out = [] if only is None else set(sent._fields).difference(only)
        return sent._replace(**dict.fromkeys(left_out))

    return jax.tree.map(np.asarray, run(*arguments, scales))


def test_rows_are_sorted_by_expert_then_device_then_token():
    mesh = local_mesh()
    count = 4 * TOKENS
    experts = draw_experts("uniform", count)
    x = np.arange(count, dtype=np.float32)[:, None] + np.zeros((1, 8), np.float32)
    weights = np.arange(experts.size, dtype=np.float32).reshape(experts.shape)
    scales = (x[:, :2] * 2).astype(jnp.bfloat16)
    out = dispatched(mesh, x, weights, experts, scales=scales)
    rows_of_device = out.rows.reshape(4, -1, 8)
    sizes = out.group_sizes.reshape(4, -1)
    for device in range(4):
        start = 0
        for local, size in enumerate(sizes[device]):
            tokens, slots = np.nonzero(experts == device * 4 + local)
            group = slice(start, start + int(size))
            assert_same_bits(rows_of_device[device, group], x[tokens])
            assert_same_bits(out.scales.reshape(4, -1, 2)[device, group], scales[tokens])
            assert_same_bits(out.weights.reshape(4, -1)[device, group], weights[tokens, slots])
            start += int(size)
        assert not rows_of_device[device, start:].any()
    assert out.group_counts.tolist() == np.bincount(experts.ravel(), minlength=EXPERTS).tolist()
    assert not out.num_dropped.any()


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("limits", [{"capacity": 2}, {"num_rows": 16}, {"num_rows": 0}])
def test_what_does_not_fit_is_dropped_and_counted(limits):
    mesh = local_mesh()
    count = 4 * TOKENS
    experts = draw_experts("skewed", count)
    x, ones = (np.ones((count, width), np.float32) for width in (8, TOP_K))
    out = dispatched(mesh, x, ones, experts, back=True, **limits)
    kept = np.sum(out.plan[:, 0])  # every row that was made adds one to its token
    assert kept == out.weights.sum() == out.group_sizes.sum() < experts.size
    assert out.num_dropped.tolist() == [experts.size - kept] * 4  # each device has the sum
    if limits == {"num_rows": 0}:
        assert kept == 0
    if limits == {"num_rows": 16}:
        assert out.rows.shape == (4 * 16, 8)
        assert out.group_sizes.reshape(4, -1).sum(1).max() == 16


def test_numbers_of_many_experts_arrive_beside_small_weights():
    """bfloat16 has no odd numbers above 256, and the weights' dtype must not carry the experts'."""
    experts = np.arange(384, dtype=np.int32).reshape(192, 2)
    x, weights = np.ones((192, 8), np.float32), np.ones(experts.shape, jnp.bfloat16)
    out = dispatched(local_mesh(2), x, weights, experts, experts=384, only=["group_sizes"])
    assert out.group_sizes.tolist() == [1] * 384


@pytest.mark.parametrize("capacity", [1, 2])
def test_room_for_rows_that_nobody_sends_is_zeros(capacity):
    """Kernels leave memory as it is where a plan has no rows: what was freed before has NaN."""
    sent = moe.make_plan(np.array([[0], [2], [2], [-1]], np.int32), 3, capacity=capacity)
    plan = tokens.in_slots(sent, capacity)
    freed = [jnp.full((plan.num_rows, 64), jnp.nan) for _ in range(8)]
    jax.block_until_ready(freed)
    del freed
    rows = moe.permute(np.ones((4, 64), np.float32), plan, implementation="interpret")
    filled = np.array([[1, 0], [0, 0], [1, 1]])[:, :capacity].reshape(-1, 1)
    np.testing.assert_array_equal(rows, np.broadcast_to(filled, rows.shape))


def test_a_capacity_keeps_the_first_tokens():
    mesh = local_mesh()
    experts = np.zeros((4 * TOKENS, TOP_K), np.int32)  # all of the first device
    experts[2::TOKENS, 0] = EXPERTS  # of none, so nothing is dropped
    x = np.arange(4 * TOKENS, dtype=np.float32)[:, None]
    ones = np.ones(experts.shape, np.float32)
    out = dispatched(mesh, x, ones, experts, capacity=2, only=["rows", "num_dropped"])
    first = np.concatenate([np.arange(d * TOKENS, d * TOKENS + 2) for d in range(4)])
    assert_same_bits(out.rows[: 3 * 8, 0], np.repeat(first, 3).astype(np.float32))
    assert out.num_dropped.tolist() == [4 * (3 * (TOKENS - 2) - 1)] * 4


@pytest.mark.slow("many programs for one rule")
def test_scales_of_rows_without_a_token_are_zero():
    """Also in an 8-bit float that has no zero."""
    mesh, experts = local_mesh(2), np.zeros((2, 1), np.int32)
    scales = np.ones((2, 1), jnp.float8_e8m0fnu)
    x, weights = np.ones((2, 8), np.float32), np.ones((2, 1), np.float32)
    out = dispatched(
        mesh, x, weights, experts, experts=2, scales=scales, num_rows=4, only=["scales"]
    )
    words = out.scales.view(np.uint8)
    assert words.ravel().tolist() == [127, 127, 0, 0, 0, 0, 0, 0]


def test_transformations():
    mesh, count = local_mesh(), 4 * TOKENS
    experts = draw_experts("uniform", count)
    x, tangent = (jnp.asarray(normal(seed, count, 8)) for seed in (0, 1))
    weights = uniform(2, *experts.shape)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def layer(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, "d")
        return moe.combine(jnp.sin(sent.rows), sent.plan, weights=sent.weights)

    def plain(x, weights, experts):
        return jnp.sin(x) * jnp.sum(weights, axis=1)[:, None]

    def all_of(function):
        run = lambda x: function(x, weights, experts)
        squares = lambda x: jnp.sum(run(x) ** 2)
        batch = jnp.stack([x, tangent])
        return (
            jax.jvp(jax.value_and_grad(squares), (x,), (tangent,)),
            jax.grad(lambda x: jnp.vdot(jax.grad(squares)(x), tangent))(x),
            jax.vmap(jax.value_and_grad(squares))(batch),
            jax.grad(jax.checkpoint(squares))(x),
        )

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, *(jax.jit(lambda f=f: all_of(f))() for f in (layer, plain)))


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("axes", [(None, None, 0), (None, 0, None)])
def test_batches_of_some_operands(axes):
    count = 2 * TOKENS
    given = normal(0, count, 8), uniform(1, count, TOP_K), draw_experts("uniform", count)
    batches = [
        a if axis is None else np.stack([a, a[::-1]]) for a, axis in zip(given, axes, strict=True)
    ]

    @functools.partial(jax.shard_map, mesh=local_mesh(2), in_specs=P("d"), out_specs=P("d"))
    def layer(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, "d")
        return moe.combine(sent.rows, sent.plan, weights=sent.weights)

    plain = lambda x, weights, _: x * jnp.sum(weights, axis=1)[:, None]
    results = (jax.jit(jax.vmap(f, axes))(*batches) for f in (layer, plain))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.slow("many programs for one rule")
def test_gradients_of_complex_tokens():
    count = 2 * TOKENS
    x, experts = np.ones((count, 8), np.complex64), draw_experts("uniform", count)
    weights, factors = uniform(1, *experts.shape), normal(2, count, 8)

    @functools.partial(jax.shard_map, mesh=local_mesh(2), in_specs=P("d"), out_specs=P("d"))
    def layer(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, "d")
        return moe.combine(jnp.imag(sent.rows), sent.plan, weights=sent.weights)

    found = jax.jit(jax.grad(lambda x: jnp.sum(layer(x, weights, experts) * factors)))(x)
    expected = -1j * factors * weights.sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_mesh_of_which_one_axis_is_manual():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("d", "automatic"))
    count = 4 * TOKENS
    x, experts, weights = normal(0, count, 8), draw_experts("uniform", count), uniform(2, count, 3)
    specs = {"in_specs": P("d"), "out_specs": P("d"), "axis_names": {"d"}}

    @functools.partial(jax.shard_map, mesh=mesh, **specs)
    def layer(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, "d")
        return moe.combine(jnp.sin(sent.rows), sent.plan, weights=sent.weights)

    plain = lambda x, weights, _: jnp.sin(x) * jnp.sum(weights, axis=1)[:, None]
    found, expected = (
        jax.jit(jax.value_and_grad(lambda x, f=f: jnp.sum(f(x, weights, experts) ** 2)))(x)
        for f in (layer, plain)
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, expected)


def beside_an_explicit_axis():
    """A mesh, operands, and a layer over one of its axes: the other cuts each array otherwise."""
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("d", "explicit"), axis_types=kinds)
    count = 4 * (TOKENS - 1)
    x, experts, weights = normal(0, count, 8), draw_experts("uniform", count), uniform(2, count, 3)
    cuts = P(None, "explicit"), P("explicit"), P()

    @functools.partial(jax.shard_map, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    def layer(*args):
        args = map(jax.sharding.reshard, args, cuts)
        sent = moe.dispatch(*args, EXPERTS, "d")
        tokens = moe.combine(jnp.sin(sent.rows), sent.plan, weights=sent.weights)
        return jax.sharding.reshard(tokens, P())

    return mesh, (x, weights, experts), layer


def test_the_other_axis_of_a_mesh_may_be_explicit():
    mesh, args, layer = beside_an_explicit_axis()
    with jax.set_mesh(mesh):
        assert jax.eval_shape(layer, *args).shape == args[0].shape


@COMPILES
def test_a_mesh_whose_other_axis_is_explicit():
    mesh, (x, weights, experts), layer = beside_an_explicit_axis()
    plain = lambda x, weights, _: jnp.sin(x) * jnp.sum(weights, axis=1)[:, None]
    with jax.set_mesh(mesh):
        found, expected = (
            jax.jit(jax.value_and_grad(lambda x, f=f: jnp.sum(f(x, weights, experts) ** 2)))(x)
            for f in (layer, plain)
        )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, expected)


@pytest.mark.slow("many programs for one rule")
def test_tokens_that_all_devices_share():
    mesh, experts = local_mesh(), draw_experts("uniform", TOKENS)
    x = normal(0, TOKENS, 8)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P("d"))
    def layer(x):
        sent = moe.dispatch(x, jnp.ones(experts.shape), experts, EXPERTS, "d")
        return moe.combine(jnp.sin(sent.rows), sent.plan, weights=sent.weights)

    found = jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))(x)
    np.testing.assert_allclose(found, 4 * TOP_K * np.cos(x), rtol=1e-5, atol=1e-5)


def test_kernels_in_the_interpreter():
    mesh = local_mesh(2)
    experts = draw_experts("uniform", 2 * TOKENS) % 4
    x = normal(0, 2 * TOKENS, 16).astype(jnp.bfloat16)
    weights = np.float32(np.arange(experts.size).reshape(experts.shape) % 7 + 1) / 8
    plain, kernels = (
        dispatched(mesh, x, weights, experts, experts=4, implementation=how, back=True)
        for how in ("xla", "interpret")
    )
    jax.tree.map(assert_same_bits, plain, kernels)


def test_no_choices():
    x, nothing = normal(0, 8, 8), np.ones((8, 0))
    out = dispatched(local_mesh(), x, nothing, nothing.astype(int), back=True)
    assert_same_bits(out.plan, np.zeros_like(x))


@pytest.mark.skipif(
    Version(jax.__version__) < Version("0.10.1"),
    reason="XLA of JAX 0.10.0 and older cannot compile it on a CPU",
)
def test_no_tokens():
    out = dispatched(
        local_mesh(), normal(0, 0, 8), normal(0, 0, 2), np.ones((0, 2), int), back=True
    )
    assert out.plan.shape == (0, 8)
    assert not out.group_sizes.any()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"experts": 15}, ArgumentValueError, "`num_experts` must be a multiple of the 4 devices"),
        ({"weights": np.ones((8, 3))}, ArgumentValueError, "same `top_k`"),
        ({"selected": np.ones((8, 2))}, ArgumentTypeError, "`experts`"),
        ({"capacity": -1}, ArgumentValueError, "`capacity`"),
        ({"num_rows": 7.5}, ArgumentTypeError, "`num_rows`"),
        ({"num_rows": -3}, ArgumentValueError, "`num_rows`"),
        ({"capacity": 0}, ArgumentValueError, "`capacity` must be at least 1"),
        (
            {"scales": np.ones((4, 3))},
            ArgumentValueError,
            r"`scales` must have shape \(.*, scales",
        ),
    ],
)
def test_mistakes(change, error, text):
    change = dict(change)
    weights = change.pop("weights", np.ones((8, 2)))
    selected = change.pop("selected", np.ones((8, 2), int))
    with pytest.raises(error, match=text):
        dispatched(local_mesh(), np.ones((8, 4)), weights, selected, **change)


@pytest.mark.parametrize("shape", [(12, 4), (1, 4), (12,), (12, 2, 4)])
def test_combine_wants_the_rows_of_dispatch(shape):
    def run(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, 4, "d", num_rows=8)
        return moe.combine(jnp.ones(shape), sent.plan, weights=sent.weights)

    mesh = local_mesh(2)
    function = jax.shard_map(run, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(ArgumentValueError, match="`rows` must"):
        jax.make_jaxpr(function)(np.ones((4, 4)), np.ones((4, 2)), np.ones((4, 2), int))


def by_dispatch(x, axis_name):
    return moe.dispatch(x, x, x.astype(int), 4, axis_name).rows


def by_layer(x, axis_name):
    experts = moe.Experts(*2 * (jnp.ones((2, 2, 2)),), activation="silu")
    routing = moe.Routing(x, x.astype(int))
    return moe.feed_forward(x, routing, experts, axis_name=axis_name).tokens


@pytest.mark.parametrize("run", [by_dispatch, by_layer])
def test_axis_must_be_one_of_a_shard_map(run):
    name = {by_dispatch: "dispatch", by_layer: "feed_forward"}[run]
    text = rf"`axis_name` must name a mesh axis .*`{name}` is called in; got "
    with pytest.raises(ArgumentValueError, match=f"{text}'d'"):
        run(np.ones((4, 2), np.float32), "d")
    cut = {"mesh": local_mesh(2), "in_specs": P("d"), "out_specs": P("d")}
    for axis_name, error in (
        (3, f"{text}3"),
        ([["d"]], text),
        (("d", "d"), "`axis_name` must name each mesh axis once; got"),
    ):
        call = jax.shard_map(functools.partial(run, axis_name=axis_name), **cut)
        with pytest.raises(ArgumentValueError, match=error):
            jax.make_jaxpr(call)(np.ones((4, 2), np.float32))
    call = jax.shard_map(functools.partial(run, axis_name=["d"]), **cut)
    assert jax.eval_shape(call, np.ones((4, 2), np.float32)).shape[1] == 2


def test_combine_wants_its_plan():
    plan = jax.jit(moe.make_plan, static_argnums=1)(np.ones((4, 2), int), 4)
    with pytest.raises(ArgumentTypeError, match="`plan` must be the plan of `dispatch`"):
        moe.combine(np.ones((8, 4)), plan, weights=None)


def test_weights_are_those_that_are_passed():
    """Other ones than `dispatch` returned, or none; and their gradient."""
    mesh, count = local_mesh(), 4 * TOKENS
    x, selected = normal(0, count, 8), draw_experts("not routed", count)
    weights = uniform(1, *selected.shape)

    def layer(passed):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        def run(x, weights, experts):
            sent = moe.dispatch(x, weights, experts, EXPERTS, "d")
            return moe.combine(jnp.sin(sent.rows), sent.plan, weights=passed(sent.weights))

        def whole(x, weights, experts):
            y, pull = jax.vjp(lambda x, weights: run(x, weights, experts), x, weights)
            return y, pull(jnp.cos(y))

        return jax.jit(whole)(x, weights, selected)

    there = (selected >= 0) & (selected < EXPERTS)
    plain = lambda w: jnp.sin(x) * jnp.sum(jnp.where(there, w, 0), 1, keepdims=True)
    for passed in (lambda w: w, lambda w: 2 * w * w, lambda _: None):
        function = lambda w, passed=passed: plain(1.0 if passed(w) is None else passed(w))
        expected, pull = jax.vjp(function, weights)
        y, (_, d_weights) = layer(passed)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(d_weights, pull(jnp.cos(y))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({}, TypeError, "missing 1 required keyword-only argument: 'weights'"),
        ({"weights": np.ones((4, 2))}, ArgumentValueError, "like the `weights` that `dispatch` re"),
        ({"weights": np.ones(7)}, ArgumentValueError, r"`weights` must have shape \(8,\) to go"),
        ({"weights": np.ones(8, int)}, ArgumentTypeError, "`weights` must have a floating"),
    ],
)
def test_combine_is_told_which_weights(change, error, text):
    def run(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, 4, "d", num_rows=8)
        return moe.combine(sent.rows, sent.plan, **change)

    function = jax.shard_map(run, mesh=local_mesh(2), in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(error, match=text):
        jax.make_jaxpr(function)(np.ones((4, 4)), np.ones((4, 2)), np.ones((4, 2), int))


@pytest.fixture
def rooms(monkeypatch):
    """Programs are lowered for GPUs that have memory, of which each exchange asks for some."""
    asked = []

    def rows(groups, room):
        asked.append(room)
        return [[*range(1, len(group) + 1), room] for group in groups]

    monkeypatch.setattr(peer_memory._host, "rows", rows)
    monkeypatch.setattr(devices, "is_cuda", lambda _: True)
    monkeypatch.setattr(devices, "gpus", lambda _: [])
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "_between_gpus", BETWEEN_GPUS)
        forget()
        yield asked
    forget()


def dispatched_and_combined(x, weights, experts):
    sent = moe.dispatch(x, weights, experts, EXPERTS, "d")
    return moe.combine(jnp.sin(sent.rows), sent.plan, weights=sent.weights)


def exchanges_of(function, x_width=24):
    count = 4 * TOKENS
    given = normal(0, count, x_width), uniform(1, count, TOP_K), draw_experts("uniform", count)
    return [call for call in cuda_calls(function, *given) if call.kernel == "exchange_rows"]


@pytest.mark.cuda_plugin
def test_programs_for_gpus_exchange_no_more_than_they_must(rooms):
    """The weights with the choices, the tokens, and the sums; and gradients of each of them."""
    specs = {"mesh": local_mesh(), "in_specs": P("d"), "out_specs": P("d")}
    layer = jax.shard_map(dispatched_and_combined, **specs)

    def squares(*operands):
        return jnp.sum(layer(*operands) ** 2)

    for function, exchanges in ((layer, 3), (jax.grad(squares, (0, 1)), 6)):
        found = exchanges_of(function)
        readers, writers = 66, 4  # a chunk for each device
        assert [call.grid for call in found] == [((readers + writers, 1, 1),)] * exchanges
    assert {*rooms} == {1}


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("size", [1, 2])
def test_an_axis_that_is_left_to_jax(rooms, size, caplog):
    """Of one device it is no axis; of several the exchange is padded, and the log says so."""
    exchange._say_padded.cache_clear()
    mesh = Mesh(np.array(jax.devices()[: 4 * size]).reshape(4, size), ("d", "t"))
    specs = {"in_specs": P("d"), "out_specs": P("d"), "axis_names": {"d"}}
    found = exchanges_of(jax.shard_map(dispatched_and_combined, mesh=mesh, **specs))
    assert len(found) == (3 if size == 1 else 0)
    assert ("leaves axes of the mesh to JAX" in caplog.text) == (size == 2)


@pytest.mark.parametrize("top_k", [2, 40])
def test_whole_slots_give_the_same_bits(monkeypatch, top_k):
    """The exchange by `all_to_all`, with gradients; sums of many rows are kernels of their own."""
    count, specs = 4 * TOKENS, {"in_specs": P("d"), "out_specs": P("d")}
    layer = jax.shard_map(dispatched_and_combined, mesh=local_mesh(), **specs)
    experts = np.random.default_rng(4).integers(-1, EXPERTS, (count, top_k)).astype(np.int32)

    @jax.jit
    def both_ways(x, weights):
        y, pull = jax.vjp(lambda x, weights: layer(x, weights, experts), x, weights)
        return y, *pull(jnp.cos(y))

    given = normal(0, count, 24), uniform(1, count, top_k)
    expected = both_ways(*given)
    asked = []
    with monkeypatch.context() as patch:
        none = lambda *operands, **forms: asked.append(forms)
        patch.setattr(exchange, "_between_gpus", none)
        forget()
        jax.clear_caches()
        found = both_ways(*given)
    forget()
    assert asked
    jax.tree.map(assert_same_bits, found, expected)
