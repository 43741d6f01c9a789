"""A gradient of weights in 8 bits, as recipes have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.products import put, sizes_of, zeros
from tests.moe import draws
from tests.moe.bounds import Near, matmul, rounded, sum_unit
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.plans.case import spans
from tests.moe.quantization.case import array_of, quantized
from triax.moe.products.quantized_outer_ops import outer_in_8_bits


def quantized_outer(rng: Rng, path: str) -> Case:
    """A gradient of weights in 8 bits."""
    num_rows, left, right, num_groups = sizes_of(rng, path)
    dtype = np.dtype(one_of(rng, ("float32", "bfloat16", "bfloat16")))
    kinds = [one_of(rng, ("float8_e4m3fn", "float8_e5m2")) for _ in range(2)]
    return outer_of(path, (num_rows, left, right, num_groups), dtype, kinds)


def outer_of(
    path: str,
    sizes: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    kinds: list[str],
    given: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """Of rows, both sides' columns and groups; `given` are sizes of all groups."""
    num_rows, left, right, num_groups = sizes
    call = (
        f"quantized_outer(left, right, sizes, dtypes={tuple(kinds)}, result_dtype='{dtype}', "
        "fast_sums=False, implementation=how)"
    )

    def draw(rng: Rng) -> Arrays:
        value_kind = one_of(rng, ("normal", "normal", "zeros", "rows"))
        arrays = {
            "left": draws.values(rng, (num_rows, left), dtype, value_kind),
            "right": draws.values(rng, (num_rows, right), dtype),
            "sizes": draws.group_sizes(rng, num_groups, num_rows),
        }
        if given:
            arrays["sizes"] = np.array(one_of(rng, given), np.int32)
        arrays["left"][:, rng.integers(left)] = 0
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        out = zeros(num_groups, left, right)
        for group, span in enumerate(spans(arrays["sizes"], num_rows)):
            count = span.stop - span.start
            if count > 0:
                sides = []
                for name, kind in zip(("left", "right"), kinds, strict=True):
                    part = arrays[name][span]
                    values, scales = quantized(part, kind, (count, 1), False)
                    numbers = array_of(values, (count, 1), part.shape).astype(np.float64) * scales
                    sides.append(Near(numbers, abs(numbers) * 2.0**-23))
                u = sum_unit(path, ml_dtypes.float8_e5m2)
                put(out, group, matmul(sides[0].T, sides[1], u, 128))
        return {"out": rounded(out, dtype)}

    names = {"quantized_outer": outer_in_8_bits}
    return Case("quantized_outer", path, call, ("out",), draw, expect, names=names)


OPS = (quantized_outer,)
