"""Every named case on a GPU, and those that are too large for the interpreter."""

import numpy as np
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
    judge(case, batch, second)
    for arrays, *found in zip(batch, first, second, strict=True):
        with np.errstate(all="ignore"):
            wanted = case.expect(arrays, found[0])
        for name, of in wanted.items():
            one, other = (result[name] for result in found)
            specified = getattr(of, "where", np.True_)  # what else there is, nobody promises
            specified = np.broadcast_to(specified, one.shape)
            assert one[specified].tobytes() == other[specified].tobytes(), name
