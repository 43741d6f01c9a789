"""`Experts.from_checkpoint`: published models, with their names of tensors and configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.moe.checkpoint.files import write
from tests.moe.checkpoint.layers import V4, exact, mxfp4, of_group
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import ArgumentValueError, CheckpointError

EXPERTS, HIDDEN, WIDTH = 3, 64, 96
rng = np.random.default_rng(0)


class Layer(NamedTuple):
    """The numbers of a layer's experts: [experts, out, in], and biases [experts, out]."""

    gate: Any
    up: Any
    down: Any
    b_gate: Any = None
    b_up: Any = None
    b_down: Any = None


def floats(*shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def drawn(biased=False):
    shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    weights = [floats(EXPERTS, *shape) for shape in shapes]
    return Layer(*weights, *([floats(EXPERTS, out) for out, _ in shapes] if biased else ()))


def each(prefix, of, names=("gate_proj", "up_proj", "down_proj"), end=".weight"):
    """Tensors of single experts."""
    return {
        f"{prefix}.experts.{e}.{name}{end}": array[e]
        for name, array in zip(names, of, strict=True)
        for e in range(EXPERTS)
    }


def granite(prefix, of):
    gate_up = np.concatenate([of.gate, of.up], axis=1)
    router = {f"{prefix}.router.layer.weight": floats(EXPERTS, HIDDEN)}
    return router | {
        f"{prefix}.input_linear.weight": gate_up,
        f"{prefix}.output_linear.weight": of.down,
    }


def dbrx(prefix, of):
    down = of.down.swapaxes(1, 2)
    rows = {"w1": of.gate, "v1": of.up, "w2": down}
    found = {
        f"{prefix}.experts.mlp.{name}": array.reshape(-1, HIDDEN) for name, array in rows.items()
    }
    return found | {f"{prefix}.router.layer.weight": floats(EXPERTS, HIDDEN)}


def step(prefix, of):
    beside = {f"{prefix}.gate.weight": floats(EXPERTS, HIDDEN), f"{prefix}.router_bias": floats(3)}
    names = "gate_proj", "up_proj", "down_proj"
    return beside | {f"{prefix}.{n}.weight": array for n, array in zip(names, of[:3], strict=True)}


def gpt_oss_by_expert(prefix, of):
    """As llm-compressor writes gpt-oss: gate and up have linear layers of their own."""
    return each(prefix, of[:3]) | each(prefix, of[3:], end=".bias")


SILU = {"hidden_act": "silu", "hidden_size": HIDDEN}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": HIDDEN,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mlp_bias": False,
    "moe_intermediate_size": WIDTH,
    "n_groups": 8,
    "n_routed_experts": EXPERTS,
    "use_bias": False,
}
FFN = {"ffn_hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": 2, "model_type": ""}
BY_LAYER = {"moe_intermediate_size": [WIDTH] * 9, "num_experts": [1, 1, EXPERTS, 7]}
PLAIN = {  # the prefix, the tensors of a layer, the configuration, the activation
    "granite": (
        "model.layers.2.block_sparse_moe",
        granite,
        SILU
        | {
            "model_type": "granitemoe",
            "intermediate_size": WIDTH,
            "num_local_experts": EXPERTS,
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
        },
        "swiglu",
    ),
    "dbrx": (
        "transformer.blocks.2.ffn",
        dbrx,
        {
            "model_type": "dbrx",
            "d_model": HIDDEN,
            "ffn_config": FFN | {"ffn_act_fn": {"name": "silu"}},
        },
        "swiglu",
    ),
    "step": (
        "model.layers.2.moe",
        step,
        SILU
        | {
            "model_type": "step3p5",
            "moe_intermediate_size": WIDTH,
            "moe_num_experts": EXPERTS,
            "swiglu_limits": [0.0, 0.0, 0.0, 7.0],
        },
        "swiglu",
    ),
    "ernie": (
        "model.layers.2.mlp",
        lambda prefix, of: each(prefix, of[:3]),
        SILU
        | {
            "model_type": "ernie4_5_moe",
            "moe_capacity": [64, 64, 64],
            "moe_intermediate_size": WIDTH,
            "moe_k": 2,
            "moe_num_experts": EXPERTS,
            "use_bias": False,
        },
        "swiglu",
    ),
    "hunyuan": (
        "model.layers.2.mlp",
        lambda prefix, of: each(prefix, of[:3]),
        SILU | BY_LAYER | {"model_type": "hunyuan_v1_moe", "intermediate_size": 7, "moe_topk": [2]},
        "swiglu",
    ),
    "kimi_linear": (
        "model.layers.2.block_sparse_moe",
        lambda prefix, of: each(prefix, of[:3], ("w1", "w3", "w2")),
        SILU
        | {
            "model_type": "kimi_linear",
            "linear_attn_config": {},
            "moe_intermediate_size": WIDTH,
            "moe_router_activation_func": "sigmoid",
            "num_experts": EXPERTS,
        },
        "swiglu",
    ),
    "gpt_oss_by_expert": (
        "model.layers.2.mlp",
        gpt_oss_by_expert,
        SILU | {"model_type": "gpt_oss", "intermediate_size": WIDTH, "swiglu_limit": 7.0},
        moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0),
    ),
}


def gate_up_and_down(experts):
    """The weights [experts, in, out] in float64; gate and up next to each other."""
    first = experts.w_gate_up
    first = first if isinstance(first, tuple) else (first,)
    return (
        np.concatenate([exact(w, experts.transposed) for w in first], axis=-1),
        exact(experts.w_down, experts.transposed),
    )


@pytest.mark.parametrize("part", [None, range(1, 3)])
@pytest.mark.parametrize("name", PLAIN)
def test_layouts(name, part, tmp_path):
    prefix, named, config, activation = PLAIN[name]
    of = drawn(biased=name == "gpt_oss_by_expert")
    checkpoint = moe.Checkpoint(write(tmp_path, named(prefix, of), config, files=2))
    found = moe.Experts.from_checkpoint(checkpoint, prefix, experts=part)
    assert (found.activation, found.interleaved) == (activation, False)
    gate_up, down = gate_up_and_down(found)
    chosen = list(part or range(EXPERTS))
    wanted = np.concatenate([of.gate, of.up], axis=1).swapaxes(1, 2)[chosen]
    np.testing.assert_array_equal(gate_up, wanted.astype(np.float64))
    np.testing.assert_array_equal(down, of.down.swapaxes(1, 2)[chosen].astype(np.float64))
    if of.b_gate is None:
        assert found.b_gate_up is found.b_down is None
    else:
        both = np.concatenate([of.b_gate, of.b_up], axis=1)[chosen]
        np.testing.assert_array_equal(found.b_gate_up, both)
        np.testing.assert_array_equal(found.b_down, of.b_down[chosen])


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("granite", "num_local_experts", "has `num_local_experts` 4, and .* has 3 experts"),
        ("granite", "intermediate_size", "has `intermediate_size` 4, and .* has 96 rows"),
        ("dbrx", "d_model", "has `d_model` 4, and .* has 64 columns"),
        ("step", "moe_num_experts", "has `moe_num_experts` 4, and .* has 3 experts"),
        ("ernie", "moe_num_experts", "has `moe_num_experts` 4, and .* has 3 experts"),
        ("ernie", "moe_intermediate_size", "has `moe_intermediate_size` 4, and .* has 96 rows"),
        ("hunyuan", "num_experts", "has `num_experts` 4, and .* has 3 experts"),
    ],
)
def test_sizes_of_another_model(name, key, message):
    prefix, named, config, _ = PLAIN[name]
    with pytest.raises(CheckpointError, match=message):
        moe.Experts.from_checkpoint(named(prefix, drawn()), prefix, config=config | {key: 4})


def test_dbrx():
    """Its experts are rows below each other, whose number the configuration has."""
    prefix, named, config, _ = PLAIN["dbrx"]
    tensors = named(prefix, drawn())
    read = lambda of, **how: moe.Experts.from_checkpoint(tensors, prefix, config=of, **how)
    published = config | {"ffn_config": FFN}  # as databricks/dbrx-instruct: no activation
    with pytest.raises(
        CheckpointError, match=r"has `ffn_act_fn` None, .* for `model_type` 'dbrx'.*`activation`"
    ):
        read(published)
    assert read(published, activation="swiglu").w_down.shape == (EXPERTS, HIDDEN, WIDTH)
    for count in (None, "3", 7, 0):
        of = config | {"ffn_config": config["ffn_config"] | {"moe_num_experts": count}}
        with pytest.raises(
            CheckpointError, match=r"w1` .* rows are those of all experts, and `moe_num"
        ):
            read(of)
    with pytest.raises(CheckpointError, match="must have a mapping as `ffn_config`; got"):
        read(config | {"ffn_config": [3]})
    with pytest.raises(ArgumentValueError, match="interleaved` must be False or None"):
        read(config, interleaved=True)


def test_the_call_for_a_type_that_is_not_known():
    """Step-3 itself has no key for its activation; its tensors are read all the same."""
    prefix, named, _, _ = PLAIN["step"]
    tensors = named(prefix, drawn())
    config = {"model_type": "step3_text", "moe_num_experts": EXPERTS, "hidden_size": HIDDEN}
    with pytest.raises(CheckpointError, match=r"'step3_text', whose experts .* Pass `activation`"):
        moe.Experts.from_checkpoint(tensors, prefix, config=config)
    found = moe.Experts.from_checkpoint(tensors, prefix, config={}, activation="swiglu")
    np.testing.assert_array_equal(found.w_down, tensors[f"{prefix}.down_proj.weight"])


LIES = None, 0, 1.5, True, "x", [], [None], [1, 2], {}, {"name": "silu"}, [[1]]


@pytest.mark.parametrize("name", PLAIN)
def test_configurations_that_lie_in_their_types(name):
    """Each is read as if it were not there, or refused: no error is a bare Python one."""
    prefix, named, config, _ = PLAIN[name]
    tensors = named(prefix, drawn(biased=name == "gpt_oss_by_expert"))
    refused = 0
    for key in (*config, "ffn_config", "swiglu_limits", "moe_latent_size", "expert_dtype"):
        for lie in LIES:
            try:
                moe.Experts.from_checkpoint(tensors, prefix, config=config | {key: lie})
            except CheckpointError:
                refused += 1
    assert refused > 50


# --- without a gate ------------------------------------------------------------------------------


@pytest.mark.parametrize("latent", [None, HIDDEN])
def test_experts_without_a_gate(latent, tmp_path):
    """Nemotron-3 has up and down only; with a latent size, experts work on shorter vectors."""
    prefix, of = "backbone.layers.2.mixer", drawn()
    config = NEMOTRON | {"moe_latent_size": latent, "hidden_size": 4 * HIDDEN if latent else HIDDEN}
    tensors = each(prefix, (of.up, of.down), ("up_proj", "down_proj"))
    found = moe.Experts.from_checkpoint(moe.Checkpoint(write(tmp_path, tensors, config)), prefix)
    assert found.activation == "relu2"
    np.testing.assert_array_equal(found.w_gate_up, of.up)
    np.testing.assert_array_equal(found.w_down, of.down)
    with pytest.raises(CheckpointError, match="has `mlp_hidden_act` 'relu', whose formula"):
        moe.Experts.from_checkpoint(tensors, prefix, config=config | {"mlp_hidden_act": "relu"})
    for activation in ("swiglu", moe.Swiglu(limit=1.0)):
        with pytest.raises(CheckpointError, match="`activation` must have no gate"):
            moe.Experts.from_checkpoint(tensors, prefix, config=config, activation=activation)
    gates = each(prefix, (of.gate,), ("gate_proj",))
    with pytest.raises(CheckpointError, match="`activation` must have a gate"):
        moe.Experts.from_checkpoint(tensors | gates, prefix, config=config)


def test_a_gate_that_is_missing():
    of = drawn()
    tensors = each("mlp", (of.up, of.down), ("up_proj", "down_proj"))
    with pytest.raises(CheckpointError, match="`activation` must have no gate"):
        moe.Experts.from_checkpoint(tensors, "mlp", config=SILU | {"model_type": "qwen3_moe"})


# --- biases of single experts --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gate_proj", "down_proj"])
def test_a_bias_that_is_missing(kind):
    prefix, named, config, _ = PLAIN["gpt_oss_by_expert"]
    tensors = named(prefix, drawn(biased=True))
    del tensors[f"{prefix}.experts.1.{kind}.bias"]
    for of in (config, SILU | {"model_type": "qwen3_moe"}):
        with pytest.raises(CheckpointError, match=rf"`{prefix}.experts.1.{kind}.bias` is missing"):
            moe.Experts.from_checkpoint(tensors, prefix, config=of)
    tensors = {name: of for name, of in tensors.items() if not name.endswith("bias")}
    with pytest.raises(
        CheckpointError, match=rf"`{prefix}.experts.0.gate_proj.bias` is missing, and"
    ):
        moe.Experts.from_checkpoint(tensors, prefix, config=config)


def test_a_bias_of_one_layer():
    tensors = each("mlp", drawn()[:3])
    bias = {"mlp.experts.1.up_proj.bias": floats(WIDTH)}
    config = SILU | {"model_type": "qwen3_moe"}
    with pytest.raises(
        CheckpointError, match=r"`mlp.experts.0.gate_proj.bias` is missing, and exp"
    ):
        moe.Experts.from_checkpoint(tensors | bias, "mlp", config=config)


def test_biases_beside_quantized_weights():
    """They are read whatever the model type is, unless all are zero."""
    prefix, linears = "mlp", ("gate_proj", "up_proj", "down_proj")
    make, of = mxfp4("weight_packed", "weight_scale"), drawn(biased=True)
    shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    tensors = each(prefix, of[3:], end=".bias")
    for e in range(EXPERTS):
        for name, shape in zip(linears, shapes, strict=True):
            for end, array in make(*shape).items():
                tensors[f"{prefix}.experts.{e}.{name}.{end}"] = array
    config = SILU | {"model_type": "qwen3_moe"}
    config |= {"quantization_config": of_group("mxfp4-pack-quantized", num_bits=4, type="float")}
    found = moe.Experts.from_checkpoint(tensors, prefix, config=config)
    np.testing.assert_array_equal(found.b_down, of.b_down)
    np.testing.assert_array_equal(found.b_gate_up, np.concatenate([of.b_gate, of.b_up], axis=1))
    zeros = {name: 0 * of if name.endswith("bias") else of for name, of in tensors.items()}
    assert moe.Experts.from_checkpoint(zeros, prefix, config=config).b_down is None


# --- quantized stacks ----------------------------------------------------------------------------


def scaled_stacks(prefix, packed):
    """`gate_up_proj` and `down_proj` with `_scale_inv`, as transformers 5 keeps them."""
    found = {}
    for name, out, depth in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        if packed:
            weight = rng.integers(0, 256, (EXPERTS, out, depth // 2), np.uint8).view(np.int8)
            scale = rng.integers(118, 130, (EXPERTS, out, depth // 32), np.uint8)
            scale = scale.view(ml_dtypes.float8_e8m0fnu)
        else:
            weight = floats(EXPERTS, out, depth).astype(ml_dtypes.float8_e4m3fn)
            scale = rng.random((EXPERTS, out // 32, depth // 32), np.float32)
        found |= {f"{prefix}.experts.{name}": weight, f"{prefix}.experts.{name}_scale_inv": scale}
    return found


@pytest.mark.parametrize("part", [None, range(1, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_quantized_stacks(packed, part, tmp_path):
    prefix, chosen = "model.layers.2.mlp", list(part or range(EXPERTS))
    tensors = scaled_stacks(prefix, packed)
    config = SILU | {"model_type": "qwen3_moe", "quantization_config": V4}
    config["quantization_config"] = V4 | {"expert_dtype": "fp4" if packed else "fp8"}
    checkpoint = moe.Checkpoint(write(tmp_path, tensors, config))
    found = moe.Experts.from_checkpoint(checkpoint, prefix, experts=part)
    for name, of in zip(("gate_up_proj", "down_proj"), gate_up_and_down(found), strict=True):
        arrays = tensors[f"{prefix}.experts.{name}"], tensors[f"{prefix}.experts.{name}_scale_inv"]
        one = moe.from_mxfp4(*arrays) if packed else moe.from_8_bits(*arrays, block_size=(32, 32))
        np.testing.assert_array_equal(of, exactly(one)[chosen])
    del tensors[f"{prefix}.experts.down_proj_scale_inv"]
    with pytest.raises(CheckpointError, match=r"down_proj` in the tensors: .* must have scales"):
        moe.Experts.from_checkpoint(tensors, prefix, config=config)


@pytest.mark.parametrize("part", [None, range(1, 3)])
def test_scales_of_all_experts_beside_the_weights_of_each(part, tmp_path):
    """As transformers 5.24 saves what it has quantized to float8 itself."""
    prefix = "model.layers.2.mlp"
    stacks = scaled_stacks(prefix, packed=False)
    config = SILU | {"model_type": "qwen3_moe", "quantization_config": V4}
    wanted = moe.Experts.from_checkpoint(stacks, prefix, experts=part, config=config)
    stem = f"{prefix}.experts."
    gate_up, down = (stacks.pop(f"{stem}{name}") for name in ("gate_up_proj", "down_proj"))
    linears = {"gate_proj": gate_up[:, :WIDTH], "up_proj": gate_up[:, WIDTH:], "down_proj": down}
    for name, of in linears.items():
        stacks |= {f"{stem}{expert}.{name}.weight": weight for expert, weight in enumerate(of)}
    checkpoint = moe.Checkpoint(write(tmp_path, stacks, config))
    found = moe.Experts.from_checkpoint(checkpoint, prefix, experts=part)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    of_no_model = {"activation": "swiglu", "config": {"quantization_config": V4}}
    assert not moe.Experts.from_checkpoint(checkpoint, prefix, **of_no_model).interleaved
    with pytest.raises(ArgumentValueError, match=r"`interleaved` must be False or None for .* own"):
        moe.Experts.from_checkpoint(checkpoint, prefix, interleaved=True)
    for name in (f"{stem}1.up_proj.weight", f"{stem}down_proj_scale_inv"):
        rest = {of: array for of, array in stacks.items() if of != name}
        with pytest.raises(CheckpointError, match="is not known beside the other tensors"):
            moe.Experts.from_checkpoint(rest, prefix, config=config)


def test_quantized_modules():
    """Step-3.5 in float8: `weight_scale_inv` of stacks."""
    prefix, named, config, _ = PLAIN["step"]
    tensors = named(prefix, drawn())
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        sizes = EXPERTS, *(of // 32 for of in tensors[name].shape[1:])
        tensors[f"{name}_scale_inv"] = rng.random(sizes, np.float32)
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    found = moe.Experts.from_checkpoint(
        tensors, prefix, config=config | {"quantization_config": fp8}
    )
    gate_up, down = gate_up_and_down(found)
    of = [
        exactly(moe.from_8_bits(tensors[name], tensors[f"{name}_scale_inv"], block_size=(32, 32)))
        for name in (f"{prefix}.{linear}_proj.weight" for linear in ("gate", "up", "down"))
    ]
    np.testing.assert_array_equal(gate_up, np.concatenate(of[:2], axis=-1))
    np.testing.assert_array_equal(down, of[2])


# --- DeepSeek-V4's files -------------------------------------------------------------------------


def test_deepseek_v4(tmp_path):
    """Experts in MXFP4 under `w1.weight` (I8) and `w1.scale` (F8_E8M0), attention in float8."""
    config = {
        "model_type": "deepseek_v4",
        "expert_dtype": "fp4",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS,
        "quantization_config": V4 | {"activation_scheme": "dynamic"},
        "swiglu_limit": 10.0,
    }
    prefix, tensors = "layers.2.ffn", {}
    make = mxfp4("weight", "scale", np.int8, ml_dtypes.float8_e8m0fnu)
    for e in range(EXPERTS):
        for name, shape in {
            "w1": (WIDTH, HIDDEN),
            "w2": (HIDDEN, WIDTH),
            "w3": (WIDTH, HIDDEN),
        }.items():
            for end, array in make(*shape).items():
                tensors[f"{prefix}.experts.{e}.{name}.{end}"] = array
    attention = "layers.2.attn.wq_a"
    tensors[f"{attention}.weight"] = floats(96, HIDDEN).astype(ml_dtypes.float8_e4m3fn)
    powers = rng.integers(118, 130, (3, 2), np.uint8).view(ml_dtypes.float8_e8m0fnu)
    tensors[f"{attention}.scale"] = powers
    checkpoint = moe.Checkpoint(write(tmp_path, tensors, config, files=2))
    found = moe.Experts.from_checkpoint(checkpoint, prefix)
    assert found.activation == moe.Swiglu(limit=10.0)
    one = lambda e, name: exactly(
        moe.from_mxfp4(
            *(tensors[f"{prefix}.experts.{e}.{name}.{end}"] for end in ("weight", "scale"))
        )
    )
    gate_up, down = gate_up_and_down(found)
    for e in range(EXPERTS):
        both = np.concatenate([one(e, "w1"), one(e, "w3")], axis=1)
        np.testing.assert_array_equal(gate_up[e], both)
        np.testing.assert_array_equal(down[e], one(e, "w2"))
    linear = moe.linear_from_checkpoint(checkpoint, attention)
    wanted = moe.from_8_bits(tensors[f"{attention}.weight"], powers, block_size=(32, 32))
    np.testing.assert_array_equal(exactly(linear), exactly(wanted).T)
    twice = config | {"quantization_config": V4 | {"expert_dtype": "fp8"}}
    with pytest.raises(
        CheckpointError, match=r"two `expert_dtype` that differ, one of them in `qu"
    ):
        moe.Experts.from_checkpoint(tensors, prefix, config=twice)
    for said in (None, "fp8"):
        with pytest.raises(CheckpointError, match=r"expert_dtype\"\]` must be one of 'fp4'; got "):
            moe.Experts.from_checkpoint(tensors, prefix, config=config | {"expert_dtype": said})


# --- Quark ---------------------------------------------------------------------------------------


def quark(layers=None, types=None, **rest):
    weight = lambda dtype: {"weight": {"dtype": dtype}}
    return {
        "quant_method": "quark",
        "global_quant_config": rest or weight("fp4"),
        "layer_quant_config": {name: weight(of) for name, of in (layers or {}).items()},
        "layer_type_quant_config": {name: weight(of) for name, of in (types or {}).items()},
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (quark(), ""),
        (quark({"*self_attn*": "fp8_e4m3", "lm_head": "int8"}), ""),
        (quark({"*experts*": "fp4"}, weight={"dtype": "int8"}), ""),
        (quark(types={"Linear": "fp4"}, weight={"dtype": "int8"}), ""),
        (quark({"*experts*": "fp8_e4m3"}), r'"dtype"\]` must be one of \'fp4\'; got \'fp8_e4m3\''),
        (quark({"*up_proj": "int4"}), r"up_proj`.*got \'int4\'"),
        (quark(types={"Linear": "int8"}), "got 'int8'"),
        (quark({"*experts*": "fp4", "*up_proj": "int4"}), "up_proj': 2 of them are for it"),
        (quark(weight=[{"dtype": "fp4"}]), r"must have a mapping as .*\[\"weight\"\]`; got \["),
    ],
)
def test_quark(said, message):
    """A layer's weights are what its pattern says, or the configuration for all."""
    tensors, prefix = {}, "model.layers.2.mlp"
    for e in range(EXPERTS):
        for name, shape in (
            ("gate", (WIDTH, HIDDEN)),
            ("up", (WIDTH, HIDDEN)),
            ("down", (HIDDEN, WIDTH)),
        ):
            for end, array in mxfp4("weight", "weight_scale")(*shape).items():
                tensors[f"{prefix}.experts.{e}.{name}_proj.{end}"] = array
    config = SILU | {"model_type": "qwen3_moe", "quantization_config": said}
    if not message:
        assert moe.Experts.from_checkpoint(tensors, prefix, config=config).w_down.packed
        return
    with pytest.raises(CheckpointError, match=message):
        moe.Experts.from_checkpoint(tensors, prefix, config=config)
