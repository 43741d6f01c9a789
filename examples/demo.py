"""Real tokens to their experts and back, through a Triton kernel, on whatever machine this is.

The tokens are scikit-learn's 1,797 handwritten digits, 64 pixels each. Four ranks hold them
in uneven parts, a small router picks one of ten experts for each, and every rank has put
its own tokens into expert order: 40 chunks by (rank, expert), as an all-to-all delivers
them. Experts want them by (expert, rank). The demo sorts the chunks, sorts them back, takes
the gradient through it, and compares all of it with NumPy, bit for bit. Then it shows what
XLA is given when the same function is lowered for a GPU.

    python examples/demo.py        # writes build/demo/chunks.png
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import triax
from triax import moe
from triax.bridge import inspect
from triax.bridge.errors import MissingDependencyError

NUM_EXPERTS = 10
TOKENS_OF_RANK = (612, 301, 497, 387)  # uneven, as in life
PICTURE = Path(__file__).resolve().parent.parent / "build" / "demo" / "chunks.png"


def main() -> None:
    device = jax.devices()[0]
    implementation = "triton" if device.platform in ("gpu", "cuda") else "interpret"
    where = "compiled" if implementation == "triton" else "in Triton's interpreter"
    print(f"triax {triax.__version__}, jax {jax.__version__}, on {device.device_kind}")
    print(f"The kernels run {where}.\n")

    tokens, probs, sizes, indices = tokens_by_rank_and_expert()
    print(f"{len(tokens)} tokens of {tokens.shape[1]} floats in {len(sizes)} chunks")
    for rank, row in enumerate(sizes.reshape(-1, NUM_EXPERTS)):
        print(
            f"  rank {rank}: {row.sum():4} tokens, for each expert "
            + " ".join(f"{n:3}" for n in row)
        )
    print()

    # --- the op -------------------------------------------------------------------
    # Everything below is an ordinary JAX function: jit, grad, scan, vmap and shard_map work.

    @jax.jit
    def to_experts(tokens, probs):
        return moe.sort_chunks_by_index(
            tokens, sizes, indices, probs, implementation=implementation
        )

    @jax.jit
    def to_ranks(rows, probs):
        return moe.sort_chunks_by_index(
            rows, sizes[indices], jnp.argsort(indices), probs, implementation=implementation
        )

    weights = np.random.default_rng(0).random(tokens.shape, np.float32)

    @jax.jit
    @jax.grad
    def gradient(tokens):
        return jnp.sum(weights * to_experts(tokens, probs).rows)

    sorted_ = timed("to the experts", to_experts, tokens, probs)
    returned = timed("and back", to_ranks, *sorted_)
    d_tokens = timed("the gradient", gradient, tokens)

    # --- the check ------------------------------------------------------------------

    order = order_by_numpy(sizes, indices)
    back = np.argsort(order)
    print("\nAgainst NumPy, bit for bit:")
    check("tokens in expert order", sorted_.rows, tokens[order])
    check("their probs", sorted_.probs, probs[order])
    check("tokens, there and back", returned.rows, tokens)
    check("probs, there and back", returned.probs, probs)
    check("gradient of the tokens", d_tokens, weights[back])

    show_what_xla_gets(tokens, probs, sizes, indices)
    draw(tokens, np.asarray(sorted_.rows), sizes, indices)
    print(f"\nThe picture is in {os.path.relpath(PICTURE)}")


def tokens_by_rank_and_expert():
    """Tokens [1797, 64] and probs [1797] by (rank, expert), the chunks' sizes, and their order."""
    digits = load_digits()
    tokens = digits.data.astype(np.float32)
    # The router: how near a token is to the mean image of each digit.
    means = np.stack([tokens[digits.target == expert].mean(0) for expert in range(NUM_EXPERTS)])
    scores = np.exp(-((tokens[:, None] - means) ** 2).mean(-1) / 4)
    expert = scores.argmax(1)
    probs = (scores.max(1) / scores.sum(1)).astype(np.float32)

    rank = np.repeat(np.arange(len(TOKENS_OF_RANK)), TOKENS_OF_RANK)
    chunk = rank * NUM_EXPERTS + expert
    arrival = np.argsort(chunk, kind="stable")
    sizes = np.bincount(chunk, minlength=len(TOKENS_OF_RANK) * NUM_EXPERTS).astype(np.int32)
    # Output chunk (expert, rank) is input chunk (rank, expert).
    indices = np.arange(len(sizes), dtype=np.int32).reshape(-1, NUM_EXPERTS).T.reshape(-1)
    return tokens[arrival], probs[arrival], sizes, indices


def order_by_numpy(sizes, indices):
    """For each row of the output, its row in the input: slices put one after another."""
    ends = np.cumsum(sizes)
    return np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in indices])


def timed(what, function, *args):
    """Runs a function twice, to tell the first call from the others."""
    print(f"  {what:15}", end="", flush=True)
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    first = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    again = time.perf_counter()
    print(f"first call {(first - start) * 1e3:8.1f} ms, then {(again - first) * 1e3:7.2f} ms")
    return result


def check(what, actual, expected):
    actual = np.asarray(actual)
    same = actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()
    print(f"  {what:24}{'equal' if same else 'DIFFERENT'}")
    if not same:
        raise SystemExit(f"{what}: the kernel and NumPy differ.")


def show_what_xla_gets(*arguments):
    """Lowers the sort and its gradient for CUDA and lists the calls. It needs no GPU."""
    # What to compile for where no GPU is here to be asked: an H100 or H200.
    os.environ.setdefault("TRIAX_CUDA_ARCH", "90")
    print("\nThe same function and its gradient, lowered for CUDA, is these calls to XLA:")

    def forward_and_backward(tokens, probs, sizes, indices):
        sort = lambda tokens: moe.sort_chunks_by_index(tokens, sizes, indices, probs)
        out, pull = jax.vjp(sort, tokens)
        return out, pull(out)

    try:
        traced = jax.jit(forward_and_backward).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    except MissingDependencyError as error:
        print(f"  This part needs `jax-cuda13-plugin`, though no GPU. {error}")
        return
    for call in inspect.describe(lowered):
        grid = " | ".join("×".join(map(str, g)) for g in call.grid)
        print(f"  {call.kernel}")
        print(f"    target {call.target}, {call.opaque_bytes} bytes, aliases {dict(call.aliases)}")
        print(f"    grid {grid}, config {' | '.join(call.config)}")


def draw(before, after, sizes, indices):
    """The tokens before and after, in their experts' colours, and where each chunk goes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    colors = np.array(matplotlib.colormaps["tab10"].colors)
    expert_before = np.repeat(np.arange(len(sizes)) % NUM_EXPERTS, sizes)
    expert_after = np.sort(expert_before)
    ends = np.cumsum(sizes)
    ends_after = np.cumsum(sizes[indices])
    total = len(before)

    figure, axes = plt.subplots(
        5, 1, figsize=(18, 10), sharex=True, height_ratios=[1, 3, 4, 3, 1], layout="constrained"
    )
    figure.get_layout_engine().set(hspace=0, h_pad=0.02)

    def paint(axis, rows, expert):
        # White where the pixel is off, the expert's colour where it is on.
        image = 1 - rows.T[:, :, None] / 16 * (1 - colors[expert])[None]
        axis.imshow(image, aspect="auto", extent=(0, total, 64, 0), interpolation="nearest")

    def thumbnails(axis, rows, expert, count=28):
        width = total / count
        for i in range(count):
            token = int((i + 0.5) * width)
            image = 1 - rows[token].reshape(8, 8, 1) / 16 * (1 - colors[expert[token]])
            axis.imshow(image, extent=(i * width, (i + 0.92) * width, 0, 1), aspect="auto")
        axis.set(ylim=(0, 1))

    thumbnails(axes[0], before, expert_before)
    paint(axes[1], before, expert_before)
    paint(axes[3], after, expert_after)
    thumbnails(axes[4], after, expert_after)

    for j, i in enumerate(indices):
        top = ends[i] - sizes[i], ends[i]
        bottom = ends_after[j] - sizes[i], ends_after[j]
        points = [(top[0], 1), (top[0], 0.5), (bottom[0], 0.5), (bottom[0], 0)]
        points += [(bottom[1], 0), (bottom[1], 0.5), (top[1], 0.5), (top[1], 1)]
        curve = [Curve.CURVE4] * 3
        codes = [Curve.MOVETO, *curve, Curve.LINETO, *curve]
        color = colors[i % NUM_EXPERTS]
        axes[2].add_patch(PathPatch(Curve(points, codes), facecolor=color, alpha=0.6, lw=0))
    axes[2].set(ylim=(0, 1))

    for axis in axes:
        axis.set(xlim=(0, total), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    start = 0
    for rank, count in enumerate(TOKENS_OF_RANK):
        axes[0].text(start + count / 2, 1.15, f"rank {rank}: {count} tokens", ha="center", size=13)
        if start:
            axes[1].axvline(start, color="black", lw=1.5)
        start += count
    for expert in range(NUM_EXPERTS):
        middle = np.flatnonzero(expert_after == expert).mean()
        axes[4].text(middle, -0.15, f"expert {expert}", ha="center", va="top", size=13)
    axes[0].set_title(
        "Tokens as ranks sent them (above) and as experts want them (below); "
        "every column is a token, every ribbon a chunk",
        size=15,
        pad=32,
    )
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
