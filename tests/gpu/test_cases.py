"""Every named case on a GPU, and those that are too large for the interpreter."""

import numpy as np
import pytest

from tests.moe.cases import LARGE, NAMED
from tests.moe.test_cases import made
from triax.testing import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ragged_dot dequantizes its weights"),  # some do, rightly
]


@pytest.mark.parametrize("name", NAMED | LARGE)
def test_case(name):
    """Results and gradients, in memory that was poisoned: the same bits in every run."""
    case = made(name, "triton")
    batch = [case.inputs(run) for run in range(2 if name in LARGE else 4)]
    poison(64 << 20)
    results, again = case.run(batch), case.run(batch)
    for arrays, one, other in zip(batch, results, again, strict=True):
        wanted = case.wanted(arrays, one)
        text = case.judge(arrays, one, wanted)
        assert text is None, f"{case.call}: {text}"
        for result, of in wanted.items():
            specified = getattr(of, "where", np.True_)  # what else there is, nobody promises
            specified = np.broadcast_to(specified, one[result].shape)
            same = one[result][specified].tobytes() == other[result][specified].tobytes()
            assert same, f"{case.call}: {result} has other bits in the second run"
