"""Inputs of bugs that other libraries had, as fixed cases that run before the random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.moe import draws
from tests.moe.bounds import exact, matmul, rounded
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng
from tests.moe.products.case import ragged_dot, zeros
from tests.moe.products.outer_case import quantized_outer
from tests.moe.products.scaled_case import scaled
from triax import moe


def unaligned_groups(path: str) -> list[Case]:
    """A gradient of weights that was wrong unless groups began at multiples of 64 rows:
    https://github.com/marin-community/marin/issues/8339"""
    given = ((40, 104, 56), (8, 32, 160), (64, 128, 8))
    return [ragged_dot(path, (200, 32, 48, 3), "bfloat16", given=given)]


def one_expert(path: str) -> list[Case]:
    """A product in 8 bits that was right for one expert alone. Here all have rows."""
    shape = (96, 64, 48, 4)
    given = ((24, 24, 24, 24), (30, 20, 22, 24))
    return [
        scaled(path, shape, kind, row_kind="float8_e4m3fn", given=given)
        for kind in ("float8_e4m3fn", "float8_e5m2")
    ]


def wide_tiles(path: str) -> list[Case]:
    """160 columns, for which tiles of 256 were taken, which were wrong on one GPU:
    https://github.com/marin-community/marin/issues/7484"""
    given = ((256, 256), (257, 255))
    return [ragged_dot(path, (512, 64, 160, 2), "bfloat16", given=given)]


def race(path: str) -> list[Case]:
    """A gradient of weights in 8 bits that differed from run to run where an expert had 128 rows
    and a column was all zeros: https://github.com/deepseek-ai/DeepGEMM/issues/365"""
    most = 512 if path == "triton" else 48
    shape = (768, most, most, 4)
    return [quantized_outer(path, shape, dtype="bfloat16", given=((256, 128, 128, 256),))]


def empty_groups(path: str) -> list[Case]:
    """Gradients that were NaN after an exchange, or a product, with empty groups:
    https://github.com/marin-community/marin/issues/8077 and
    https://github.com/openxla/tokamax/pull/1016"""
    product = ragged_dot(path, (16, 64, 32, 4), "bfloat16", given=((8, 0, 8, 0),))
    return [product, exchange(path, 1)]


def latency_hiding(path: str) -> list[Case]:
    """Exchanges whose first backward pass XLA's latency hiding spoilt:
    https://github.com/marin-community/marin/pull/8081"""
    return [exchange(path, len(jax.devices()), hiding=True)]


KNOWN: tuple[Callable[[str], list[Case]], ...] = (
    unaligned_groups,
    one_expert,
    wide_tiles,
    race,
    empty_groups,
    latency_hiding,
)


def exchange(path: str, devices: int, hiding: bool = False) -> Case:
    """Tokens to their experts' devices and back; half of the experts get none."""
    experts, tokens, hidden = 2 * devices, 4 * devices, 16
    mesh = Mesh(np.array(jax.devices()[:devices]), ("e",))

    def part(x: Any, weights: Any, ids: Any, w: Any) -> Any:
        sent = moe.dispatch(
            x,
            weights,
            ids,
            experts,
            "e",
            implementation=path,  # type: ignore[arg-type]
        )
        out = moe.ragged_dot(sent.rows, w, sent.group_sizes, implementation=path)  # type: ignore[arg-type]
        return moe.combine(out, sent.plan, weights=sent.weights, implementation=path)  # type: ignore[arg-type]

    over = P("e")
    exchanged = jax.shard_map(part, mesh=mesh, in_specs=(over,) * 4, out_specs=over)

    def draw(rng: Rng) -> Arrays:
        return {
            "x": draws.values(rng, (tokens, hidden), np.float32),
            "weights": draws.values(rng, (tokens, 2), np.float32),
            "ids": 2 * rng.integers(0, devices, (tokens, 2), np.int32),
            "w": draws.values(rng, (experts, hidden, hidden), np.float32),
            "g_out": draws.values(rng, (tokens, hidden), np.float32),
        }

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        x, g, weights, w = (exact(arrays[name]) for name in ("x", "g_out", "weights", "w"))
        out, d_x, d_weights = zeros(tokens, hidden), zeros(tokens, hidden), zeros(tokens, 2)
        d_w = zeros(experts, hidden, hidden)
        for token, slot in np.ndindex(tokens, 2):
            expert, weight = arrays["ids"][token, slot], weights[token, slot]
            inner = matmul(x[token : token + 1], w[expert])
            d_inner = weight * g[token : token + 1]
            for into, at, term in (
                (out, token, weight * inner[0]),
                (d_x, token, matmul(d_inner, w[expert].T)[0]),
                (d_weights, (token, slot), matmul(inner, g[token : token + 1].T)[0, 0]),
                (d_w, expert, matmul(x[token : token + 1].T, d_inner)),
            ):
                into.value[at] += term.value
                # A sum of all tokens' terms, in any order.
                into.error[at] += term.error + tokens * 2.0**-23 * abs(term.value)
        found_by = {"out": out, "d_x": d_x, "d_weights": d_weights, "d_w": d_w}
        return {name: rounded(of, np.float32) for name, of in found_by.items()}

    call, names = "exchanged(x, weights, ids, w)", {"exchanged": exchanged}
    gradients = ("x", "weights", "w")
    program = Case("exchange", path, call, ("out",), draw, expect, gradients, names)
    if hiding and jax.default_backend() == "gpu":
        options: Any = {"xla_gpu_enable_latency_hiding_scheduler": True}
        program.jitted = jax.jit(program.everything, compiler_options=options)
    return program


def run_all(path: str, cases: int = 8) -> Iterator[tuple[str, str]]:
    """Each one's name, and "right", or "wrong" or "skipped" with a reason."""
    repeats = 20 if path == "triton" else 2
    for known in KNOWN:
        if known is latency_hiding and len(jax.devices()) == 1:
            yield known.__name__, "skipped: it needs several devices"
            continue
        yield (
            known.__name__,
            next(filter(None, (check(p, cases, repeats) for p in known(path))), "right"),
        )


def check(program: Case, cases: int, repeats: int) -> str | None:
    """What is wrong with some cases of a program, each of which runs several times."""
    for case in range(cases):
        arrays = program.inputs(case)
        runs = program.run([arrays] * repeats)
        if text := program.judge(arrays, runs[0]):
            return f"wrong: {program.call}: {text}"
        for found in runs[1:]:
            if any(found[name].tobytes() != runs[0][name].tobytes() for name in found):
                return f"wrong: {program.call}: it has other bits in another run"
    return None
