"""combine in 8 bits: the sums of rounded rows, with the gradients of exact ones."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.moe.expert_parallel import test_expert_parallel as whole
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.testing import assert_same_bits

DEVICES, EXPERTS, TOP_K, TOKENS, HIDDEN = 4, 8, 3, 7, 160  # a block of 128 and one of 32
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def drawn(dtype="float32"):
    x = whole.normal(0, DEVICES * TOKENS, HIDDEN).astype(dtype)
    weights = whole.uniform(1, DEVICES * TOKENS, TOP_K)
    experts = np.random.default_rng(2).integers(-1, EXPERTS, weights.shape).astype(np.int32)
    return x, weights, experts


def run(x, weights, experts, weighted=True, **options):
    """Each token's rows, times 3, 5, … for the experts of a device."""

    def part(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, "e")
        factor = (3 + 2 * jax.lax.axis_index("e")).astype(x.dtype)
        of_rows = sent.weights if weighted else None
        return moe.combine(sent.rows * factor, sent.plan, weights=of_rows, **options)

    kinds = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:DEVICES]}
    mesh = jax.make_mesh((DEVICES,), ("e",), **kinds)
    spread = jax.shard_map(part, mesh=mesh, in_specs=P("e"), out_specs=P("e"))
    return jax.jit(spread)(x, weights, experts)


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(rows, dtype):
    return moe.quantize(rows, dtype, block=(1, 128)).dequantize(rows.dtype)


def rounded(rows, dtype):
    return np.asarray(rows if dtype is None else there_and_back(rows, dtype), np.float64)


def expected(x, weights, experts, dtype):
    """What travels is a row for each device and token; None rounds nothing."""
    out = np.zeros(x.shape)
    for device in range(DEVICES):
        factor, here = np.float32(3 + 2 * device), experts // 2 == device
        here &= experts >= 0
        total = np.sum(np.where(here, weights, 0), axis=1, dtype=np.float64)
        rows = (total[:, None] * np.asarray(x * factor, np.float64)).astype(x.dtype)
        out += rounded(rows, dtype) * here.any(axis=1)[:, None]
    return out


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_sums_of_rounded_rows(dtype):
    given = drawn()
    found = np.asarray(run(*given, exchange_dtype=dtype))
    wanted, exact = (expected(*given, kind) for kind in (dtype, None))
    # A sum that another order puts on the other side of a middle is rounded to a neighbour.
    far = np.abs(found - wanted) > 1e-5 * np.abs(wanted).max()
    assert np.mean(far) < 0.002
    assert np.linalg.norm(found - wanted) < 2e-3 * np.linalg.norm(wanted)
    assert 0.01 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.08


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_are_those_of_exact_rows(weighted):
    x, weights, experts = drawn("bfloat16")
    cotangent = whole.normal(5, *x.shape).astype(x.dtype)

    @jax.jit
    def both(x, weights):
        pulled = []
        for dtype in (E4M3, None):
            function = functools.partial(
                run, experts=experts, weighted=weighted, exchange_dtype=dtype
            )
            out, pull = jax.vjp(lambda x, w, f=function: f(x, w), x, weights)
            assert out.dtype == x.dtype
            pulled.append(pull(cotangent))
        return pulled

    (d_x, d_weights), (wanted_x, wanted_weights) = jax.tree.map(np.asarray, both(x, weights))
    assert_same_bits(d_x, wanted_x)
    assert_same_bits(d_weights, wanted_weights)


@pytest.mark.slow("many programs for one rule")
def test_forward_mode():
    x, weights, experts = drawn()
    run_8 = lambda x: run(x, weights, experts, exchange_dtype=E4M3)
    out, tangent = jax.jvp(run_8, (x,), (x,))
    assert_same_bits(out, run_8(x))
    assert_same_bits(tangent, run(x, weights, experts))  # it is linear


@pytest.mark.slow("many programs for one rule")
def test_a_token_without_rows_is_zero():
    x, weights, experts = drawn()
    experts[3] = -1
    found = run(x, weights, experts, exchange_dtype=E4M3)
    assert not np.any(np.asarray(found)[3])


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float9", 8])
def test_mistakes(dtype):
    with pytest.raises(ArgumentValueError, match="`exchange_dtype` must be float8_e4m3fn or"):
        run(*drawn(), exchange_dtype=dtype)


def test_rows_that_are_not_rounded():
    with jax.enable_x64():
        x, *others = drawn("float64")
        with pytest.raises(ArgumentTypeError, match="`rows` are of float64"):
            run(x, *others, exchange_dtype=E4M3)
