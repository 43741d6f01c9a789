"""The layer with products in 8 bits: what `tests/moe/test_cases.py` does not see."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe import flat
from triax import moe
from triax.errors import DifferentiationError
from triax.moe.layer import ops
from triax.testing import assert_close, assert_same_bits

ALL = moe.Recipe(weight_gradient="rows")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("jit", [False, True])
def test_products_that_are_not_quantized_have_the_precision_in_force(jit):
    """Where the layer is called: gradients, and with `jit` all, are traced elsewhere."""

    def layer_of(recipe):
        def loss(*given):
            with jax.default_matmul_precision("tensorfloat32"):
                return jnp.sum(flat.layer(*given, top_k=2, recipe=recipe).tokens)

        return jax.grad(jax.jit(loss) if jit else loss, (0, 1, 2, 3))

    given = layer(dtype="float32")
    text = str(jax.make_jaxpr(layer_of(moe.Recipe(None, None)))(*given))
    of_products = re.findall(r"options=Options\(.*?precision=(\S+),", text)
    assert len(of_products) > 5
    assert {*of_products} == {"'tensorfloat32'"}
    assert "FAST_ACCUM" not in text
    text = str(jax.make_jaxpr(layer_of(moe.Recipe("rows", "rows")))(*given))
    assert text.count("precision='tensorfloat32'") > 2
    assert "FAST_ACCUM" in text


def layer(seed=0, dtype="bfloat16", experts=8):
    normal = functools.partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    x, logits = normal((64, 96)), normal((64, experts))
    w_gate_up, w_down = normal((experts, 96, 80)) / 10, normal((experts, 40, 96)) / 6
    cast = lambda array: jnp.asarray(array.astype(jnp.dtype(dtype)))
    return cast(x), jnp.asarray(logits), cast(w_gate_up), cast(w_down)


def value_and_gradients(given, recipe, **how):
    def loss(x, logits, w_gate_up, w_down):
        out = flat.layer(x, logits, w_gate_up, w_down, top_k=2, recipe=recipe, **how)
        return jnp.sum(out.tokens.astype("float32") ** 2), out.tokens

    # Not under jit: tests share the programs of single steps.
    (_, tokens), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*given)
    return tokens, *gradients


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("recipe", ["rows", "blocks", ALL, moe.Recipe(None, "rows")], ids=str)
def test_the_layer_op_by_op(monkeypatch, recipe, biased, two, implementation):
    """Tokens are quantized before they move, gradients too, and glu's result as it is made: the
    same bits as of the rows afterwards, which are near those without a recipe, but others."""
    x, logits, w_gate_up, w_down = layer()
    how = {"implementation": implementation}
    biases = jnp.linspace(-1, 1, 8 * 80).reshape(8, 80).astype("bfloat16")
    if biased:
        how |= {"b_gate_up": biases, "b_down": jnp.ones((8, 96), "bfloat16")}
    if two:
        w_gate_up = tuple(jnp.split(w_gate_up, 2, axis=2))
        how |= {"b_gate_up": tuple(jnp.split(biases, 2, axis=1))} if biased else {}
    given = x, logits, w_gate_up, w_down
    found = value_and_gradients(given, recipe, **how)
    d_x, plain = (
        np.asarray(of[1], np.float64) for of in (found, value_and_gradients(given, None, **how))
    )
    assert 0.005 < np.linalg.norm(d_x - plain) / np.linalg.norm(plain) < 0.1
    multiply = ops.multiply

    def apart(self, rows, matrix, sizes, by=None, quantized=None, source=None, target=None):
        rows = rows if source is None else moe.permute(rows, source)
        out = multiply(self, rows, matrix, sizes, by)
        return out if target is None else moe.unpermute(out, target)

    def glu_apart(self, gate, up, row_weights, matrix, sizes, kind, target, made=None):
        by = None if matrix.bias is None else row_weights
        inner = moe.glu(gate if up is None else (gate, up), row_weights)
        return apart(self, inner, matrix, sizes, by, target=target)

    monkeypatch.setattr(ops, "multiply", apart)
    monkeypatch.setattr(ops, "glu_multiply", glu_apart)
    wanted = value_and_gradients(given, recipe, **how)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        if implementation == "xla":
            assert_same_bits(a, b)
        else:  # plain JAX's glu, of another order
            assert_close(a, np.asarray(b, np.float64), terms=64)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("recipe", ["rows", ALL])
def test_tokens_cut_over_devices(recipe):
    given = layer()
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    plain = value_and_gradients(given, recipe)
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
        cut = jax.jit(lambda *given: value_and_gradients(given, recipe))
        found = cut(put(given[0]), put(given[1]), *given[2:])
    for i, (a, b) in enumerate(zip(found, plain, strict=True)):
        a, b = np.asarray(a), np.asarray(b, np.float64)
        if recipe == ALL and i > 2:  # each part of an expert's rows has scales of its own
            assert 0 < np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)
        else:
            assert_close(a, b, terms=64)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("recipe", "of_x"),
    [
        ("rows", ()),
        (ALL, ()),
        ("blocks", (None, "a")),
        (ALL, (None, "a")),
    ],
)
def test_gradients_with_width_or_hidden_cut_on_explicit_axes(recipe, of_x):
    given = layer()
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    plain = value_and_gradients(given, recipe)
    specs = (
        [of_x, (), (None, "a"), (None, None, "a")]
        if of_x
        else [(), (), (None, None, "a"), (None, "a")]
    )
    with jax.set_mesh(mesh):
        put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        found = jax.jit(lambda *given: value_and_gradients(given, recipe))(*map(put, given, specs))
    for a, b in zip(found, plain, strict=True):
        assert_close(np.asarray(a), np.asarray(b, np.float64), terms=64)


@pytest.mark.nightly("its parts have tests of their own")
@pytest.mark.parametrize("weight_gradient", [None, "rows"])
def test_gradients_inside_shard_map_with_the_width_cut(weight_gradient):
    """Tokens are the same on all devices, and each has a part of the experts' width."""
    x, logits, w_gate_up, w_down = layer(dtype="float32")
    given = x, logits, tuple(jnp.split(w_gate_up, 2, axis=2)), w_down

    def loss(total, *given):
        recipe = moe.Recipe("rows", None, weight_gradient=weight_gradient)
        tokens = flat.layer(*given, top_k=2, recipe=recipe).tokens
        return jnp.sum(jnp.sin(total(tokens)))

    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec

    def cut(x, logits, w_gate_up, w_down):
        return loss(lambda tokens: jax.lax.psum(tokens, "a"), x, logits, w_gate_up, w_down)

    specs = spec(), spec(), spec(None, None, "a"), spec(None, "a")
    spread = jax.shard_map(cut, mesh=mesh, in_specs=specs, out_specs=spec())
    found = jax.jit(jax.grad(spread, (0, 1, 2, 3)))(*given)
    wanted = jax.grad(lambda *given: loss(lambda tokens: tokens, *given), (0, 1, 2, 3))(*given)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


@pytest.mark.slow("its parts have tests of their own")
def test_weights_that_are_quantized():
    """In place of arrays, for inference and for the gradient of the tokens."""
    x, logits, *weights = layer()
    gate_up = moe.quantize(weights[0], block=(1, None, 1), transposed=True)
    down = moe.quantize(weights[1], "int8", block=(1, 32, 1))
    exact = [w.dequantize("bfloat16") for w in (gate_up, down)]

    def run(x, *weights):
        return flat.layer(x, logits, *weights, top_k=2).tokens

    for found, plain in zip(
        jax.vjp(lambda x: run(x, gate_up, down), x)[1](x),
        jax.vjp(lambda x: run(x, *exact), x)[1](x),
        strict=True,
    ):
        assert_close(found, np.asarray(plain, np.float64), terms=96)
    found, plain = run(x, gate_up, down), run(x, *exact)
    assert_close(found, np.asarray(plain, np.float64), terms=96)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("recipe", ["rows", ALL])
def test_what_has_no_derivative(recipe):
    given = layer()
    no_derivative = pytest.raises(DifferentiationError, match="`recipe` a layer has gradients, but")
    with no_derivative:
        jax.jvp(lambda x: value_and_gradients((x, *given[1:]), recipe)[0], given[:1], given[:1])
    which = 1 if recipe == "rows" else 2  # by the tokens, or by weights
    twice = lambda x: jnp.sum(value_and_gradients((x, *given[1:]), recipe)[which].astype("float32"))
    with no_derivative:
        jax.grad(twice)(given[0])


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("row", "`recipe` must be 'rows', 'blocks'"),
        (1, "`recipe` must be 'rows', 'blocks'"),
        ({"forward": "cols"}, "`forward` must be one of 'rows', 'blocks', None; got 'cols'"),
        ({"rows_gradient": "cols"}, "`rows_gradient` must be"),
        ({"weight_gradient": "blocks"}, "`weight_gradient` must be one of 'rows', None.* span exp"),
        ({"gradient_dtype": "int8"}, "`gradient_dtype` must be"),
        ({"fast_sums": "no"}, "`fast_sums` must be"),
    ],
)
def test_mistakes(recipe, match):
    with pytest.raises((TypeError, ValueError), match=match):
        value_and_gradients(layer(), moe.Recipe(**recipe) if isinstance(recipe, dict) else recipe)


@pytest.mark.parametrize("fast", [False, True])
def test_sums_of_all_products(fast):
    recipe = moe.Recipe(weight_gradient="rows", fast_sums=fast)
    loss = lambda *given: jnp.sum(flat.layer(*given, top_k=2, recipe=recipe).tokens)
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 2, 3)))(*layer()))
    assert ("FAST_ACCUM" in text) == fast


def test_a_recipe_for_64_bits():
    with jax.enable_x64():
        given = [array.astype("float64") for array in layer()]
        with pytest.raises(TypeError, match="`recipe` does not support float64, the dtype of `x`"):
            value_and_gradients(given, "rows")


def test_a_recipe_for_weights_that_are_quantized():
    x, logits, w_gate_up, w_down = layer()
    quantized = moe.quantize(w_down, block=(1, None, 1), transposed=True)
    with pytest.raises(TypeError, match=r"`experts\.w_down` is a ScaledArray, and"):
        flat.layer(x, logits, w_gate_up, quantized, top_k=2, recipe="rows")
