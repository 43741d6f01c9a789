"""Compares the layer with the MoE blocks of Hugging Face's transformers, in float32 on the CPU.

Of each model its own block is made, small and with random weights, and run forward and backward;
`feed_forward` is given the same tensors, in the block's layout. An array's error is the largest
difference, relative to the largest magnitude in transformers' array. Values and the gradients of
the input and of every parameter are compared. Where the model's type is known, so is what its own
router gives with `Router.from_config` of its own configuration. Prints the errors, writes
`benchmarks/models.json`, and exits with 1 if one is above the limit. `make models` makes the
environment and calls this.

    python -m benchmarks.models [--only NAME …] [--output FILE]
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record
from triax import moe
from triax.moe.model_types import TYPES

LIMIT = 1e-6
BATCH, SEQUENCE, HIDDEN, WIDTH, EXPERTS, TOP_K = 2, 20, 32, 24, 16, 4
ROUTER = "router.weight"
VOCABULARY = 50  # for routers that go by the token's id


# Each takes the block's tensors by name, the tokens [tokens, hidden] and their ids.


def routed(p, x, choice, router=None, layout=None, **options):
    """The experts, under the names that most blocks give them."""
    layout = {"transposed": True} | (layout or {})
    experts = moe.Experts(p["experts.gate_up_proj"], p["experts.down_proj"], **layout)
    return moe.feed_forward(x, choice, experts, router, **options).tokens


def shared(p, x, name, activation="swiglu"):
    """An MLP that all tokens go through."""
    gate_up = [x @ p[f"{name}.{which}_proj.weight"].T for which in ("gate", "up")]
    inner = moe.glu(jnp.concatenate(gate_up, axis=1), activation=activation)
    return inner @ p[f"{name}.down_proj.weight"].T


def softmax(p, x, ids, router="gate.weight", bias=None, layout=None, **options):
    return routed(p, x, x @ p[router].T, moe.Router(TOP_K, **options), layout, bias=bias)


def sigmoid(p, x, ids, bias="gate.e_score_correction_bias", **options):
    options = {"score": "sigmoid", "bias": p[bias], "normalize": True} | options
    return softmax(p, x, ids, **options)


def plus_shared(p, x, ids, rest, name="shared_experts", **options):
    return rest(p, x, ids, **options) + shared(p, x, name)


def plus_gated_shared(p, x, ids, **options):
    by_token = jax.nn.sigmoid(x @ p["shared_expert_gate.weight"].T)
    return softmax(p, x, ids, **options) + by_token * shared(p, x, "shared_expert")


def gpt_oss(p, x, ids):
    experts = moe.Experts(
        *(p["experts.gate_up_proj"], p["experts.down_proj"]),
        b_gate_up=p["experts.gate_up_proj_bias"],
        b_down=p["experts.down_proj_bias"],
        activation=moe.Swiglu(alpha=1.702, limit=0.7, up_offset=1.0),
        interleaved=True,
    )
    logits = x @ p["router.weight"].T + p["router.bias"]
    return moe.feed_forward(x, logits, experts, moe.Router(TOP_K, normalize=True)).tokens


def deepseek_v4(p, x, ids, hashed=False):
    logits = x @ p["gate.weight"].T
    router = moe.Router(TOP_K, score="sqrtsoftplus", normalize=True, scale=1.5)
    layout = {"activation": moe.Swiglu(limit=0.7)}
    if hashed:
        routing = moe.route(logits, router, experts=p["gate.tid2eid"][ids])
    else:
        routing = moe.route(logits, router, bias=p["gate.e_score_correction_bias"])
    return routed(p, x, routing, layout=layout) + shared(p, x, "shared_experts", **layout)


def llama4(p, x, ids):
    """The router's weight multiplies the token."""
    weights, chosen = moe.route(x @ p[ROUTER].T, moe.Router(1, score="sigmoid"))
    routing = moe.Routing(jnp.ones_like(weights), chosen)
    return routed(p, x * weights, routing, layout={"transposed": False}) + shared(
        p, x, "shared_expert"
    )


def minimax_m3(p, x, ids):
    activation = moe.Swiglu(alpha=1.702, limit=0.7, up_offset=1.0)
    inner = moe.glu(x @ p["shared_experts.gate_up_proj.weight"].T, activation=activation)
    shared_out = inner @ p["shared_experts.down_proj.weight"].T
    return sigmoid(p, x, ids, scale=2.0, layout={"activation": activation}) + shared_out


def nemotron(p, x, ids):
    """Without a gate; the routed experts work on a shorter vector that a matmul makes."""
    experts = p["experts.up_proj"], p["experts.down_proj"]
    out = moe.feed_forward(
        x @ p["fc1_latent_proj.weight"].T,
        x @ p["gate.weight"].T,
        moe.Experts(*experts, activation="relu2", transposed=True),
        moe.Router(TOP_K, score="sigmoid", normalize=True, scale=2.5),
        bias=p["gate.e_score_correction_bias"],
    )
    inner = moe.glu(x @ p["shared_experts.up_proj.weight"].T, activation="relu2")
    shared = inner @ p["shared_experts.down_proj.weight"].T
    return out.tokens @ p["fc2_latent_proj.weight"].T + shared


def longcat(p, x, ids):
    """Experts past the last return their token."""
    logits, bias = x @ p["router.classifier.weight"].T, p["router.e_score_correction_bias"]
    routing = moe.route(logits, moe.Router(TOP_K, scale=6.0), bias=bias)
    gate_up, down = p["experts.gate_up_proj"][:EXPERTS], p["experts.down_proj"]
    out = moe.feed_forward(x, routing, moe.Experts(gate_up, down, transposed=True))
    kept = jnp.where(routing.experts >= EXPERTS, routing.weights, 0)
    return out.tokens + jnp.sum(kept, axis=1, keepdims=True) * x


def phimoe(p, x, ids, jitter=0.2):
    """Each choice's weight is its share among the logits that are near it."""
    logits = left = x @ p["router.weight"].T
    routing = []
    for _ in range(2):
        best = jax.lax.stop_gradient(jnp.max(left, axis=1, keepdims=True))
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        chosen = jnp.argmax(left, axis=1, keepdims=True)
        near = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=1)
        routing.append((jnp.take_along_axis(near, chosen, axis=1), chosen))
        left = jnp.where(jnp.arange(EXPERTS) == chosen, -jnp.inf, left)
    both = (jnp.concatenate(arrays, axis=1) for arrays in zip(*routing, strict=True))
    return routed(p, x, moe.Routing(*both))


def dbrx(p, x, ids):
    gate, up, down = (p[f"experts.mlp.{n}"].reshape(EXPERTS, WIDTH, -1) for n in ("w1", "v1", "w2"))
    gate_up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    logits, router = x @ p["router.layer.weight"].T, moe.Router(TOP_K, normalize=True)
    return moe.feed_forward(x, logits, moe.Experts(gate_up, down), router).tokens


def gemma4(p, x, ids):
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    logits = normal * p["router.scale"] * HIDDEN**-0.5 @ p["router.proj.weight"].T
    router, scales = moe.Router(TOP_K, normalize=True), p["router.per_expert_scale"]
    return routed(p, x, logits, router, {"activation": "geglu"}, expert_scale=scales)


def lfm2(p, x, ids):
    """The sum of the weights is raised by 1e-6 before they are divided by it."""
    logits = x @ p["gate.weight"].T
    weights, experts = moe.route(logits, moe.Router(TOP_K, score="sigmoid"), bias=p["expert_bias"])
    weights /= jnp.sum(weights, axis=1, keepdims=True) + 1e-6
    return routed(p, x, moe.Routing(weights, experts))


def step3(p, x, ids):
    """Clipped after SiLU, which a JAX function says."""
    clipped = lambda gate, up: jnp.minimum(jax.nn.silu(gate), 0.2) * jnp.clip(up, -0.2, 0.2)
    out = sigmoid(p, x, ids, scale=3.0, layout={"activation": clipped})
    return out + shared(p, x, "shared_experts")


class Model(NamedTuple):
    """The folder under `transformers/models`, the block's class (or two: router and experts) and
    its config's; our call; and sizes that not all have."""

    names: str
    call: Any
    sizes: dict[str, Any] = {}  # noqa: RUF012


GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
NO_GROUPS = GROUPS | {"n_group": 1, "topk_group": 1}
OURS = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
NORMALISED = partial(softmax, normalize=True)
V3 = partial(plus_shared, rest=sigmoid)
QWEN3_NEXT = partial(plus_gated_shared, normalize=True)
ONE_SHARED, WIDE_SHARED = {"n_shared_experts": 1}, {"shared_expert_intermediate_size": 40}
V4 = {"mlp_layer_types": ["moe"], "num_hidden_layers": 1, "swiglu_limit": 0.7}
HASHED = V4 | {"mlp_layer_types": ["hash_moe"], "vocab_size": VOCABULARY}
DBRX = {"ffn_hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K}

MODELS = {
    "Mixtral": Model("mixtral MixtralSparseMoeBlock MixtralConfig", NORMALISED),
    "Qwen2-MoE": Model(
        "qwen2_moe Qwen2MoeSparseMoeBlock Qwen2MoeConfig", plus_gated_shared, WIDE_SHARED
    ),
    "Qwen3-MoE": Model(
        "qwen3_moe Qwen3MoeSparseMoeBlock Qwen3MoeConfig", NORMALISED, {"norm_topk_prob": True}
    ),
    "Qwen3-Next": Model(
        "qwen3_next Qwen3NextSparseMoeBlock Qwen3NextConfig", QWEN3_NEXT, WIDE_SHARED
    ),
    "Qwen3.5-MoE": Model(
        "qwen3_5_moe Qwen3_5MoeSparseMoeBlock Qwen3_5MoeTextConfig", QWEN3_NEXT, WIDE_SHARED
    ),
    "OLMoE": Model("olmoe OlmoeSparseMoeBlock OlmoeConfig", softmax),
    "DeepSeek-V2": Model(
        "deepseek_v2 DeepseekV2Moe DeepseekV2Config",
        partial(plus_shared, rest=softmax, group_score="max", **OURS),
        GROUPS | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "DeepSeek-V3": Model("deepseek_v3 DeepseekV3MoE DeepseekV3Config", partial(V3, **OURS), GROUPS),
    "DeepSeek-V4": Model("deepseek_v4 DeepseekV4SparseMoeBlock DeepseekV4Config", deepseek_v4, V4),
    "DeepSeek-V4, hashed": Model(
        "deepseek_v4 DeepseekV4SparseMoeBlock DeepseekV4Config",
        partial(deepseek_v4, hashed=True),
        HASHED,
    ),
    "gpt-oss": Model("gpt_oss GptOssMLP GptOssConfig", gpt_oss, {"swiglu_limit": 0.7}),
    "Llama 4": Model("llama4 Llama4TextMoe Llama4TextConfig", llama4, {"num_experts_per_tok": 1}),
    "GLM-4.5": Model("glm4_moe Glm4MoeMoE Glm4MoeConfig", partial(V3, scale=2.5), NO_GROUPS),
    "Kimi K2": Model(  # its configuration names DeepSeek-V3's architecture
        "deepseek_v3 DeepseekV3MoE DeepseekV3Config", partial(V3, scale=2.5), NO_GROUPS | ONE_SHARED
    ),
    "Kimi Linear": Model(
        "kimi_linear KimiLinearMoE KimiLinearConfig", partial(V3, scale=2.5), NO_GROUPS
    ),
    "MiniMax-Text-01": Model("minimax MiniMaxSparseMoeBlock MiniMaxConfig", NORMALISED),
    "MiniMax-M2": Model(
        "minimax_m2 MiniMaxM2SparseMoeBlock MiniMaxM2Config",
        partial(sigmoid, bias="e_score_correction_bias"),
    ),
    "MiniMax-M3": Model(
        "minimax_m3_vl MiniMaxM3VLSparseMoeBlock MiniMaxM3VLTextConfig",
        minimax_m3,
        {"swiglu_limit": 0.7, "shared_intermediate_size": 40, "routed_scaling_factor": 2.0},
    ),
    "Nemotron-H": Model(
        "nemotron_h NemotronHMoE NemotronHConfig",
        nemotron,
        NO_GROUPS | {"moe_latent_size": 20, "moe_shared_expert_intermediate_size": 40},
    ),
    "LongCat-Flash": Model(
        "longcat_flash LongcatFlashMoE LongcatFlashConfig",
        longcat,
        {"zero_expert_num": 4, "expert_ffn_hidden_size": WIDTH, "routed_scaling_factor": 6.0},
    ),
    "PhiMoE": Model(
        "phimoe PhimoeSparseMoeBlock PhimoeConfig",
        phimoe,
        {"router_jitter_noise": 0.2, "num_experts_per_tok": 2},
    ),
    "DBRX": Model("dbrx DbrxFFN DbrxConfig", dbrx, {"d_model": HIDDEN, "ffn_config": DBRX}),
    "Gemma 4": Model(
        "gemma4 Gemma4TextRouter+Gemma4TextExperts Gemma4TextConfig",
        gemma4,
        {"enable_moe_block": True},
    ),
    "ERNIE 4.5": Model(
        "ernie4_5_moe Ernie4_5_MoeSparseMoeBlock Ernie4_5_MoeConfig",
        partial(V3, bias="gate.moe_statics.e_score_correction_bias", score="softmax"),
        {"moe_num_shared_experts": 2},
    ),
    "Hunyuan-A13B": Model(
        "hunyuan_v1_moe HunYuanMoEV1Moe HunYuanMoEV1Config",
        partial(plus_shared, rest=NORMALISED, name="shared_mlp", router="gate.wg.weight"),
        {"moe_topk": TOP_K},
    ),
    "Jamba": Model("jamba JambaSparseMoeBlock JambaConfig", partial(softmax, router=ROUTER)),
    "Granite MoE": Model(
        "granitemoe GraniteMoeMoE GraniteMoeConfig", partial(NORMALISED, router=ROUTER)
    ),
    "LFM2-MoE": Model(
        "lfm2_moe Lfm2MoeSparseMoeBlock Lfm2MoeConfig", lfm2, {"use_expert_bias": True}
    ),
    "Trinity": Model(
        "afmoe AfmoeSparseMoeBlock AfmoeConfig",
        partial(V3, bias="expert_bias", router="router.gate.weight", scale=2.5),
        {"route_scale": 2.5, "num_shared_experts": 1},
    ),
    "Ling 3.0": Model(
        "bailing_hybrid BailingHybridMoE BailingHybridConfig", partial(V3, **OURS), GROUPS
    ),
    "dots.llm1": Model("dots1 Dots1MoE Dots1Config", partial(V3, **OURS), GROUPS | ONE_SHARED),
    "MiMo-V2-Flash": Model(
        "mimo_v2_flash MiMoV2FlashMoE MiMoV2FlashConfig", partial(sigmoid, scale=2.5), NO_GROUPS
    ),
    "Mistral Large 4": Model(
        "mistral_large4 MistralLarge4TextMoE MistralLarge4TextConfig",
        partial(plus_shared, rest=NORMALISED, **OURS),
        GROUPS,
    ),
    "Step 3.7": Model(
        "step3p7 Step3p7SparseMoeBlock Step3p7TextConfig",
        step3,
        {"moe_router_scaling_factor": 3.0, "swiglu_limits": [0.2], "swiglu_limits_shared": None},
    ),
}


def make_block(model: Model, seed: int):
    """The block of transformers, with random weights."""
    import torch

    folder, classes, config = model.names.split()
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    top_k = "top_k_experts" if folder == "gemma4" else "num_experts_per_tok"
    sizes = {"hidden_size": HIDDEN, top_k: TOP_K}
    sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), WIDTH)
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
    config = getattr(module, config)(**sizes | model.sizes)
    config._experts_implementation = "eager"
    kinds = [getattr(module, name) for name in classes.split("+")]
    depth = {"layer_idx": 0} if "layer_idx" in inspect.signature(kinds[0]).parameters else {}
    blocks = [kind(config, **depth) for kind in kinds]
    block = blocks[0] if len(blocks) == 1 else router_and_experts(*blocks)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, tensor in block.state_dict().items():
            values = rng.standard_normal(tensor.shape) * (
                tensor.shape[-1] ** -0.5 if tensor.ndim > 1 and "bias" not in name else 1 / 8
            )
            if not tensor.is_floating_point():
                values = rng.integers(0, EXPERTS, tensor.shape)
            tensor.copy_(torch.from_numpy(values + ("scale" in name)))
    block.config_of_model = config.to_dict()
    return block.eval()


def router_and_experts(router, experts):
    """A block of the two, where the model's layer has them side by side."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = router, experts

        def forward(self, x):
            x = x.reshape(-1, HIDDEN)
            _, weights, chosen = self.router(x)
            return self.experts(x, chosen, weights)

    return Block()


def compare(model: Model, seed: int = 0) -> tuple[dict[str, str], dict[str, float]]:
    """Where the block's classes are, and the error of each array, both by name."""
    import torch

    block = make_block(model, seed)
    rng = np.random.default_rng(seed + 1)
    x, upstream = rng.standard_normal((2, BATCH, SEQUENCE, HIDDEN)).astype(np.float32)
    ids = rng.integers(0, VOCABULARY, BATCH * SEQUENCE)

    routers = [m for m in block.modules() if type(m).__name__.endswith(("Router", "Gate"))]
    routed: list[Any] = []
    for router in routers:
        router.register_forward_hook(lambda of, _, out: routed.append((of, out)))
    given = torch.from_numpy(x).requires_grad_()
    hashed = "input_ids" in inspect.signature(block.forward).parameters
    out = block(given, torch.from_numpy(ids)) if hashed else block(given)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.from_numpy(upstream).reshape(out.shape))
    wanted = {"tokens": out.detach(), "gradient of x": given.grad}
    trained = {n: p for n, p in block.named_parameters() if p.requires_grad}
    wanted |= {f"gradient of {n}": p.grad for n, p in trained.items()}

    tensors = {n: jnp.asarray(t.detach().numpy()) for n, t in block.state_dict().items()}
    fixed = {n: tensors.pop(n) for n in list(tensors) if n not in trained}
    fixed = {n: a.reshape(-1) if "bias" in n else a for n, a in fixed.items()}
    flat, upstream = x.reshape(-1, HIDDEN), upstream.reshape(-1, HIDDEN)

    def loss(tensors, x):
        tokens = model.call(tensors | fixed, x, ids)
        return jnp.sum(tokens * upstream), tokens

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (d_tensors, d_x), tokens = grad(tensors, flat)
    found = {"tokens": tokens, "gradient of x": d_x}
    found |= {f"gradient of {n}": d_tensors[n] for n in trained}
    known = TYPES.get(block.config_of_model["model_type"])
    if known and not known.router.refused:
        ((router, out),) = routed
        wanted["routing"], found["routing"] = routings(block, router, out, hashed)
    return sources(block), {name: error(found[name], array) for name, array in wanted.items()}


def routings(block, router, out, hashed: bool):
    """The weights [tokens, experts] of a block's own router, and those of `Router.from_config`."""
    if type(router).__name__ == "DbrxRouter":  # which returns logits
        out = out, *block.route_tokens_to_experts(out)
    logits, weights, chosen = (part.detach() for part in out)
    if type(router).__name__ == "Gemma4TextRouter":  # which returns probabilities
        logits = logits.log()
        weights = weights / router.per_expert_scale.detach()[chosen]  # `expert_scale`
    # Their blocks scale the experts' sum.
    if type(router).__name__ in ("MiniMaxM3VLTopKRouter", "Step3p7TopKRouter"):
        weights = weights * block.routed_scaling_factor
    named = [*block.named_buffers(), *block.named_parameters()]
    biases = [b.reshape(-1) for n, b in named if n.endswith("e_score_correction_bias")]
    found = moe.route(
        jnp.asarray(logits.numpy()),
        moe.Router.from_config(block.config_of_model),
        bias=None if hashed or not biases else jnp.asarray(biases[0].numpy()),
        experts=jnp.asarray(chosen.numpy()) if hashed else None,
    )
    dense = jnp.zeros(logits.shape).at[jnp.arange(len(logits))[:, None], found.experts]
    return logits.new_zeros(logits.shape).scatter_add_(1, chosen, weights), dense.add(found.weights)


def sources(block) -> dict[str, str]:
    """The classes that the model's own file has for its block: file and line under `models/`."""
    found = {}
    for kind in {type(module): None for module in block.modules()}:
        if kind.__module__.startswith("transformers.models."):
            path, lines = Path(inspect.getsourcefile(kind)), inspect.getsourcelines(kind)
            found[kind.__name__] = f"{path.parent.name}/{path.name}#L{lines[1]}"
    return found


def error(found, wanted) -> float:
    wanted = wanted.numpy().astype(np.float64)
    off = np.abs(np.asarray(found, np.float64).reshape(wanted.shape) - wanted).max()
    most = np.abs(wanted).max()
    if not most > 0:
        raise ValueError("an array of zeros compares nothing")
    return float(off / most)


def main():
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[])
    options = parser.parse_args()
    results, wrong = {}, []
    for name, model in MODELS.items():
        if name in (options.only or MODELS):
            code, errors = compare(model)
            worst = max(errors, key=lambda n: np.nan_to_num(errors[n], nan=np.inf))
            results[name] = {"sources": code, "errors": errors}
            print(f"{name:20} {errors[worst]:.1e}  {worst}")
            wrong += [] if errors[worst] <= LIMIT else [name]
    if wrong:
        sys.exit(f"above {LIMIT:g}: {', '.join(wrong)}")
    if not options.only:
        record.write(options.output, limit=LIMIT, results=results)


if __name__ == "__main__":
    main()
