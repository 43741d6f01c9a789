"""`triax.sharded`: the result does not depend on how arrays are cut, and parts are what is run."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import triax
from triax import settings, testing
from triax.errors import ArgumentTypeError, ArgumentValueError, OutOfBounds
from triax.sharding import explicit
from triax.sharding.splits import Shard

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

ROWS, WIDTH = 8, 12
RULE = "t h, h -> t h"


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row * width + at, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x) / width + 1e-6)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + row * width + at, x * scale * weight, mask=mask)


seen: list[tuple[int, ...]] = []  # the shapes that the kernel is called on


def call(x, weight):
    seen.append(x.shape)
    return triax.triton_call(
        x,
        weight,
        width=x.shape[1],
        BLOCK=triton.next_power_of_2(x.shape[1]),
        kernel=rms_norm_kernel,
        out_type=x,
        grid=x.shape[0],
        vmap_method="sequential",
    )


def plain(x, weight, power=2):
    return x * jax.lax.rsqrt(jnp.mean(x**power, axis=-1, keepdims=True) + 1e-6) * weight


@jax.custom_vjp
def rms_norm(x, weight):
    return call(x, weight)


rms_norm.defvjp(lambda *args: (call(*args), args), lambda args, d: jax.vjp(plain, *args)[1](d))
norm = triax.sharded(rms_norm, RULE, cut="t")


def product(a, b):
    return a @ b


@functools.cache
def with_gradients(function):
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1))


@functools.cache
def alone(function):
    """The function as one program on one device."""
    return jax.jit(function)


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def mesh_of(kind):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis, axis))


def run(function, mesh, args, specs):
    """The results of `function` under `jit` for arguments that are cut by `specs`."""
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)
    ]
    seen.clear()
    with jax.set_mesh(mesh):
        return jax.jit(function)(*placed)


def assert_close(got, wanted):
    jax.tree.map(lambda g, w: testing.assert_close(np.asarray(g), w, terms=ROWS), got, wanted)


# What x is cut by, and the part of it that a device has: over h it must be gathered.
PLACEMENTS = [
    (P(), ROWS),
    (P("data"), ROWS // 2),
    (P(("model", "data")), ROWS // 8),
    (P(None, "model"), ROWS),
    (P("data", "model"), ROWS // 2),
]


@pytest.mark.sampled(3, 3)
@pytest.mark.parametrize("kind", ["plain", "explicit"])
@pytest.mark.parametrize("of_weight", [P(), P("model")], ids=str)
@pytest.mark.parametrize(("spec", "rows"), PLACEMENTS, ids=str)
def test_placements(kind, spec, rows, of_weight):
    args = drawn((ROWS, WIDTH), (WIDTH,))
    mesh = mesh_of(kind)
    out = run(norm, mesh, args, [spec, of_weight])
    assert (rows, WIDTH) in seen
    assert all(shape[0] in (rows, ROWS) for shape in seen)
    assert out.sharding.shard_shape(out.shape) == (rows, WIDTH)
    assert_close(out, alone(plain)(*args))
    assert_close(
        run(with_gradients(norm), mesh, args, [spec, of_weight]),
        alone(with_gradients(plain))(*args),
    )


def test_a_program_over_several_devices_can_be_exported():
    """XLA's callback that cuts an op is no part of it: the op runs whole on every device."""
    args = drawn((ROWS, WIDTH), (WIDTH,))
    mesh = mesh_of("plain")
    cut = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    function = jax.jit(triax.sharded(plain, RULE, cut="t"), in_shardings=cut)
    exported = jax.export.export(function)(*args)
    assert exported.nr_devices == 8
    placed = [jax.device_put(arg, sharding) for arg, sharding in zip(args, cut, strict=True)]
    assert_close(exported.call(*placed), alone(plain)(*args))


def test_types_on_explicit_axes():
    mesh, args = mesh_of("explicit"), drawn((6, WIDTH), (WIDTH,))

    def types(x, weight):
        out = norm(x, weight)
        assert jax.typeof(out).sharding.spec == P("data", None)
        return out

    assert_close(run(types, mesh, args, [P("data"), P()]), alone(plain)(*args))


def test_the_first_array_decides_over_what_a_dimension_is_sharded():
    def summed(x, y):
        out = triax.sharded(jnp.add, "t, t -> t", cut="t")(x, y)
        assert jax.typeof(out).sharding.spec == P("data")
        return out

    x, y = drawn((8,), (8,))
    assert_close(run(summed, mesh_of("explicit"), [x, y], [P("data"), P("model")]), x + y)


def test_sizes_that_devices_do_not_divide_are_left_whole():
    """XLA would pad six rows over four devices, and the sum would be of eight."""
    (x,) = drawn((6, WIDTH))
    cut = triax.sharded(lambda x: jnp.sum(x + 1, axis=0), "t h -> h", cut="h", reduce="t")
    whole = lambda x: cut(jax.lax.with_sharding_constraint(x, P("model", "data")))
    assert_close(run(whole, mesh_of("plain"), [x], [P()]), np.sum(x + 1, axis=0))


@pytest.mark.parametrize("kind", ["plain", "explicit"])
@pytest.mark.parametrize(
    "specs",
    [
        (P(None, "model"), P("model")),
        (P("data", "model"), P()),
        (P("data", "model"), P("model", "data")),
        (P("model"), P(None, "data")),
    ],
    ids=str,
)
def test_reduce_sums_over_the_parts(kind, specs):
    args = drawn((8, 16), (16, 4))
    both = triax.sharded(product, "t k, k n -> t n", cut="t n", reduce="k")
    got = run(with_gradients(both), mesh_of(kind), args, specs)
    assert_close(got, alone(with_gradients(product))(*args))


def test_small_floats_are_summed_in_float32():
    """CPUs do so themselves, if they do not end the process."""
    sum_ = lambda part: Shard({"k": ("model",)}).sum("k", part)
    over_all = jax.shard_map(sum_, mesh=mesh_of("plain"), in_specs=P("model"), out_specs=P())
    text = str(jax.make_jaxpr(over_all)(jnp.ones(4, jnp.bfloat16)))
    assert re.search(r"f32\[1\]\S* = psum", text)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sums_over_dimensions_in_any_order(count):
    """The order in which an array has them decides, not that of their names or of `reduce`."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=3 * (AxisType.Auto,))
    (values,) = drawn((2, 4, 2, 6)[:count])
    spec = [P("z"), P("y", "x"), P("x", "y", "z"), P("z", "y", "x")][count - 1]
    for names in itertools.permutations("bhkt"[:count]):
        summed = triax.sharded(jnp.sum, f"{' '.join(names)} ->", reduce=names[::-1])
        assert_close(run(summed, mesh, [values], [spec]), np.sum(values))


@pytest.mark.parametrize("kind", ["plain", "explicit"])
def test_small_floats_are_rounded_once_after_the_sum(kind):
    """256 and 1 are 256 in bfloat16, whichever dimension is summed first."""
    values = np.array([[256, 1, 0, 0], [1, -256, 0, 0]], jnp.bfloat16)
    summed = triax.sharded(jnp.sum, "t h ->", reduce="t h")
    testing.assert_same_bits(
        run(summed, mesh_of(kind), [values], [P("data", "model")]), jnp.bfloat16(2)
    )


@pytest.mark.parametrize("kind", ["plain", "explicit"])
@pytest.mark.parametrize("names", ["".join(names) for names in itertools.permutations("bht")])
def test_gradient_by_a_weight_alone_sums_over_all_other_dimensions(kind, names):
    a, b, c = names
    args = drawn((4, ROWS, WIDTH), (WIDTH,))
    cut = triax.sharded(plain, f"{a} {b} {c}, {c} -> {a} {b} {c}", cut=f"{b} {a}")
    of_weight = lambda f: jax.grad(lambda x, weight: jnp.sum(jnp.sin(f(x, weight))), 1)
    got = run(of_weight(cut), mesh_of(kind), args, [P("data", "model"), P()])
    testing.assert_close(np.asarray(got), alone(of_weight(plain))(*args), terms=4 * ROWS)


def test_sums_over_dimensions_of_different_arguments():
    args = drawn((8, 4), (2, 8, 4))
    both = lambda x, y: jnp.einsum("tk,bth->kh", x, y)
    cut = triax.sharded(both, "t k, b t h -> k h", cut="h k", reduce="b t")
    specs = [P("model"), P("data", "model")]
    for mesh in map(mesh_of, ("plain", "explicit")):
        assert_close(run(cut, mesh, args, specs), alone(both)(*args))


def test_without_reduce_a_dimension_is_gathered():
    args = drawn((8, 16), (16, 4))
    rows = triax.sharded(product, "t k, k n -> t n", cut="t")
    got = run(with_gradients(rows), mesh_of("plain"), args, [P(None, "model"), P("model", "data")])
    assert_close(got, alone(with_gradients(product))(*args))


def test_without_shardy():
    args = drawn((ROWS, WIDTH), (WIDTH,))
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        got = run(with_gradients(norm), mesh_of("plain"), args, [P("data"), P("model")])
        assert (ROWS // 2, WIDTH) in seen
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert_close(got, alone(with_gradients(plain))(*args))


def test_beside_an_automatic_axis():
    """Explicit axes shard; the other stays XLA's."""
    types = AxisType.Explicit, AxisType.Auto
    mesh, args = jax.make_mesh((2, 4), ("data", "model"), axis_types=types), drawn((8, 12), (12,))
    seen_axes = []

    def noted(x, weight):
        mesh = jax.sharding.get_abstract_mesh()
        seen_axes.append({*mesh.manual_axes})
        return call(x, weight)

    out = run(triax.sharded(noted, RULE, cut="t"), mesh, args, [P("data"), P()])
    assert (ROWS // 2, WIDTH) in seen
    assert {"data"} in seen_axes
    assert {"data", "model"} not in seen_axes
    assert_close(out, alone(plain)(*args))


def test_the_result_decides_before_the_operands():
    mesh, args = mesh_of("plain"), drawn((ROWS, WIDTH), (WIDTH,))
    placed = jax.device_put(args[0], NamedSharding(mesh, P("data")))
    seen.clear()
    out = jax.jit(norm, out_shardings=NamedSharding(mesh, P("model")))(placed, args[1])
    assert (ROWS // 4, WIDTH) in seen
    assert (ROWS // 2, WIDTH) not in seen
    assert_close(out, alone(plain)(*args))


def test_what_is_kept_is_not_gathered():
    specs = []

    def noted(x):
        specs.append(jax.typeof(explicit.gathered(x, 0)).sharding.spec)
        return x

    run(noted, mesh_of("explicit"), drawn((ROWS, WIDTH)), [P("data", "model")])
    assert specs == [P("data", None)]


def test_a_dimension_of_one_is_in_no_constant():
    one = triax.sharded(lambda x: x + np.ones((1, WIDTH), np.float32), "t h -> t h", cut="t")
    x = np.zeros((1, WIDTH), np.float32)
    np.testing.assert_array_equal(run(one, mesh_of("plain"), [x], [P()]), x + 1)


def test_integers_are_summed_as_integers():
    x = np.full((ROWS, WIDTH), 2**24 + 1, np.int32)
    total = triax.sharded(lambda x: jnp.sum(x, axis=0), "t h -> h", reduce="t")
    out = run(total, mesh_of("plain"), [x], [P("data")])
    np.testing.assert_array_equal(out, x.sum(0))


@pytest.mark.parametrize("kind", ["plain", "explicit"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_cuts_batches(axis, kind):
    shape, spec = [ROWS, WIDTH], [None, None]
    shape.insert(axis, 4)
    spec.insert(axis, "model")
    args, specs = drawn(shape, (WIDTH,)), [P(*spec), P()]
    mapped = lambda f: jax.vmap(with_gradients(f), (axis, None))
    assert_close(run(mapped(norm), mesh_of(kind), args, specs), alone(mapped(plain))(*args))
    out = run(jax.vmap(norm, (axis, None)), mesh_of(kind), args, specs)
    assert out.sharding.shard_shape(out.shape) == (1, ROWS, WIDTH)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_arrays_are_parts_already(check_vma):
    args, mesh = drawn((ROWS, WIDTH), (WIDTH,)), mesh_of("plain")

    def loss(x, weight):
        return jax.lax.psum(jnp.sum(jnp.sin(norm(x, weight))), "data")

    specs = P("data"), P()
    local = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    got = run(jax.value_and_grad(local, (0, 1)), mesh, args, specs)
    assert {*seen} == {(ROWS // 2, WIDTH)}
    assert_close(got, alone(with_gradients(plain))(*args))


def test_gradient_inside_shard_map_sums_that_of_a_replicated_weight():
    args, mesh = drawn((ROWS, WIDTH), (WIDTH,)), mesh_of("plain")
    inside = jax.grad(lambda *a: jnp.sum(jnp.sin(norm(*a))), (0, 1))
    specs = P("data"), P()
    local = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=specs)
    assert_close(run(local, mesh, args, specs), alone(with_gradients(plain))(*args)[1])


@pytest.mark.parametrize("rules", ["one for each gradient", "one for both"])
def test_custom_vjp_outside(rules):
    """Forward and backward are cut each for itself, and nothing is run twice."""
    seen = []

    def backward(x, weight, d_out):
        seen.append(x.shape)
        return jax.vjp(plain, x, weight)[1](d_out)

    there = triax.sharded(call, RULE, cut="t")
    of_x = triax.sharded(lambda *a: backward(*a)[0], "t h, h, t h -> t h", cut="t")
    of_weight = triax.sharded(lambda *a: backward(*a)[1], "t h, h, t h -> h", reduce="t")
    back = lambda *a: (of_x(*a), of_weight(*a))
    if rules == "one for both":
        back = triax.sharded(backward, "t h, h, t h -> t h, h", reduce="t")
    outside = jax.custom_vjp(there)
    outside.defvjp(lambda *args: (there(*args), args), lambda args, d: back(*args, d))
    args = drawn((ROWS, WIDTH), (WIDTH,))
    for kind in ("plain", "explicit"):
        seen.clear()
        got = run(with_gradients(outside), mesh_of(kind), args, [P("data"), P()])
        assert (ROWS // 2, WIDTH) in seen
        assert_close(got, alone(with_gradients(plain))(*args))


@pytest.mark.slow("many programs for one rule")
def test_other_transformations():
    args, mesh, specs = drawn((ROWS, WIDTH), (WIDTH,)), mesh_of("plain"), [P("data"), P()]

    def twice(norm):
        def layers(x, weight):
            step = lambda x, weight: (norm(x, weight), None)
            return jax.lax.scan(jax.checkpoint(step), x, jnp.stack([weight, 2 * weight]))[0]

        return layers

    got = run(with_gradients(twice(norm)), mesh, args, specs)
    assert_close(got, alone(with_gradients(twice(plain)))(*args))
    smooth = triax.sharded(plain, RULE, cut="t")
    both = lambda f: lambda *args: jax.jvp(f, args, args)
    assert_close(run(both(smooth), mesh, args, specs), alone(both(plain))(*args))
    again = lambda f: (
        lambda *args: jax.grad(lambda x: jnp.sum(with_gradients(f)(x, args[1])[1][0]))(args[0])
    )
    assert_close(run(again(smooth), mesh, args, specs), alone(again(plain))(*args))


def test_options_pytrees_integers_and_eager_calls():
    def pair(both, *, power):
        out = plain(both["x"], both["weight"], power)
        return {"out": out, "rank": jnp.argsort(out, axis=1)}

    cut = triax.sharded(pair, "h, t h -> t h, t h", cut="t")  # leaves are sorted by key
    x, weight = drawn((ROWS, WIDTH), (WIDTH,))
    function = lambda x, weight: cut({"x": x, "weight": weight}, power=4)
    got = run(function, mesh_of("plain"), [x, weight], [P("data"), P()])
    np.testing.assert_array_equal(got["rank"], np.argsort(plain(x, weight, 4), axis=1))
    moving = lambda f: with_gradients(lambda x, weight: f(x, weight)["out"])
    whole = lambda x, weight: pair({"x": x, "weight": weight}, power=4)
    got = run(moving(function), mesh_of("plain"), [x, weight], [P("data"), P()])
    assert_close(got, alone(moving(whole))(x, weight))
    with pytest.raises(OutOfBounds):  # itself, not its text in an error of XLA
        triax.sharded(outside, "t -> t", cut="t")(jnp.arange(8.0))


@triton.jit
def outside_kernel(x_ptr, out_ptr):
    tl.store(out_ptr + 1000, tl.load(x_ptr))


def outside(x):
    return triax.triton_call(x, kernel=outside_kernel, out_type=x, grid=1)


def test_parts_know_what_is_set_where_they_are_called():
    """XLA has them traced in a thread of its own."""
    known = []

    def function(x):
        known.append(
            (
                x.shape[0],
                settings.mode_in_force(),
                settings.checked(),
                settings.one_order_of_sums(),
                jax.config.jax_default_matmul_precision,
                jax.config.jax_enable_x64,
                jax.config.jax_default_prng_impl,
                jax.config.jax_threefry_partitionable,
            )
        )
        return 2 * x

    (x,) = drawn((ROWS, WIDTH))
    cut = triax.sharded(function, "t h -> t h", cut="t")
    with (
        triax.tuning_mode("off"),
        testing.checked(),
        triax.same_bits(),
        jax.default_matmul_precision("highest"),
        jax.enable_x64(True),
        jax.default_prng_impl("rbg"),
        jax.threefry_partitionable(False),
    ):
        run(cut, mesh_of("plain"), [x], [P("data")])
    of_all = "off", True, True, "highest", True, "rbg", False
    assert known == [(rows, *of_all) for rows in (ROWS, ROWS // 2)]


def test_wide_intermediates_of_parts_stay_wide():
    x = np.arange(10**6, 10**6 + ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    scatter = lambda x: (x.astype(np.int64) * 10**6 % 1000033).astype(np.int32)
    cut = triax.sharded(scatter, "t h -> t h", cut="t")
    with jax.enable_x64(True):
        got = run(cut, mesh_of("plain"), [x], [P("data")])
    np.testing.assert_array_equal(got, scatter(x))


def test_arrays_of_64_bits_are_cut_as_others_are():
    shapes = []

    def function(x, at):
        shapes.append((x.shape, x.dtype.name, at.dtype.name))
        return x * 3, x[at]

    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    at = np.array([5, 0, 7], np.int64)
    cut = triax.sharded(function, "t h, k -> t h, k h", cut="h")
    with jax.enable_x64(True):
        got = run(cut, mesh_of("plain"), [x, at], [P(None, "data"), P()])
    for found, wanted in zip(got, (x * 3, x[at]), strict=True):
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, wanted)
    assert shapes == [((ROWS, width), "float64", "int64") for width in (WIDTH, WIDTH // 2)]


@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_booleans_are_not_summed(under):
    cut = triax.sharded(lambda x: jnp.any(x > 0, 0), "t h -> h", reduce="t")
    with pytest.raises(ArgumentValueError, match="result 0 is summed over parts of 't', so it"):
        under(cut)(*drawn((ROWS, WIDTH)))


def test_host_callbacks_of_parts_are_told_apart():
    """Several kernels, in several functions, whose parts share the program's one callback."""
    x, weight = drawn((ROWS, WIDTH), (WIDTH,))

    def layers(norm):
        half = WIDTH // 2
        return lambda x, w: norm(norm(x, w) + 1, 2 * w) - jnp.tile(norm(x[:, :half], w[:half]), 2)

    def several(x, weight):
        return layers(call)(x, weight)

    for function in (layers(norm), triax.sharded(several, RULE, cut="t")):
        out = run(function, mesh_of("plain"), [x, weight], [P("data"), P()])
        assert_close(out, alone(layers(plain))(x, weight))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3,), "`rule` must be a string"),
        (("t h, h",), "one '->'"),
        (("t h -> t -> h",), "one '->'"),
        (("t t -> t",), "'t' twice in 't t'"),
        (("t ... -> t",), "got '...'"),
        ((RULE,), "`cut` is missing"),
        ((RULE, {"cut": 3}), "`cut` must be names"),
        ((RULE, {"cut": "token"}), "got 'token'"),
        (("t -> t n", {"cut": "n"}), "`cut` must have names of arguments"),
        (("t k, k n -> t n", {"cut": "t k"}), "pass reduce='k'"),
        (("t h -> t h, h", {"cut": "t"}), "result 1 of"),
        ((RULE, {"cut": "t", "reduce": "h"}), "Pass cut='h'"),
        (("t k -> t", {"cut": "t", "reduce": "t k"}), "`reduce` has 't', and so has `cut`"),
    ],
)
def test_wrong_rules(arguments, says):
    rule, options = arguments[0], dict(*arguments[1:])
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=re.escape(says)):
        triax.sharded(plain, rule, **options)


@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("rule", "shapes", "says"),
    [
        (RULE, [(8, 12)], "`rule` has 2 arguments, and the function has 1"),
        (RULE, [(8, 12), (12, 1)], "names 1 dimension of argument 1"),
        (RULE, [(8, 12), (6,)], "'h' is 12, and 6 in argument 1"),
        ("t h, h -> t", [(8, 12), (12,)], "names 1 dimension of result 0"),
        ("t h, h -> t h, t", [(8, 12), (12,)], "`rule` has 2 results"),
        ("t a, b -> t b", [(8, 1), (12,)], None),
        ("t a, b -> t a", [(8, 1), (12,)], "'a' is 1, and 12 in result 0"),
    ],
)
def test_arrays_that_are_not_what_the_rule_says(under, rule, shapes, says):
    function = under(
        triax.sharded(
            lambda *args: plain(*args, *args[2:]) if len(args) > 1 else args, rule, cut="t"
        )
    )
    if says is None:
        assert function(*drawn(*shapes)).shape == (8, 12)
        return
    with pytest.raises(ArgumentValueError, match=re.escape(says)):
        function(*drawn(*shapes))


def test_wrong_arguments():
    x, weight = map(jnp.asarray, drawn((ROWS, WIDTH), (WIDTH,)))
    with pytest.raises(ArgumentTypeError, match="must be an array; got 3 of type int"):
        norm(x, 3)
    with pytest.raises(ArgumentTypeError, match="`weight` is an array"):
        norm(x, weight=weight)
    with pytest.raises(ArgumentTypeError, match="`function` must be a function"):
        triax.sharded(x, RULE, cut="t")


TABLE = np.arange(ROWS, dtype=np.float32)


def test_arrays_that_a_function_closes_over():
    """A part would read the first rows of the whole."""
    x = jnp.ones((ROWS, WIDTH))
    on_device = jnp.asarray(TABLE)

    def traced(x, table):
        return triax.sharded(lambda x: x * table[:, None], "t h -> t h", cut="t")(x)

    for function in (
        triax.sharded(lambda x: x * TABLE[:, None], "t h -> t h", cut="t"),
        triax.sharded(jax.jit(lambda x: x * on_device[:, None]), "t h -> t h", cut="t"),
        lambda x: traced(x, x[:, 0]),
    ):
        with pytest.raises(ArgumentValueError, match="closes over an array, float32"):
            jax.jit(function)(x)

    @jax.custom_vjp
    def of_table(x):
        return 2 * x

    of_table.defvjp(lambda x: (2 * x, None), lambda _, d: (d * on_device[: d.shape[0], None],))
    long = np.arange(128, dtype=np.float32)
    positions = triax.sharded(
        lambda x: x * jnp.asarray(long)[: x.shape[0], None], "t h -> t h", cut="t"
    )
    cut = triax.sharded(of_table, "t h -> t h", cut="t")
    for function in (positions, jax.grad(lambda x: jnp.sum(cut(x)))):
        with pytest.raises(ArgumentValueError, match="closes over an array, float32"):
            jax.jit(function)(x)
    made = triax.sharded(lambda x: x * jnp.array([1.0, 2.0] * 6), "t h -> t h", cut="t")
    assert run(made, mesh_of("plain"), [x], [P("data")]).shape == x.shape


def test_what_shows_only_on_a_part():
    x = np.ones((ROWS, WIDTH), np.float32)
    fixed = triax.sharded(lambda x: jnp.zeros((ROWS, WIDTH)) + x[:1], "t h -> t h", cut="t")
    printing = triax.sharded(lambda x: (jax.debug.print("x"), x)[1], "t h -> t h", cut="t")
    for function, says in ((fixed, "take sizes from its arguments"), (printing, "host callback")):
        with pytest.raises(Exception, match=says):
            run(function, mesh_of("plain"), [x], [P("data")])
