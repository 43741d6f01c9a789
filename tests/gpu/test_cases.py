"""Every named case on a GPU, and those that are too large for the interpreter."""

import pytest

from tests.moe.cases import LARGE, NAMED
from tests.moe.test_cases import judge, made
from triax.testing import poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMED | LARGE)
def test_case(name):
    """Results and gradients, in memory that was poisoned: the same bits in every run."""
    case = made(name, "triton")
    batch = [case.inputs(run) for run in range(4)]
    poison(64 << 20)
    first, second = case.run(batch), case.run(batch)
    judge(case, batch, first)
    for one, other in zip(first, second, strict=True):
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
