"""The candidates that a call has: one for each config that is a kernel of its own."""

import jax
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from triax.binding import candidates
from triax.binding.kernel import Kernel

X = np.zeros(100, np.float32)


def grids(configs, grid, **options):
    kernel = triton.autotune([triton.Config(c) for c in configs], key=[])(kernels.copy_kernel)
    call = lambda: triax.triton_call(
        X, n=100, kernel=kernel, out_type=X, grid=grid, tuning="off", **options
    )
    (equation,) = jax.make_jaxpr(call)().eqns
    return [candidate.grid[0] for candidate in equation.params["call"].candidates]


def test_configs_that_differ_in_what_changes_nothing_are_one():
    """`ROWS` is no parameter: only the grid reads it."""
    configs = [{"BLOCK": 64, "ROWS": 1}, {"BLOCK": 64, "ROWS": 2}, {"BLOCK": 64, "ROWS": 4}]
    assert grids(configs, lambda meta: 4 // meta["ROWS"]) == [4, 2, 1]
    assert grids(configs, lambda meta: max(2, 4 // meta["ROWS"])) == [4, 2]


@pytest.mark.parametrize(("conflicts", "left"), [("config", [64, 128]), ("caller", [32])])
def test_configs_that_differ_only_in_what_the_caller_sets_are_one(conflicts, left):
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = triton.autotune(configs, key=[])(kernels.copy_kernel)
    request = candidates.Request(
        kernel=Kernel.of(kernel),
        parameters=(),
        arguments={},
        keywords={"BLOCK": 32},
        options={},
        grid=lambda meta: meta["BLOCK"],
        num_results=1,
        conflicts=conflicts,
    )
    assert [candidate.grid[0] for candidate in candidates.build(request)] == left
