"""A decoder for gpt-oss and Qwen3-MoE: attention in plain JAX, the experts by Triax.

    python examples/decoder.py FOLDER --prompt 200006 1428 25 --steps 64

FOLDER is a checkpoint as Hugging Face has it: `config.json` and safetensors. Without one, weights
are random: those of a model of gpt-oss-20b's size on a GPU, of a tiny one elsewhere. Prints the
likeliest next tokens and, on a GPU, tokens a second and the share of the MoE layers.

    config, params = load(moe.Checkpoint(folder))  # activations have the embedding's dtype
    tokens = generate(config, params, [[1, 2, 3], [4, 5]], steps=16)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe

EXPERTS = P("expert")  # the mesh's axis that experts are spread over
Array = jax.Array
Named = Mapping[str, Any]
Params = dict[str, Any]
Cache = dict[str, Any]
Result = tuple[Cache, Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """What a program depends on besides shapes: static under `jax.jit`."""

    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...]  # of each layer: how many positions it sees, None for all
    frequencies: tuple[float, ...]  # of rotary embedding, in radians for each position
    rope_scale: float
    router: moe.Router
    mesh: Mesh | None = None  # whose axis "expert" the experts are spread over


class Stated(dict[str, Any]):
    """What `config.json` holds; looking up what it does not raises ValueError."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"The model's `config.json` has no `{key}`.")


def read_config(given: Named) -> Config:
    """Reads a `config.json` of gpt-oss or Qwen3-MoE; raises ValueError for anything else."""
    given = Stated(given)
    kind = given["model_type"]
    if kind == "gpt_oss":
        sliding = [t == "sliding_attention" for t in given["layer_types"]]
    elif kind == "qwen3_moe":
        sliding = [given["use_sliding_window"]] * given["num_hidden_layers"]
        if given["mlp_only_layers"] or given["decoder_sparse_step"] != 1:
            raise ValueError("Layers without experts (`mlp_only_layers`) are not supported.")
    else:
        raise ValueError(f"`model_type` must be gpt_oss or qwen3_moe; got {kind!r}.")
    if any(sliding) and not given["sliding_window"]:
        raise ValueError(f"`sliding_window` must be positive; got {given['sliding_window']}.")
    if len(sliding) != given["num_hidden_layers"]:
        raise ValueError("`layer_types` must have an entry for each of `num_hidden_layers`.")
    frequencies, rope_scale = rope(given)
    return Config(
        head_dim=given["head_dim"],
        norm_eps=given["rms_norm_eps"],
        windows=tuple(given["sliding_window"] if slides else None for slides in sliding),
        frequencies=tuple(map(float, frequencies)),
        rope_scale=rope_scale,
        router=moe.Router.from_config(given),
    )


def rope(given: Named) -> tuple[np.ndarray, float]:
    """The frequencies [head_dim / 2], and the factor of sines and cosines."""
    how = given.get("rope_parameters")  # as transformers 5 writes it
    how = how or {"rope_theta": given["rope_theta"], **(given["rope_scaling"] or {})}
    kind = how.get("rope_type") or how.get("type", "default")
    dim, base = given["head_dim"], how["rope_theta"]
    pairs = np.arange(dim // 2)
    frequencies = base ** (-2 * pairs / dim)
    if kind == "default":
        return frequencies, 1.0
    if kind != "yarn" or "mscale" in how:
        raise ValueError(f"Rotary embedding must be default or yarn without mscale; got {how}.")
    # YaRN (arXiv 2309.00071): pairs that turn at least `beta_fast` times over the positions of
    # pretraining stay, those that turn at most `beta_slow` times are slowed, others in between.
    positions, factor = how["original_max_position_embeddings"], how["factor"]
    turning = lambda times: dim * math.log(positions / (times * math.tau)) / (2 * math.log(base))
    low, high = turning(how.get("beta_fast", 32)), turning(how.get("beta_slow", 1))
    if how.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    scale = how.get("attention_factor") or 0.1 * math.log(factor) + 1
    return frequencies * (1 - slowed + slowed / factor), scale


def load(
    tensors: Named | str | Path, given: Named | None = None, mesh: Mesh | None = None
) -> tuple[Config, Params]:
    """Puts the weights on the device, or, if there is a mesh, on its devices, each of which gets a
    part of the experts: of a `moe.Checkpoint` or its folder, or of arrays by a
    checkpoint's names and what its `config.json` holds. Experts stay quantized, attention and
    routers are widened to the embedding's dtype. Raises ValueError for what is missing, or has
    another shape than `config.json` says."""
    tensors = moe.Checkpoint(tensors) if isinstance(tensors, (str, Path)) else tensors
    given = Stated(tensors.config if given is None else given)
    config, is_gpt_oss = read_config(given), given["model_type"] == "gpt_oss"
    linears = [f"self_attn.{name}_proj" for name in "qkvo"]
    router = "mlp.router" if is_gpt_oss else "mlp.gate"
    biased = linears if given.get("attention_bias", is_gpt_oss) else []
    own = ["input_layernorm", "post_attention_layernorm", *linears]
    own += [router, *(() if is_gpt_oss else ("self_attn.q_norm", "self_attn.k_norm"))]
    own = [*(f"{name}.weight" for name in own), *(f"{name}.bias" for name in biased)]
    own += ["mlp.router.bias", "self_attn.sinks"] if is_gpt_oss else []

    hidden, heads, dim = given["hidden_size"], given["num_attention_heads"], config.head_dim
    # transformers 5 writes Qwen3-MoE's under gpt-oss's name.
    is_local = is_gpt_oss or "num_local_experts" in given
    rows = {"q": heads * dim, "k": given["num_key_value_heads"] * dim, "o": hidden}
    rows = {f"self_attn.{name}_proj": size for name, size in (*rows.items(), ("v", rows["k"]))}
    rows[router] = given["num_local_experts" if is_local else "num_experts"]
    shapes = {f"{name}.weight": (size, hidden) for name, size in rows.items()}
    shapes |= {f"{name}.bias": (size,) for name, size in rows.items()}
    shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    shapes |= {"self_attn.o_proj.weight": (hidden, heads * dim), "self_attn.sinks": (heads,)}
    ends = "model.embed_tokens.weight", "lm_head.weight"
    shapes |= dict.fromkeys(ends, (given["vocab_size"], hidden))

    def tensor(name: str, of_layer: str = "") -> Array:
        if of_layer.removesuffix(".weight") in (*linears, router):
            made = moe.linear_from_checkpoint(tensors, name.removesuffix(".weight"), config=given)
            is_scaled = isinstance(made, moe.ScaledArray)
            array = jnp.asarray(made.astype(embedding.dtype) if is_scaled else made)
        elif name in tensors:
            array = jnp.asarray(tensors[name])
        else:
            raise ValueError(f"The checkpoint has no `{name}`, which its configuration asks for.")
        wanted = shapes.get(of_layer or name, (hidden,))
        if array.shape != wanted:
            raise ValueError(
                f"`{name}` must be of the configuration's shape {wanted}; got {array.shape}."
            )
        return jax.device_put(array, placed(P()))

    def placed(spec: P) -> NamedSharding | None:
        return None if mesh is None else NamedSharding(mesh, spec)

    def layer(index: int) -> Params:
        prefix = f"model.layers.{index}."
        names = {n for n in tensors if n.startswith(prefix) and ".experts." not in n}
        known = {prefix + name for name in own}
        split = {n: n.removeprefix(prefix).rpartition(".") for n in names - known}
        # Those of quantized weights, and GPTQ's biases of layers that have none.
        own_of = {n: end for n, (of, _, end) in split.items() if of in (*linears, router)}
        fine = {n for n, end in own_of.items() if end != "bias" or not np.any(tensors[n])}
        if unknown := sorted(names - known - fine):
            raise ValueError(
                f"The checkpoint has `{unknown[0]}`, which its configuration does not ask for."
            )
        found = {name: tensor(prefix + name, name) for name in own}
        experts = moe.Experts.from_checkpoint(tensors, f"{prefix}mlp", config=given)
        return found | {"experts": jax.device_put(experts, placed(EXPERTS))}

    head = "model.embed_tokens" if given["tie_word_embeddings"] else "lm_head"
    names = "model.embed_tokens", "model.norm", head
    embedding, norm, head = (tensor(f"{name}.weight") for name in names)
    layers = [layer(index) for index in range(len(config.windows))]
    params = {"embedding": embedding, "layers": layers, "norm": norm, "head.weight": head}
    return dataclasses.replace(config, mesh=mesh), params


def make_cache(config: Config, params: Params, batch: int, length: int) -> Cache:
    """Room for the keys and values of `length` positions of `batch` sequences."""
    of_keys = [layer["self_attn.k_proj.weight"].shape[0] for layer in params["layers"]]
    shapes = [(batch, size // config.head_dim, length, config.head_dim) for size in of_keys]
    zeros = lambda: [jnp.zeros(shape, params["embedding"].dtype) for shape in shapes]
    return {"keys": zeros(), "values": zeros(), "length": jnp.zeros(batch, jnp.int32)}


def linear(weights: Params, name: str, x: Array, dtype: Any = None) -> Array:
    """``x @ w.T + b``, summed in float32, in the dtype of `x` or another one."""
    w, wide = weights[f"{name}.weight"], {"preferred_element_type": jnp.float32}
    out = jnp.einsum("...i,oi->...o", x, w, **wide) + weights.get(f"{name}.bias", 0)
    return out.astype(dtype or x.dtype)


def rms_norm(config: Config, weight: Array, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + config.norm_eps) * weight).astype(x.dtype)


def rotate(config: Config, x: Array, positions: Array) -> Array:
    """Turns each head's pairs (i, i + head_dim / 2): x [batch, tokens, heads, head_dim]."""
    angles = positions[..., None, None] * jnp.array(config.frequencies, jnp.float32)
    cos, sin = (config.rope_scale * f(angles) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(
    config: Config,
    weights: Params,
    window: int | None,
    x: Array,  # [batch, tokens, hidden]
    positions: Array,  # [batch, tokens]
    keys: Array,  # [batch, key heads, length, head_dim]: the cache
    values: Array,
) -> tuple[Array, Array, Array]:
    """Attention without the residual, [batch, tokens, hidden], and the cache with these tokens."""
    (batch, tokens, _), (key_heads, length) = x.shape, keys.shape[1:3]
    x = rms_norm(config, weights["input_layernorm.weight"], x)
    split = lambda x: x.reshape(batch, tokens, -1, config.head_dim)
    q, k, v = (split(linear(weights, f"self_attn.{name}_proj", x)) for name in "qkv")
    if "self_attn.q_norm.weight" in weights:  # Qwen3
        q = rms_norm(config, weights["self_attn.q_norm.weight"], q)
        k = rms_norm(config, weights["self_attn.k_norm.weight"], k)
    q, k = rotate(config, q, positions), rotate(config, k, positions)
    sequence = jnp.arange(batch)[:, None]
    keys = keys.at[sequence, :, positions].set(k)
    values = values.at[sequence, :, positions].set(v)

    q = q.reshape(batch, tokens, key_heads, -1, config.head_dim)  # heads that share a key
    scores = jnp.einsum("btkgd,bkld->bkgtl", q, keys, preferred_element_type=jnp.float32)
    behind = positions[..., None] - jnp.arange(length)  # how far a position is behind the token
    seen = (behind >= 0) & (behind < (window or length))
    scores = jnp.where(seen[:, None, None], scores * config.head_dim**-0.5, -jnp.inf)
    # gpt-oss' sinks take a share of the softmax, and add nothing.
    sinks = weights.get("self_attn.sinks", jnp.full(q.shape[2:4], -jnp.inf))
    sinks = sinks.astype(jnp.float32).reshape(key_heads, -1, 1, 1)
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    shares = jnp.exp(scores - most)
    shares /= jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sinks - most)
    mixed = jnp.einsum("bkgtl,bkld->btkgd", shares.astype(x.dtype), values)
    return linear(weights, "self_attn.o_proj", mixed.reshape(batch, tokens, -1)), keys, values


def mixture(config: Config, weights: Params, x: Array) -> Array:
    """The layer of experts, without the residual: x and the result [batch, tokens, hidden]."""
    x = rms_norm(config, weights["post_attention_layernorm.weight"], x)
    router = "mlp.router" if "mlp.router.weight" in weights else "mlp.gate"
    logits = linear(weights, router, x, jnp.float32)
    if config.mesh is None:
        return moe.feed_forward(x, logits, weights["experts"], config.router).tokens

    @functools.partial(jax.shard_map, mesh=config.mesh, in_specs=(P(), P(), EXPERTS), out_specs=P())
    def of_all(x: Array, logits: Array, experts: moe.Experts) -> Array:
        """All devices have all tokens, of which each runs those of its own experts."""
        routing = moe.route(logits, config.router)
        first = jax.lax.axis_index(*EXPERTS) * len(experts.w_down)
        routing = routing._replace(experts=routing.experts - first)
        return jax.lax.psum(moe.feed_forward(x, routing, experts).tokens, *EXPERTS)

    flat = (of.reshape(-1, of.shape[-1]) for of in (x, logits))
    return of_all(*flat, weights["experts"]).reshape(x.shape)


def forward(config: Config, params: Params, cache: Cache, tokens: Array) -> Result:
    """Runs tokens [batch, tokens] that follow those in the cache.

    Returns the cache with them in it, and the input [batch, tokens, hidden] of the logits: NaN
    for tokens that the cache has no room for. Padding counts as tokens; `length` can be set.
    """
    x = params["embedding"][tokens]
    positions = cache["length"][:, None] + jnp.arange(tokens.shape[1])
    keys, values = [], []
    layers = zip(params["layers"], config.windows, cache["keys"], cache["values"], strict=True)
    for weights, window, *cached in layers:
        out, *cached = attention(config, weights, window, x, positions, *cached)
        keys, values, x = [*keys, cached[0]], [*values, cached[1]], x + out
        x += mixture(config, weights, x)
    cache = {"keys": keys, "values": values, "length": cache["length"] + tokens.shape[1]}
    fits = positions < keys[0].shape[2]
    return cache, jnp.where(fits[..., None], rms_norm(config, params["norm"], x), jnp.nan)


def logits(params: Params, x: Array) -> Array:
    return linear(params, "head", x, jnp.float32)


def step(config: Config, params: Params, cache: Cache, tokens: Array) -> Result:
    """Runs one token of each sequence, [batch]; returns the cache, and the next tokens."""
    cache, x = forward(config, params, cache, tokens[:, None])
    return cache, jnp.argmax(logits(params, x[:, 0]), axis=-1)


decode = jax.jit(step, static_argnums=0, donate_argnums=2)  # the cache is written in place


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(config: Config, params: Params, cache: Cache, tokens: Array, lengths: Array) -> Result:
    """Fills an empty cache with prompts [batch, tokens], padded on the right to one length.

    No token of a prompt sees its padding, and later tokens take its place in the cache. Returns
    the cache, and the next tokens.
    """
    cache, x = forward(config, params, cache, tokens)
    last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
    return cache | {"length": lengths}, jnp.argmax(logits(params, last[:, 0]), axis=-1)


def generate(config: Config, params: Params, prompts: list[list[int]], steps: int) -> np.ndarray:
    """Continues prompts of any lengths with the likeliest tokens: [prompts, steps]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if not (lengths.size and lengths.all()):
        raise ValueError(f"Prompts must have at least one token; got lengths {lengths.tolist()}.")
    known = range(len(params["embedding"]))
    if wrong := [token for prompt in prompts for token in prompt if token not in known]:
        raise ValueError(f"Tokens must be in {known}; got {wrong[0]}.")
    longest = int(lengths.max())
    padded = np.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], np.int32)
    cache = make_cache(config, params, len(prompts), longest + steps)
    cache, tokens = prefill(config, params, cache, padded, lengths)
    found = [tokens]
    for _ in range(steps - 1):
        cache, tokens = decode(config, params, cache, tokens)
        found.append(tokens)
    return np.stack(found, axis=1)[:, :steps]


def report(config: Config, params: Params, batch: int, start: int, steps: int) -> str:
    """Times steps of decoding from position `start` on, and their MoE layers alone."""

    def seconds(function: Callable[..., Any], *state: Any) -> float:
        state = jax.block_until_ready(function(*state))
        began = time.perf_counter()
        for _ in range(steps):
            state = function(*state)
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / steps

    @jax.jit
    def layers(x: Array, params: Params) -> Array:
        return functools.reduce(lambda x, w: x + mixture(config, w, x), params["layers"], x)

    cache = make_cache(config, params, batch, start + steps + 1)
    tokens = jnp.arange(batch) % len(params["embedding"])
    run = functools.partial(decode, config, params)
    whole = seconds(run, cache | {"length": cache["length"] + start}, tokens)
    alone = seconds(lambda x: (layers(x, params),), params["embedding"][tokens[:, None]])
    figures = f"{1e3 * whole:.2f} ms a step, {alone / whole:.0%} in MoE layers"
    return f"{batch / whole:,.0f} tokens/s; {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--prompt", type=int, nargs="+", default=[*range(32)])
    parser.add_argument("--batch", type=int, default=1, help="how often the prompt is run at once")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if args.folder is not None:
        config, params = load(moe.Checkpoint(args.folder))
    else:
        import random_checkpoint as of  # the file beside this one

        given, dtype = (of.GPT_OSS_20B, "bfloat16") if on_gpu else (of.TINY_GPT_OSS, "float32")
        config, params = load(of.draw(given, dtype=dtype), given)
        print(f"random weights: {len(config.windows)} layers of {given['hidden_size']}")
    print("next tokens:", *generate(config, params, [args.prompt] * args.batch, args.steps)[0])
    if on_gpu:
        print(report(config, params, args.batch, len(args.prompt), args.steps))
    else:
        print("no times: there is no GPU")


if __name__ == "__main__":
    main()
