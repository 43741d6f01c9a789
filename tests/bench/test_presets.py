"""The shapes of models, and the suites that pick from them."""

import pytest

from triax.bench import presets
from triax.bench.programs import OPS
from triax.bridge.errors import ArgumentValueError

SHAPES = {
    "mixtral-8x7b": (4096, 8, 2),
    "deepseek-v3": (7168, 256, 8),
    "qwen3-235b": (4096, 128, 8),
    "gpt-oss-120b": (2880, 128, 4),
    "kimi-k2": (7168, 384, 8),
    "llama4-maverick": (5120, 128, 1),
}


def test_shapes():
    found = {name: (p.hidden, p.experts, p.top_k) for name, p in presets.PRESETS.items()}
    assert found == SHAPES


def test_find():
    assert presets.find("qwen3-235b").experts == 128
    with pytest.raises(ArgumentValueError, match=r"`--presets` must name some of .*; got 'gpt-5'"):
        presets.find("gpt-5")


@pytest.mark.parametrize("name", presets.SUITES)
def test_suites_compete_on_cases_they_have(name):
    suite = presets.SUITES[name]
    assert set(suite.presets) <= set(presets.PRESETS)
    competition = suite.competition or presets.Competition()
    assert set(competition.presets or ()) <= set(suite.presets)
    assert set(competition.tokens or ()) <= {*suite.tokens, *(count for _, count in suite.also)}
    assert {name for name, _ in suite.also} <= set(suite.presets)
    assert set(competition.routings or ()) <= set(suite.routings)
    assert set(competition.ops or ()) <= set(OPS)


def test_suites_say_what_they_cover():
    quick, full, scaling = (str(presets.SUITES[name]) for name in ("quick", "full", "scaling"))
    chunks = "a chunk sort of 524,288 × 4,096 in 64 chunks"
    shape = "deepseek-v3 at 8,192 tokens, uniform routing"
    assert quick == f"{shape}; {chunks}; competitors: everywhere"
    assert full.split("; ") == [
        "all presets at 8,192 and 32,768 tokens, uniform and skewed routing",
        "deepseek-v3 at 128, 512, 2,048, 16,384, 131,072 and 524,288 tokens, uniform routing",
        "qwen3-235b, mixtral-8x7b at 16,384 tokens, uniform routing",
        chunks,
        "competitors: at 16,384 tokens, uniform routing, for deepseek-v3, qwen3-235b, "
        "mixtral-8x7b and ops route+grad, permute, unpermute, sort_chunks",
    ]
    assert scaling.endswith("competitors: none")


@pytest.mark.parametrize("name", presets.SUITES)
def test_small_on_the_host(name):
    suite = presets.SUITES[name]
    small = presets.on_host(suite)
    assert small.tokens == (128,)
    assert small.also == ()
    assert small.presets == suite.presets
    assert (small.chunks is None) == (suite.chunks is None)
    if small.chunks is not None:
        assert small.chunks.tokens * small.chunks.hidden * 4 < 10**7
