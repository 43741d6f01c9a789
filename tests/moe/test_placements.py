"""Random placements of all ops; `tests/moe/placements/case.py` says what a case is.

The hundred, of which CI runs forty, are drawn anew in every run. A failure says how to repeat a
case alone, and PLACEMENTS_SEED=… repeats them all.
"""

from __future__ import annotations

import os
import secrets

import jax
import pytest

from tests.moe.placements import many
from tests.moe.placements.case import Placement

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
    pytest.mark.filterwarnings("ignore:feed_forward gathers all experts:UserWarning"),
]

PARTS, CASES = 5, 20


def told(found):
    """A case that is to be looked at, as a few lines."""
    case = Placement(found.seed, found.index)
    return "\n".join(
        [
            f"python -m tests.moe.placements --seed {found.seed} --case {found.index}",
            *case.lines,
            f"{found.verdict}: {found.message[:2000]}",
        ]
    )


def check(outcomes):
    outcomes = list(outcomes)
    wrong = [found for found in outcomes if found.verdict == "wrong"]
    refused = [found for found in outcomes if found.verdict == "refused"]
    assert not wrong, "\n\n".join(map(told, wrong))
    print(*refused, sep="\n")
    # JAX itself refuses one of fifty: of 20 there are more than four in one run of 20,000.
    assert len(refused) <= 4, "\n\n".join(map(told, refused))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("index", range(2))
def test_a_few_placements(index):
    check([many.outcome(2, index)])


@pytest.mark.sampled(0, 2)  # most of their time is XLA's, which compiles a program for each
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_placements(part):
    seed = int(os.environ.get("PLACEMENTS_SEED") or secrets.randbelow(10**9))
    print(f"PLACEMENTS_SEED={seed}")
    check(many.outcomes(seed, range(part * CASES, (part + 1) * CASES)))
