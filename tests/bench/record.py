"""An invented record of `triax bench` on a GPU, in the form of its JSON."""

from __future__ import annotations

from triax.bench.suites import PRESETS

FRACTIONS = {
    "permute": 0.96,
    "permute+plan": 0.93,
    "unpermute": 0.98,
    "permute_grad": 0.97,
    "unpermute_grad": 0.95,
    "route": 0.94,
    "route+grad": 0.95,
}
RATIOS = {
    "permute": {"jnp.take": 1.2, "torch.index_select": 0.9},
    "unpermute": {"jnp.take": 2.3, "transformer_engine": 1.4},
    "route+grad": {"argsort+take": 7.1, "hand-written vjp": 2.6, "transformer_engine": 1.7},
}


def result(op, preset, tokens, implementation="triax", *, median_us=100.0, fraction=None, **more):
    """One entry of `results`; `preset` a name, or None for a chunk sort."""
    hidden, experts, top_k = PRESETS[preset] if preset else (4096, 64, 1)
    return {
        "op": op,
        "preset": preset,
        "tokens": tokens,
        "hidden": hidden,
        "experts": experts,
        "top_k": top_k,
        "dtype": "bfloat16",
        "routing": "uniform" if preset else None,
        "implementation": implementation,
        "median_us": median_us,
        "p10_us": median_us and 0.98 * median_us,
        "p90_us": median_us and 1.03 * median_us,
        "samples": 100,
        "bytes": 10**9,
        "terabytes_per_second": median_us and 1e3 / median_us,
        "stream_us": fraction and fraction * median_us,
        "fraction_of_stream": fraction,
        "error": None,
        "seconds_method": "events",
    } | more


def record(results):
    """A record of those results."""
    return {
        "schema": 1,
        "written": "2026-11-21T15:00:00Z",
        "command": "triax bench",
        "machine": {"platform": "cuda", "device": "NVIDIA H200", "driver": "1", "host_cores": 16},
        "versions": {"triax": "0.1", "jax": "0.11", "jaxlib": "0.11", "triton": "3", "python": "3"},
        "results": results,
        "streams": [],
        "first_call": [],
        "memory": [],
        "notes": [],
        "complete": True,
    }


def full_record(presets=("mixtral-8x7b", "deepseek-v3"), tokens=(128, 8192, 16384)):
    """All ops, several models and numbers of tokens, competitors at one of them."""
    results = []
    for preset in presets:
        for count in tokens:
            results.append(result("plan", preset, count, median_us=5 + count / 2500))
            for number, (op, fraction) in enumerate(FRACTIONS.items()):
                median_us = count * (number + 1) / 50
                results.append(
                    result(op, preset, count, median_us=median_us, fraction=fraction - 10 / count)
                )
                for name, ratio in RATIOS.get(op, {}).items() if count == 8192 else ():
                    results.append(result(op, preset, count, name, median_us=ratio * median_us))
    for op in ("sort_chunks", "sort_chunks_grad"):
        results.append(result(op, None, 524288, median_us=4080.0, fraction=0.98))
        results.append(result(op, None, 524288, "jnp.take", median_us=5300.0))
    return record(results)
