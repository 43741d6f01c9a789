"""Whether an implementation's results are right: asked before its speed is measured.

They are compared with those of the same case by `implementation="xla"`: integers and moves bit for
bit, sums within the tolerances of `triax.testing`. Moves treat all columns alike, so they are
compared some columns at a time, which takes little memory beside arrays that fill it. Matmuls are
compared with dense ones, a group at a time, because `jax.lax.ragged_dot` can want more memory than
a GPU has.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.bench.cases import OPS, Case, Inputs
from triax.testing import TOLERANCES

_PARTS = 8
_EXACT = ("permute", "permute+plan", "sort_chunks", "sort_chunks_grad")
_WITH_COLUMNS = ("x", "rows", "gradient")


def problem(case: Case, inputs: Inputs, outputs: Any) -> str | None:
    """What is wrong with the outputs of a case, or None."""
    shape_of = lambda tree: jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree)
    got, want = shape_of(outputs), shape_of(jax.eval_shape(_reference(case), inputs))
    if str(got) != str(want):
        return f"wrong: the outputs are {got}, and should be {want}"
    cut = not OPS[case.op].matmuls and case.hidden % _PARTS == 0 and {*inputs} & {*_WITH_COLUMNS}
    parts = _PARTS if cut else 1
    found = [_compare(case.unnamed, parts, inputs, outputs, part) for part in range(parts)]
    for number, output in enumerate(jax.tree.leaves(outputs)):
        errors, expected = zip(*(both[number] for both in found), strict=True)
        if errors[0] is None:  # without columns, it is a sum over those of the inputs
            errors = (_errors(case, output, sum(expected)),)
        worst, squares, largest = np.asarray(errors, np.float64).T
        if _is_exact(case, output):
            if differ := worst.sum():
                return f"wrong: {differ:.0f} elements of output {number} differ"
            continue
        scale = max(largest.max(), float(np.finfo(np.float32).tiny))
        rms = math.sqrt(squares.sum() / output.size) / scale
        limit = _limit(case, output)
        if not (worst.max() / scale <= limit and rms <= limit / 3):
            return (
                f"wrong: output {number} has errors up to {worst.max() / scale:.3g}, {rms:.3g} in "
                f"the mean; the limits are {limit:.3g} and {limit / 3:.3g}"
            )
    return None


def _reference(case: Case) -> Any:
    return case.program(_dot_by_group if OPS[case.op].matmuls else "xla")


def _dot_by_group(rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array) -> jax.Array:
    row = jnp.arange(rows.shape[0])[:, None]

    @jax.checkpoint
    def multiply(out: jax.Array, group: Any) -> tuple[jax.Array, None]:
        matrix, size, end = group
        inside = (row >= end - size) & (row < end)
        return jnp.where(inside, rows @ matrix, out), None

    out = jnp.zeros((rows.shape[0], matrices.shape[2]), rows.dtype)
    return jax.lax.scan(multiply, out, (matrices, group_sizes, jnp.cumsum(group_sizes)))[0]


def _limit(case: Case, output: Any) -> float:
    """For sums of a token's rows in the output's dtype, and of columns or rows in float32.

    A matmul's results are rounded to the case's dtype on their way, also into a float32.
    """
    op = OPS[case.op]
    terms = max(case.hidden, case.tokens * case.top_k if op.matmuls else 0)
    rounding = TOLERANCES[case.dtype if op.matmuls else output.dtype.name]
    if op.matmuls != 1:  # the sum over a token's rows
        rounding *= math.sqrt(case.top_k)
    return rounding + TOLERANCES["float32"] * math.sqrt(terms)


def _is_exact(case: Case, output: Any) -> bool:
    return case.op in _EXACT or not jnp.issubdtype(output.dtype, jnp.floating)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare(case: Case, parts: int, inputs: Inputs, outputs: Any, part: Any) -> Any:
    """For each output its errors in some columns and None; or None and what is to be summed."""
    width = case.hidden // parts
    cut = lambda a: jax.lax.dynamic_slice_in_dim(a, part * width, width, axis=1)
    if parts > 1:
        inputs = {name: cut(a) if name in _WITH_COLUMNS else a for name, a in inputs.items()}
    expected = jax.tree.leaves(_reference(case)(inputs))
    pairs = []
    for got, want in zip(jax.tree.leaves(outputs), expected, strict=True):
        if got.shape != want.shape:
            pairs.append((_errors(case, cut(got), want), None))
        elif parts == 1 or _is_exact(case, got):
            pairs.append((_errors(case, got, want), None))
        else:
            pairs.append((None, want))
    return pairs


@functools.partial(jax.jit, static_argnums=0)
def _errors(case: Case, got: jax.Array, want: jax.Array) -> jax.Array:
    """The largest error, the squares' sum, the largest magnitude; or how many elements differ."""
    if _is_exact(case, got):
        if jnp.issubdtype(got.dtype, jnp.floating):
            as_bits = functools.partial(
                jax.lax.bitcast_convert_type, new_dtype=f"uint{8 * got.dtype.itemsize}"
            )
            got, want = as_bits(got), as_bits(want)
        return jnp.stack([jnp.sum(got != want, dtype=jnp.float32), 0, 0])
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    error = jnp.abs(got - want)
    return jnp.stack([jnp.max(error), jnp.sum(error * error), jnp.max(jnp.abs(want))])
