"""Serving and training with the same bits: log-probabilities that differ by exactly 0.

    python examples/same_bits.py

Reinforcement learning samples tokens in one program and trains on them in another. If the two
compute other log-probabilities, the policy that is trained is not the one that acted. Here prompts
are run at once, tokens are sampled one at a time from a cache, and a training step runs whole
sequences, with the experts that serving chose (`moe.Routing`). Under `triax.same_bits` a row of
`moe.ragged_dot`, and so of `moe.feed_forward`, has the same bits in all three on a GPU. The rest of
a model must have them, too:

- The matmuls of `decoder.py`, cuBLAS's, take an order of sums by their number of rows. Here they
  are `moe.ragged_dot` with one group.
- Attention, norms and log-probabilities are kernels with a program for each row, whose loops go
  over the keys or the vocabulary from their beginning, in blocks of one size.
- Between layers tokens are float32: XLA may round bfloat16 less often in one program than in
  another.

Plain JAX, as on a CPU, promises no order of sums: there the difference may be a rounding error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import decoder  # the file beside this one
import jax
import jax.numpy as jnp
import random_checkpoint
import triton
import triton.language as tl
from comparing import on_gpu

import triax
from triax import moe

Array = jax.Array
Params = dict[str, Any]
BLOCK = 64


@triton.jit
def norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    x = tl.load(x_ptr + tl.program_id(0) * WIDTH + at, mask=mask, other=0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    out = x * tl.load(weight_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) * WIDTH + at, out, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def attention_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    first_ptr,
    tokens,
    length,
    out_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # by so many heads
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM)
    sequence = token // tokens
    position = tl.load(first_ptr + sequence) + token % tokens
    q = tl.load(q_ptr + (token * HEADS + head) * DIM + d).to(tl.float32)
    base = (sequence * (HEADS // SHARED) + head // SHARED) * length
    most = tl.load(sinks_ptr + head)  # -inf where the model has none
    total = tl.where(most == -float("inf"), 0.0, 1.0)
    out = tl.zeros((DIM,), tl.float32)
    for start in range(0, position + 1, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = (key <= position) & (position - key < WINDOW)
        at = (base + key)[:, None] * DIM + d[None, :]
        k = tl.load(keys_ptr + at, mask=seen[:, None], other=0).to(tl.float32)
        v = tl.load(values_ptr + at, mask=seen[:, None], other=0).to(tl.float32)
        scores = tl.where(seen, tl.sum(q[None, :] * k, 1) * DIM**-0.5, -float("inf"))
        now = tl.maximum(tl.maximum(most, tl.max(scores)), -1e30)
        shares = tl.exp(scores - now)
        total = total * tl.exp(most - now) + tl.sum(shares)
        out = out * tl.exp(most - now) + tl.sum(shares[:, None] * v, 0)
        most = now
    tl.store(out_ptr + (token * HEADS + head) * DIM + d, out / total)


@triton.jit
def log_prob_kernel(logits_ptr, token_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = logits_ptr + tl.program_id(0) * WIDTH
    most, total = -float("inf"), 0.0
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(row + at, mask=at < WIDTH, other=-float("inf"))
        now = tl.maximum(most, tl.max(logits))
        total = total * tl.exp(most - now) + tl.sum(tl.exp(logits - now))
        most = now
    chosen = tl.load(row + tl.load(token_ptr + tl.program_id(0)))
    tl.store(out_ptr + tl.program_id(0), chosen - most - tl.log(total))


def with_gradient_of(plain: Callable[..., Array]) -> Callable[..., Any]:
    """Gives a kernel the gradient of plain JAX; keywords are numbers."""

    def of(run: Callable[..., Array]) -> Callable[..., Array]:
        @functools.wraps(run)
        def call(*args: Any, **sizes: Any) -> Array:
            function, reference = (functools.partial(of, **sizes) for of in (run, plain))
            function = jax.custom_vjp(function)
            forward = lambda *kept: (function(*kept), kept)
            function.defvjp(forward, lambda kept, d_out: jax.vjp(reference, *kept)[1](d_out))
            return function(*args)

        return call

    return of


def plain_norm(x: Array, weight: Array, *, eps: float) -> Array:
    x = x.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * weight).astype(weight.dtype)


@with_gradient_of(plain_norm)
def norm(x: Array, weight: Array, *, eps: float) -> Array:
    """The root mean square norm of the last dimension, in the dtype of the weight."""
    width = x.shape[-1]
    return triax.triton_call(
        x,
        weight,
        kernel=norm_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, weight.dtype),
        grid=x.size // width,
        eps=eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )


def plain_attention(
    q: Array, keys: Array, values: Array, sinks: Array, first: Array, *, window: int
) -> Array:
    (batch, tokens, heads, dim), (key_heads, length) = q.shape, keys.shape[1:3]
    q = q.reshape(batch, tokens, key_heads, -1, dim)
    scores = jnp.einsum("btkgd,bkld->bkgtl", q, keys, preferred_element_type=jnp.float32)
    behind = first[:, None, None] + jnp.arange(tokens)[:, None] - jnp.arange(length)
    seen = ((behind >= 0) & (behind < window))[:, None, None]
    scores = jnp.where(seen, scores * dim**-0.5, -jnp.inf)
    sinks = jnp.broadcast_to(sinks.reshape(key_heads, -1, 1, 1), (*scores.shape[:-1], 1))
    shares = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), axis=-1)[..., :-1]
    return jnp.einsum("bkgtl,bkld->btkgd", shares.astype(q.dtype), values).reshape(
        batch, tokens, heads, dim
    )


@with_gradient_of(plain_attention)
def attention(
    q: Array, keys: Array, values: Array, sinks: Array, first: Array, *, window: int
) -> Array:
    """q [batch, tokens, heads, dim], of which each sequence's first has position `first`, over
    keys and values [batch, key heads, length, dim]; `sinks` [heads] take shares of nothing."""
    batch, tokens, heads, dim = q.shape
    return triax.triton_call(
        q,
        keys,
        values,
        sinks,
        first,
        tokens,
        keys.shape[2],
        kernel=attention_kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch * tokens, heads),
        HEADS=heads,
        SHARED=heads // keys.shape[1],
        WINDOW=window,
        DIM=dim,
        BLOCK=BLOCK,
    )


def plain_log_prob(logits: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]


@with_gradient_of(plain_log_prob)
def log_prob(logits: Array, tokens: Array) -> Array:
    """The logarithm of each token's probability, [tokens], by its logits [tokens, vocabulary]."""
    return triax.triton_call(
        logits,
        tokens,
        kernel=log_prob_kernel,
        out_type=jax.ShapeDtypeStruct(tokens.shape, jnp.float32),
        grid=len(tokens),
        WIDTH=logits.shape[1],
        BLOCK=1024,
    )


def linear(weights: Params, name: str, x: Array, dtype: Any = None) -> Array:
    """As the decoder's, with an order of sums that does not depend on the number of tokens."""
    rows, bias = x.reshape(-1, x.shape[-1]), weights.get(f"{name}.bias")
    out = moe.ragged_dot(
        rows,
        weights[f"{name}.weight"][None],
        jnp.array([len(rows)]),
        bias=None if bias is None else bias[None],
        transpose_weights=True,
        preferred_element_type=dtype or x.dtype,
    )
    return out.reshape(*x.shape[:-1], -1)


def forward(
    config: decoder.Config,
    recipe: str | None,
    params: Params,
    cache: Params,
    tokens: Array,
    routings: list[moe.Routing] | None = None,
) -> tuple[Params, Array, list[moe.Routing]]:
    """Runs tokens [batch, tokens] that follow those in the cache, by experts as in `routings`.

    Returns the cache with them in it, the logits [batch, tokens, vocabulary], and each layer's
    routing.
    """
    (batch, count), first = tokens.shape, cache["length"]
    sequence, positions = jnp.arange(batch)[:, None], first[:, None] + jnp.arange(count)
    x = params["embedding"][tokens].astype(jnp.float32)
    cached, routed = {"keys": [], "values": [], "length": first + count}, []
    for index, (weights, window) in enumerate(zip(params["layers"], config.windows, strict=True)):
        rows = norm(x, weights["input_layernorm.weight"], eps=config.norm_eps)
        split = lambda x: x.reshape(batch, count, -1, config.head_dim)
        q, k, v = (split(linear(weights, f"self_attn.{name}_proj", rows)) for name in "qkv")
        if "self_attn.q_norm.weight" in weights:  # Qwen3
            q = norm(q, weights["self_attn.q_norm.weight"], eps=config.norm_eps)
            k = norm(k, weights["self_attn.k_norm.weight"], eps=config.norm_eps)
        q, k = (decoder.rotate(config, of, positions) for of in (q, k))
        keys = cache["keys"][index].at[sequence, :, positions].set(k)
        values = cache["values"][index].at[sequence, :, positions].set(v)
        sinks = weights.get("self_attn.sinks", jnp.full(q.shape[2], -jnp.inf)).astype(jnp.float32)
        mixed = attention(q, keys, values, sinks, first, window=window or keys.shape[2])
        x += linear(weights, "self_attn.o_proj", mixed.reshape(batch, count, -1))

        rows = norm(x, weights["post_attention_layernorm.weight"], eps=config.norm_eps)
        if routings is None:
            name = "mlp.router" if "mlp.router.weight" in weights else "mlp.gate"
            choice = linear(weights, name, rows, jnp.float32), weights["experts"], config.router
        else:
            choice = routings[index], weights["experts"]
        done = moe.feed_forward(rows, *choice, recipe=recipe)
        x += done.tokens
        routed.append(done.routing)
        cached["keys"].append(keys)
        cached["values"].append(values)
    x = norm(x, params["norm"], eps=config.norm_eps)
    return cached, linear(params, "head", x, jnp.float32), routed


run = jax.jit(forward, static_argnums=(0, 1))


def serve(
    config: decoder.Config, recipe: str | None, params: Params, prompts: Array, steps: int
) -> tuple[Array, Array, list[moe.Routing]]:
    """Samples `steps` tokens after prompts [batch, length], one at a time.

    Returns the sequences, the sampled tokens' log-probabilities [batch, steps], and the routing of
    all tokens but the last ones, which were not run.
    """
    batch, length = prompts.shape
    cache = decoder.make_cache(config, params, batch, length + steps)
    tokens, sampled, found, routings = prompts, [prompts], [], []
    for key in jax.random.split(jax.random.key(1), steps):
        cache, logits, routed = run(config, recipe, params, cache, tokens)
        tokens = jax.random.categorical(key, logits[:, -1]).astype(jnp.int32)
        found.append(jax.jit(log_prob)(logits[:, -1], tokens))
        routings.append(routed)
        tokens = tokens[:, None]
        sampled.append(tokens)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *routings)
    return jnp.concatenate(sampled, axis=1), jnp.stack(found, axis=1), whole


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(
    config: decoder.Config,
    recipe: str | None,
    params: Params,
    sequences: Array,
    served: Array,
    advantages: Array,
    routings: list[moe.Routing],
) -> tuple[Array, Params]:
    """One step of a policy gradient, by the probabilities of `serve`.

    Returns the log-probabilities, as `served`, and the gradient of all weights but the experts'.
    """
    batch, steps = served.shape

    def loss(trained: Params) -> tuple[Array, Array]:
        layers = zip(trained["layers"], params["layers"], strict=True)
        whole = trained | {"layers": [ours | {"experts": of["experts"]} for ours, of in layers]}
        cache = decoder.make_cache(config, whole, batch, sequences.shape[1])
        _, logits, _ = forward(config, recipe, whole, cache, sequences[:, :-1], routings)
        logits, targets = logits[:, -steps:], sequences[:, -steps:]
        found = log_prob(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        found = found.reshape(batch, steps)
        return -jnp.mean(jnp.exp(found - served) * advantages), found

    without = lambda layer: {name: of for name, of in layer.items() if name != "experts"}
    trained = params | {"layers": [without(layer) for layer in params["layers"]]}
    gradient, found = jax.grad(loss, has_aux=True)(trained)
    return found, gradient


LARGER = {  # on a GPU, where few and many tokens take other kernels
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "sliding_window": 128,
}
CASES = {  # what experts are in: a model, and the layer's recipe
    "bfloat16": (random_checkpoint.TINY_QWEN3_MOE, None),
    "8 bits": (random_checkpoint.TINY_QWEN3_MOE, "rows"),
    "MXFP4": (random_checkpoint.TINY_GPT_OSS, None),
}


def difference(name: str, batch: int, length: int, steps: int) -> float:
    """The largest one of log-probabilities in serving and in training."""
    given, recipe = CASES[name]
    given = given | LARGER if on_gpu() else given
    config, params = decoder.load(random_checkpoint.draw(given, dtype="bfloat16"), given)
    prompts = jax.random.randint(jax.random.key(0), (batch, length), 0, given["vocab_size"])
    sequences, served, routings = serve(config, recipe, params, prompts, steps)
    advantages = jax.random.normal(jax.random.key(2), (batch, 1))
    trained, _ = train(config, recipe, params, sequences, served, advantages, routings)
    return float(jnp.max(jnp.abs(trained - served)))


def main() -> float:
    sizes, largest = (8, 320, 32) if on_gpu() else (2, 6, 3), 0.0
    for name in CASES:
        for is_same in (False, True) if on_gpu() else (True,):
            with triax.same_bits(is_same):
                off = difference(name, *sizes)
            without = "" if is_same else ", without `same_bits`"
            print(f"experts in {name}{without}: log-probabilities differ by at most {off:.1e}")
            largest = max(largest, off * is_same)
    return largest


if __name__ == "__main__":
    main()
