"""What the MoE kernels gain by how they are written: each measured against other ways.

Five groups: "plan", one of many pairs, by `variants.py` and by other configs; "few pairs", one
launch against three, and how many pairs a program places; "chunk sort", bytes per program, the
search for a row's chunk, and eviction hints; "permute", streaming stores, several of a token's
rows at once, and wider parts; "unpermute", accesses per thread.
Every result is checked before it is timed. Prints a table and writes
`benchmarks/experiments.json`. It needs a GPU.

    python benchmarks/experiments.py [--groups GROUP ...] [--output FILE] [--seconds SECONDS]

Exits with 1 where a result is wrong or cannot be had; its time is null then. The time is null
too where the method is "host-bound": it would not be the device's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_record
import jax
import variants

from triax.bench.cases import Case
from triax.bench.checks import problem
from triax.bench.presets import PRESETS, SUITES
from triax.bench.timing import time_program
from triax.bridge.errors import TriaxError
from triax.moe.blocks import power_of_two
from triax.moe.chunks import configs as chunk_configs
from triax.moe.chunks import launchers as chunk_launchers
from triax.moe.permute import configs as permute_configs
from triax.moe.permute import launchers as permute_launchers
from triax.moe.plan import configs as plan_configs
from triax.moe.plan import launchers as plan_launchers

PLAN_TOKENS = 16384
FEW_TOKENS = (128, 256, 512)
PERMUTES = (
    ("gpt-oss-120b", 32768),
    ("deepseek-v3", 16384),
    ("mixtral-8x7b", 32768),
    ("llama4-maverick", 32768),
    ("deepseek-v3", 128),
)
UNPERMUTES = (("llama4-maverick", 32768), ("mixtral-8x7b", 32768), ("qwen3-235b", 32768))
PLAN_MS, SORT_MS, MOVE_MS = 15.0, 60.0, 30.0
# Elements and warps of a program that moves float32 rows, from 2 KiB to 16.
MOVES = ((512, 4), (1024, 8), (2048, 8), (4096, 8))
SEARCH_WAYS = (2, 16, 128)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a case: what is put in place of attributes while it is traced."""

    name: str
    replaced: tuple[tuple[Any, str, Any], ...] = ()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target, attribute, value in self.replaced:
                stack.enter_context(mock.patch.object(target, attribute, value))
            yield


Experiment = tuple[Case, list[Variant]]


def plan_case(tokens: int) -> Case:
    return Case.routed("plan", PRESETS["deepseek-v3"], tokens, "bfloat16", "uniform")


def configured(config: Any, **changes: Any) -> tuple[Any, str, Any]:
    """The config that the heuristic gives for the plan's experts, with other fields."""
    default = config.heuristic(PRESETS["deepseek-v3"].experts)
    changed = dataclasses.replace(default, **changes)
    return config, "heuristic", mock.Mock(return_value=changed)


def plan() -> Iterator[Experiment]:
    sort = plan_configs.SortConfig
    others = {
        "four launches, by comparison": variants.four_launches,
        "two launches": variants.two_launches,
        "all parts in one histogram": variants.parts_in_one_histogram,
        "starts by comparison": variants.starts_by_comparison,
        "groups laid out in the scan's launch": variants.groups_in_scan,
    }
    yield (
        plan_case(PLAN_TOKENS),
        [
            Variant("production"),
            *(
                Variant(name, ((plan_launchers, "place_pairs", place_pairs),))
                for name, place_pairs in others.items()
            ),
            *(
                Variant(f"{field} {value}", (configured(sort, **{field: value}),))
                for field, values in (("part", (64, 256)), ("place_warps", (1, 4)))
                for value in values
            ),
            *(
                Variant(f"count_warps {warps}", (configured(sort, count_warps=warps),))
                for warps in (2, 8)
            ),
            *(
                Variant(f"max_blocks {blocks}", ((sort, "max_blocks", blocks),))
                for blocks in (128, 512)
            ),
        ],
    )


def few_pairs() -> Iterator[Experiment]:
    few = plan_configs.FewPairsConfig
    one_launch = (few, "max_pairs", 2**31)
    for tokens in FEW_TOKENS:
        found = [
            Variant("one launch", (one_launch,)),
            Variant("three launches", ((few, "max_pairs", 0),)),
        ]
        if tokens == FEW_TOKENS[0]:
            found += [
                Variant(f"block_pairs {pairs}", (one_launch, configured(few, block_pairs=pairs)))
                for pairs in (8, 16, 32)
            ]
        yield plan_case(tokens), found


def chunk_sort() -> Iterator[Experiment]:
    config = chunk_configs.MoveConfig
    hints = {
        "loads": {"load_hint": "evict_first"},
        "stores": {"store_hint": "evict_first"},
        "loads and stores": {"load_hint": "evict_first", "store_hint": "evict_first"},
    }
    hinted = {
        name: functools.partial(variants.move_rows_with_hints, **hint)
        for name, hint in hints.items()
    }
    chunks = SUITES["quick"].chunks
    assert chunks is not None
    yield (
        Case.chunked("sort_chunks", chunks, "float32"),
        [
            Variant("production"),
            *(
                Variant(
                    f"{width * 4 // 1024} KiB per program",
                    ((config, "heuristic", mock.Mock(return_value=config(1, width, warps))),),
                )
                for width, warps in MOVES
            ),
            *(
                Variant(f"{ways} search ways", ((chunk_configs, "_MAX_WAYS", ways),))
                for ways in SEARCH_WAYS
            ),
            *(
                Variant(f"evict_first on {name}", ((chunk_launchers, "move_rows", move_rows),))
                for name, move_rows in hinted.items()
            ),
        ],
    )


def permute() -> Iterator[Experiment]:
    config = permute_configs.MoveConfig
    for preset, tokens in PERMUTES:
        case = Case.routed("permute", PRESETS[preset], tokens, "bfloat16", "uniform")
        whole = power_of_two(case.hidden)
        changed = {
            f"{slots} at once, {warps} warps": config(1, 1024, warps, slots)
            for slots, warps in ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8))
        } | {
            "half rows": config(1, whole // 2, min(16, whole // 2 // 256)),
            "whole rows, 16 warps": config(1, whole, 16),
        }
        plain_stores = Variant("without streaming stores", ((permute_launchers, "_STORES", ""),))
        yield case, [Variant("production"), plain_stores, *with_moves("for_copies", changed)]


def unpermute() -> Iterator[Experiment]:
    changed = {
        f"{warps} warps": permute_configs.MoveConfig(1, 1024, warps) for warps in (1, 2, 4, 8)
    }
    for preset, tokens in UNPERMUTES:
        case = Case.routed("unpermute", PRESETS[preset], tokens, "bfloat16", "uniform")
        yield case, [Variant("production"), *with_moves("for_parts", changed)]


def with_moves(formula: str, changed: dict[str, Any]) -> list[Variant]:
    """Variants by other configs than that of the formula, by name."""
    return [
        Variant(name, ((permute_configs.MoveConfig, formula, mock.Mock(return_value=move)),))
        for name, move in changed.items()
    ]


GROUPS: dict[str, tuple[Callable[[], Iterator[Experiment]], float]] = {
    "plan": (plan, PLAN_MS),
    "few pairs": (few_pairs, PLAN_MS),
    "chunk sort": (chunk_sort, SORT_MS),
    "permute": (permute, MOVE_MS),
    "unpermute": (unpermute, MOVE_MS),
}


def shape(case: Case) -> str:
    if case.op == "plan":
        return f"{case.tokens * case.top_k} pairs, {case.experts} experts"
    if case.preset is not None:
        return f"{case.tokens} tokens, {case.preset.name}"
    return f"{case.tokens}x{case.hidden} {case.dtype}, {case.experts} chunks"


def trace(case: Case, variant: Variant, inputs: Any) -> Any:
    """The case's program, traced; its kernels begin to compile."""
    program = jax.jit(lambda inputs: case.program(inputs))
    with variant.in_force():
        program.trace(inputs)
    return program


def measure(
    case: Case, variant: Variant, program: Any, inputs: Any, target_ms: float
) -> dict[str, Any]:
    """The time of a program whose outputs are right."""
    result = {"median_us": None, "method": None, "correct": False}
    with variant.in_force():  # for the programs that repeat this one
        try:
            wrong = problem(case, inputs, program(inputs))
            if wrong is None:
                timing = time_program(program, inputs, chain=case.chain, target_ms=target_ms)
                # What a plan costs inside a larger program.
                if case.op == "plan" and timing.graph_us is not None:
                    result |= {"method": "graph", "median_us": round(timing.graph_us, 2)}
                else:
                    result["method"] = timing.method
                    if timing.method != "host-bound":
                        result["median_us"] = round(timing.median_us, 2)
                result["correct"] = True
        except (TriaxError, jax.errors.JaxRuntimeError) as error:  # a config may not fit
            wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        print(f"{variant.name}: {wrong}", file=sys.stderr)
    return result


def run(groups: list[str], seconds: float) -> list[dict[str, Any]]:
    """Measures the groups and prints a line for each result."""
    deadline = time.monotonic() + seconds
    results = []
    print(f"{'group':<12}{'variant':<38}{'shape':<34}{'us':>9}  method")
    for group in groups:
        experiments, target_ms = GROUPS[group]
        for case, found in experiments():
            inputs = case.make_inputs()
            programs = [trace(case, variant, inputs) for variant in found]
            for variant, program in zip(found, programs, strict=True):
                if time.monotonic() > deadline:
                    print("out of time: the rest was not measured", file=sys.stderr)
                    return results
                result = {
                    "group": group,
                    "variant": variant.name,
                    "shape": shape(case),
                    **measure(case, variant, program, inputs, target_ms),
                }
                results.append(result)
                us = "-" if result["median_us"] is None else f"{result['median_us']:.2f}"
                note = result["method"] if result["correct"] else "WRONG"
                print(
                    f"{group:<12}{variant.name:<38}{result['shape']:<34}{us:>9}  {note}",
                    flush=True,
                )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default_output = Path(__file__).with_suffix(".json")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--output", type=Path, default=default_output)
    parser.add_argument("--seconds", type=float, default=120, help="stop after this many")
    options = parser.parse_args()
    if (missing := gpu_record.missing_gpu()) is not None:
        print(missing, file=sys.stderr)
        return 2
    results = run(options.groups, options.seconds)
    gpu_record.write(options.output, results=results)
    return 0 if all(result["correct"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
