"""`sort_chunks_by_index`: checks its arguments and calls the op."""

from __future__ import annotations

from triax.moe.chunk_sort import arguments, ops
from triax.moe.chunk_sort.reference import Sorted
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


def sort_chunks_by_index(
    x: Array,
    split_sizes: Array,
    sorted_indices: Array,
    probs: Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> Sorted:
    """Cuts the rows of `x` into chunks and reorders the chunks.

        x = jnp.arange(5.0)[:, None]
        out = moe.sort_chunks_by_index(x, jnp.array([2, 1, 2]), jnp.array([1, 0, 2]))
        out.rows[:, 0]  # [2., 0., 1., 3., 4.]

    Chunk i of `x` is the `split_sizes[i]` rows after chunk i - 1, and chunk j of the output is
    chunk `sorted_indices[j]` of `x`. Rows past the last chunk stay where they are. Expert
    parallelism needs this after an all-to-all, which delivers rows by (rank, expert) when they are
    needed by (expert, rank), and again before the all-to-all back.

    Rows and probs are copied bit for bit. So are their gradients, which move the other way and keep
    the dtypes of `x` and `probs`. Equal inputs give equal outputs in every run.

    Sizes and indices are values on the device and cannot be checked. If they are wrong, rows are
    misplaced, but no memory outside of the arrays is touched: a negative size is an empty chunk;
    chunks end at the last row of `x`; an index outside [0, chunks) is an empty output chunk; output
    chunks past the last row are cut off. In the gradient, a chunk named by several output chunks
    gets the gradient of the first, and a chunk named by none gets the gradient of its own rows.

    Args:
      x: [tokens, hidden], any dtype. At most 2**31 - 1 tokens.
      split_sizes: integer [chunks].
      sorted_indices: integer [chunks], a permutation of 0 to chunks - 1.
      probs: float [tokens], moved with the rows, or None.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      `Sorted`: rows [tokens, hidden] and probs [tokens], in the dtypes of `x` and `probs`.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    operands = arguments.checked(
        x, split_sizes, sorted_indices, probs, implementation=implementation
    )
    return ops.sort_chunks(*operands, implementation)
