"""Products on a GPU: kernels in Gluon have the bits of Triton's, TF32, and all powers of two."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.products import case, scaled_case
from tests.moe.products.chosen import without
from tests.moe.products.test_few_rows import all_numbers, all_numbers_of_nvfp4
from tests.moe.test_cases import made
from triax import moe
from triax.moe.products import choose
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu

# The result that two kernels compute alike.
_HALVES = {name: "d_weights" for name in case.LARGE if "by" in name and "float32" not in name}
_EIGHT_BITS = {name: "out" for name in scaled_case.LARGE if "8 bits" in name and "fast" not in name}


@pytest.mark.parametrize(("name", "result"), (_HALVES | _EIGHT_BITS).items())
def test_kernels_in_gluon_have_the_bits_of_tritons(name, result):
    kernels = "sm90_8_bits", "sm90_16_bits"
    batch = [made(name, "triton").inputs(run) for run in range(2)]
    poison(64 << 20)
    with choose.noted() as choices:
        found = made(name, "triton").run(batch)
    if not {choice.kernel for choice in choices} & {*kernels}:
        pytest.skip("no kernel in Gluon takes it here")
    with contextlib.ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(without(kernel))
        wanted = made(name, "triton").run(batch)
    for one, other in zip(found, wanted, strict=True):
        if one[result].shape[1] > 32:  # both multiply in warp groups
            assert_same_bits(one[result], other[result])


def test_tf32_where_the_matmul_precision_says_so():
    program = case.ragged_dot("triton", (2048, 512, 256, 4), given=((512, 100, 900, 300),))
    rng, shapes = np.random.default_rng(0), ((2048, 512), (4, 512, 256), (2048, 256))
    arrays = program.inputs(0)
    for name, shape in zip(("rows", "weights", "g_out"), shapes, strict=True):
        arrays[name] = rng.standard_normal(shape, np.float32)
    with jax.default_matmul_precision("tensorfloat32"):
        (found,) = program.run([arrays])
    for name, wanted in program.expect(arrays, found).items():
        error = np.linalg.norm(found[name] - wanted.value) / np.linalg.norm(wanted.value)
        assert 2e-6 < error < 1e-3, name


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
@pytest.mark.parametrize("num_rows", [64, 256, 1024, 4096, 16384])
def test_all_numbers_times_all_powers_of_two(num_rows, dtype):
    """Whatever tiles the rows of a group take."""
    rows, weights, sizes, wanted = all_numbers(num_rows, dtype)
    weights = jax.jit(moe.ScaledArray.tile)(weights)
    multiply = lambda *args: moe.ragged_dot(*args, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(jax.jit(multiply)(rows, weights, sizes), wanted)


@pytest.mark.parametrize("num_rows", [64, 256, 1024, 4096])
def test_all_numbers_times_all_scales_of_e4m3(num_rows):
    *args, wanted = all_numbers_of_nvfp4(num_rows)
    multiply = lambda *args: moe.ragged_dot(*args, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(jax.jit(multiply)(*args), wanted)
