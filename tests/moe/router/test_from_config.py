"""`Router.from_config`: the router of each model type; what is missing or unknown is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.checkpoint.configs import PUBLISHED, SHARED
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.model_types import TYPES

# What the keys of routers hold in the tests; any other key holds 1.
VALUES = {
    "attn_output_gate": True,
    "moe_topk": 5,
    "moe_top_k": 3,
    "moe_k": 3,
    "moe_random_routing_dropped_token": False,
    "num_experts_per_token": 3,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "routed_scaling_factor": 2.5,
    "router_jitter_noise": 0.1,
    "top_k_experts": 6,
    "topk_group": 2,
    "use_routing_bias": True,
}
DEEPSEEK = moe.Router(
    3, score="sigmoid", num_groups=4, top_groups=2, group_score="top2", normalize=True, scale=2.5
)
NORMALIZED = moe.Router(3, normalize=True)
NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
V2 = {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
V4 = {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc"}
REFUSED = "llama4_text", "phimoe"
# Each model type's router, and what its keys hold beside `VALUES`.
ROUTERS = {
    "dbrx": (NORMALIZED, {"ffn_config": {}}),
    "deepseek_v2": (
        moe.Router(3, num_groups=4, top_groups=2, group_score="max", scale=2.5),
        {"scoring_func": "softmax"} | V2,
    ),
    "deepseek_v3": (DEEPSEEK, NOAUX),
    "deepseek_v32": (DEEPSEEK, NOAUX),
    "deepseek_v4": (moe.Router(3, score="sqrtsoftplus", normalize=True, scale=2.5), V4),
    "ernie4_5_moe": (NORMALIZED, {"moe_gate": "topk", "moe_norm_min": 1e-12}),
    "gemma4_text": (moe.Router(6, normalize=True), {}),
    "glm4_moe": (DEEPSEEK, {}),
    "glm4_moe_lite": (DEEPSEEK, {}),
    "glm_moe_dsa": (DEEPSEEK, {}),
    "gpt_oss": (NORMALIZED, {}),
    "granitemoe": (NORMALIZED, {}),
    "granitemoehybrid": (NORMALIZED, {}),
    "granitemoeshared": (NORMALIZED, {}),
    "hunyuan_v1_moe": (moe.Router(5, normalize=True), {"moe_topk": [5, 5]}),
    "kimi_k2": (DEEPSEEK, NOAUX),
    "kimi_linear": (
        DEEPSEEK,
        {"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 4},
    ),
    "longcat_flash": (moe.Router(5, scale=2.5), {}),
    "minimax": (NORMALIZED, {}),
    "minimax_m2": (moe.Router(3, score="sigmoid", normalize=True), {"scoring_func": "sigmoid"}),
    "minimax_m3_vl_text": (moe.Router(3, score="sigmoid", normalize=True, scale=2.5), {}),
    "mixtral": (NORMALIZED, {}),
    "nemotron_h": (DEEPSEEK, {}),
    "olmoe": (NORMALIZED, {}),
    "qwen2_moe": (NORMALIZED, {}),
    "qwen3_5_moe_text": (NORMALIZED, {}),
    "qwen3_moe": (NORMALIZED, {}),
    "qwen3_next": (NORMALIZED, {}),
    "qwen3_vl_moe_text": (NORMALIZED, {}),
    "step3p5": (
        moe.Router(3, score="sigmoid", normalize=True, scale=3.0),
        {"moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0},
    ),
}
QWEN = {"model_type": "qwen3_moe", "num_experts_per_tok": 3, "norm_topk_prob": False}


def config_of(model_type):
    """A configuration with every key that is published for a model type."""
    inner, outer = (dict.fromkeys(text.split(), 1) for text in PUBLISHED[model_type])
    keys = dict.fromkeys(SHARED.split(), 1) | inner
    values = VALUES | ROUTERS.get(model_type, (None, {}))[1]
    found = {key: values.get(key, 1) for key in keys} | {"model_type": model_type}
    return {**outer, "text_config": found} if outer else found


def test_every_model_type_is_here():
    assert {*TYPES} == {*ROUTERS, *REFUSED} == {*PUBLISHED}


@pytest.mark.parametrize("model_type", ROUTERS)
def test_each_model_type(model_type):
    assert moe.Router.from_config(config_of(model_type)) == ROUTERS[model_type][0]


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_a_router_cannot_say(model_type):
    with pytest.raises(CheckpointError, match=r"no moe\.Router: it (multiplies|weighs)"):
        moe.Router.from_config(config_of(model_type))


def test_the_lines_for_llama_4():
    """The message's call equals its definition: the token times its weight, then the expert."""
    with pytest.raises(CheckpointError) as caught:
        moe.Router.from_config(config_of("llama4_text"))
    rng = np.random.default_rng(0)
    x, logits, up, down = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((7, 8), (7, 3), (3, 8, 10), (3, 5, 8))
    )
    names = {"moe": moe, "jnp": jnp, "x": x, "logits": logits, "experts": moe.Experts(up, down)}
    routing, layer = re.findall(r"`([^`]*\([^`]*)`", str(caught.value))
    exec(routing, names)
    best = jnp.argmax(logits, axis=1)
    scaled = x * jax.nn.sigmoid(jnp.max(logits, axis=1, keepdims=True))
    gate, up = jnp.split(jnp.einsum("th,thw->tw", scaled, up[best]), 2, axis=1)
    wanted = jnp.einsum("tw,twh->th", jax.nn.silu(gate) * up, down[best])
    np.testing.assert_allclose(eval(layer, names).tokens, wanted, rtol=1e-5, atol=1e-5)


def test_no_groups():
    config = config_of("glm4_moe") | {"n_group": 1, "topk_group": 1}
    found = moe.Router.from_config(config)
    assert found == moe.Router(3, score="sigmoid", normalize=True, scale=2.5)
    greedy = config_of("deepseek_v2") | {"topk_method": "greedy", "n_group": None}
    assert moe.Router.from_config(greedy) == moe.Router(3, scale=2.5)


def test_attributes_take_the_place_of_keys():
    assert moe.Router.from_config(QWEN, top_k=1, normalize=True) == moe.Router(1, normalize=True)
    assert moe.Router.from_config({"model_type": "qwen3_moe"}, top_k=2, normalize=2.0).top_k == 2
    with pytest.raises(ArgumentValueError, match="`top_k`"):
        moe.Router.from_config(QWEN, top_k=0)


@pytest.mark.parametrize("model_type", ROUTERS)
def test_each_key_that_is_read_must_be_there(model_type):
    config = config_of(model_type)
    inner = config.get("text_config", config)
    router = TYPES[model_type].router
    for key in (*router.read, "n_group", "topk_group"):
        if key not in inner or (key in router.fixed and len(router.fixed[key]) < 2):
            continue
        needed = key in router.read
        lacking = {k: value for k, value in inner.items() if k != key}
        if needed:
            with pytest.raises(CheckpointError, match=f"has no .*`{key}`.*Pass `"):
                moe.Router.from_config(lacking)
        else:
            moe.Router.from_config(lacking)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v4", "norm_topk_prob", False),
        ("minimax_m2", "scoring_func", "softmax"),
        ("qwen3_vl_moe_text", "norm_topk_prob", False),
    ],
)
def test_values_that_the_models_code_does_not_know(model_type, key, value):
    with pytest.raises(CheckpointError, match=f"`{key}` {value!r}; .* is known with"):
        moe.Router.from_config(config_of(model_type) | {key: value})


@pytest.mark.parametrize(
    "key",
    ["n_group", "router_logit_softcapping", "routed_scaling_factor", "moe_foo", "topk_method"],
)
def test_keys_that_may_change_the_router_are_refused(key):
    """Those of other model types, too."""
    with pytest.raises(CheckpointError, match=f"has `{key}`, unknown for `model_type` 'qwen3_moe'"):
        moe.Router.from_config(QWEN | {key: 2})
    assert moe.Router.from_config(QWEN | {key: None}) == moe.Router(3)


@pytest.mark.parametrize("config", [{}, {"model_type": "new"}, {"model_type": ["qwen3_moe"]}])
def test_unknown_model_types(config):
    with pytest.raises(CheckpointError, match=r"router is not known; known are .* `moe.Router\("):
        moe.Router.from_config(config)


def test_a_configuration_is_a_mapping():
    with pytest.raises(ArgumentTypeError, match="`config`"):
        moe.Router.from_config("config.json")


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        ("hunyuan_v1_moe", {"moe_topk": [2, 4]}, r"has `moe_topk` \[2, 4\], by which"),
        ("step3p5", {"num_experts_per_tok": 4}, "`num_experts_per_tok` 4, `moe_top_k` 3, by which"),
    ],
)
def test_numbers_of_experts_that_differ(model_type, changed, message):
    """Of layers, or under two names."""
    config = config_of(model_type)
    config = config | {"text_config": config.get("text_config", config) | changed}
    with pytest.raises(CheckpointError, match=f"{message} .* Pass `top_k`"):
        moe.Router.from_config(config)
    assert moe.Router.from_config(config, top_k=2).top_k == 2
