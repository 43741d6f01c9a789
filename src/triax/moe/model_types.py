"""What `config.json` says about a layer's experts and router, by its `model_type`.

Each model type has one list of the keys that are read, and one of those that do not matter for
experts. Any other key is refused, because it may change what experts compute: the caller then
passes an argument that takes its place, or the configuration without it. The router's keys are read
by the same rule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from triax import messages
from triax.errors import ArgumentTypeError, CheckpointError
from triax.moe.activations.reference import Activation, Name, Swiglu

COUNTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
_ACTIVATIONS: dict[bool, dict[str, Name]] = {  # with a gate, and without
    True: {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu_exact"},
    False: {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu2": "relu2"},
}


@dataclasses.dataclass(frozen=True)
class RouterKeys:
    """How a model type's own code routes, and the keys that it reads for it.

    Attributes:
      score: as in `Router`.
      normalize: as in `Router`; None where `normalized` says it.
      scaled: whether the `factor` multiplies the weights.
      group_score: as in `Router`, for types with `groups` and `topk_group`.
      top_k, normalized, factor, groups: the keys of the experts per token, of whether weights are
        normalised, of what multiplies them, and of the number of groups; or several names of it.
      fixed: the values that other keys may have. A key with one value may be missing.
      refused: why a `Router` cannot say what the type does, and the lines that do it.
    """

    score: str = "softmax"
    normalize: bool | None = True
    scaled: bool = False
    group_score: str | None = None
    top_k: str = "num_experts_per_tok"
    normalized: str = "norm_topk_prob"
    factor: str = "routed_scaling_factor"
    groups: str = "n_group"
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    refused: str = ""

    @property
    def read(self) -> set[str]:
        """The keys that are read."""
        keys = {*self.top_k.split(), *self.fixed}
        keys |= {*self.normalized.split()} if self.normalize is None else set()
        keys |= {*self.factor.split()} if self.scaled else set()
        return keys | ({*self.groups.split(), "topk_group"} if self.group_score else set())


@dataclasses.dataclass(frozen=True)
class ModelType:
    """The keys of a model type's configuration.

    Attributes:
      width: the key of the experts' width, or several, the first of which that is there counts.
      activation: the key of the gate's activation.
      clipped: for types whose `swiglu_limit` is read, SwiGLU without it. `swiglu_alpha` is read
        where alpha is not 1, and may be missing.
      gated: whether experts have a gate.
      interleaved: whether gate and up alternate in `gate_up_proj`.
      biased: whether experts have biases.
      hidden: the keys of the size of the experts' tokens; likewise.
      formats: the keys that belong to `quantization_config`.
      inner: the key of a configuration of the experts' own.
      limits: the key of each layer's limit, by which SwiGLU is clipped behind SiLU; 0 is none.
      others: the keys that do not matter for experts, besides those of all types.
      router: how it routes.
    """

    width: str = "moe_intermediate_size"
    activation: str = "hidden_act"
    clipped: Swiglu | None = None
    gated: bool = True
    interleaved: bool = False
    biased: bool = False
    hidden: tuple[str, ...] = ("hidden_size",)
    formats: tuple[str, ...] = ()
    inner: str = ""
    limits: str = ""
    others: str = ""
    router: RouterKeys = RouterKeys()

    @property
    def read(self) -> set[str]:
        """The keys that are read for experts, besides those of all types."""
        limit = {"swiglu_limit"} if self.clipped else set()
        alpha = {"swiglu_alpha"} if self.clipped and self.clipped.alpha != 1 else set()
        keys = {self.activation, self.inner, self.limits, *self.hidden, *self.formats}
        keys |= {*self.width.split()}
        return keys | limit | alpha


# How routers compute was read in transformers 5.24, and compared with it (`benchmarks/models.py`).
_OF_CONFIG = RouterKeys(normalize=None, fixed={"scoring_func": ("softmax",)})
_ALWAYS = RouterKeys(fixed={"norm_topk_prob": (True,)})
_SIGMOID = RouterKeys("sigmoid", fixed={"scoring_func": ("sigmoid",)})
_NOAUX = RouterKeys(
    "sigmoid",
    normalize=None,
    scaled=True,
    group_score="top2",
    fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
# Its `norm_topk_prob` is read by DeepSeek's code alone, and False in what is published.
_DEEPSEEK_V2 = RouterKeys(
    normalize=False,
    scaled=True,
    group_score="max",
    fixed={
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
    },
)
_DEEPSEEK_V4 = RouterKeys(
    "sqrtsoftplus",
    scaled=True,
    fixed={
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
    },
)
_GROUPS = RouterKeys("sigmoid", normalize=None, scaled=True, group_score="top2")
_ON_THE_TOKEN = RouterKeys(
    refused="multiplies the token by its weight before the expert, not the expert's result. Of one "
    'expert per token: `weights, ids = moe.route(logits, moe.Router(1, score="sigmoid"))`, then '
    "`moe.feed_forward((x * weights).astype(x.dtype), moe.Routing(jnp.ones_like(weights), ids), "
    "experts)`."
)
_SPARSEMIXER = RouterKeys(
    refused="weighs each choice among the logits near it (sparsemixer). Pass `feed_forward` a "
    "`moe.Routing` in place of logits."
)

_GPT_OSS = Swiglu(alpha=1.702, up_offset=1.0)
_DEEPSEEK = ModelType(others="mlp_bias seq_aux", router=_NOAUX)
_QWEN = ModelType(others="qkv_bias mamba_ssm_dtype", router=_OF_CONFIG)
_MINIMAX = ModelType(
    "intermediate_size",
    others="use_routing_bias mlp_intermediate_size shared_intermediate_size shared_moe_mode "
    "layernorm_mlp_alpha layernorm_mlp_beta layernorm_full_attention_alpha block_size postnorm "
    "layernorm_linear_attention_alpha full_attn_alpha_factor linear_attn_alpha_factor "
    "mlp_alpha_factor mlp_beta_factor",
)
_GRANITE = ModelType(
    "intermediate_size",
    others="embedding_multiplier logits_scaling residual_multiplier shared_intermediate_size "
    "position_embedding_type normalization_function layers_block_type mamba_n_heads mamba_n_groups "
    "mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias "
    "mamba_proj_bias time_step_min time_step_max time_step_limit time_step_floor",
)
TYPES = {
    "dbrx": ModelType(
        "ffn_hidden_size",
        activation="ffn_act_fn",
        hidden=("d_model",),
        inner="ffn_config",
        others="attn_config n_heads n_layers resid_pdrop emb_pdrop moe_jitter_eps moe_loss_weight",
        router=RouterKeys(
            top_k="moe_top_k num_experts_per_tok", fixed={"moe_normalize_expert_weights": (1.0,)}
        ),
    ),
    "deepseek_v2": dataclasses.replace(_DEEPSEEK, router=_DEEPSEEK_V2),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": ModelType(
        clipped=Swiglu(),
        formats=("expert_dtype",),
        others="mlp_bias num_hash_layers hc_mult hc_eps hc_sinkhorn_iters o_groups compress_rates "
        "compress_ratios compress_rate_csa compress_rate_hca",
        router=_DEEPSEEK_V4,
    ),
    "ernie4_5_moe": ModelType(
        others="use_bias use_rmsnorm moe_capacity moe_layer_start_index moe_layer_end_index "
        "moe_layer_interval moe_num_shared_experts moe_use_aux_free",
        router=RouterKeys(
            top_k="moe_k num_experts_per_tok",
            fixed={"moe_gate": ("topk",), "moe_gate_act": ("softmax",), "moe_norm_min": (1e-12,)},
        ),
    ),
    "gemma4_text": ModelType(
        activation="hidden_activation",
        others="enable_moe_block top_k_experts use_double_wide_mlp num_kv_shared_layers "
        "hidden_size_per_layer_input final_logit_softcapping per_layer_config",
        router=RouterKeys(top_k="top_k_experts"),
    ),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "gpt_oss": ModelType(
        "intermediate_size",
        clipped=_GPT_OSS,
        interleaved=True,
        biased=True,
        others="experts_per_token",
    ),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": ModelType(
        "moe_intermediate_size intermediate_size",
        others="num_shared_expert use_mixed_mlp_moe moe_drop_tokens moe_layer_num_skipped "
        "moe_random_routing_dropped_token mlp_bias use_cla cla_share_factor norm_type",
        router=RouterKeys(top_k="moe_topk num_experts_per_tok"),
    ),
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": ModelType(
        others="mla_use_nope model_max_length num_shared_experts",
        router=dataclasses.replace(
            _GROUPS,
            top_k="num_experts_per_tok num_experts_per_token",
            normalized="norm_topk_prob moe_renormalize",
            groups="n_group num_expert_group",
            fixed={"moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,)},
        ),
    ),
    "llama4_text": ModelType(
        "intermediate_size",
        others="intermediate_size_mlp interleave_moe_layer_step moe_layers floor_scale "
        "for_llm_compressor",
        router=_ON_THE_TOKEN,
    ),
    "longcat_flash": ModelType(
        "expert_ffn_hidden_size",
        others="ffn_hidden_size moe_topk zero_expert_num zero_expert_type router_bias "
        "mla_scale_q_lora mla_scale_kv_lora",
        router=RouterKeys(normalize=False, scaled=True, top_k="moe_topk"),
    ),
    "minimax": _MINIMAX,
    "minimax_m2": dataclasses.replace(_MINIMAX, router=_SIGMOID),
    "minimax_m3_vl_text": ModelType(
        "intermediate_size",
        clipped=_GPT_OSS,
        others="dense_intermediate_size shared_intermediate_size merged_hidden_size "
        "use_routing_bias",
        router=dataclasses.replace(_SIGMOID, scaled=True),
    ),
    "mixtral": ModelType("intermediate_size"),
    "nemotron_h": ModelType(
        activation="mlp_hidden_act",
        gated=False,
        hidden=("moe_latent_size", "hidden_size"),
        others="mlp_bias use_bias moe_shared_expert_intermediate_size moe_shared_expert_overlap "
        "hybrid_override_pattern layers_block_type layer_norm_epsilon num_logits_to_keep "
        "residual_in_fp32 rescale_prenorm_residual use_mamba_kernels mamba_hidden_act "
        "mamba_num_heads mamba_head_dim mamba_proj_bias mamba_ssm_cache_dtype ssm_state_size "
        "n_groups conv_kernel use_conv_bias expand chunk_size time_step_min time_step_max "
        "time_step_limit time_step_floor time_step_rank",
        router=_GROUPS,
    ),
    "olmoe": ModelType("intermediate_size", others="clip_qkv", router=_OF_CONFIG),
    "phimoe": ModelType(
        "intermediate_size", others="input_jitter_noise lm_head_bias", router=_SPARSEMIXER
    ),
    "qwen2_moe": _QWEN,
    "qwen3_5_moe_text": dataclasses.replace(_QWEN, router=_ALWAYS),
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_vl_moe_text": dataclasses.replace(_QWEN, router=_ALWAYS),
    "step3p5": ModelType(
        limits="swiglu_limits",
        others="swiglu_limits_shared share_expert_dim share_expert_dims moe_layers_enum use_moe "
        "moe_every_n_layer moe_layer_offset mtp_mlp_layer_types mlp_bias need_fp32_gate gating "
        "use_moe_router_bias query_pre_attn_scalar per_layer_config partial_rotary_factors "
        "yarn_only_types sink att_impl_type zero_centered",
        router=RouterKeys(
            "sigmoid",
            scaled=True,
            top_k="num_experts_per_tok moe_top_k",
            factor="moe_router_scaling_factor",
            fixed={"moe_router_activation": ("sigmoid",), "norm_expert_weight": (True,)},
        ),
    ),
}

_READ = {"model_type", "text_config", "quantization_config", "hidden_size", *COUNTS}
# Keys of any model: the router, other layers, and the defaults that transformers writes.
_OTHERS = """
    attention_bias aux_loss_alpha chunk_size_feed_forward decoder_sparse_step ep_size
    first_k_dense_replace ignore_index intermediate_size mlp_layer_types mlp_only_layers
    moe_intermediate_size moe_layer_freq multi_modal_projector_bias multimodal_projector_bias
    n_group n_shared_experts norm_topk_prob num_experts_per_tok projector_bias
    projector_hidden_act rope_interleave routed_scaling_factor router_aux_loss_coef
    router_jitter_noise scoring_func shared_expert_intermediate_size topk_group topk_method

    add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    cross_attention_hidden_size diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task id2label
    label2id length_penalty min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences prefix pretraining_tp problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate suppress_tokens task_specific_params
    temperature tf_legacy_loss top_k top_p torchscript typical_p use_bfloat16 use_cache
"""
# Patterns of keys that cannot matter for experts, unless a word of `_EXPERTS` is in them.
_ELSEWHERE = re.compile(
    r"""
    _?(name_or_path|commit_hash|attn_implementation\w*) | transformers_\w+ | (torch_)?dtype
    | \w+_token(_id|_ids|_index)? | \w*vocab\w* | tokenizer_\w+ | tie_\w+ | is_\w+ | output_\w+
    | \w*(attention|attn|heads|head_dim|lora_rank|rope|rotary|sliding_window|layernorm)\w*
    | (use_)?qk_norm\w* | \w*norm_eps | index(er)?_\w+ | initial\w+ | (original_)?max_\w+
    | num_(hidden_)?layers | layer_types | \w*dropout\w* | \w*(mtp|nextn)\w*
    | linear_(conv|key|value|num)\w+ | \w*(vision|audio|image|video|generation|projector)_\w+
    """,
    re.VERBOSE,
)
_EXPERTS = re.compile(
    r"(?<![a-z])act|swiglu|limit|alpha|expert|moe|mlp|ffn|interleav|glu|gelu|silu|clamp|bias|quant"
)
# The words of `_EXPERTS` for which an argument of `Experts.from_checkpoint` takes a key's place.
_ARGUMENTS = {
    "interleaved": re.compile("interleav"),
    "activation": re.compile(r"(?<![a-z])act|swiglu|limit|alpha|glu|gelu|silu|clamp"),
}
_WITHOUT = "Pass `config` without {} if experts do not depend on it."
# Words of keys that may say how a router chooses or weighs, and of those that have them by chance.
_OF_ROUTERS = re.compile(
    r"rout|top_?k|n_group|scor|gate|expert_bias|norm_\w*prob|experts_per|moe_.*(softcap|scal|temp)"
)
_NOT_OF_ROUTERS = re.compile(
    r"""
    index\w*_topk\w* | num_beam_groups | output_\w+ | top_[kp] | attn_output_gate | n_routed_experts
    | router_(aux_loss_coef|jitter_noise|bias|z_loss_coef) | use_routing_bias | experts_per_token
    | \w*gate_up\w* | shared_expert_gate\w* | top_k_experts | moe_topk | n_groups
    | mamba_\w+ | \w*attn_gate | num_attention_groups | need_fp32_gate
    | use_moe_router_bias
    """,
    re.VERBOSE,
)


@dataclasses.dataclass(frozen=True)
class Described:
    """What a configuration and the caller say about a layer's experts.

    Attributes:
      activation: as in `Experts`.
      interleaved: whether gate and up alternate in `gate_up_proj`; None if nobody says so.
      biased: whether experts must have biases.
      counts, hidden, width: the sizes that the configuration has, by their keys.
      quantization: `quantization_config`, or what it holds for None.
    """

    activation: Activation
    interleaved: bool | None
    biased: bool
    counts: Mapping[str, Any]
    hidden: Mapping[str, Any]
    width: Mapping[str, Any]
    quantization: Any


def describe(
    config: Any,
    activation: Activation | None = None,
    interleaved: bool | None = None,
    prefix: str = "",
) -> Described:
    """Returns what a configuration says; the arguments, if given, take the place of its keys.

    The prefix, what is before the names of a layer's tensors, has the layer's number.

    Raises:
      ArgumentTypeError: `config` is no mapping.
      CheckpointError: a key or the model type is not known, or a value is not.
    """
    config, known = _known(config)
    by_caller = {"activation": activation is not None, "interleaved": interleaved is not None}
    if activation is None:
        activation = _activation(config, known, prefix)
    if interleaved is None and known is not None:
        interleaved = known.interleaved
    _check_keys(config, known, by_caller)
    counts, hidden, width = (
        {key: _of_layer(config[key], prefix) for key in keys if config.get(key) is not None}
        for keys in (
            COUNTS,
            known.hidden if known else ("hidden_size",),
            known.width.split() if known else (),
        )
    )
    hidden, width = (dict([*of.items()][:1]) for of in (hidden, width))
    biased = known is not None and known.biased
    quantization = config.get("quantization_config")
    return Described(activation, interleaved, biased, counts, hidden, width, quantization)


def routing(config: Any, by_caller: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the `Router` of a configuration; those of the caller stay.

    Raises:
      ArgumentTypeError: `config` is no mapping.
      CheckpointError: the model type is not known, a key is missing, unknown or has a value that
        the type's code does not know, or a `Router` cannot say what the type does.
    """
    config, known = _known(config)
    name = messages.short(config.get("model_type"))
    by_hand = "Write the router out, as in `moe.Router(8, normalize=True)`."
    if known is None:
        raise CheckpointError(
            f"The model's configuration has `model_type` {name}, whose router is not known; known "
            f"are {', '.join(TYPES)}. {by_hand}"
        )
    router = known.router
    if router.refused:
        raise CheckpointError(
            f"The router of `model_type` {name} is no moe.Router: it {router.refused}"
        )
    beside = _unknown(config, known).get("config", ())
    unknown = [
        f"`{key}`"
        for key, value in config.items()
        if isinstance(key, str) and key not in router.read and value not in (None, False)
        if key in beside or (_OF_ROUTERS.search(key) and not _NOT_OF_ROUTERS.fullmatch(key))
    ]
    if unknown:
        raise CheckpointError(
            f"The model's configuration has {', '.join(unknown)}, unknown for `model_type` {name}: "
            f"the router may depend on it. Pass `config` without it if not. {by_hand}"
        )
    for key, values in router.fixed.items():
        if len(values) > 1 and config.get(key) is None and "num_groups" not in by_caller:
            raise CheckpointError(
                f"The model's configuration has no `{key}`, by which `model_type` {name} routes. "
                "Pass `num_groups` and `top_groups`, which are 1 for no groups."
            )
        if config.get(key) is not None and config[key] not in values:
            said = " or ".join(map(repr, values))
            raise CheckpointError(
                f"The model's configuration has `{key}` {messages.short(config[key])}; `model_type`"
                f" {name} is known with {said}. {by_hand}"
            )

    def value(argument: str, keys: str) -> Any:
        if argument in by_caller:
            return by_caller[argument]
        said = {key: _of_layer(config[key]) for key in keys.split() if config.get(key) is not None}
        one = next(iter(said.values()), None)
        if one is None or isinstance(one, list | tuple) or any(of != one for of in said.values()):
            there = ", ".join(f"`{key}` {messages.short(of)}" for key, of in said.items())
            missing = "no " + " or ".join(f"`{key}`" for key in keys.split())
            raise CheckpointError(
                f"The model's configuration has {there or missing}, by which `model_type` {name} "
                f"routes. Pass `{argument}`."
            )
        return one

    fields: dict[str, Any] = {"score": router.score, "top_k": value("top_k", router.top_k)}
    if router.normalize is None:
        fields["normalize"] = value("normalize", router.normalized)
    else:
        fields["normalize"] = router.normalize
    if router.scaled:
        fields["scale"] = value("scale", router.factor)
    if router.group_score and config.get("topk_method") != "greedy":
        groups = {
            "num_groups": value("num_groups", router.groups),
            "top_groups": value("top_groups", "topk_group"),
        }
        if groups["num_groups"] != 1:
            fields |= groups | {"group_score": router.group_score}
    return {**fields, **by_caller}


def quantization_of(config: Any) -> Any:
    """Returns the `quantization_config` of a configuration, or what it holds for None."""
    return _known(config)[0][_QUANTIZATION]


def _known(config: Any) -> tuple[dict[str, Any], ModelType | None]:
    """Returns the decoder's configuration, and what is known of its model type."""
    if not isinstance(config, Mapping):
        raise ArgumentTypeError(
            "Argument `config` must be what `config.json` holds, a mapping; got "
            f"{messages.shown(config)}."
        )
    config = _merged(config, "text_config")
    model_type = config.get("model_type")
    known = TYPES.get(model_type) if isinstance(model_type, str) else None
    if known is not None and known.inner:
        config = _merged(config, known.inner) | {"model_type": model_type}
    formats = known.formats if known is not None else ()
    beside = {key: config[key] for key in formats if config.get(key) is not None}
    if beside and isinstance(within := config[_QUANTIZATION] or {}, Mapping):
        _check_alike(within, beside, f"`{_QUANTIZATION}`")
        config[_QUANTIZATION] = {**within, **beside}
    return config, known


def _of_layer(value: Any, prefix: str = "") -> Any:
    """Returns a layer's entry of a list with one for each layer, if known, or else the value."""
    if not isinstance(value, list | tuple) or not value:
        return value
    number = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", prefix)
    if number and int(number[1]) < len(value):
        return value[int(number[1])]
    return value[0] if all(of == value[0] for of in value) else value


_QUANTIZATION = "quantization_config"


def _merged(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns a configuration with the keys of the one within it, such as the decoder's."""
    inner = {} if config.get(key) is None else config[key]
    if not isinstance(inner, Mapping):
        raise CheckpointError(
            f"The model's configuration must have a mapping as `{key}`; got "
            f"{messages.shown(inner)}. Pass `config`, what `{key}` should hold."
        )
    _check_alike(config, {_QUANTIZATION: inner.get(_QUANTIZATION)}, f"`{key}`")
    both = [of[_QUANTIZATION] for of in (inner, config) if of.get(_QUANTIZATION) is not None]
    return {**config, **inner, _QUANTIZATION: both[0] if both else None}


def _check_alike(config: Mapping[str, Any], others: Mapping[str, Any], where: str) -> None:
    for key, of in others.items():
        if config.get(key) is not None and of is not None and config[key] != of:
            raise CheckpointError(
                f"The model's configuration has two `{key}` that differ, one of them in {where}."
                " Pass `config` with the one that is right for the experts."
            )


def _unknown(config: Mapping[str, Any], known: ModelType | None) -> dict[str, list[Any]]:
    """Returns keys in no list that may matter, by the argument that can take their place."""
    fine = _READ | {*_OTHERS.split()}
    fine |= known.read | known.router.read | {*known.others.split()} if known else set()
    unknown: dict[str, list[Any]] = {}
    for key in config:
        is_text = isinstance(key, str)
        if key in fine or (is_text and _ELSEWHERE.fullmatch(key) and not _EXPERTS.search(key)):
            continue
        fits = (name for name, words in _ARGUMENTS.items() if is_text and words.search(key))
        unknown.setdefault(next(fits, "config"), []).append(key)
    return unknown


def _check_keys(
    config: Mapping[str, Any], known: ModelType | None, by_caller: Mapping[str, bool]
) -> None:
    """Raises for keys that may matter for experts and that neither the type nor a caller covers."""
    keys = {
        argument: ", ".join(f"`{key}`" for key in unknown)
        for argument, unknown in _unknown(config, known).items()
        if not by_caller.get(argument)
    }
    if keys:
        remedies = " ".join(
            _WITHOUT.format(names)
            if argument == "config"
            else f"Pass `{argument}` to take the place of {names}."
            for argument, names in keys.items()
        )
        raise CheckpointError(
            f"The model's configuration has {', '.join(keys.values())}, unknown for `model_type` "
            f"{messages.short(config.get('model_type'))}: experts may depend on it. {remedies}"
        )


def _activation(config: Mapping[str, Any], known: ModelType | None, prefix: str) -> Activation:
    """Returns the activation that a configuration says, whose type must be known."""
    if known is None:
        raise CheckpointError(
            f"The model's configuration has `model_type` {messages.short(config.get('model_type'))}"
            f", whose experts are not known; known are {', '.join(TYPES)}. Pass `activation`, such "
            'as "swiglu" for silu(gate) * up.'
        )
    name, limit = config.get(known.activation), config.get("swiglu_limit")
    if isinstance(name, Mapping) and name.keys() == {"name"}:
        name = name["name"]
    said = f"`{known.activation}` {messages.short(name)}"
    if known.limits and (clips := _of_layer(config.get(known.limits), prefix)):
        raise CheckpointError(
            f"The model's configuration has `{known.limits}` {messages.short(clips)} for "
            f"`{prefix}`, which is clipped behind SiLU. Pass `activation`, a function: `lambda "
            "gate, up: jnp.minimum(jax.nn.silu(gate), limit) * jnp.clip(up, -limit, limit)`."
        )
    if known.clipped is not None:
        alpha = config.get("swiglu_alpha")
        said += f", `swiglu_limit` {messages.short(limit)}"
        said += f" and `swiglu_alpha` {messages.short(alpha)}" * (alpha is not None)
        changed = {"limit": limit} if alpha is None else {"limit": limit, "alpha": alpha}
        try:
            if name == "silu" and limit is not None:
                return dataclasses.replace(known.clipped, **changed)
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(name, str) and name in _ACTIVATIONS[known.gated]:
        return _ACTIVATIONS[known.gated][name]
    raise CheckpointError(
        f"The model's configuration has {said}, whose formula is not known for `model_type` "
        f"{config['model_type']!r}. Pass `activation`, such as moe.Swiglu(limit=10.0)."
    )
