"""The table of forms on the CPU: kernels in the interpreter, ops in plain JAX too."""

import pytest

from tests.forms.calls import KERNELS
from tests.forms.check import cells, check

SHAPES = pytest.mark.parametrize("is_round", [True, False], ids=["round", "odd"])
# Callbacks are not exported, and nothing is tuned at run time here.
INTERPRETED = [pair for pair in cells() if pair[1] != "export" and "runtime" not in pair[0]]


@pytest.mark.sampled(None, 20)
@SHAPES
@pytest.mark.parametrize(("name", "form"), [pair for pair in INTERPRETED if pair[0] in KERNELS])
def test_kernels_in_the_interpreter(name, form, is_round):
    check(name, form, is_round, "interpret")


@pytest.mark.sampled(2, 20)
@SHAPES
@pytest.mark.parametrize(("name", "form"), [pair for pair in INTERPRETED if pair[0] not in KERNELS])
def test_ops_in_the_interpreter(name, form, is_round):
    check(name, form, is_round, "interpret")


@pytest.mark.sampled(2, 20)
@SHAPES
@pytest.mark.parametrize(("name", "form"), [pair for pair in cells() if pair[0] not in KERNELS])
def test_ops_in_plain_jax(name, form, is_round):
    check(name, form, is_round, "xla")
