"""Checks an implementation's results; none is timed before they are right.

They are compared with those of the same case by `implementation="xla"`: integers and moves bit for
bit, sums within the tolerances of `triax.testing`. Matmuls are compared with dense ones, a group at
a time, because `jax.lax.ragged_dot` can want more memory than a GPU has.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.cases import OPS, Case, Inputs
from triax.testing import TOLERANCES

_EXACT = ("permute", "permute+plan", "sort_chunks", "sort_chunks_grad")
_TINY = np.finfo(np.float32).tiny


def problem(case: Case, inputs: Inputs, outputs: Any, wanted: Any = None) -> str | None:
    """What is wrong with the outputs of a case, or None; `wanted` is what `expected` gives."""
    shape_of = lambda tree: str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree))
    got, want = shape_of(outputs), shape_of(jax.eval_shape(_reference(case), inputs))
    if got != want:
        return f"wrong: the outputs are {got}, and should be {want}"
    found = _errors(case.unnamed, inputs, outputs, wanted)
    for number, (output, errors) in enumerate(zip(jax.tree.leaves(outputs), found, strict=True)):
        if _is_exact(case, output):
            if errors:
                return f"wrong: {errors:.0f} elements of output {number} differ"
            continue
        limit = _limit(case, output)
        worst, rms = errors
        if not (worst <= limit and rms <= limit / 3):
            return (
                f"wrong: output {number} has errors up to {worst:.3g}, {rms:.3g} in the mean; "
                f"the limits are {limit:.3g} and {limit / 3:.3g}"
            )
    return None


def expected(case: Case, inputs: Inputs) -> Any:
    """The right outputs of a case, for outputs of several to be compared with."""
    return jax.jit(_reference(case))(inputs)


def _reference(case: Case) -> Any:
    return case.program(_dot_by_group if OPS[case.op].matmuls else "xla")


def _dot_by_group(rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array) -> jax.Array:
    row = jnp.arange(rows.shape[0])[:, None]

    @jax.checkpoint
    def multiply(matrix: jax.Array, size: jax.Array, end: jax.Array) -> jax.Array:
        inside = (row >= end - size) & (row < end)
        return jnp.where(inside, rows @ matrix, 0)

    # A sum, of which autodiff keeps nothing, as a choice between two would.
    add = lambda out, group: (out + multiply(*group), None)
    out = jnp.zeros((rows.shape[0], matrices.shape[2]), rows.dtype)
    return jax.lax.scan(add, out, (matrices, group_sizes, jnp.cumsum(group_sizes)))[0]


def _limit(case: Case, output: Any) -> float:
    """For sums of a token's rows in the output's dtype, and of columns or rows in float32.

    A matmul's results are rounded to the case's dtype on their way, even to a float32 output.
    """
    op = OPS[case.op]
    terms = max(case.hidden, case.rows if op.matmuls else 0)
    rounding = TOLERANCES[case.dtype if op.matmuls else output.dtype.name]
    if op.matmuls != 1:  # the sum over a token's rows
        rounding *= math.sqrt(case.top_k)
    return rounding + TOLERANCES["float32"] * math.sqrt(terms)


def _is_exact(case: Case, output: Any) -> bool:
    return case.op in _EXACT or not jnp.issubdtype(output.dtype, jnp.floating)


@functools.partial(jax.jit, static_argnums=0)
def _errors(case: Case, inputs: Inputs, outputs: Any, wanted: Any) -> list[Any]:
    """For each output how many elements differ; or the largest and the mean error, over the
    largest magnitude. The reference need not be kept: XLA computes a move as it compares it."""
    found: list[Any] = []
    wants = jax.tree.leaves(_reference(case)(inputs) if wanted is None else wanted)
    for got, want in zip(jax.tree.leaves(outputs), wants, strict=True):
        if _is_exact(case, got):
            bits = lambda a: jax.lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}")
            found.append(jnp.sum(bits(got) != bits(want), dtype=jnp.float32))
        else:
            found.append(relative_errors(got, want))
    return found


def relative_errors(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest and the root mean square error of floats, over the largest magnitude of `want`.

    In float32, or in the wider dtype of the two; not finite where the arrays are not.
    """
    wide = max((np.dtype("float32"), got.dtype, want.dtype), key=lambda dtype: dtype.itemsize)
    scale = jnp.maximum(jnp.max(jnp.abs(want.astype(wide))), _TINY)
    error = jnp.abs(got.astype(wide) - want.astype(wide)) / scale
    return jnp.max(error), jnp.sqrt(jnp.mean(error * error))
