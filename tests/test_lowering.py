"""A user's primitive: on the CPU, and lowered for CUDA."""

import functools

import jax
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from tests.cases import cuda_call
from tests.primitives import accumulate, add_in_blocks, own, sum_and_accumulate
from triax import testing
from triax.compat import versions
from triax.errors import ArgumentValueError


@pytest.fixture
def arrays():
    rng = np.random.default_rng(3)
    return [rng.standard_normal(1003).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize("grid_kind", ["int", "tuple", "callable"])
def test_runs_on_cpu(arrays, grid_kind):
    x, y = arrays
    total, updated = jax.jit(functools.partial(sum_and_accumulate, grid_kind=grid_kind))(x, y)
    testing.assert_same_bits(total, x + y)
    testing.assert_close(updated, y.astype(float) + 2.0 * x, terms=2)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("grid_kind", ["int", "tuple", "callable"])
@pytest.mark.parametrize("tuning", ["off", "runtime"])
@pytest.mark.filterwarnings("ignore:.*tuning at run time needs:UserWarning")
def test_lowers(arrays, grid_kind, tuning):
    function = functools.partial(sum_and_accumulate, grid_kind=grid_kind, tuning=tuning)
    call = cuda_call(function, *arrays)
    blocks = (64, 256, 1024)
    if tuning == "off" or not versions.RUNTIME_AUTOTUNING.passes(versions.gated_version()):
        blocks = blocks[:1]
    sizes = [64 if grid_kind != "callable" else block for block in blocks]
    assert call.grid == tuple((-(-1003 // size), 1, 1) for size in sizes)
    assert call.aliases == ((1, 1),)
    assert call.saved == (((1, 3, 4012),) if len(blocks) > 1 else ())
    assert len(call.operands) == len(call.results) == 2


@pytest.mark.cuda_plugin
def test_who_wins_where_caller_and_config_disagree(arrays):
    """A config's value wins where several are tried; the caller's where one stands for all."""

    def grids(mode):
        call = cuda_call(functools.partial(add_in_blocks, tuning=mode), *arrays)
        return [grid[0] for grid in call.grid]

    assert grids("off") == [512]
    assert grids("cached") == [512]
    assert grids("auto") == [512]  # lowered without a GPU: nothing to measure on
    if versions.RUNTIME_AUTOTUNING.passes(versions.gated_version()):
        assert grids("runtime") == [64, 256, 1024]


def test_constexprs_decide_in_the_interpreter(arrays):
    def add_the_first_block(ctx, x, y):
        kernel, values = kernels.autotuned_add_kernel, {"n": 1003, "BLOCK": 512}
        return triax.triton_call_lowering(ctx, kernel, x, y, grid=1, constexprs=values)

    (total,) = jax.jit(own(add_the_first_block, lambda x, y: [x]))(*arrays)
    assert np.isfinite(total).sum() == 512


def test_an_aliased_result_of_another_index_than_its_operand(arrays):
    """Its own parameter points to that operand's memory, in the interpreter too."""

    def accumulate_into_the_first(ctx, x, y):
        return triax.triton_call_lowering(
            ctx,
            kernels.sum_and_accumulate_kernel,
            x,
            y,
            grid=lambda meta: triton.cdiv(1003, meta["BLOCK"]),
            input_output_aliases={0: 1},
            constexprs={"n": 1003, "SCALE": 2.0},
        )

    x, y = arrays
    total, updated = jax.jit(own(accumulate_into_the_first))(x, y)
    testing.assert_same_bits(total, x + y)
    testing.assert_close(updated, y.astype(float) + 2.0 * x, terms=2)


def test_one_pointer_for_an_aliased_pair(arrays):
    x, y = arrays
    testing.assert_same_bits(jax.jit(accumulate)(x, y), y + x)


@pytest.mark.cuda_plugin
def test_one_pointer_for_an_aliased_pair_lowers(arrays):
    call = cuda_call(accumulate, *arrays)
    assert call.aliases == ((1, 0),)
    assert (call.operands, call.results) == (("tensor<1003xf32>",) * 2, ("tensor<1003xf32>",))
    assert len(call.zeroed_bytes[0]) == 2


def test_a_fallback_without_programs_gives_way_to_a_config(arrays):
    def rule(ctx, x, y):
        n = ctx.avals_in[0].size
        return triax.triton_call_lowering(
            ctx,
            kernels.autotuned_add_kernel,
            x,
            y,
            grid=lambda meta: 0 if meta["BLOCK"] == 512 else triton.cdiv(n, meta["BLOCK"]),
            constexprs={"n": n, "BLOCK": 512},
        )

    x, y = arrays
    (out,) = jax.jit(own(rule, lambda x, y: [x]))(x, y)
    testing.assert_same_bits(out, x + y)


@pytest.mark.parametrize(
    ("aliases", "inputs", "message"),
    [
        (
            {},
            2,
            r"2 inputs and 2 outputs\. Each input and output takes one parameter; scalars go to "
            r"`constexprs`\.",
        ),
        # With one of two aliased there are four, or three.
        ({1: 1}, 2, r"2 outputs, 1 of them aliased\. Each .* one parameter, or each aliased pair"),
        # Neither a pointer for each nor one for each pair: some aliased outputs have one.
        ({0: 0, 1: 1, 2: 2}, 3, r"3 inputs and 3 outputs, 3 of them aliased\."),
    ],
)
def test_pointer_count_is_checked(arrays, aliases, inputs, message):
    def wrong(ctx, *operands):
        return triax.triton_call_lowering(
            ctx,
            kernels.sum_and_accumulate_kernel,
            *operands,
            grid=1,
            input_output_aliases=aliases,
            constexprs={"SCALE": 1.0},
        )

    with pytest.raises(
        ArgumentValueError, match=rf"has 5 parameters besides `constexprs` .*{message}"
    ):
        jax.jit(own(wrong))(*[*arrays, arrays[0]][:inputs])
