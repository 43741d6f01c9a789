"""Programs of every kind lower for cards that are not here; `tests.cards` takes all of them."""

import dataclasses
import warnings

import jax
import pytest

from tests import cards
from triax.compat import jax_private
from triax.moe.products import any_gpu_configs

PROGRAMS = (
    "ragged_dot, 4000 rows, bfloat16{'transpose_weights': True}",
    "ragged_dot, 500 rows, float4_e2m1fn in 32, in tiles",
)
COMPILED = cards.Compiled("ragged_dot", "", 1, 100, 0, "mma.sync", "cp.async", False, 0)


@pytest.mark.sampled(0, 1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("card", [80, 89, 100, 120])
def test_programs_lower(card, name):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kernels = cards.lower(cards.PROGRAMS[name], card)
    assert {kernel.compute_capability for _, kernel in kernels.values()} == {card}
    by_tma = card >= 90 and jax_private.supports_tensor_maps()
    warned = "float4" in name and not by_tma
    assert ["in memory" in str(each.message) for each in told] == [True] * warned


@pytest.mark.slow("compiled for a GPU, to look at its code")
@pytest.mark.cuda_plugin
def test_blocks_that_do_not_fit_are_found(monkeypatch):
    if not jax_private.supports_tensor_maps():
        pytest.skip("stages that do not fit are those of descriptors, which need JAX 0.11")
    monkeypatch.setattr(cards, "PROGRAMS", {"a layer": cards.PROGRAMS[PROGRAMS[0]]})
    monkeypatch.setattr(any_gpu_configs, "shared_bytes", lambda *_: 0)
    jax.clear_caches()
    _, (problem,) = cards.survey(120)
    assert "bytes of shared memory per block" in problem
    assert "101376" in problem


@pytest.mark.parametrize(
    ("changed", "problems"),
    [
        ({}, []),
        ({"spilled_bytes": 8}, []),
        ({"spilled_bytes": 500}, ["spills 500 bytes of registers"]),
        ({"spilled_bytes": 500, "products": "none"}, []),
        ({"spilled_bytes": 500, "kernel": "place_mask"}, []),
        ({"spilled_bytes": 64, "kernel": "few_rows"}, []),
        ({"spilled_bytes": 65, "kernel": "few_rows", "products": "none"}, ["spills 65 bytes"]),
        ({"spilled_bytes": 33, "kernel": "glu", "products": "none"}, ["spills 33 bytes"]),
        ({"overwritten": 3}, ["writes 3 times to registers that are still read"]),
    ],
)
def test_what_is_wrong_with_a_kernel(changed, problems):
    found = list(cards.wrong(dataclasses.replace(COMPILED, **changed)))
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True))
