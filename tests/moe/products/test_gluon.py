"""The values of the kernels in Gluon, which the interpreter and PTX do not see, and faults in them.

Operands are small integers and scales powers of two, so that all sums are exact in float32, and
results must be equal to rounded float64. Each planted fault must be found with one of few seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.compat import versions
from triax.moe.activations import options as activations
from triax.moe.products import sm90_8_bits, sm90_16_bits
from triax.moe.products.operands import Parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.product import GroupOuter, RaggedDot
from triax.moe.shared.target import Target
from triax.testing import assert_close

if not versions.GLUON.passes(versions.installed("triton")):
    pytest.skip(f"needs Triton {versions.GLUON.stable}", allow_module_level=True)

import itertools

from tests import gluon

HOPPER = Target(compute_capability=90, multiprocessors=2, tensor_maps=True)
HALF, E4M3 = "bfloat16", "float8_e4m3fn"
SIZES = (130, 0, 40)  # more than a tile, none, and less than half a tile


def integers(rng: np.random.Generator, *shape: int, dtype: str = HALF) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(jnp.dtype(dtype))


def powers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (2.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


def spans(sizes: Sequence[int], num_rows: int, first: int = 0) -> list[slice]:
    bounds = np.minimum(first + np.cumsum([0, *np.maximum(sizes, 0)]), num_rows)
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def groups(sizes: Sequence[int], first: int | None) -> Groups:
    return Groups(jnp.array(sizes, jnp.int32), None if first is None else jnp.int32(first))


def outside(rows: list[slice], num_rows: int) -> np.ndarray:
    held = np.zeros(num_rows, bool)
    for span in rows:
        held[span] = True
    return ~held


def check_16_bits(
    seed: int,
    edits: Sequence[tuple[str, str]] = (),
    *,
    sizes: Sequence[int] = SIZES,
    num_rows: int = 200,
    depth: int = 200,
    columns: int = 264,
    first: int | None = None,
    dtype: str = HALF,
    transposed: bool = False,
    bias: bool = False,
    activation: Any = None,
    interleaved: bool = False,
    weighted: bool = False,
) -> None:
    rng = np.random.default_rng(seed)
    x = integers(rng, num_rows, depth, dtype=dtype)
    w = integers(rng, len(sizes), depth, columns, dtype=dtype)
    rows = spans(sizes, num_rows, first or 0)
    x[outside(rows, num_rows)] = np.nan
    b = integers(rng, len(sizes), columns, dtype=dtype) if bias else None
    weights = powers(rng, num_rows) if weighted else None
    stored = np.ascontiguousarray(w.swapaxes(1, 2)) if transposed else w
    spec = activation and activations.resolve(activation, interleaved)[0]
    product = RaggedDot(
        target=HOPPER,
        left=Parts(x),
        right=Parts(stored),
        weights=stored,
        groups=groups(sizes, first),
        options=Options(jnp.dtype(dtype), None),
        implementation="interpret",
        transposed=transposed,
        bias=b,
        bias_weights=weights if bias else None,
        row_weights=weights if spec else None,
        glu=spec,
    )
    with gluon.emulated(seed, edits):
        results = sm90_16_bits.ragged_dot(product)
    out, inner = results if spec else (results, None)
    wanted = np.zeros((num_rows, columns))
    for group, span in enumerate(rows):
        wanted[span] = x[span].astype(np.float64) @ w[group].astype(np.float64)
        if b is not None:
            by = 1.0 if weights is None else weights[span].astype(np.float64)[:, None]
            wanted[span] += b[group].astype(np.float64) * by
    np.testing.assert_array_equal(out, wanted.astype(jnp.dtype(dtype)))
    if spec:
        how = {"activation": activation, "interleaved": interleaved, "implementation": "xla"}
        made = moe.glu(np.asarray(out, np.float32), weights, **how)
        assert_close(np.asarray(inner), np.asarray(made, np.float64))


def check_outer(
    seed: int,
    edits: Sequence[tuple[str, str]] = (),
    *,
    sizes: Sequence[int] = (100, 0, 70),
    num_rows: int = 200,
    left: int = 136,
    right: int = 264,
    first: int | None = None,
    dtype: str = HALF,
) -> None:
    rng = np.random.default_rng(seed)
    rows = spans(sizes, num_rows, first or 0)
    sides = [integers(rng, num_rows, n, dtype=dtype) for n in (left, right)]
    for side in sides:
        side[outside(rows, num_rows)] = np.nan
    product = GroupOuter(
        target=HOPPER,
        left=Parts(sides[0]),
        right=Parts(sides[1]),
        groups=groups(sizes, first),
        options=Options(jnp.dtype(dtype), None),
        implementation="interpret",
    )
    with gluon.emulated(seed, edits):
        out = sm90_16_bits.group_outer(product)
    exact = [side.astype(np.float64) for side in sides]
    wanted = np.stack([exact[0][span].T @ exact[1][span] for span in rows])
    np.testing.assert_array_equal(out, wanted.astype(jnp.dtype(dtype)))


def check_8_bits(
    seed: int,
    edits: Sequence[tuple[str, str]] = (),
    *,
    sizes: Sequence[int] = SIZES,
    num_rows: int = 200,
    depth: int = 400,
    columns: int = 272,
    first: int | None = None,
    blocked: bool = True,
    dtype: str = E4M3,
    out: str = HALF,
) -> None:
    rng = np.random.default_rng(seed)
    deep, wide = -(-depth // 128), -(-columns // 128)
    x = integers(rng, num_rows, depth, dtype=dtype)
    w = integers(rng, len(sizes), columns, depth, dtype=dtype)
    rows = spans(sizes, num_rows, first or 0)
    x[outside(rows, num_rows)] = np.nan
    exact = x.astype(np.float64), w.astype(np.float64)
    if blocked:
        scales = powers(rng, num_rows, deep), powers(rng, len(sizes), wide, deep)
        left, right = Parts(x, scales[0], 128), Parts(w, scales[1], 128, 128)
        of_columns = scales[1].repeat(128, 1)[:, :columns]
        by = scales[0].repeat(128, 1)[:, :depth], of_columns.repeat(128, 2)[..., :depth]
    else:
        scales = powers(rng, num_rows), powers(rng, len(sizes), columns)
        left, right = Parts(x, scales[0]), Parts(w, scales[1], None, 1)
        by = scales[0][:, None], scales[1][..., None]
    product = RaggedDot(
        target=HOPPER,
        left=left,
        right=right,
        weights=w,
        groups=groups(sizes, first),
        options=Options(jnp.dtype(out), None),
        implementation="interpret",
        transposed=True,
    )
    with gluon.emulated(seed, edits):
        found = sm90_8_bits.ragged_dot(product)
    wanted = np.zeros((num_rows, columns))
    for group, span in enumerate(rows):
        wanted[span] = exact[0][span] * by[0][span] @ (exact[1][group] * by[1][group]).T
    np.testing.assert_array_equal(found, wanted.astype(jnp.dtype(out)))


CHECKS = {"16 bits": check_16_bits, "outer": check_outer, "8 bits": check_8_bits}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "16 bits": ("16 bits", {}),
    "16 bits, float16, transposed": ("16 bits", {"dtype": "float16", "transposed": True}),
    "16 bits, one block of depth": ("16 bits", {"depth": 8, "columns": 136}),
    "16 bits, groups in the middle": ("16 bits", {"sizes": (3, 70, 0, 1), "first": 77}),
    "16 bits, wrong sizes": ("16 bits", {"sizes": (-5, 150, 2**31 - 1, 2**31 - 1)}),
    "16 bits, no rows": ("16 bits", {"sizes": (0, 0)}),
    # Whole blocks of the depth.
    "16 bits, bias": (
        "16 bits",
        {"bias": True, "depth": 192, "columns": 400, "transposed": True},
    ),
    "16 bits, weighted bias": ("16 bits", {"bias": True, "weighted": True}),
    "16 bits, gated": (
        "16 bits",
        {"activation": moe.Swiglu(1.5, 40.0, 512.0), "columns": 304, "weighted": True},
    ),
    "16 bits, interleaved": (
        "16 bits",
        {"activation": "geglu", "interleaved": True, "columns": 264, "bias": True},
    ),
    "16 bits, no gate": ("16 bits", {"activation": "relu2", "columns": 264}),
    "outer": ("outer", {}),
    "outer, float16, narrow": ("outer", {"dtype": "float16", "left": 8, "right": 520}),
    "outer, groups in the middle": ("outer", {"sizes": (0, 1, 64, 65, 0), "first": 33}),
    "8 bits, blocks": ("8 bits", {}),
    "8 bits, blocks, e5m2, float32": ("8 bits", {"dtype": "float8_e5m2", "out": "float32"}),
    "8 bits, blocks, groups in the middle": ("8 bits", {"sizes": (3, 70, 0, 1), "first": 77}),
    "8 bits, blocks, wrong sizes": ("8 bits", {"sizes": (-5, 150, 2**31 - 1), "columns": 128}),
    "8 bits, rows": ("8 bits", {"blocked": False}),
    "8 bits, rows, float32, narrow": (
        "8 bits",
        {"blocked": False, "out": "float32", "columns": 144},
    ),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow("other waits"))])
@pytest.mark.parametrize("case", CASES)
def test_values(case, seed):
    check, settings = CASES[case]
    CHECKS[check](seed, **settings)


# What is changed in a kernel's source, and what it makes wrong: mostly when things happen. A wrong
# place or factor shows in `test_values`.
LOADED = "mbarrier.wait(full.index(stage), count // STAGES & 1)"
EMPTY = "mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)"
FAULTS: dict[str, tuple[str, str, str]] = {
    "16 bits: loads do not wait": ("16 bits", EMPTY, "pass"),
    "16 bits: loads wait for the other phase": ("16 bits", EMPTY, EMPTY.replace(" ^ 1", "")),
    "16 bits: products do not wait for loads": ("16 bits", LOADED, "pass"),
    "16 bits: a running product's buffer is released": (
        "16 bits",
        "empty.index((count + STAGES - 1) % STAGES), count=1, pred=start > 0",
        "empty.index(count % STAGES), count=1, pred=start > 0",
    ),
    "16 bits: two products run when a buffer is released": (
        "16 bits",
        "warpgroup_mma_wait(1,",
        "warpgroup_mma_wait(2,",
    ),
    "16 bits: sums are read while they are made": (
        "16 bits",
        "total = warpgroup_mma_wait(0, deps=(total,))",
        "pass",
    ),
    "16 bits: sums go on in the next tile": ("16 bits", "use_acc=start > 0", "use_acc=True"),
    "16 bits: results are overwritten": (
        "16 bits",
        "mbarrier.wait(empty.index(STAGES + PART), turn & 1 ^ 1)",
        "pass",
    ),
    "16 bits: results are stored before they are there": (
        "16 bits",
        "mbarrier.wait(full.index(STAGES + part), turn & 1)",
        "pass",
    ),
    "16 bits: a half is never given back": (
        "16 bits",
        "mbarrier.arrive(empty.index(STAGES + part), count=1)",
        "pass",
    ),
    "16 bits: one half gives back for both": (
        "16 bits",
        "count=2 if i < STAGES else 1",
        "count=1",
    ),
    "16 bits: fewer bytes are expected": (
        "16 bits",
        "rows.block_type.nbytes + 2 * weights",
        "rows.block_type.nbytes + weights",
    ),
    "16 bits: the bias of another stage": (
        "16 bits, bias",
        "biases.index(last)",
        "biases.index((last + 1) % STAGES)",
    ),
    "16 bits: a bias with every block of depth": ("16 bits, bias", "block, pred=is_last", "block"),
    "8 bits: loads do not wait": ("8 bits, blocks", EMPTY, "pass"),
    "8 bits: products do not wait for loads": ("8 bits, blocks", LOADED, "pass"),
    "8 bits: a running product's buffer is released": (
        "8 bits, blocks",
        "empty.index((count + STAGES - 1) % STAGES), count=1, pred=block > 0",
        "empty.index(count % STAGES), count=1, pred=block > 0",
    ),
    "8 bits: the last buffer is not given back": (
        "8 bits, blocks",
        "mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)\n",
        "pass\n",
    ),
    "8 bits: scales are not waited for": (
        "8 bits, blocks",
        "count=1 + 32 if BLOCKED else 1",
        "count=1",
    ),
    "8 bits: scales arrive before they are there": (
        "8 bits, blocks",
        "                _copy(buffers[3].index(stage), row_scales_ptr + row_at)\n"
        "                async_copy.mbarrier_arrive(ready, increment_count=False)\n",
        "                async_copy.mbarrier_arrive(ready, increment_count=False)\n"
        "                _copy(buffers[3].index(stage), row_scales_ptr + row_at)\n",
    ),
    "8 bits: a block leaves while the next is written": (
        "8 bits, blocks",
        "tma.store_wait(MADE - 1)",
        "tma.store_wait(MADE)",
    ),
    "8 bits: a block leaves unfenced": (
        "8 bits, blocks",
        "    made.store(block.to(made.dtype))\n    fence_async_shared()\n",
        "    made.store(block.to(made.dtype))\n",
    ),
    "8 bits: the end does not wait for stores": ("8 bits, blocks", "tma.store_wait(0)", "pass"),
}
MOST_SEEDS = 4


@pytest.mark.sampled(2, 13)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault):
    """Each planted fault is found: by a wrong result, or as what hardware does not define."""
    case, old, new = FAULTS[fault]
    check, settings = CASES[case]
    for seed in range(MOST_SEEDS):
        try:
            CHECKS[check](seed, [(old, new)], **settings)
        except (AssertionError, gluon.Fault, IndexError):
            return
    pytest.fail("not found")
