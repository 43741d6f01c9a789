"""`Experts` as a value: a pytree with checks, and its weights in 8 bits for several calls."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.layer.test_recipes import ALL, layer
from tests.moe.quantization import oracle
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, TriaxError
from triax.moe.layer import ops, products
from triax.testing import assert_same_bits

HALVES = [moe.Recipe(*of) for of in ((None, "rows"), ("blocks", None))]
RECIPES = ["rows", "blocks", ALL, *HALVES, moe.Recipe("rows", "blocks", "float8_e5m2")]
ROUTER = moe.Router(2)


def loss(experts, x, logits, recipe=None, **how):
    out = moe.feed_forward(x, logits, experts, ROUTER, recipe=recipe, **how).tokens
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def given(two=False, transposed=False, **layout):
    x, logits, w_gate_up, w_down = layer()
    weights = (tuple(jnp.split(w_gate_up, 2, axis=2)) if two else w_gate_up), w_down
    if transposed:
        weights = jax.tree.map(lambda w: jnp.swapaxes(w, 1, 2), weights)
    return moe.Experts(*weights, transposed=transposed, **layout), x, logits


def biased():
    experts, *others = given(two=True, activation="geglu")
    biases = {"b_gate_up": 2 * (jnp.ones((8, 40)),), "b_down": jnp.ones((8, 96))}
    return dataclasses.replace(experts, **biases), *others


# --- a pytree ---------------------------------------------------------------------------------


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("leaf", [None, 3, object(), P("a"), jax.ShapeDtypeStruct((2,), "int8")])
def test_leaves_may_be_anything(leaf):
    for experts in (given()[0], biased()[0], given()[0].quantized(ALL)):
        found = jax.tree.map(lambda _, leaf=leaf: leaf, experts)
        assert found.activation == experts.activation
        assert repr(found).startswith("Experts(w_gate_up=")
        if leaf is not None:
            assert set(jax.tree.leaves(found)) == {leaf}
    assert repr(moe.Experts(leaf, leaf)).startswith("Experts(")


def test_names_of_leaves_and_how_it_is_shown():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(biased()[0])]
    of_two = [".w_gate_up[0]", ".w_gate_up[1]", ".w_down", ".b_gate_up[0]", ".b_gate_up[1]"]
    assert paths == [*of_two, ".b_down"]
    assert repr(biased()[0]) == (
        "Experts(w_gate_up=(bfloat16[8,96,40], bfloat16[8,96,40]), w_down=bfloat16[8,40,96], "
        "b_gate_up=(float32[8,40], float32[8,40]), b_down=float32[8,96], activation='geglu')"
    )


def test_an_optimizer_steps():
    """Of optax: its state are Experts, too, also where there are no biases."""
    optimizer, run = optax.adam(0.1), jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def step(experts, gradients):
        updates, state = optimizer.update(gradients, optimizer.init(experts), experts)
        return optax.apply_updates(experts, updates), state

    for experts, *others in (given(), biased()):
        before, gradients = run(experts, *others)
        stepped, state = step(experts, gradients)
        assert repr(stepped) == repr(experts) == repr(state[0].mu)
        assert run(stepped, *others)[0] < before


W = {n: jnp.ones(shape) for n, shape in (("w_gate_up", (4, 8, 24)), ("w_down", (4, 12, 8)))}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"w_gate_up": W["w_gate_up"][:3]}, r"`w_gate_up` must have shape \(4, 8, 24\) to go"),
        ({"w_down": jnp.ones((12, 8))}, r"`w_down` must have shape \[experts, depth, columns\]"),
        ({"b_gate_up": jnp.ones((4, 8))}, r"`b_gate_up` must have shape \(4, 24\) to go with `w_g"),
        (
            {"b_gate_up": (jnp.ones((4, 12)),) * 2},
            "must be one array, as `w_gate_up` is",
        ),
        (
            {"w_gate_up": (jnp.ones((4, 8, 12)),) * 2, "interleaved": True},
            "Leave `interleaved`",
        ),
    ],
)
def test_mistakes_are_named_where_it_is_made(changes, match):
    with pytest.raises(TriaxError, match=match):
        moe.Experts(**W | changes)


def test_mistakes_that_only_the_layer_can_see():
    alone = jnp.ones((4, 8, 12)), jnp.ones((4, 12, 8))
    swapped = moe.Experts(*(w.swapaxes(1, 2) for w in alone), activation="silu")
    for experts, match in (
        (swapped, r"\(4, 12, 8\) .*got \(4, 8, 12\).*`transposed=True`"),
        (moe.Experts(None, W["w_down"]), r"`experts\.w_gate_up` must be an array"),
        (jax.tree.map(lambda w: w[None], moe.Experts(**W)), "Pass stacked layers one at a"),
    ):
        with pytest.raises(TriaxError, match=match):
            moe.feed_forward(jnp.ones((6, 8)), jnp.ones((6, 4)), experts, ROUTER)


@pytest.mark.nightly("its parts have tests of their own")
def test_weights_in_8_bits_that_were_cast_with_the_others():
    x, wide = jnp.ones((6, 8), jnp.bfloat16), moe.Experts(**W).quantized("rows")
    cast = jax.tree.map(lambda w: w.astype(x.dtype), wide)
    for experts, match in (
        (wide, "Cast it before `quantized`"),
        (cast, "in 8 bits for `forwar"),
    ):
        with pytest.raises(TriaxError, match=match):
            moe.feed_forward(x, jnp.ones((6, 4)), experts, ROUTER, recipe="rows")
    again = cast.quantized("rows")  # in place of copies that are of no use
    moe.feed_forward(x, jnp.ones((6, 4)), again, ROUTER, recipe="rows")


# --- in 8 bits --------------------------------------------------------------------------------


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_same_bits(recipe, two, transposed):
    experts, *others = given(two, transposed)
    # Not under jit: cases share the programs of single steps.
    run = jax.value_and_grad(functools.partial(loss, recipe=recipe), (0, 1))
    plain = run(experts, *others)
    value, (found, d_x) = run(experts.quantized(recipe), *others)
    jax.tree.map(assert_same_bits, (value, (found.quantized(None), d_x)), plain)
    assert not any(jnp.any(array.astype("float32")) for array in jax.tree.leaves(found.in_8_bits))


@pytest.mark.slow("its parts have tests of their own")
def test_what_was_made_is_what_is_multiplied(monkeypatch):
    """That of other weights makes another result, and the gradient is still of the weights."""
    experts, *others = given()
    zeros = jax.tree.map(jnp.zeros_like, experts.quantized("rows"))
    monkeypatch.setattr(products, "in_8_bits", None)  # nothing is quantized again
    stale = dataclasses.replace(experts)
    vars(stale).update(in_8_bits=zeros.in_8_bits, recipe=zeros.recipe)
    run = jax.jit(functools.partial(jax.value_and_grad(loss), recipe="rows"))
    value, gradients = run(stale, *others)
    assert value == 0
    assert gradients.w_down.dtype == experts.w_down.dtype
    # With other weights there is nothing that was made of these.
    assert dataclasses.replace(stale, w_down=experts.w_down).in_8_bits is None


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_tokens_cut_over_devices(axis_type):
    experts, x, logits = given()
    mesh = jax.make_mesh((4,), ("a",), axis_types=(axis_type,), devices=jax.devices()[:4])
    plain = jax.grad(loss)(experts, x, logits, "rows")

    @jax.jit
    def run(experts, x, logits):
        return jax.grad(loss)(experts.quantized("rows"), x, logits, "rows").quantized(None)

    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, P("a")))
        found = run(experts, put(x), put(logits))
    for a, b in zip(*map(jax.tree.leaves, (found, plain)), strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)  # sums of parts, in bfloat16


@pytest.mark.nightly("its parts have tests of their own")
def test_experts_cut_over_devices():
    """By one spec for all arrays, or a spec for each."""
    experts, x, logits = given()
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    cut = P("a")

    def run(once):
        def part(experts, x, logits, router):
            used = experts.quantized("rows" if once else None)
            found = jax.grad(loss, (0, 1))(used, x, logits, "rows", axis_name="a")
            return found[0].quantized(None), found[1]

        of_experts = jax.tree.map(lambda _: cut, experts) if once else cut
        specs = {"in_specs": (of_experts, cut, cut, P()), "out_specs": (of_experts, cut)}
        return jax.jit(jax.shard_map(part, mesh=mesh, **specs))

    found, plain = (run(once)(experts, x, logits, ROUTER) for once in (True, False))
    jax.tree.map(assert_same_bits, found, plain)


@pytest.mark.parametrize(
    ("weights", "recipe", "match"),
    [
        (jnp.ones((8, 96)), "rows", "must have shape"),
        (jnp.ones((2, 8, 96, 96)), "rows", "must have shape.*Pass stacked layers"),
        (jnp.ones((8, 96, 96), "float8_e4m3fn"), "rows", "`experts.w_gate_up` .*float8_e4m3fn"),
        (moe.quantize(jnp.ones((8, 96, 96)), block=(1, None, 1)), "rows", "is a ScaledArray, and"),
        (jnp.ones((8, 96, 96)), "columns", "`recipe` must be"),
    ],
)
def test_mistakes_of_quantized(weights, recipe, match):
    with pytest.raises(TriaxError, match=match):
        moe.Experts(weights, weights, activation="relu2").quantized(recipe)


@pytest.mark.parametrize("recipe", [None, "blocks"])
def test_another_recipe_than_they_are_quantized_for(recipe):
    experts, *others = given()
    with pytest.raises(ArgumentValueError, match=r"`experts` is quantized for Recipe\(.*`recipe`"):
        loss(experts.quantized("rows"), *others, recipe)


# --- tiles ------------------------------------------------------------------------------------


def in_4_bits(two=False, nvfp4=False):
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    x, logits = normal(0, 20, 128), normal(1, 20, 8)
    w_gate_up, w_down = normal(2, 8, 128, 128), normal(3, 8, 64, 128)
    first = tuple(jnp.split(w_gate_up, 2, axis=2)) if two else w_gate_up
    four = lambda w: moe.quantize(w, "int4", block=(1, 32, 1), transposed=True)
    if nvfp4:
        four = lambda w: jax.tree.map(jnp.asarray, oracle.nvfp4(w.shape))
    return moe.Experts(*jax.tree.map(four, (first, w_down))), x, logits.astype(jnp.float32)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("two", [False, True])
def test_experts_in_tiles(two, nvfp4):
    experts, x, logits = in_4_bits(two, nvfp4)
    tiled = jax.jit(moe.Experts.tile)(experts)
    arrays = jax.tree.leaves(tiled, is_leaf=lambda of: isinstance(of, moe.ScaledArray))
    assert [of.tiled for of in arrays] == [True] * (2 + two)
    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)))
    jax.tree.map(assert_same_bits, run(tiled, x, logits), run(experts, x, logits))


def test_weights_of_both_matmuls_are_tiled():
    tiled = jax.eval_shape(lambda: in_4_bits()[0].tile())
    assert (tiled.w_gate_up.tiled, tiled.w_down.tiled) == (True, True)


def test_gradients_in_8_bits_have_the_shapes_of_transposed_weights():
    experts, *others = given(transposed=True)
    gradients = jax.eval_shape(jax.grad(lambda experts: loss(experts, *others, ALL)), experts)
    shapes, wanted = (list(map(jnp.shape, jax.tree.leaves(of))) for of in (gradients, experts))
    assert shapes == wanted


def test_the_backward_pass_waits_for_gate_and_up_and_the_first_rows_for_the_second_weights(
    monkeypatch,
):
    """Of two arrays of rows only one is there at a time."""
    seen, after = [], ops.after
    both = lambda *of: seen.append(tuple(array.shape for array in of)) or after(*of)
    monkeypatch.setattr(ops, "after", both)
    experts, x, logits = given()
    jax.eval_shape(jax.grad(loss), experts, x[:7], logits[:7])  # traced here for the first time
    gate_up = 14, 2 * experts.w_down.shape[1]
    assert seen == [(x[:7].shape, gate_up), (gate_up, experts.w_down.shape)]


def test_gate_and_up_are_kept_for_derivatives_alone(monkeypatch):
    seen, run = [], ops.ragged_dot_glu

    def spied(*operands, keep_product, **options):
        seen.append(keep_product)
        return run(*operands, keep_product=keep_product, **options)

    monkeypatch.setattr(ops, "ragged_dot_glu", spied)
    experts, x, logits = jax.tree.map(lambda a: a.astype("bfloat16"), given())
    layer = lambda experts: loss(experts, x[:9], logits[:9])  # traced here for the first time
    jax.eval_shape(layer, experts)
    assert seen == [False]
    jax.eval_shape(jax.grad(layer), experts)
    assert seen[1]
    assert all(seen[1:])


def test_copies_in_8_bits_may_be_made_where_gradients_are(monkeypatch):
    monkeypatch.setattr(products, "in_8_bits", None)  # no weights are quantized again
    experts, *others = given(two=True, transposed=True)
    once = lambda experts: loss(experts.quantized("rows"), *others, "rows")
    gradients = jax.eval_shape(jax.grad(once), experts)
    assert gradients.w_down.shape == experts.w_down.shape


@pytest.mark.parametrize("quantized", [False, True])
def test_arrays_of_numpy_go_to_the_device_once(quantized, monkeypatch):
    experts, x, logits = in_4_bits() if quantized else biased()
    experts = jax.tree.map(np.asarray, experts)
    moved, asarray = [], jnp.asarray
    counting = lambda value, *of, **how: moved.append(value) or asarray(value, *of, **how)
    monkeypatch.setattr(jnp, "asarray", counting)
    jax.eval_shape(functools.partial(moe.feed_forward, experts=experts, router=ROUTER), x, logits)
    leaves = jax.tree.leaves(experts)
    counts = [sum(value is leaf for value in moved) for leaf in leaves]
    assert counts == [1] * len(leaves)


@pytest.mark.slow("many programs for one rule")
def test_only_quantized_weights_are_tiled():
    with pytest.raises(ArgumentTypeError, match=r"Only quantized weights are tiled; got Experts"):
        given()[0].tile()
    experts, *_ = in_4_bits()
    some = dataclasses.replace(experts, w_down=experts.w_down.dequantize()).tile()
    assert (some.w_gate_up.tiled, some.w_down.dtype) == (True, "float32")
    short = moe.quantize(jnp.ones((8, 128, 96)), "int4", block=(1, 32, 1))
    filled = moe.Experts(short, jnp.ones((8, 48, 128))).tile()
    assert (filled.w_gate_up.tiled, filled.w_gate_up.shape) == (True, (8, 128, 96))
