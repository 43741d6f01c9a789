"""The candidates that a call has: one for each config that is a kernel of its own."""

import jax
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from triax.binding import candidates
from triax.binding.kernel import Kernel, Parameter
from triax.errors import ArgumentTypeError

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
    request = candidates.UnresolvedCall(
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


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
@pytest.mark.parametrize(
    ("call", "logged"),
    [
        ({}, True),
        ({"zeroed_outputs": (0,)}, False),
        ({"zeroed_outputs": lambda meta: (0,) if meta["BLOCK"] == 64 else ()}, False),
        ({"input_output_aliases": {"out_ptr": 0}, "out_ptr": X}, False),
    ],
)
def test_an_output_that_only_measuring_fills_is_logged(caplog, option, call, logged):
    candidates._warn.cache_clear()
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = triton.autotune(configs, key=[], **{option: ["out_ptr"]})(kernels.copy_kernel)
    for _ in range(2):
        jax.make_jaxpr(
            lambda: triax.triton_call(X, n=100, kernel=kernel, out_type=X, grid=2, **call)
        )()
    text = (
        f"kernel copy_kernel: `{option}` names the output `out_ptr`, but takes effect only while "
        "configs are measured: in the program, an output is uninitialised. If the kernel adds to "
        "the output, pass `zeroed_outputs=(0,)`, or alias an operand with the initial values to it."
    )
    assert caplog.messages == [text] * logged


def test_a_config_sets_what_nothing_reads():
    with pytest.raises(
        ArgumentTypeError, match=r"A config of kernel .* sets `OTHER`, which is neither a parameter"
    ):
        grids([{"BLOCK": 16, "OTHER": 1}], 1)


def test_none_for_a_number():
    kernel, parameter = Kernel.of(kernels.copy_kernel), Parameter("n", False, False, None, "i32")
    candidates._check_number(kernel, parameter, None)
    with pytest.raises(ArgumentTypeError, match=r"`n` of kernel .* must be a number"):
        candidates._check_number(kernel, parameter, X)
