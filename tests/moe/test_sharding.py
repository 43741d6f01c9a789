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

from tests.moe.case import ModelSizes
from tests.moe.placements.case import compare, uncut, with_gradients
from tests.moe.placements.ops import OPS
from triax import moe, testing

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
    pytest.mark.filterwarnings("ignore:feed_forward gathers all experts"),  # as these want it to
]

SIZES = ModelSizes(tokens=16, hidden=24, width=8, experts=4, top_k=2)
NAMES = [name for name in OPS if not name.startswith("exchange")]  # which has a mesh of its own
WITH_COLUMNS = [name for name in NAMES if OPS[name](None, SIZES).columns]
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


def is_even(arrays):
    """Whether rows of most groups, or most experts, are there."""
    sizes, ids = arrays.get("sizes"), arrays.get("ids")
    if sizes is not None:
        fit = min(sizes) >= 0 and max(sizes) < SIZES.rows and sum(sizes) < SIZES.rows
        return fit and np.count_nonzero(sizes) > 2
    return ids is None or (ids.min() >= 0 and ids.max() < SIZES.experts and len({*ids.flat}) > 2)


def drawn(name, sizes=SIZES):
    """A case uncut, its arrays, and cotangents of its results."""
    one, rng = uncut(name, sizes), np.random.default_rng(0)
    arrays = next(filter(is_even, (one.draw(rng) for _ in itertools.count())))
    types = one.results(arrays)
    return one, arrays, {n: rng.standard_normal(t.shape).astype(t.dtype) for n, t in types.items()}


def forward(name, sizes=SIZES):
    """A function of a case's arrays that returns its results by name, and these arrays."""
    one, arrays, _ = drawn(name, sizes)
    return lambda arrays: one.case.forward(arrays, one)[1], arrays


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
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    placed = jax.tree.map(place, list(args), list(specs))
    with jax.set_mesh(mesh):
        program = jax.jit(function).lower(*placed).compile()
        return program, program(*placed)


def whole(arrays, **specs):
    """Specs by which arrays are not cut, but for some."""
    return {name: specs.get(name, P()) for name in arrays}


def check(name, mesh, specs, is_set=True):
    """That results and gradients are those of one device; cotangents' specs are "g_…".

    Returns the program and what it returned.
    """
    one, arrays, given = drawn(name)
    function = functools.partial(with_gradients, one.function, one.case.gradients)
    place = lambda of, spec: jax.device_put(of, NamedSharding(mesh, spec))
    placed = {n: place(a, specs.get(n, P())) for n, a in arrays.items()}
    cotangents = {n: place(a, specs.get(f"g_{n}", P())) for n, a in given.items()}
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        program = jax.jit(function).lower(placed, cotangents).compile()
        found = program(placed, cotangents)
    wanted = one.program(False)(arrays, given)
    exact = one.exact(arrays, given, wanted)
    for of, array in wanted.items():
        compare(of, found[of], array, of in exact)
    return program, found


def check_columns(name, mesh, axes):
    """That each device has all that it needs of arrays whose columns are cut."""
    function, arrays = forward(name)
    case, spec = OPS[name](None, SIZES), P(None, axes)
    specs = whole(arrays, **dict.fromkeys(case.columns, spec))
    program, results = compiled(function, mesh, [arrays], [specs])
    assert collectives(program) == []
    assert spec_of(results[case.results[0]]) == spec
    jax.tree.map(testing.assert_same_bits, results, jax.jit(function)(arrays))


def collectives(program):
    return COLLECTIVES.findall(program.as_text())


def spec_of(array):
    """Without the dimensions at the end that are not cut."""
    spec = tuple(array.sharding.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return P(*spec)


@pytest.mark.sampled(0, 8)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_do_not_depend_on_shardings(kind, name):
    _, arrays, given = drawn(name)
    rng = np.random.default_rng([*map(ord, name + kind)])
    arrays |= {f"g_{n}": array for n, array in given.items()}
    choices = {n: [*ways_to_cut(array.shape)] for n, array in arrays.items()}
    check(name, mesh_of(kind), {n: of[rng.integers(len(of))] for n, of in choices.items()})


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_cut_each_otherwise(name):
    """On explicit axes: plain JAX wants arrays that are cut alike."""
    mesh = mesh_of("explicit")
    fits = lambda size, axis: axis if size % mesh.shape[axis] == 0 else None
    each = zip(drawn(name)[1].items(), itertools.cycle([("model", "data"), ("data", "model")]))
    specs = {n: P(*map(fits, array.shape, axes)) for (n, array), axes in each}
    check(name, mesh, specs)


@pytest.mark.sampled(1, 8)
@pytest.mark.parametrize(
    ("name", "specs"),
    [
        # Halves of gate and up that are not where the device's parts of the columns are.
        ("glu", {"gate_up": P(None, "model")}),
        # Each device has a part of every row, and a part of each weight's gradient.
        ("glu, two", {"gate": P(None, "model"), "up": P(None, "model")}),
        (
            "glu, a function of two",
            {"weights": P("model"), "gate": P(None, "data"), "up": P("data", "model")},
        ),
        ("glu, a function of interleaved columns", {"gate_up": P(None, ("model", "data"))}),
        # What is kept for the backward means the same, however XLA cuts either.
        *(
            ("feed_forward", {"x": P(of), "logits": P(of), "g_tokens": P(targets)})
            for of, targets in (
                ("model", "data"),
                ("model", ("model", "data")),
                (("model", "data"), "data"),
            )
        ),
    ],
)
def test_results_and_gradients_where_cuts_meet(kind, name, specs):
    check(name, mesh_of(kind), specs)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("name", WITH_COLUMNS)
def test_cut_columns_move_nothing_between_devices(kind, name):
    check_columns(name, mesh_of(kind), ("data", "model"))


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_cut_batches_move_nothing_between_devices(kind, name, shared):
    """Every second array is the same for all of the batch."""
    function, arrays = forward(name)
    axes = {n: None if i % 2 == shared and i else 0 for i, n in enumerate(arrays)}
    stacked = {
        n: a if axes[n] is None else np.stack([np.roll(a, i, 0) for i in range(8)])
        for n, a in arrays.items()
    }
    batch = P(("data", "model"))
    batched = jax.vmap(function, (axes,))
    specs = whole(arrays, **{n: batch for n, axis in axes.items() if axis == 0})
    program, results = compiled(batched, mesh_of(kind), [stacked], [specs])
    assert collectives(program) == []
    for n, wanted in jax.jit(batched)(stacked).items():
        bits = [np.asarray(of).tobytes() for of in wanted]
        is_shared = len(set(bits)) == 1  # made of what is the same for all of the batch
        assert is_shared or spec_of(results[n]) == batch
        compare(n, results[n], wanted)


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
    function, arrays = forward("ragged_dot")
    specs = dict(zip(("rows", "weights", "sizes"), specs, strict=True))
    program, actual = compiled(function, mesh_of(kind), [arrays], [specs])
    assert collectives(program) == collective
    assert spec_of(actual["out"]) == result
    compare("out", actual["out"], jax.jit(function)(arrays)["out"])


def test_shardy_is_told_what_is_summed_and_what_stays_whole():
    """The depth; groups."""
    function, arrays = forward("ragged_dot")
    mesh = mesh_of("plain")
    placed = {n: jax.device_put(a, NamedSharding(mesh, P())) for n, a in arrays.items()}
    rule = r"sharding_rule<\(\[\w, (\w)\], \[(\w), \1, \w\].* reduction=\{\1\} need_\w*=\{\2"
    with jax.set_mesh(mesh):
        assert re.search(rule, jax.jit(function).lower(placed).as_text())


@pytest.mark.sampled(1)
def test_partial_products_are_summed_in_float32(kind):
    """Two parts that cancel: rounded to bfloat16 before the sum, little would be left of it.

    The bias is added once.
    """
    rows = np.ones((8, 4), np.float32) * np.array([256, 1, -256, 0], np.float32)
    args = [jnp.asarray(a, jnp.bfloat16) for a in (rows, np.ones((1, 4, 4)), np.full((1, 4), 2))]
    product = lambda rows, weights, bias: moe.ragged_dot(rows, weights, np.array([8]), bias=bias)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=mesh_of(kind).axis_types)
    _, out = compiled(product, mesh, args, (P(None, "model"), P(None, "model"), P()))
    testing.assert_same_bits(out, jnp.full((8, 4), 1 + 2, jnp.bfloat16))


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
    function, arrays = forward("feed_forward, sigmoids")
    cut = P(("data", "model"))
    specs = whole(arrays, x=cut, logits=cut)
    mesh = mesh_of("explicit")
    program, results = compiled(function, mesh, [arrays], [specs])
    assert set(collectives(program)) == {"all-reduce"}
    assert spec_of(results["tokens"]) == cut
    program, results = check("feed_forward, sigmoids", mesh, specs | {"g_tokens": cut})
    assert set(collectives(program)) == {"all-reduce"}
    for name in ("x", "logits", "w_gate_up", "w_down"):
        assert spec_of(results[f"d_{name}"]) == specs[name]


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
    rng = np.random.default_rng(0)
    tokens, hidden, width, experts, top_k, _ = SIZES

    def loss(x, logits, w_gate, w_up, w_down):
        layer = moe.Experts((w_gate, w_up), w_down, activation=swiglu)
        router = moe.Router(top_k, score="sigmoid", normalize=True)
        return jnp.sum(moe.feed_forward(x, logits, layer, router, recipe=recipe).tokens ** 2)

    shapes = [(tokens, hidden), (tokens, experts), *[(experts, hidden, width)] * 2]
    args = [rng.standard_normal(of, np.float32) for of in (*shapes, (experts, width, hidden))]
    shardings = [NamedSharding(mesh_of("explicit"), spec) for spec in (P(), P(), *specs)]
    with jax.set_mesh(mesh_of("explicit")):
        placed = map(jax.device_put, args, shardings)
        gradients = jax.eval_shape(jax.grad(loss, tuple(range(5))), *placed)
    for gradient, sharding in zip(gradients, shardings, strict=True):
        assert spec_of(gradient) == sharding.spec


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("name", NAMES)
def test_types_alone_name_the_mesh(name):
    """Arrays on a mesh with explicit axes, which is not set."""
    _, arrays, _ = drawn(name)
    specs = {n: P("data") for n, a in arrays.items() if a.ndim == 2 and a.shape[0] % 2 == 0}
    check(name, mesh_of("explicit"), specs, is_set=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", ["vmap of the gradient", "gradient of the vmap"])
def test_gradients_of_cut_batches_on_explicit_axes(over):
    """Of an array that all share, and that is cut over another axis, too."""
    function, arrays = forward("unpermute")
    xs = np.stack([arrays["rows"], arrays["rows"][::-1]])

    def loss(rows, weights, ids):
        out = function({"rows": rows, "weights": weights, "ids": ids})["out"]
        return jnp.sum(jax.sharding.reshard(out, P()) ** 2)

    axes = (0, None, None)
    if over == "vmap of the gradient":
        both = jax.vmap(jax.value_and_grad(loss, (0, 1)), axes)
    else:
        both = jax.value_and_grad(lambda *args: jnp.sum(jax.vmap(loss, axes)(*args)), (0, 1))
    args = [xs, arrays["weights"], arrays["ids"]]
    specs = [P("data", None, "model"), P("model"), P("model")]
    _, actual = compiled(both, mesh_of("explicit"), args, specs)
    with jax.set_mesh(mesh_of("explicit")):
        jax.tree.map(functools.partial(compare, over), actual, jax.jit(both)(*args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "name"), [("plain", "permute"), ("plain", "chunks"), ("explicit", "route")]
)
def test_beside_manual_axes(kind, name):
    """An op is whole on automatic axes that `shard_map` leaves, and cut over explicit ones."""
    function, arrays = forward(name)
    batches = jax.tree.map(lambda a: np.stack([a, a]), arrays)

    @functools.partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def each(arrays):
        one = jax.tree.map(lambda a: a[0], arrays)
        return jax.tree.map(lambda a: a[None], function(one))

    cut = lambda a: P("data", *(["model"] if a.ndim > 1 else []))
    program, actual = compiled(each, mesh_of(kind), [batches], [jax.tree.map(cut, arrays)])
    # XLA, cutting a gather itself, would add up parts.
    assert "all-reduce" not in collectives(program)
    for n, wanted in jax.jit(function)(arrays).items():
        compare(n, actual[n], np.stack([wanted, wanted]))


def test_types_of_what_is_not_cut_name_the_mesh_too():
    function, arrays = forward("unpermute")
    whole = NamedSharding(mesh_of("explicit"), P())
    rows = jax.device_put(arrays["rows"], whole)
    out = jax.eval_shape(lambda rows: function(arrays | {"rows": rows})["out"], rows)
    assert out.sharding.mesh == whole.mesh.abstract_mesh


@pytest.mark.slow("many programs for one rule")
def test_dimensions_cut_over_a_part_of_a_mesh_axis():
    """Four groups over eight devices: XLA has a name for that, and JAX has none."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    function, arrays = forward("feed_forward")
    by_token = {"x": 0, "logits": 0}

    def grouped(arrays):
        parts = arrays | {
            n: a.reshape(4, -1, a.shape[1]) for n, a in arrays.items() if n in by_token
        }
        out = jax.vmap(function, ({n: by_token.get(n) for n in arrays},))(parts)
        # JAX 0.9 raises where XLA leaves results like that, with or without ops of ours.
        found = out["tokens"].reshape(arrays["x"].shape), out["group_counts"]
        return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P()))

    specs = whole(arrays, x=P("data"), logits=P("data"))
    _, actual = compiled(grouped, mesh, [arrays], [specs])
    jax.tree.map(functools.partial(compare, ""), actual, jax.jit(grouped)(arrays))


@pytest.mark.parametrize("around", ["the call", "the op"])
def test_parts_are_multiplied_as_the_caller_asked(around):
    function, arrays = forward("ragged_dot")

    def precise(arrays):
        with jax.default_matmul_precision("highest"):
            return function(arrays)

    run = precise if around == "the op" else function
    with (
        contextlib.nullcontext() if around == "the op" else jax.default_matmul_precision("highest")
    ):
        specs = whole(arrays, rows=P("data"))
        program, _ = compiled(run, mesh_of("plain"), [arrays], [specs])
    assert "operand_precision={highest,highest}" in program.as_text()


def test_64_bits_are_not_cut():
    """XLA has parts traced in a thread of its own, which does not know of this."""
    with jax.enable_x64(True):
        function, arrays = forward("ragged_dot", SIZES._replace(dtype="float64"))
        specs = whole(arrays, rows=P("data"))
        _, found = compiled(function, mesh_of("plain"), [arrays], [specs])
        np.testing.assert_allclose(found["out"], jax.jit(function)(arrays)["out"], rtol=1e-12)


def test_without_shardy():
    function, arrays = forward("unpermute")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        specs = whole(arrays, rows=P(None, "data"))
        _, actual = compiled(function, mesh_of("plain"), [arrays], [specs])
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert spec_of(actual["out"]) == P(None, "data")
    compare("out", actual["out"], jax.jit(function)(arrays)["out"])


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
    one, *args = drawn("feed_forward")
    both = functools.partial(with_gradients, one.function, one.case.gradients)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    placed = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), args)

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
    case, arrays = OPS["permute"]("interpret", SIZES), forward("permute")[1]
    function = lambda arrays: case.forward(arrays)[1]
    specs = whole(arrays, x=P(None, "model"))
    program, out = compiled(function, mesh_of("plain"), [arrays], [specs])
    assert not collectives(program)
    jax.tree.map(testing.assert_same_bits, out, jax.jit(function)(arrays))
