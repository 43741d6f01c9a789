"""Ids and sizes that no int32 holds are out of range; none becomes the number of its low half."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.moe.cases import NAMED, ORDINARY, UNUSUAL
from tests.moe.test_cases import flat, made
from triax import moe
from triax.errors import ArgumentValueError
from triax.moe import transformer_engine as te
from triax.testing import assert_same_bits

BEYOND = (2**32 + 1, 2 - 2**40, 2**31, -(2**63))  # the low halves of three are experts
LIMITS = np.iinfo(np.int32)
X = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
WEIGHTS, IDS = X[:, :2], np.array([[0, 1], [2, 3], [1, 0], [3, 1], [0, 2], [2, 1]])
EXPERTS, SIZES, MATRICES = 4, np.array([2, 1, 1, 1]), np.ones((4, 32, 32), np.float32)


def wider(array, rng):
    """In 64 bits, with some numbers that 32 do not hold, and the nearest that they do."""
    wide, at = array.astype(np.int64), np.asarray(rng.random(array.shape) < 0.3)
    wide[at] = rng.choice(BEYOND, int(at.sum()))
    return wide, np.clip(wide, LIMITS.min, LIMITS.max).astype(np.int32)


def has_integers(name):
    dtypes = {array.dtype for array in NAMED[name](None).inputs(0).values()}
    return np.dtype(np.int32) in dtypes and all(dtype.itemsize < 8 for dtype in dtypes)


OTHERS = ("feed_forward, a routing", "route, chosen already, softmax, False")
INSIDE = {"quantized_outer"}  # of products: who calls it has narrowed the sizes
NAMES = [n for n in (*ORDINARY, *UNUSUAL, *OTHERS) if n not in INSIDE and has_integers(n)]


@pytest.mark.sampled(3, 12)
@pytest.mark.parametrize("arrays", ["NumPy", "JAX, 64 bits"])
@pytest.mark.parametrize("path", ["xla", "interpret"])
@pytest.mark.parametrize("name", NAMES)
def test_as_the_nearest_that_int32_holds(name, path, arrays):
    """As constants of the program: as arguments JAX would cut them itself, without 64 bits."""
    case, rng = made(name, path), np.random.default_rng(0)
    case.gradients = ()
    given = case.inputs(0)
    both = {n: wider(a, rng) for n, a in given.items() if a.dtype == np.int32}
    wrong, nearest = ({n: of[i] for n, of in both.items()} for i in range(2))
    with jax.enable_x64(arrays != "NumPy"):
        if arrays != "NumPy":
            wrong = {n: jnp.asarray(a) for n, a in wrong.items()}
        run = jax.jit(lambda: [case.everything(given | other) for other in (wrong, nearest)])
        found, wanted = map(flat, run())
    for n, array in wanted.items():
        assert_same_bits(found[n], array, n)


def test_ids_that_go_to_other_devices():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))

    def send(ids, x, weights):
        sent = moe.dispatch(x, weights, ids, EXPERTS, "x")
        return sent.rows, sent.weights, sent.group_sizes

    # The ids are no argument, as above.
    over = lambda ids: jax.shard_map(
        functools.partial(send, ids), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )(X, WEIGHTS)
    wrong, nearest = wider(IDS, np.random.default_rng(0))
    found, wanted = jax.jit(lambda: (over(wrong), over(nearest)))()
    jax.tree.map(assert_same_bits, found, wanted)


REFUSED = {
    "num_experts": lambda n: moe.make_plan(IDS, n),
    "capacity": lambda n: moe.make_plan(IDS, EXPERTS, capacity=n),
    "num_rows": lambda n: moe.make_plan(IDS, EXPERTS, num_rows=n),
    "align_size": lambda n: moe.make_plan(IDS, EXPERTS, align_size=n),
    "top_k": lambda n: moe.Router(n),
    "group_offset": lambda n: moe.ragged_dot(X, MATRICES[:2], SIZES, group_offset=n),
    "roll_to_expert_id": lambda n: te.pure_jax_token_dispatch(
        X, IDS, EXPERTS, 2, roll_to_expert_id=n
    ),
    "shard_id": lambda n: te.compute_ragged_all_to_all_params(np.ones((2, 4), int), n, 2),
}


@pytest.mark.parametrize("number", [2**32 + 1, np.int64(2**32 + 1), np.int64(1 - 2**32)])
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_are_no_arrays_are_refused(name, number):
    with pytest.raises(ArgumentValueError, match=f"`{name}` must be .*; got {number}"):
        REFUSED[name](number)
