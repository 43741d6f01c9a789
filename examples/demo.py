"""Shows what Triax does, on any machine, with real tokens and through Triton kernels.

The tokens are scikit-learn's 1,797 handwritten digits, 64 pixels each.

1. Four ranks hold them in uneven parts, a small router picks one of ten experts for each, and
   every rank has put its own tokens into expert order: 40 chunks by (rank, expert), as an
   all-to-all delivers them. Experts want them by (expert, rank). The demo sorts the chunks, sorts
   them back, and takes the gradient through it.
2. Each token goes to its two best experts: to its rows and back, with weights, and the gradient.
   All of both is compared with NumPy, bit for bit.
3. What XLA is given when the same functions are lowered for a GPU.
4. A mixture of experts learns to read the digits.

    python examples/demo.py        # writes build/demo/chunks.png, training.png and ribbons.svg
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pictures
import train
from sklearn.datasets import load_digits

import triax
from triax import moe
from triax.emitting import reading
from triax.errors import MissingDependencyError

NUM_EXPERTS = 10
TOKENS_OF_RANK = (612, 301, 497, 387)  # uneven, as in life
TOP_K = 2
ALIGN_SIZE = 16  # matmuls want each expert's rows to be a multiple of this
PICTURES = Path(__file__).resolve().parent.parent / "build" / "demo"


def main() -> None:
    device = jax.devices()[0]
    implementation = "triton" if device.platform in ("gpu", "cuda") else "interpret"
    where = "compiled" if implementation == "triton" else "in Triton's interpreter"
    print(f"triax {triax.__version__}, jax {jax.__version__}, on {device.device_kind}")
    print(f"The kernels run {where}.")

    sort_chunks_and_back(implementation)
    route_and_return(implementation)
    show_what_xla_gets()
    learn_the_digits()


# --- 1. the chunk sort ------------------------------------------------------------------
# All functions timed below are ordinary JAX: jit, grad, scan, vmap and shard_map work.


def sort_chunks_and_back(implementation):
    tokens, probs, sizes, indices = tokens_by_rank_and_expert()
    print(f"\n1. {len(tokens)} tokens of {tokens.shape[1]} floats in {len(sizes)} chunks")
    for rank, row in enumerate(sizes.reshape(-1, NUM_EXPERTS)):
        print(
            f"  rank {rank}: {row.sum():4} tokens, for each expert "
            + " ".join(f"{n:3}" for n in row)
        )

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

    order = order_by_numpy(sizes, indices)
    print("  Against NumPy, bit for bit:")
    check("tokens in expert order", sorted_.rows, tokens[order])
    check("their probs", sorted_.probs, probs[order])
    check("tokens, there and back", returned.rows, tokens)
    check("probs, there and back", returned.probs, probs)
    check("gradient of the tokens", d_tokens, weights[np.argsort(order)])
    drawn = tokens, np.asarray(sorted_.rows), sizes, indices, TOKENS_OF_RANK
    path = PICTURES / "chunks.png"
    pictures.draw_chunks(path, *drawn)
    pictures.draw_ribbons(path.with_name("ribbons.svg"), *drawn)  # docs/pictures has a copy
    print(f"  The picture is {os.path.relpath(path)}")


def tokens_by_rank_and_expert():
    """Tokens [1797, 64] and probs [1797] by (rank, expert), the chunks' sizes, and their order."""
    tokens, scores = tokens_and_scores()
    expert = scores.argmax(1)
    probs = scores.max(1)

    rank = np.repeat(np.arange(len(TOKENS_OF_RANK)), TOKENS_OF_RANK)
    chunk = rank * NUM_EXPERTS + expert
    arrival = np.argsort(chunk, kind="stable")
    sizes = np.bincount(chunk, minlength=len(TOKENS_OF_RANK) * NUM_EXPERTS).astype(np.int32)
    # Output chunk (expert, rank) is input chunk (rank, expert).
    indices = np.arange(len(sizes), dtype=np.int32).reshape(-1, NUM_EXPERTS).T.reshape(-1)
    return tokens[arrival], probs[arrival], sizes, indices


def tokens_and_scores():
    """The digits [1797, 64], and a router's logits for each of the experts."""
    digits = load_digits()
    tokens = digits.data.astype(np.float32)
    # The router: how near a token is to the mean image of each digit.
    means = np.stack([tokens[digits.target == expert].mean(0) for expert in range(NUM_EXPERTS)])
    scores = np.exp(-((tokens[:, None] - means) ** 2).mean(-1) / 4)
    return tokens, (scores / scores.sum(1, keepdims=True)).astype(np.float32)


def order_by_numpy(sizes, indices):
    """For each row of the output, its row in the input: slices put one after another."""
    ends = np.cumsum(sizes)
    return np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in indices])


# --- 2. plan, permute, unpermute ---------------------------------------------------------


def route_and_return(implementation):
    tokens, scores = tokens_and_scores()
    experts = np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)
    # Weights in whole 256ths, and gradients in whole numbers, make every product and sum below
    # exact: then there is one right answer, in whatever order a machine adds.
    weights = np.round(np.take_along_axis(scores, experts, axis=1) * 256) / np.float32(256)
    d_out = np.random.default_rng(0).integers(0, 8, tokens.shape).astype(np.float32)
    kwargs = {"implementation": implementation}

    @jax.jit
    def to_experts(tokens, weights):
        plan = moe.make_plan(experts, NUM_EXPERTS, align_size=ALIGN_SIZE, **kwargs)
        return plan, moe.permute(tokens, plan, weights=weights, **kwargs)

    @jax.jit
    def there_and_back(tokens, weights):
        plan, permuted = to_experts(tokens, weights)
        number = jnp.repeat(
            jnp.arange(1.0, NUM_EXPERTS + 1), plan.group_sizes, total_repeat_length=plan.num_rows
        )
        rows = permuted.rows * number[:, None]  # the expert: multiplies by its number
        return moe.unpermute(rows, plan, weights, **kwargs)

    @jax.jit
    def gradients(tokens, weights):
        return jax.vjp(there_and_back, tokens, weights)[1](d_out)

    print(f"\n2. Every token to the {TOP_K} experts that it is nearest to, and back")
    plan, permuted = timed("to the experts", to_experts, tokens, weights)
    out = timed("there and back", there_and_back, tokens, weights)
    d_tokens, d_weights = timed("the gradients", gradients, tokens, weights)

    counts = np.bincount(experts.reshape(-1), minlength=NUM_EXPERTS)
    sizes = -(-counts // ALIGN_SIZE) * ALIGN_SIZE
    pairs = np.argsort(experts.reshape(-1), kind="stable")  # (token, choice) by expert
    starts = zip(np.cumsum(sizes) - sizes, counts, strict=True)
    filled = np.concatenate([np.arange(start, start + count) for start, count in starts])
    rows = np.zeros((plan.num_rows, tokens.shape[1]), np.float32)
    row_weights = np.zeros(plan.num_rows, np.float32)
    rows[filled], row_weights[filled] = tokens[pairs // TOP_K], weights.reshape(-1)[pairs]
    number = (experts + 1).astype(np.float32)
    scale = (weights * number).sum(1, keepdims=True)
    print("  Against NumPy, bit for bit:")
    check("rows of each expert", plan.group_sizes, sizes.astype(np.int32))
    check("tokens in expert order", permuted.rows, rows)
    check("their weights", permuted.weights, row_weights)
    check("tokens, there and back", out, tokens * scale)
    check("gradient of the tokens", d_tokens, d_out * scale)
    check("gradient of the weights", d_weights, number * (tokens * d_out).sum(1, keepdims=True))


# --- 3. the program for a GPU ------------------------------------------------------------


def show_what_xla_gets():
    """Lowers the ops and their gradients for CUDA and lists the calls. It needs no GPU."""
    # Without a GPU, compile for an H100 or H200.
    os.environ.setdefault("TRIAX_CUDA_ARCH", "90")
    print("\n3. The same and its gradients, lowered for CUDA, is these calls to XLA:")
    tokens, probs, sizes, indices = tokens_by_rank_and_expert()

    def sort(tokens):
        return moe.sort_chunks_by_index(tokens, sizes, indices, probs)

    def route(tokens, experts, weights):
        plan = moe.make_plan(experts, NUM_EXPERTS, align_size=ALIGN_SIZE)
        return moe.unpermute(moe.permute(tokens, plan), plan, weights)

    def forward_and_backward(tokens, experts, weights):
        sorted_, pull = jax.vjp(sort, tokens)
        routed, pull_routed = jax.vjp(route, tokens, experts, weights)
        return pull(sorted_), pull_routed(routed)

    pairs = (len(tokens), TOP_K)
    arguments = tokens, np.zeros(pairs, np.int32), np.ones(pairs, np.float32)
    try:
        traced = jax.jit(forward_and_backward).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    except MissingDependencyError as error:
        print(f"  This part needs `jax-cuda13-plugin`, though no GPU. {error}")
        return
    for call in reading.triton_calls(lowered):
        grid = " | ".join("×".join(map(str, g)) for g in call.grid)
        print(f"  {call.kernel}")
        print(f"    target {call.target}, {len(call.opaque)} bytes, aliases {dict(call.aliases)}")
        print(f"    grid {grid}, config {' | '.join(call.config)}")


# --- 4. training -------------------------------------------------------------------------


def learn_the_digits():
    print("\n4. A mixture of experts learns to read the digits")
    start = time.perf_counter()
    history = train.train()
    print(f"  {len(history.loss)} steps in {time.perf_counter() - start:.1f} s")
    print(f"  {history.accuracy:.1%} of {train.NUM_HELD_OUT} held-out images are classified right")
    if history.accuracy < 0.95:
        raise SystemExit("It should be above 95 %.")
    path = PICTURES / "training.png"
    pictures.draw_training(path, history)
    print(f"  The loss and the load of the experts are in {os.path.relpath(path)}")


# --- helpers -----------------------------------------------------------------------------


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


if __name__ == "__main__":
    main()
