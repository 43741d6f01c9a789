"""How good the configs are that the MoE ops choose by formula.

For each op, width and dtype of the list: the config of the formula against others of the same
family.

    python -m benchmarks.default_configs [--output FILE] [--seconds N]
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record
from benchmarks.harness.inputs import normal, with_gradients
from triax import moe
from triax.benchmark import HOST_BOUND, time_program
from triax.moe.chunk_sort import configs as chunk_configs
from triax.moe.permutation import configs as permute_configs
from triax.moe.shared.blocks import power_of_two

# Bytes of the rows [rows, width]: large enough that a launch is nothing.
ROW_BYTES = 1 << 30
# Elements of a row, their dtype, and the choices of a token.
WIDTHS = (
    (7168, "bfloat16", 8),
    (2880, "bfloat16", 4),
    (5120, "bfloat16", 1),
    (4096, "bfloat16", 8),
    (512, "bfloat16", 8),
    (2048, "bfloat16", 8),
    (1000, "float32", 8),
    (4096, "bfloat16", 2),
    (7168, "int8", 8),
    (64, "bfloat16", 8),
    (4096, "float32", 8),
    (7168, "float32", 8),
)
PROGRAM_BYTES = (2048, 4096, 8192)
MAX_WARPS = 16


@dataclasses.dataclass(frozen=True)
class Op:
    """An op, the formula that it takes its config from, and its program on `inputs`."""

    name: str
    config: Any
    formula: str
    whole_rows: bool
    program: Any
    floats_only: bool = False


def permute(x, plan):
    return moe.permute(x, plan)


def unpermute(operands, plan):
    return moe.unpermute(operands[0], plan, operands[1])


def gradients_alone(function, operands, gradient):
    """The forward pass is dropped, because nothing of a move's gradient depends on its result."""
    return with_gradients(function, lambda out: gradient)(operands)[1]


_Move, _Chunk = permute_configs.MoveConfig, chunk_configs.ChunkMoveConfig
_of_rows = lambda i: (i["rows"], i["weights"])
OPS = (
    Op("permute", _Move, "for_copies", False, lambda i: permute(i["x"], i["plan"])),
    Op("unpermute", _Move, "for_parts", False, lambda i: unpermute(_of_rows(i), i["plan"]), True),
    Op(
        *("permute_grad", _Move, "for_plain_sums", False),
        lambda i: gradients_alone(lambda x: permute(x, i["plan"]), i["x"], i["rows"]),
        floats_only=True,
    ),
    Op(
        *("unpermute_grad", _Move, "for_rows", True),
        lambda i: gradients_alone(lambda of: unpermute(of, i["plan"]), _of_rows(i), i["x"]),
        floats_only=True,
    ),
    Op(
        *("sort_chunks", _Chunk, "heuristic", False),
        lambda i: moe.sort_chunks_by_index(i["rows"], i["sizes"], i["order"]),
    ),
)


def candidates(op: Op, width: int, itemsize: int, top_k: int) -> list[Any]:
    """The formula's config first, then others: more or fewer bytes, wider or narrower blocks,
    more or fewer warps, several rows of a token at once."""
    config = op.config
    formula = getattr(config, op.formula)
    moves_parts = op.formula in ("for_parts", "for_plain_sums", "for_copies")
    default = formula(width, itemsize, top_k) if moves_parts else formula(width, itemsize)
    found = [default]
    if op.formula == "for_copies":
        found += [
            dataclasses.replace(default, block_slots=slots, num_warps=warps)
            for slots in (1, 2, 4)
            for warps in (default.num_warps, min(MAX_WARPS, 2 * default.num_warps))
            if slots <= top_k
        ]
    if op.whole_rows:
        blocks = [(default.block_tokens, default.block_width), (1, default.block_width // 2)]
    else:
        blocks = []
        for program_bytes in PROGRAM_BYTES:
            elements = program_bytes // itemsize
            for block in {default.block_width, min(elements, power_of_two(width))}:
                if block <= elements:
                    blocks.append((min(elements // block, 256), block))
    for rows, block in blocks:
        most = max(1, min(MAX_WARPS, rows * block * itemsize // (16 * 32)))
        found += [config(rows, block, warps) for warps in (most, most // 2) if warps]
    return list(dict.fromkeys(found))


def make_inputs(width: int, dtype: str, top_k: int) -> dict[str, Any]:
    """Uniform routing over 64 experts; 64 chunks of uneven sizes."""
    rng = np.random.default_rng(0)
    num_rows = ROW_BYTES // (width * jnp.dtype(dtype).itemsize) // top_k * top_k
    num_rows = min(num_rows, 1 << 21)
    tokens = num_rows // top_k
    selected = jnp.asarray(rng.integers(0, 64, (tokens, top_k)), jnp.int32)
    plan = jax.jit(functools.partial(moe.make_plan, num_experts=64))(selected)
    cuts = np.sort(rng.integers(0, num_rows + 1, 63))
    x = normal(0, tokens, width, dtype=dtype, scale=50.0)
    return {
        "x": x,
        "plan": plan,
        "weights": jnp.asarray(rng.random((tokens, top_k)), jnp.float32),
        "rows": jax.jit(moe.permute)(x, plan),
        "sizes": jnp.asarray(np.diff(cuts, prepend=0, append=num_rows), jnp.int32),
        "order": jnp.asarray(rng.permutation(64), jnp.int32),
    }


def trace(op: Op, config: Any, inputs: Any) -> Any:
    """The op's program with a config of our own; its kernels begin to compile."""
    jax.clear_caches()  # JAX traces an op once for its shapes
    with mock.patch.object(op.config, op.formula, return_value=config):
        return jax.jit(lambda inputs: op.program(inputs)).trace(inputs)


def measure(program: Any, inputs: Any, target_ms: float = 12) -> float | None:
    """Median microseconds, or None where they cannot be told."""
    timing = time_program(program, inputs, target_ms=target_ms)
    return None if timing.method == HOST_BOUND else timing.median_us


@jax.jit
def _is_close(left: Any, right: Any) -> jax.Array:
    """Whether results agree: integers in every bit, floats but for the order of a sum's terms."""
    close = lambda a, b: (
        jnp.max(jnp.abs(a.astype(jnp.float32) - b))
        <= (
            16 * jnp.finfo(a.dtype).eps * jnp.max(jnp.abs(b.astype(jnp.float32)))
            if jnp.issubdtype(a.dtype, jnp.floating)
            else 0
        )
    )
    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(close, left, right))))


def compare(op: Op, width: int, dtype: str, top_k: int, inputs: Any) -> dict[str, Any]:
    """All candidates' times, and what the formula's config loses against the best."""
    configs = candidates(op, width, jnp.dtype(dtype).itemsize, top_k)
    programs: dict[Any, Any] = {}
    times: dict[Any, float | None] = {}
    for config, traced in [(config, trace(op, config, inputs)) for config in configs]:
        try:
            programs[config] = traced.lower().compile()
            if not _is_close(programs[config](inputs), programs[configs[0]](inputs)):
                raise ValueError("its results are not those of the formula's config")
            times[config] = measure(programs[config], inputs)
        except Exception as error:  # registers or shared memory: a config may not fit
            print(f"  {config}: {type(error).__name__}: {error}", file=sys.stderr)
            times[config] = None
    known = {config: us for config, us in times.items() if us is not None}
    if configs[0] not in known:
        raise SystemExit(f"{op.name}, {width} {dtype}: the formula's config cannot be timed")
    best = min(known, key=known.__getitem__)
    # Both once more, one after the other: the least of many is partly luck.
    formula_us, best_us = (
        measure(programs[config], inputs, 40) or known[config] for config in (configs[0], best)
    )
    return {
        "op": op.name,
        "width": width,
        "dtype": dtype,
        "top_k": top_k,
        "formula": dataclasses.asdict(configs[0]),
        "formula_us": formula_us,
        "best": dataclasses.asdict(best),
        "best_us": best_us,
        "loss": formula_us / best_us - 1,
        "tried": [
            {"config": dataclasses.astuple(config), "median_us": us} for config, us in times.items()
        ],
    }


def main() -> int:
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--seconds", type=float, default=400, help="stop after this many")
    options = record.parse(parser)
    todo = [
        (width, dtype, top_k, [op for op in OPS if not (op.floats_only and dtype == "int8")])
        for width, dtype, top_k in WIDTHS
    ]
    results = list(run(todo, time.monotonic() + options.seconds))
    planned = sum(len(ops) for *_, ops in todo)
    within = sum(result["loss"] <= 0.03 for result in results)
    print(
        f"{within} of {len(results)} within 3% of the best; {planned - len(results)} not measured"
    )
    record.write(options.output, planned=planned, results=results)
    return int(within < len(results))


def run(todo: Any, deadline: float) -> Iterator[dict[str, Any]]:
    """The comparisons, each printed, until the time is over."""
    for width, dtype, top_k, ops in todo:
        inputs = make_inputs(width, dtype, top_k)
        for op in ops:
            if time.monotonic() > deadline:
                return
            result = compare(op, width, dtype, top_k, inputs)
            print(record.shown({n: of for n, of in result.items() if n != "tried"}), flush=True)
            yield result


if __name__ == "__main__":
    sys.exit(main())
