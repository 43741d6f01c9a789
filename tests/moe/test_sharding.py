"""Plain `jit` and explicit meshes: results do not depend on how arrays are cut over devices."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe, testing

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 8, 4, 2
ROUTER = moe.Router(TOP_K, score="sigmoid", normalize=True)
COLLECTIVES = re.compile(
    r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\S*\("
)


@pytest.fixture(params=["plain", "explicit"])
def kind(request):
    """Who knows how arrays are cut: XLA, or their types."""
    return request.param


def mesh_of(kind):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis, axis))


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    return {
        "x": normal(TOKENS, HIDDEN),
        "weights": rng.random((TOKENS, TOP_K), np.float32),
        "ids": rng.integers(0, EXPERTS, (TOKENS, TOP_K), np.int32),
        "logits": normal(TOKENS, EXPERTS),
        "w_gate_up": normal(EXPERTS, HIDDEN, 2 * WIDTH) / 4,
        "w_down": normal(EXPERTS, WIDTH, HIDDEN) / 4,
        "rows": normal(TOKENS * TOP_K, HIDDEN),
        "sizes": np.array([5, 0, 17, 3], np.int32),
        "probs": rng.random(TOKENS * TOP_K, np.float32),
        "bias": normal(EXPERTS),
        "order": np.array([2, 0, 3, 1], np.int32),
    }


def assert_all_close(actual, expected, *, rtol, atol):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, actual, expected)


def permutation(x, weights, ids):
    plan = moe.make_plan(ids, EXPERTS, align_size=4)
    out = moe.permute(x, plan, weights=weights)
    return moe.unpermute(jnp.tanh(out.rows) * out.weights[:, None], plan, weights), plan.row_of


def products(rows, w_gate_up, sizes):
    return moe.ragged_dot(rows, w_gate_up, sizes)


def layer(x, logits, w_gate_up, w_down, bias):
    out = moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), ROUTER, bias=bias)
    return out.tokens, out.group_counts


# Arguments are named as in `drawn`, floats first.
OPS = {
    "permutation": permutation,
    "chunk sort": lambda rows, probs, sizes, order: moe.sort_chunks_by_index(
        rows, sizes, order, probs
    ),
    "ragged_dot": products,
    "router": lambda logits: moe.route(logits, ROUTER),
    "feed_forward": layer,
}


def names(function):
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def arguments(function):
    return [drawn()[name] for name in names(function)]


def with_gradients(function, args):
    """The results and the gradients of the floats."""
    floats = tuple(i for i, arg in enumerate(args) if arg.dtype == np.float32)

    def loss(*args):
        results = function(*args)
        moving = [r for r in jax.tree.leaves(results) if jnp.issubdtype(r.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(r)) for r in moving), results

    return lambda *args: jax.grad(loss, floats, has_aux=True)(*args)


of_each_op = pytest.mark.parametrize(
    "name",
    [
        "permutation",
        "feed_forward",
        *(
            pytest.param(name, marks=pytest.mark.slow("they are cut by the same code"))
            for name in sorted(OPS.keys() - {"permutation", "feed_forward"})
        ),
    ],
)


def ways_to_cut(shape):
    """All specs of a mesh of 2 × 4 that cut the shape into equal parts."""
    parts = {None: 1, "data": 2, "model": 4, ("data", "model"): 8}
    for spec in itertools.product(parts, repeat=len(shape)):
        used = [
            name for part in spec if part for name in ([part] if isinstance(part, str) else part)
        ]
        if len(used) == len(set(used)) and not any(
            size % parts[part] for size, part in zip(shape, spec, strict=True)
        ):
            yield P(*spec)


def compiled(function, mesh, args, specs):
    """The program for arguments cut by `specs`, and its results."""
    placed = [
        jax.device_put(arg, NamedSharding(mesh, spec))
        for arg, spec in zip(args, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        program = jax.jit(function).lower(*placed).compile()
        return program, program(*placed)


def collectives(program):
    return COLLECTIVES.findall(program.as_text())


def spec_of(array):
    """Without the dimensions at the end that are not cut."""
    spec = tuple(array.sharding.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return P(*spec)


@pytest.mark.sampled(0, 2)
@of_each_op
def test_results_and_gradients_do_not_depend_on_shardings(kind, name):
    function = OPS[name]
    args = arguments(function)
    both = with_gradients(function, args)
    expected = jax.jit(both)(*args)
    rng = np.random.default_rng([*map(ord, name + kind)])
    choices = [list(ways_to_cut(arg.shape)) for arg in args]
    specs = [ways[rng.integers(len(ways))] for ways in choices]
    _, actual = compiled(both, mesh_of(kind), args, specs)
    assert_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("name", ["permutation", "chunk sort"])
def test_a_cut_width_moves_nothing_between_devices(kind, name):
    function = OPS[name]
    args = arguments(function)
    specs = [P(None, ("data", "model"))] + [P()] * (len(args) - 1)
    program, results = compiled(function, mesh_of(kind), args, specs)
    assert collectives(program) == []
    assert spec_of(results[0]) == specs[0]
    jax.tree.map(testing.assert_same_bits, results, jax.jit(function)(*args))


@pytest.mark.sampled(0, 1)
@of_each_op
def test_cut_batches_move_nothing_between_devices(kind, name):
    function = OPS[name]
    shared = ("w_gate_up", "w_down", "bias")
    axes = [None if name in shared else 0 for name in names(function)]
    args = [
        arg if axis is None else np.stack([np.roll(arg, i, 0) for i in range(8)])
        for arg, axis in zip(arguments(function), axes, strict=True)
    ]
    specs = [P() if axis is None else P(("data", "model")) for axis in axes]
    batched = jax.vmap(function, axes)
    program, results = compiled(batched, mesh_of(kind), args, specs)
    assert collectives(program) == []
    expected = jax.jit(batched)(*args)
    for actual, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert spec_of(actual) == specs[0]
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("specs", "collective", "result"),
    [
        # Rows: each device multiplies its own; the weights' gradient is summed up.
        ((P(("data", "model")), P(), P()), [], P(("data", "model"))),
        # Columns, and rows over the other axis.
        ((P("data"), P(None, None, "model"), P()), [], P("data", "model")),
        # The depth: one sum of the partial products.
        ((P(None, "model"), P(None, "model"), P()), ["all-reduce"], P()),
    ],
)
def test_products_are_cut_like_dense_ones(kind, specs, collective, result):
    args = arguments(products)
    program, actual = compiled(products, mesh_of(kind), args, specs)
    assert collectives(program) == collective
    assert spec_of(actual) == result
    np.testing.assert_allclose(actual, jax.jit(products)(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
def test_partial_products_are_summed_in_float32(kind):
    """Two parts that cancel: rounded to bfloat16 before the sum, little would be left of it."""
    rows = np.ones((8, 4), np.float32) * np.array([256, 1, -256, 0], np.float32)
    args = [jnp.asarray(a, jnp.bfloat16) for a in (rows, np.ones((1, 4, 4)))]
    args.append(np.array([8], np.int32))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=mesh_of(kind).axis_types)
    specs = (P(None, "model"), P(None, "model"), P())
    _, out = compiled(products, mesh, args, specs)
    testing.assert_same_bits(out, jnp.ones((8, 4), jnp.bfloat16))


@pytest.mark.sampled(1)
def test_gradients_of_small_weights_are_summed_in_float32(kind):
    """Those of `unpermute`'s weights, products of rows and gradients, where the width is cut."""
    gradient = np.tile(np.array([256, 1, -256, 0], np.float32), (4, 1))

    def d_weights(rows, weights):
        plan = moe.make_plan(np.arange(4)[:, None], 4)
        tokens, pull = jax.vjp(lambda weights: moe.unpermute(rows, plan, weights), weights)
        cotangent = jnp.asarray(gradient, jnp.bfloat16)
        if kind == "explicit":
            cotangent = jax.sharding.reshard(cotangent, jax.typeof(tokens).sharding)
        return pull(cotangent)[0]

    args = [jnp.ones((4, 4), jnp.bfloat16), jnp.ones((4, 1), jnp.bfloat16)]
    _, out = compiled(d_weights, mesh_of(kind), args, [P(None, "data"), P()])
    testing.assert_same_bits(out, args[1])


@pytest.mark.slow("the ops' sharding has tests of its own")
def test_the_layers_tokens_stay_on_their_device():
    """On explicit axes each device routes its own; counts and gradients of weights are summed."""
    args = arguments(layer)
    specs = [P(("data", "model")), P(("data", "model")), P(), P(), P()]
    program, (tokens, counts) = compiled(layer, mesh_of("explicit"), args, specs)
    assert set(collectives(program)) == {"all-reduce"}
    assert spec_of(tokens) == specs[0]
    expected, expected_counts = jax.jit(layer)(*args)
    np.testing.assert_allclose(tokens, expected, rtol=1e-5, atol=1e-6)
    testing.assert_same_bits(counts, expected_counts)

    both = with_gradients(layer, args)
    program, (gradients, _) = compiled(both, mesh_of("explicit"), args, specs)
    assert set(collectives(program)) == {"all-reduce"}
    assert [spec_of(g) for g in gradients[:4]] == specs[:4]
    assert_all_close(gradients, jax.jit(both)(*args)[0], rtol=1e-4, atol=1e-5)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", [None, "rows"])
@pytest.mark.parametrize(
    "specs",
    [
        (P(None, None, "model"), P(None, None, "model"), P()),
        (P(), P(), P(None, "model")),
        (P(None, None, "data"), P(None, None, "model"), P(None, "data")),
    ],
    ids=str,
)
def test_weights_may_be_cut_each_otherwise_around_a_function(recipe, specs):
    """An activation that is a function is plain JAX, which refuses types that do not go together:
    while the layer and its gradients are traced."""

    def layer(x, logits, w_gate, w_up, w_down):
        experts = moe.Experts((w_gate, w_up), w_down, activation=swiglu)
        return moe.feed_forward(x, logits, experts, ROUTER, recipe=recipe).tokens

    x, logits, w_gate_up, w_down = (drawn()[n] for n in ("x", "logits", "w_gate_up", "w_down"))
    args = [x, logits, *np.split(w_gate_up, 2, axis=2), w_down]
    shardings = [NamedSharding(mesh_of("explicit"), spec) for spec in (P(), P(), *specs)]
    with jax.set_mesh(mesh_of("explicit")):
        gradients, _ = jax.eval_shape(
            with_gradients(layer, args), *map(jax.device_put, args, shardings)
        )
    for gradient, sharding in zip(gradients, shardings, strict=True):
        assert spec_of(gradient) == sharding.spec


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("width", "specs"),
    [(8, [P(None, "data"), P("data", "model")]), (3, [P(None, "data")])],
    ids=["two arrays", "one array, whose halves do not split"],
)
def test_a_function_of_gate_and_up_that_are_cut_otherwise(width, specs):
    rng = np.random.default_rng(0)
    drawn = lambda *shape: rng.standard_normal(shape, np.float32)

    def glu(weights, *gate_up):
        return moe.glu(gate_up if up else gate_up[0], weights, activation=swiglu)

    up = len(specs) == 2
    args = [drawn(16), *(drawn(16, width if up else 2 * width) for _ in specs)]
    both = with_gradients(glu, args)
    _, actual = compiled(both, mesh_of("explicit"), args, [P("model"), *specs])
    assert_all_close(actual, jax.jit(both)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
def test_the_gradient_of_glus_weights_where_the_width_is_cut(kind):
    """Each device has a part of every row, and a part of each weight's gradient."""
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape, np.float32) for shape in ((16,), (16, 8), (16, 8))]
    both = with_gradients(lambda weights, *gate_up: moe.glu(gate_up, weights), args)
    _, actual = compiled(both, mesh_of(kind), args, [P(), P(None, "model"), P(None, "model")])
    assert_all_close(actual, jax.jit(both)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("specs", [("a", "b"), ("a", "ab"), ("ab", "b")], ids=str)
def test_the_layers_backward_may_be_cut_otherwise_than_its_forward(specs):
    """What is kept for the backward means the same, however XLA cuts either."""
    of_tokens, of_targets = (P(tuple(spec)) for spec in specs)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=2 * (AxisType.Auto,))
    args = [*arguments(layer)[:4], drawn(1)["x"]]

    def loss(x, logits, w_gate_up, w_down, targets):
        out = moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), ROUTER)
        return jnp.sum((out.tokens - targets) ** 2)

    both = jax.value_and_grad(loss, (0, 1, 2, 3))
    _, actual = compiled(both, mesh, args, [of_tokens, of_tokens, P(), P(), of_targets])
    assert_all_close(actual, jax.jit(both)(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["permutation", "feed_forward"])
def test_types_alone_name_the_mesh(name):
    """Arrays on a mesh with explicit axes, which is not set."""
    args = arguments(OPS[name])
    mesh = mesh_of("explicit")
    both = with_gradients(OPS[name], args)
    specs = [P("data") if arg.ndim == 2 else P() for arg in args]
    placed = [
        jax.device_put(arg, NamedSharding(mesh, spec))
        for arg, spec in zip(args, specs, strict=True)
    ]
    assert_all_close(jax.jit(both)(*placed), jax.jit(both)(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("over", ["vmap of the gradient", "gradient of the vmap"])
def test_gradients_of_cut_batches_on_explicit_axes(over):
    """Of an array that all share, and that is cut over another axis, too."""
    x, _, ids = arguments(permutation)
    xs = np.stack([x, x[::-1]])
    weights = drawn()["weights"]

    def loss(x, weights, ids):
        tokens, _ = permutation(x, weights, ids)
        return jnp.sum(jax.sharding.reshard(tokens, P()) ** 2)

    axes = (0, None, None)
    if over == "vmap of the gradient":
        both = jax.vmap(jax.value_and_grad(loss, (0, 1)), axes)
    else:
        both = jax.value_and_grad(lambda *args: jnp.sum(jax.vmap(loss, axes)(*args)), (0, 1))
    specs = [P("data", None, "model"), P("model"), P("model")]
    _, actual = compiled(both, mesh_of("explicit"), [xs, weights, ids], specs)
    with jax.set_mesh(mesh_of("explicit")):
        expected = jax.jit(both)(xs, weights, ids)
    assert_all_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "name"), [("plain", "permutation"), ("plain", "chunk sort"), ("explicit", "router")]
)
def test_beside_manual_axes(kind, name):
    """An op is whole on automatic axes that `shard_map` leaves, and cut over explicit ones."""
    function = OPS[name]
    args = arguments(function)
    batches = [np.stack([arg, arg]) for arg in args]

    @functools.partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def each(*args):
        return jax.tree.map(lambda a: a[None], function(*(arg[0] for arg in args)))

    specs = [P("data", *(["model"] if a.ndim > 1 else [])) for a in args]
    program, actual = compiled(each, mesh_of(kind), batches, specs)
    # XLA, cutting a gather itself, would add up parts.
    assert "all-reduce" not in collectives(program)
    expected = jax.jit(function)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, [b, b], rtol=1e-5, atol=1e-6), actual, expected
    )


def test_types_of_what_is_not_cut_name_the_mesh_too():
    x, weights, ids = arguments(permutation)
    whole = NamedSharding(mesh_of("explicit"), P())
    tokens, _ = jax.eval_shape(lambda x: permutation(x, weights, ids), jax.device_put(x, whole))
    assert tokens.sharding.mesh == whole.mesh.abstract_mesh


@pytest.mark.slow("many programs for one rule")
def test_dimensions_cut_over_a_part_of_a_mesh_axis():
    """Four groups over eight devices: XLA has a name for that, and JAX has none."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def grouped(x, logits, w_gate_up, w_down, bias):
        x, logits = (a.reshape(4, -1, a.shape[1]) for a in (x, logits))
        tokens, counts = jax.vmap(layer, (0, 0, None, None, None))(
            x, logits, w_gate_up, w_down, bias
        )
        # JAX 0.9 raises where XLA leaves results like that, with or without ops of ours.
        whole = NamedSharding(mesh, P())
        return jax.lax.with_sharding_constraint((tokens.reshape(TOKENS, HIDDEN), counts), whole)

    args = arguments(layer)
    specs = [P("data"), P("data"), P(), P(), P()]
    _, actual = compiled(grouped, mesh, args, specs)
    assert_all_close(actual, jax.jit(grouped)(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("around", ["the call", "the op"])
def test_parts_are_multiplied_as_the_caller_asked(around):
    args = arguments(products)

    def precise(*args):
        with jax.default_matmul_precision("highest"):
            return products(*args)

    function = precise if around == "the op" else products
    with (
        contextlib.nullcontext() if around == "the op" else jax.default_matmul_precision("highest")
    ):
        program, _ = compiled(function, mesh_of("plain"), args, [P("data"), P(), P()])
    assert "operand_precision={highest,highest}" in program.as_text()


def test_64_bits_are_not_cut():
    """XLA has parts traced in a thread of its own, which does not know of this."""
    with jax.enable_x64(True):
        args = arguments(products)
        args[:2] = (arg.astype(np.float64) for arg in args[:2])
        _, out = compiled(products, mesh_of("plain"), args, [P("data"), P(), P()])
        np.testing.assert_allclose(out, jax.jit(products)(*args), rtol=1e-12)


def test_without_shardy():
    args = arguments(permutation)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        _, actual = compiled(permutation, mesh_of("plain"), args, [P("data"), P(), P()])
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert_all_close(actual, jax.jit(permutation)(*args), rtol=1e-5, atol=1e-6)


@pytest.fixture
def compilation_cache(tmp_path):
    """JAX's persistent cache, in a folder of its own."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        cache.reset_cache()
        if values is settings:
            yield tmp_path


@pytest.mark.slow("it compiles whole layers for JAX's cache, which is the same")
def test_a_program_for_one_device_has_no_callback(compilation_cache):
    """It can be exported, and JAX's persistent cache finds it again."""
    args = arguments(layer)
    both = with_gradients(layer, args)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    placed = [jax.device_put(arg, NamedSharding(mesh, P())) for arg in args]

    def entries():
        jax.clear_caches()
        lowered = jax.jit(both).lower(*placed)
        assert "CustomSPMDPartitioning" not in lowered.as_text()
        assert "callback" not in lowered.as_text()
        lowered.compile()
        return sorted(path.name for path in compilation_cache.glob("*-cache"))

    first = entries()
    assert len(first) == 1
    assert entries() == first

    exported = jax.export.export(jax.jit(both))(*args)
    again = jax.export.deserialize(exported.serialize()).call
    jax.tree.map(np.testing.assert_allclose, again(*args), jax.jit(both)(*args))


def test_interpreted_kernels_are_cut():
    """Their host callbacks must live as long as the program."""
    args = arguments(permutation)[0], arguments(permutation)[2]

    def moved(x, ids):
        plan = moe.make_plan(ids, EXPERTS, implementation="interpret")
        return moe.permute(x, plan, implementation="interpret")

    program, out = compiled(moved, mesh_of("plain"), args, [P(None, "model"), P()])
    assert not collectives(program)
    testing.assert_same_bits(out, jax.jit(moved)(*args))
