"""The candidates that a call has: one for each config that is a kernel of its own."""

import jax
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from triax.binding import candidates
from triax.binding.kernel import Kernel, Parameter
from triax.binding.launch import ArrayType
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

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


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_warps": 0}, ArgumentValueError, "`num_warps` must be an int, a power of two; got 0"),
        ({"num_stages": np.ones(2)}, ArgumentTypeError, "`num_stages` must be known when"),
    ],
)
def test_options_that_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        candidates.check_options(options)


def test_an_output_has_one_operand():
    array = ArrayType((4,), np.dtype(np.float32))
    with pytest.raises(ArgumentValueError, match="gives output 0 to two operands, `x` and `y`"):
        candidates.check_aliases({0: 0, 1: 0}, [array] * 2, [array], ["x", "y"])


@pytest.mark.parametrize("name", ["launch_cooperative_grid", "launch_pdl"])
def test_options_of_tritons_launcher(name):
    candidates._refuse_launch_options("kernel", {name: False})
    candidates._refuse_launch_options("kernel", {name: None})
    with pytest.raises(UnsupportedError, match=f"has the option `{name}`=True"):
        candidates._refuse_launch_options("kernel", {name: True})


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
