"""What `tests/moe/test_cases.py` does not see of the layer: what it keeps, launches and refuses."""

from __future__ import annotations

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe import flat
from tests.moe.layer.case import FORWARD, KERNELS
from triax import moe
from triax.emitting import reading
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.testing import assert_close, assert_same_bits

TOKENS, HIDDEN, WIDTH, EXPERTS = 24, 16, 24, 5


def draw(seed=0, dtype="float32", tokens=TOKENS):
    """x, logits, w_gate_up and w_down."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    args = (
        normal(tokens, HIDDEN).astype(jnp.dtype(dtype)),
        normal(tokens, EXPERTS),
        (normal(EXPERTS, HIDDEN, 2 * WIDTH) * HIDDEN**-0.5).astype(jnp.dtype(dtype)),
        (normal(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5).astype(jnp.dtype(dtype)),
    )
    return jax.device_put(args)


def layer(*args, **options):
    return flat.layer(*args, **{"top_k": 2} | options)


def value_and_gradients(function, args, **options):
    upstream = np.random.default_rng(9).standard_normal(args[0].shape)

    def loss(*args):
        out = function(*args, **options)
        return jnp.sum(out.tokens.astype(jnp.asarray(upstream).dtype) * upstream), out

    gradients, out = jax.jit(jax.grad(loss, tuple(range(4)), has_aux=True))(*args)
    return out, gradients


@pytest.mark.parametrize("way", ["plain", "typed tokens", "axis_name", "axis_name, one of two"])
def test_pairs_are_kept_or_counted_in_all_modes_alike(way):
    """The sum over all devices: with ones everywhere a pair that is kept adds 1 to its token."""
    chosen = np.random.default_rng(0).integers(0, 3, (16, 2)) % 4  # expert 3 gets none
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    experts = moe.Experts(ones(4, 1, 1), ones(4, 1, 1), activation="relu2")
    axis_name = "t" if way.startswith("axis_name") else None

    of_two = way.endswith("of two")
    cast = jax.sharding.reshard if of_two else lambda array, _: array

    def run(x, chosen, experts):
        x, chosen = cast(x, P("rest")), cast(chosen, P("rest"))
        routing = moe.Routing(jnp.ones_like(chosen, x.dtype), chosen)
        out = moe.feed_forward(x, routing, experts, capacity=2, axis_name=axis_name)
        return cast(out.tokens, P()), out.num_dropped, out.group_counts

    args = ones(16, 1), jnp.asarray(chosen), experts
    if way != "plain":
        kind = AxisType.Auto if way == "axis_name" else AxisType.Explicit
        shape, axes = ((4, 2), ("t", "rest")) if of_two else ((4,), ("t",))
        devices = jax.devices()[: math.prod(shape)]
        mesh = jax.make_mesh(shape, axes, len(axes) * (kind,), devices=devices)
        specs = P("t"), P("t"), P("t") if axis_name else P()
        args = jax.device_put(args, tuple(NamedSharding(mesh, spec) for spec in specs))
        # Counts need no `psum` over an axis that `shard_map` leaves to JAX.
        if axis_name:
            cut = {"in_specs": P("t"), "out_specs": (P("t"), P(), P()), "axis_names": {"t"}}
            run = jax.shard_map(run, mesh=mesh, **cut)
    with jax.set_mesh(mesh) if of_two else contextlib.nullcontext():
        tokens, dropped, counts = jax.jit(run)(*args)
    np.testing.assert_array_equal(counts, np.bincount(chosen.ravel(), minlength=4))
    assert 0 < dropped == chosen.size - np.sum(np.asarray(tokens))
    if axis_name is None:  # two pairs of each expert that has any, whoever has the tokens
        assert dropped == chosen.size - 3 * 2
    else:  # two tokens from each place on the axis to each expert's
        pairs = np.sum(chosen.reshape(4, 4, 2, 1) == np.arange(4), axis=2)
        beyond = np.cumsum(pairs > 0, axis=1) > 2
        assert dropped == np.sum(pairs * beyond)


@pytest.mark.parametrize("tokens_too", [True, False])
def test_gathering_experts_is_told_where_the_layer_is_called(tokens_too):
    x, logits, w_gate_up, w_down = draw(tokens=8)
    arrays = x, logits[:, :4], moe.Experts(w_gate_up[:4], w_down[:4])
    mesh = jax.make_mesh((2,), ("e",), (AxisType.Explicit,), devices=jax.devices()[:2])
    sharded = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("e")))
    args = *(sharded(arrays[:2]) if tokens_too else arrays[:2]), sharded(arrays[2])
    call = lambda x, logits, experts: moe.feed_forward(x, logits, experts, moe.Router(2)).tokens
    match = (
        r"gathers all .*`experts\.w_gate_up` \(float32\[4,16,48\]\) over 'e'\. .* `axis_name='e'`"
    )
    with jax.set_mesh(mesh):
        with pytest.warns(UserWarning, match=match) as told:
            out = jax.jit(call)(*args)
        assert [warning.filename for warning in told] == [__file__]
        assert_close(out, np.asarray(call(*arrays)), terms=64)
        # What the warning says to do if that is meant.
        meant = jax.jit(lambda x, logits, e: call(x, logits, jax.sharding.reshard(e, P())))
        assert_same_bits(meant(*args), out)


def test_what_devices_count_of_their_tokens_is_summed():
    x, logits, *weights = draw(tokens=8)
    mesh = jax.make_mesh((2,), ("t",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, P("t")))
        out = jax.jit(lambda x, logits: layer(x, logits, *weights))(put(x), put(logits))
    counts = np.bincount(np.argsort(-logits, axis=1)[:, :2].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(out.group_counts, counts)


def test_capacity_makes_no_more_rows_than_experts_take():
    args = draw()
    for options, rows in [
        ({}, 2 * TOKENS),
        ({"capacity": 3}, 3 * EXPERTS),
        ({"capacity": 100}, 2 * TOKENS),
    ]:
        program = jax.jit(functools.partial(layer, **options)).lower(*args).as_text()
        assert f"tensor<{rows}x{2 * WIDTH}xf32>" in program


LIGHT = jax.checkpoint_policies.save_only_these_names(
    "triax_routing", "triax_plan", "triax_ragged_dot"
)


def residuals(function, args):
    """Shapes of the floats of [rows, …] that the backward pass finds ready."""
    pull = jax.eval_shape(lambda *args: jax.vjp(lambda *a: function(*a).tokens, *args)[1], *args)
    rows = 2 * TOKENS
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape[:1] == (rows,))


ROWS = 2 * TOKENS
KEPT = {
    (): [(ROWS,), (ROWS, 2 * WIDTH)],
    ("triax_glu",): [(ROWS,), (ROWS, WIDTH), (ROWS, 2 * WIDTH)],
    ("triax_permuted_rows",): [(ROWS,), (ROWS, HIDDEN), (ROWS, 2 * WIDTH)],
    ("triax_glu", "triax_permuted_rows"): [
        (ROWS,),
        (ROWS, HIDDEN),
        (ROWS, WIDTH),
        (ROWS, 2 * WIDTH),
    ],
}
WAYS = {
    "": {},
    "function": {"activation": lambda gate, up: jax.nn.silu(gate) * up},
    "interleaved": {"interleaved": True, "activation": moe.Swiglu(limit=1.0)},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_what_is_kept_for_the_backward_pass(way, implementation):
    """The first matmul's result and what is asked for; what is made again is the same bits."""
    args = draw(7, "bfloat16")
    how = WAYS[way] | {"implementation": implementation}
    results = []
    for keep, kept in KEPT.items():
        run = functools.partial(layer, keep=keep, **how)
        if not (way and keep):
            assert set(residuals(run, args)) - {(ROWS,)} == {*kept} - {(ROWS,)}
        if implementation == "xla" or len(keep) in (0, 2):
            results.append(jax.jit(lambda args, run=run: value_and_gradients(run, args))(args))
    for found in results[1:]:
        # Compiled by XLA, sums of another program may be rounded in another way.
        same = assert_same_bits if implementation == "interpret" else assert_nearly
        jax.tree.map(same, found, results[0])


def test_a_scale_that_a_function_closes_over_has_a_gradient():
    args = draw(7, "float32")
    loss = lambda scale: jnp.sum(layer(*args, activation=lambda gate, up: scale * gate * up).tokens)
    value, of_scale = jax.jit(jax.value_and_grad(loss))(1.0)
    np.testing.assert_allclose(of_scale, value, rtol=1e-5)


@pytest.mark.slow("many programs for one rule")
@pytest.mark.parametrize("keep", [(), ("triax_glu",)])
def test_functions_that_close_over_arrays_of_the_program(keep):
    """They have gradients, too: of a scale of the whole activation, those that scale the loss."""
    args = draw(7, "float32")

    def loss(scale, args):
        activation = lambda gate, up: scale * jax.nn.silu(gate) * up
        return jnp.sum(layer(*args, activation=activation, keep=keep).tokens ** 2)

    value, (of_scale, of_args) = jax.jit(jax.value_and_grad(loss, (0, 1)))(1.0, args)
    expected = jax.grad(lambda args: jnp.sum(layer(*args).tokens ** 2))(args)
    np.testing.assert_allclose(of_scale, 2 * value, rtol=1e-5)
    jax.tree.map(assert_nearly, of_args, expected)
    along = jax.jvp(lambda scale: loss(scale, args), (1.0,), (1.0,))[1]
    np.testing.assert_allclose(along, 2 * value, rtol=1e-5)


def only_the_largest(gate, up):
    best, at = jax.lax.top_k(gate, 2)
    return jax.vmap(lambda row, at, best: row.at[at].set(best))(jnp.zeros_like(up), at, best) * up


# What goes over the first dimension goes over the one row that is there.
FUNCTIONS = {
    "softmax": lambda gate, up: jax.nn.softmax(gate, axis=1) * jnp.cumsum(up, 1),
    "softmax over rows": lambda gate, up: jax.nn.softmax(gate, axis=0) * up,
    "mean of all": lambda gate, up: (gate - jnp.mean(gate)) * up,
    "rolled rows": lambda gate, up: jnp.roll(gate, 1, axis=0) * up,
    "products of rows": lambda gate, up: gate @ (gate.T @ up),
    "rows' numbers": lambda gate, up: gate * up * (1 + jnp.arange(len(gate))[:, None]),
    "rows' count": jax.jit(lambda gate, up: gate * up / len(gate)),
    "the first row": lambda gate, up: (gate * up).at[0, 1:].set(0),
    "map over rows": lambda gate, up: jax.lax.map(
        lambda row: jax.nn.softmax(row @ gate.T) @ up, gate
    ),
    "checkpoint": jax.checkpoint(lambda gate, up: jnp.sort(gate.T, 0).T * up.sum(0)),
    "argmax": lambda gate, up: up * jnp.take_along_axis(gate, jnp.argmax(up, 1)[:, None], 1),
    "indexed rows": lambda gate, up: up * gate[jnp.arange(len(gate)), jnp.argmax(up, 1)][:, None],
    "vectorize": lambda gate, up: jnp.vectorize(jax.nn.silu)(gate) * up,
    "while": lambda gate, up: jax.lax.while_loop(
        lambda x: jnp.sum(x * x) > 0.01, lambda x: x / 2, gate * up
    ),
    "cond": lambda gate, up: jax.lax.cond(gate.sum() > 0, jnp.sin, jnp.cos, gate) * up,
    "scan": lambda gate, up: jax.lax.scan(lambda c, x: (c * up, x), gate, jnp.ones(3))[0],
    "reshaped": lambda gate, up: jnp.roll(gate.reshape(-1, 2), 1, 1).reshape(gate.shape) * up,
    "FFT": lambda gate, up: jnp.fft.fft(gate.T).T.real * up,
    "the largest": only_the_largest,
}


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_given_each_row_by_itself(name):
    """So no token's result depends on which others there are, or on its number among them."""
    function, (x, logits, *weights) = FUNCTIONS[name], draw(5)
    together = layer(x, logits, *weights, activation=function).tokens
    poisoned = x.at[1:].set(jnp.nan)
    alone = layer(poisoned, logits, *weights, activation=function).tokens
    np.testing.assert_array_equal(alone[:1], together[:1])
    rng = np.random.default_rng(5)
    rows = jnp.asarray(rng.normal(size=(7, 2 * WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=7), jnp.float32)

    def one_by_one(rows, weights):
        gate, up = rows[:, None, :WIDTH], rows[:, None, WIDTH:]
        return jnp.concatenate(
            [w * function(*of) for w, *of in zip(weights, gate, up, strict=True)]
        )

    run = functools.partial(moe.glu, activation=function)
    np.testing.assert_allclose(run(rows, weights), one_by_one(rows, weights), rtol=1e-5, atol=1e-6)
    if name != "while":  # which has no gradient
        total = lambda f: jax.grad(lambda *of: f(*of).sum(), (0, 1))(rows, weights)
        for actual, expected in zip(total(run), total(one_by_one), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_functions_that_are_written_for_other_shapes_name_it():
    args = draw()
    for wrong in (
        lambda gate, up: gate * up * np.ones((TOKENS * 2, 1)),
        lambda gate, up: gate.sum(0) * up[0],
        lambda gate, up: jnp.int32(gate * up),
    ):
        with pytest.raises(ArgumentValueError, match=rf"`activation`.*one row \(1, {WIDTH}\)"):
            jax.eval_shape(functools.partial(layer, activation=wrong), *args)
    over_rows = functools.partial(layer, activation=lambda gate, up: gate.sum(2) * up)
    with pytest.raises(ValueError, match="axis 2") as info:
        jax.eval_shape(over_rows, *args)
    assert any(f"one row at a time, of shape (1, {WIDTH})" in note for note in info.value.__notes__)


def assert_nearly(a, b):
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2 * max(1e-6, np.abs(b).max(initial=0)))


def test_what_a_device_keeps_of_the_tokens_of_others():
    """Tokens as they came; they are not sent again, and their rows are made again."""
    x, logits, w_gate_up, w_down = draw(3)
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    kept = []

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def run(*args):
        spread = functools.partial(layer, axis_name="d")
        out, pull = jax.vjp(lambda *args: spread(*args).tokens, *args)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(pull))
        return pull(out)

    program = str(jax.make_jaxpr(run)(x, logits[:, :4], w_gate_up[:4], w_down[:4]))
    rows = max(shape[0] for shape in kept if len(shape) == 2)
    assert (rows, 2 * WIDTH) in kept
    assert (TOKENS, HIDDEN) in kept
    assert not {(rows, HIDDEN), (rows, WIDTH)} & {*kept}
    # Tokens, their weights with their experts, and what comes back; and the gradient of each.
    exchanges = "send_tokens", "combine_rows", "collect_tokens"
    assert [program.count(f" triax_{name}[") for name in exchanges] == [3, 1, 2]


def test_bytes_a_token_that_are_kept():
    """As the docs have them, of shapes that were measured."""
    for tokens, experts, top_k, hidden, width, most in [
        (8192, 32, 8, 7168, 2048, 66_000),
        (16384, 64, 4, 2560, 1280, 20_700),
        (32768, 128, 8, 4096, 1024, 33_000),
    ]:
        shapes = (tokens, hidden), (tokens, experts), (experts, hidden, 2 * width)
        shapes = *shapes, (experts, width, hidden)
        dtypes = "bfloat16", "float32", "bfloat16", "bfloat16"
        args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        run = lambda *args, k=top_k: layer(*args, top_k=k, normalize=True).tokens
        held = jax.eval_shape(lambda *args, run=run: jax.vjp(run, *args)[1], *args)
        num_bytes = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
        assert tokens * top_k * 4 * width < num_bytes(held) - num_bytes(args) <= tokens * most


@pytest.mark.slow("many programs for one rule")
def test_policy_that_permutes_again():
    """A policy of `jax.checkpoint` around the layer finds its names, what it keeps or not."""
    args = draw(7)
    light = jax.checkpoint(layer, policy=LIGHT)
    assert residuals(light, args) == [(ROWS, 2 * WIDTH)]
    full = functools.partial(layer, keep=["triax_glu", "triax_permuted_rows"])
    names = jax.checkpoint_policies.save_only_these_names("triax_permuted_rows")
    assert residuals(jax.checkpoint(full, policy=names), args) == [(ROWS, HIDDEN)]
    results = (value_and_gradients(f, args) for f in (light, layer, jax.checkpoint(layer)))
    actual, expected, again = results
    jax.tree.map(assert_nearly, actual, expected)
    jax.tree.map(assert_nearly, again, expected)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("numbers", [(0,), (0, 3), (2,), (0, 2, 3)])
def test_only_the_gradients_that_are_asked_for(numbers):
    args = draw(7, "bfloat16")
    of = jax.grad(lambda *args: jnp.sum(layer(*args).tokens ** 2), numbers)
    count = sum(number in (2, 3) for number in numbers)
    assert str(jax.make_jaxpr(of)(*args)).count(" = triax_group_outer[") == count
    everything = gradients(*args)
    for actual, number in zip(jax.jit(of)(*args), numbers, strict=True):
        assert_nearly(actual, everything[number])


def lowered(function, platform):
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in draw(0, "bfloat16")]
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))


def kernels(function):
    return sorted(call.kernel for call in reading.triton_calls(lowered(function, "cuda")))


def gradients(*args, layer=layer):
    return jax.jit(jax.grad(lambda *args: jnp.sum(layer(*args).tokens ** 2), (0, 1, 2, 3)))(*args)


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
@pytest.mark.cuda_plugin
def test_kernels_on_cuda():
    """Of the layer alone, and of one that keeps what others make again."""
    assert kernels(layer) == sorted(FORWARD)
    kept = functools.partial(layer, keep=["triax_permuted_rows", "triax_glu"])
    wanted = [*KERNELS]
    wanted.remove("permute")
    assert kernels(functools.partial(gradients, layer=kept)) == sorted(wanted)


def test_a_mistake_spoils_no_later_call():
    """An op is made once for the same options, and 3.0 equals 3."""
    args = draw(6)
    for wrong, right in (({"top_k": 3.0}, {"top_k": 3}), ({"capacity": True}, {"capacity": 1})):
        ((name, value),) = wrong.items()
        with pytest.raises(ArgumentTypeError, match=rf"`{name}` must be .*int.*got {value}"):
            jax.eval_shape(functools.partial(layer, **wrong), *args)
        jax.eval_shape(functools.partial(layer, **right), *args)


@pytest.mark.slow("many programs for one rule")
def test_the_gradient_multiplies_as_the_layer_was_asked_to():
    """The precision in force where the layer is called holds where its gradient is traced."""
    tf32 = functools.partial(jax.default_matmul_precision, "tensorfloat32")
    plain = contextlib.nullcontext

    def precisions(around_layer, around_all):
        def scoped(*args):
            with around_layer():
                return layer(*args)

        def run(*args):
            with around_all():
                return gradients(*args, layer=scoped)

        return re.findall(r"precision = \[(\w+), \1\]", jax.jit(run).lower(*draw(0)).as_text())

    inside, around, neither = (
        precisions(*how) for how in ((tf32, plain), (plain, tf32), 2 * (plain,))
    )
    assert inside == around == ["HIGH"] * len(neither)
    assert set(neither) == {"DEFAULT"}


of_type, of_value, ones = ArgumentTypeError, ArgumentValueError, jnp.ones
T, H, W, E = TOKENS, HIDDEN, WIDTH, EXPERTS


def routing(shape, of_experts=None):
    return moe.Routing(ones(shape), ones(of_experts or shape, int))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, of_type, r"`x` must be an array of shape \[tokens, hidden\]"),
        ({"x": ones(4)}, of_value, r"`x` must have shape \[tokens, hidden\]"),
        ({"x": ones((2, 3, 16))}, of_value, r"`logits` must have shape \(6, 5\)"),
        ({"x": ones((T, H), int)}, of_type, "`x` must have a floating"),
        ({"x": ones((T, H), "float8_e4m3fn")}, of_type, "`x` must be a float of 16 bits or more"),
        (
            {"x": ones((T, H), "bfloat16")},
            of_type,
            r"`experts\.w_gate_up` .* dtype of `x`, bfloat16",
        ),
        ({"logits": None}, of_type, "`logits_or_routing` must be an array of logits, or"),
        (
            {"logits": ones((3, E))},
            of_value,
            r"`logits` must have shape \(24, 5\) .*; got \(3, 5\)",
        ),
        (
            {"logits": routing((T, 2), (T, 3))},
            of_value,
            r"`routing.experts` must have shape \(24, 2\)",
        ),
        (
            {"logits": moe.Routing(ones((T, 2), "float8_e5m2"), ones((T, 2), int))},
            of_type,
            r"^Argument `routing\.weights` must be a float of 16 bits or more; .* Cast it\.",
        ),
        ({"logits": routing((T, 2)), "bias": ones(E)}, of_type, "Arguments for logits, `bias`"),
        ({"logits": routing((12, 2, 2))}, of_value, r"`routing.weights` must have shape \[tok"),
        ({"b_down": ones((E, W))}, of_value, r"`b_down` must have shape \(5, 16\) .* `w_down`"),
        ({"activation": "relu2", "interleaved": True}, of_value, "'relu2', has no gate. Leave it"),
        ({"activation": "relu"}, of_value, "`activation` must be one of 'swiglu', 'geglu'"),
        ({"w_gate_up": (ones((E, H, W)),)}, of_value, "`w_gate_up` must be one array, or two"),
        (
            {"w_gate_up": 2 * (ones((E, H, W)),), "b_gate_up": (None,)},
            of_value,
            "`b_gate_up` must be two arrays, as `w_gate_up` is",
        ),
        (
            {"w_gate_up": ones((E, H, W))},
            of_value,
            r"must have no gate, .*\(5, 16, 24\) has .*With a gate .* \(5, 16, 48\)",
        ),
        ({"w_down": ones((E + 1, W, H))}, of_value, r"\(6, 16, 48\) .* `w_down` of shape \(6, 24,"),
        ({"w_down": ones((E, H, W))}, of_value, "if `w_down` had its last two axes swapped"),
        ({"w_down": ones((E, W, H), "float16")}, of_type, r"`experts\.w_down` .* got float16"),
        (
            {"w_down": ones((E, W, H), int)},
            of_type,
            r"`experts\.w_down` must have a floating-point",
        ),
        (
            {"w_gate_up": ones((E, H, 2 * W), "float8_e4m3fn")},
            of_type,
            r"^Argument `experts\.w_gate_up` must be a float of 16 bits or more",
        ),
        (
            {"b_gate_up": ones((E, 2 * W), int)},
            of_type,
            r"^Argument `experts\.b_gate_up` must have a floating-point dtype",
        ),
        ({"bias": ones(E + 1)}, of_value, r"^Argument `bias` must have shape \(5,\) .* `logits`"),
        ({"bias": ones(E, int)}, of_type, "^Argument `bias` must have a floating-point dtype"),
        (
            {"expert_scale": ones((E, 1))},
            of_value,
            r"^Argument `expert_scale` must have shape \[ex",
        ),
        ({"axis_name": "experts"}, of_value, "`axis_name` must name a mesh axis of the"),
        ({"top_k": 6}, of_value, r"`router\.top_k` must be at most the 5 experts"),
        ({"capacity": 0}, of_value, "`capacity` must be at least 1"),
        ({"implementation": "cuda"}, of_value, "`implementation` must be one of"),
        ({"score": "tanh"}, of_value, "`score` must be one of"),
        ({"scores": "softmax"}, TypeError, r"^feed_forward\(\) got an unexpected.* 'scores'"),
    ],
)
def test_what_is_wrong_is_named(changes, error, message):
    names = ["x", "logits", "w_gate_up", "w_down"]
    given = dict(zip(names, draw(), strict=True)) | changes
    if isinstance(given["logits"], moe.Routing):
        given["top_k"] = None
    with pytest.raises(error, match=message):
        layer(**given)


@pytest.mark.parametrize("name", ["w_gate_up", "w_down"])
def test_scales_that_no_product_takes_are_those_of_the_named_weights(name):
    given = dict(zip(["x", "logits", "w_gate_up", "w_down"], draw(), strict=True))
    given[name] = moe.quantize(given[name], block=(1, 1, None))
    with pytest.raises(of_value, match=rf"^Argument `experts\.{name}` must have scales of blocks"):
        layer(**given)


@pytest.mark.parametrize("name", ["w_gate_up", "w_down"])
def test_tokens_that_do_not_go_with_the_named_weights(name):
    x, w = jnp.ones((2, 64), "float16"), jnp.ones((4, 64, 64), "float16")
    weights = {"w_gate_up": w, "w_down": w}
    weights[name] = moe.quantize(w, "int8", block=(1, 32, 1), transposed=True).tile()
    message = rf"^Argument `x` must .*16, .* in tiles; got .* `experts\.{name}` with `tiles=False`"
    with pytest.raises(of_type, match=message):
        layer(x, jnp.ones((2, 4)), **weights, activation="relu2")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"x": "x", "w_gate_up": "w_gate_up", "w_down": "w_down"}, "x"),
        ({"b_gate_up": (E, 2 * W)}, "experts.b_gate_up"),
        ({"b_down": (E, H)}, "experts.b_down"),
    ],
)
def test_arrays_that_the_kernels_do_not_take(changes, name):
    with jax.enable_x64(True):
        given = dict(zip(["x", "logits", "w_gate_up", "w_down"], draw(), strict=True))
        for of, shape in changes.items():
            array = given[shape] if isinstance(shape, str) else ones(shape)
            given[of] = array.astype("float64")
        layer(**given, implementation="xla")
        message = f"^Argument `{re.escape(name)}` must be a float of at most 32 bits"
        with pytest.raises(of_type, match=message):
            layer(**given, implementation="interpret")


def test_weights_of_a_routing_that_the_kernels_do_not_take():
    x, logits, *weights = draw()
    with jax.enable_x64(True):
        routed = moe.route(logits, moe.Router(2))
        routed = routed._replace(weights=routed.weights.astype("float64"))
        run = functools.partial(moe.feed_forward, x, routed, moe.Experts(*weights))
        assert run(implementation="xla").tokens.dtype == x.dtype
        message = r"^Argument `routing\.weights` must be a float of at most 32 bits"
        with pytest.raises(of_type, match=message):
            run(implementation="interpret")


def test_the_activation_with_the_first_product_changes_no_bit():
    """With `keep` the two are ops of their own. Layers of float32 have no op for both."""
    x, *others = draw(dtype="bfloat16")

    def run(x, *others, **options):
        function = lambda *args: layer(*args, implementation="interpret", **options).tokens
        out, pull = jax.vjp(function, x, *others)
        return out, pull(jnp.cos(out))

    programs = [jax.jit(functools.partial(run, **how)) for how in ({}, {"keep": ["triax_glu"]})]
    names = [str(program.trace(x, *others).jaxpr) for program in programs]
    assert ["triax_ragged_dot_glu" in text for text in names] == [True, False]
    assert "triax_ragged_dot_glu" not in str(jax.make_jaxpr(run)(*draw()))
    alone = jax.jit(functools.partial(layer, implementation="interpret"))(x, *others).tokens
    assert_same_bits(alone, programs[0](x, *others)[0])
    for a, b in zip(*(jax.tree.leaves(program(x, *others)) for program in programs), strict=True):
        assert_same_bits(a, b)


@pytest.mark.slow("many programs for one rule")
def test_second_derivatives_in_16_bits():
    """By the layer whose activation is an op of its own, which makes the same graph."""
    x, *others = draw(dtype="bfloat16")

    def second(x, **options):
        function = lambda x: jnp.sum(jnp.sin(layer(x, *others, **options).tokens).astype("float32"))
        return jax.jvp(jax.grad(function), (x,), (jnp.cos(x),))

    fused, apart = (
        jax.jit(functools.partial(second, **how))(x) for how in ({}, {"keep": ["triax_glu"]})
    )
    for a, b in zip(fused, apart, strict=True):
        assert np.any(a)
        assert_close(a, np.asarray(b, np.float64), terms=64)
