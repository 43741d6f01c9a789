"""ragged_dot with the weights of some of the groups, against all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe.products import oracle
from tests.moe.products.test_ragged_dot import PATHS, WIDTHS
from triax import moe
from triax.moe.products import arguments
from triax.testing import assert_close, assert_same_bits, checked

NUM_ROWS = 124  # four devices cut them
SIZES = np.array([20, 0, 37, 30, -4, 9], np.int32)
COUNT = 2  # groups with weights
NAMES = "out", "rows", "weights", "bias", "bias_weights"


def draw(dtype="float32", widths="descriptors"):
    """Rows, weights of all groups, a bias of each, its weights, a gradient."""
    depth, columns = WIDTHS[widths]
    case = oracle.draw(3, depth, columns, dtype, NUM_ROWS, len(SIZES))
    rng = np.random.default_rng(4)
    bias = rng.standard_normal((len(SIZES), columns)).astype(dtype)
    bias_weights = rng.standard_normal(NUM_ROWS).astype("float32")
    return case.rows, case.weights, bias, bias_weights, case.gradient


def run(arrays, offset, implementation, sizes=SIZES):
    *operands, gradient = arrays

    def product(x, w, bias, bias_weights):
        how = {"bias": bias, "bias_weights": bias_weights, "implementation": implementation}
        return moe.ragged_dot(x, w, sizes, group_offset=offset, **how)

    def with_gradients(operands, gradient):
        out, pull = jax.vjp(product, *operands)
        return out, *pull(gradient)

    return dict(zip(NAMES, jax.jit(with_gradients)(operands, gradient), strict=True))


def some(arrays, offset):
    """The weights and biases of the groups from `offset` on, and NaN in the rows of others."""
    rows, weights, bias, bias_weights, gradient = map(np.copy, arrays)
    of_others = np.ones(len(rows), bool)
    for span in list(oracle.spans(SIZES, len(rows)))[offset : offset + COUNT]:
        of_others[span] = False
    for array in (rows, bias_weights, gradient):
        array[of_others] = np.nan
    local = slice(offset, offset + COUNT)
    return (rows, weights[local], bias[local], bias_weights, gradient), of_others


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    ("offset", "widths", "dtype"),
    [
        (0, "descriptors", "bfloat16"),
        (1, "pointers", "float32"),
        (2, "descriptors", "float32"),
        (3, "descriptors", "float16"),
        (4, "pointers", "bfloat16"),
    ],
)
def test_as_if_all_groups_were_multiplied(implementation, offset, widths, dtype):
    arrays = draw(dtype, widths)
    wanted = run(tuple(a.astype("float32") for a in arrays), None, "xla")
    part, of_others = some(arrays, offset)
    with checked():
        found = run(part, offset, implementation)
    for name in ("out", "rows", "bias_weights"):
        expected = np.where(
            of_others if wanted[name].ndim == 1 else of_others[:, None], 0, wanted[name]
        )
        assert_close(found[name], expected, terms=64)
        assert_same_bits(found[name][of_others], np.zeros_like(found[name][of_others]))
    for name in ("weights", "bias"):
        assert_close(found[name], wanted[name][offset : offset + COUNT], terms=64)


@pytest.mark.slow("many programs for one rule")
@pytest.mark.parametrize("implementation", PATHS)
def test_an_offset_on_the_device(implementation):
    """The same bits as an int; groups that do not exist are empty, wherever it points."""
    part, _ = some(draw(), 2)
    program = jax.jit(lambda offset: run(part, offset, implementation))
    for name, array in program(jnp.int32(2)).items():
        assert_same_bits(array, run(part, 2, implementation)[name])
    rows, weights, bias, bias_weights, gradient = draw()
    given = rows, weights[:COUNT], bias[:COUNT], bias_weights, gradient
    program = jax.jit(lambda offset: run(given, offset, implementation))
    for outside in (-COUNT, len(SIZES), -(2**31), 2**31 - 1):
        for array in program(jnp.int32(outside)).values():
            assert not np.any(array)
    # Half outside: group 5 has the first weights, and the second ones have no rows.
    last = program(jnp.int32(len(SIZES) - 1))
    rows = np.flatnonzero(np.any(np.asarray(last["out"]) != 0, axis=1))
    np.testing.assert_array_equal(rows, np.r_[87:96])
    assert not np.any(last["weights"][1])


@pytest.mark.slow("many programs for one rule")
@pytest.mark.parametrize("implementation", PATHS)
def test_offsets_of_a_batch(implementation):
    part = tuple(np.nan_to_num(array) for array in some(draw(), 2)[0])
    offsets = jnp.array([0, 3])
    found = jax.vmap(lambda offset: run(part, offset, implementation))(offsets)
    for i, offset in enumerate(offsets):
        for name, array in run(part, offset, implementation).items():
            assert_close(found[name][i], array, terms=64)


@pytest.mark.slow("many programs for one rule")
@pytest.mark.parametrize(
    ("offset", "promotion"), [(-1, "strict"), (-(2**40), "standard"), (2**40, "standard")]
)
def test_an_offset_of_64_bits(offset, promotion):
    """The same as of 32 bits, before the first group too."""
    rows, weights = jnp.ones((8, 16)), jnp.stack([jnp.full((16, 16), i + 1.0) for i in range(3)])
    near = max(-9, min(9, offset))
    how = {"implementation": "xla"}
    wanted = moe.ragged_dot(rows, weights, np.array([5, 2]), group_offset=jnp.int32(near), **how)
    with jax.enable_x64(), jax.numpy_dtype_promotion(promotion):
        out = moe.ragged_dot(
            rows, weights, jnp.array([5, 2], "int32"), group_offset=jnp.int64(offset), **how
        )
        assert_same_bits(out, wanted)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("cut", [("a", None), (None, "a")])
def test_over_devices(kind, cut):
    """Rows, or the depth, are cut."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,), devices=jax.devices()[:4])
    part = tuple(np.nan_to_num(array) for array in some(draw(), 2)[0])
    whole = run(part, 2, None)
    with jax.set_mesh(mesh):
        rows = jax.device_put(part[0], NamedSharding(mesh, PartitionSpec(*cut)))
        found = jax.jit(lambda rows: run((rows, *part[1:]), jnp.int32(2), None))(rows)
    for name, array in found.items():
        assert_close(np.asarray(array), whole[name], terms=64)


@pytest.mark.slow("many programs for one rule")
def test_scales_are_those_of_the_weights():
    rows, weights = jnp.ones((4, 16)), jnp.ones((1, 16, 16), "int8")
    weights = moe.ScaledArray(weights, jnp.full((1, 1, 1), 3.0), (1, None, None))
    for implementation in PATHS:
        how = {"group_offset": 1, "implementation": implementation}
        out = moe.ragged_dot(rows, weights, jnp.array([1, 2]), **how)
        np.testing.assert_array_equal(out[:, 0], [0, 48, 48, 0])


@pytest.mark.parametrize(
    ("offset", "match"),
    [
        (5, "`group_offset` must be from 0 to 4"),
        (-1, "`group_offset` must be from 0 to 4"),
        (True, "group_offset"),
        (jnp.zeros(2, jnp.int32), "group_offset"),
        (jnp.float32(1), "group_offset"),
    ],
)
def test_mistakes(offset, match):
    arrays, _ = some(draw(), 0)
    with pytest.raises((TypeError, ValueError), match=match):
        run(arrays, offset, None)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int32"])
def test_an_offset_of_any_integer_dtype(kind):
    assert arguments._check_offset(jnp.array(2, kind), 5, 3) == 2
