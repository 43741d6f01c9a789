"""`Experts.from_checkpoint`: every layout and format against each expert's own tensors."""

from __future__ import annotations

import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.moe.checkpoint.files import write
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError

EXPERTS, HIDDEN, WIDTH, GROUP = 3, 64, 96, 32
MLP = "model.layers.3.mlp"
USUAL, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
SHAPES = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)

rng = np.random.default_rng(0)


def words(*shape):
    return rng.integers(-(2**31), 2**31, shape, np.int32)


def floats(*shape, dtype=ml_dtypes.bfloat16):
    return rng.standard_normal(shape).astype(dtype)


def plain(out, depth):
    return {"weight": floats(out, depth)}


def gptq(out, depth):
    groups = depth // GROUP
    return {
        "qweight": words(depth // 8, out),
        "qzeros": words(groups, out // 8),
        "scales": floats(groups, out, dtype=np.float16),
        "g_idx": np.arange(depth, dtype=np.int32) // GROUP,
    }


def awq(out, depth):
    rest = {name: array for name, array in gptq(out, depth).items() if name != "g_idx"}
    return rest | {"qweight": words(depth, out // 8)}


def packed(out, depth):
    return {
        "weight_packed": words(out, depth // 8),
        "weight_scale": floats(out, depth // GROUP),
        "weight_shape": np.array([out, depth]),
    }


def packed_with_zeros(out, depth):
    return packed(out, depth) | {"weight_zero_point": words(out // 8, depth // GROUP)}


def in_8_bits(scale, *sizes, dtype=ml_dtypes.float8_e4m3fn):
    """Weights with scales of the sizes, where a number is that of a block."""

    def make(out, depth):
        found = [-(-of // size) for of, size in zip((out, depth), sizes, strict=False)]
        weight = rng.integers(-100, 100, (out, depth)).astype(dtype)
        return {"weight": weight, scale: np.array(2.0 ** rng.integers(-3, 3, found), np.float32)}

    return make


FORMATS = {
    "plain": (plain, moe.Experts, {}),
    "gptq": (gptq, moe.from_gptq, {"quant_method": "gptq"}),
    "gptq_v2": (
        gptq,
        lambda *of: moe.from_gptq(*of, v2=True),
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, moe.from_awq, {"quant_method": "awq", "version": "GEMM"}),
    "packed": (packed, moe.from_compressed_tensors, {}),
    "packed_with_zeros": (packed_with_zeros, moe.from_compressed_tensors, {}),
    "blocks": (in_8_bits("weight_scale_inv", 32, 32), moe.from_8_bits, {}),
    "compressed_blocks": (in_8_bits("weight_scale", 32, 32), moe.from_8_bits, {}),
    # The last block of the gate is partial, and up is next to it.
    "partial_blocks": (in_8_bits("weight_scale_inv", 64, 64), moe.from_8_bits, {}),
    # 128 × 128: both gate and up are in a part of a block.
    "wide_blocks": (in_8_bits("weight_scale_inv", 128, 128), moe.from_8_bits, {}),
    "channels": (in_8_bits("weight_scale", 1, 1000, dtype=np.int8), moe.from_8_bits, {}),
    "tensors": (in_8_bits("weight_scale"), moe.from_8_bits, {}),
}


def layer(make, linears=USUAL, prefix=MLP, experts=EXPERTS):
    return {
        f"{prefix}.experts.{e}.{name}.{of}": array
        for e in range(experts)
        for name, shape in zip(linears, SHAPES, strict=True)
        for of, array in make(*shape).items()
    }


def exact(weights, transposed):
    """Weights [experts, in, out] in float64."""
    is_scaled = isinstance(weights, moe.ScaledArray)
    array = exactly(weights) if is_scaled else np.asarray(weights, np.float64)
    return array.swapaxes(-1, -2) if transposed else array


def wanted(tensors, name, linears, expert, prefix=MLP):
    """One expert's [gate | up] and down, by the function for one matrix."""
    found = []
    for linear in linears:
        stem = f"{prefix}.experts.{expert}.{linear}."
        arrays = [array for of, array in tensors.items() if of.startswith(stem)]
        one = FORMATS[name][1]
        found.append(exact(arrays[0], True) if one is moe.Experts else exact(one(*arrays), False))
    return np.concatenate(found[:2], axis=-1), found[2]


@pytest.mark.parametrize("linears", [USUAL, MIXTRAL], ids=["usual", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, linears, tmp_path):
    make, _, quantization = FORMATS[name]
    tensors = layer(make, linears)
    config = {"quantization_config": quantization}
    write(tmp_path, tensors, config, files=2)
    checkpoint = moe.Checkpoint(tmp_path)
    for given, how in ((checkpoint, {}), (tensors, {"config": config})):
        found = moe.Experts.from_checkpoint(given, MLP, **how)
        assert all(type(array) is np.ndarray for array in jax.tree.leaves(found))
        for expert in range(EXPERTS):
            gate_up, down = wanted(tensors, name, linears, expert)
            w_gate_up, w_down = (
                exact(w, found.transposed)[expert] for w in (found.w_gate_up, found.w_down)
            )
            np.testing.assert_array_equal(w_gate_up, gate_up)
            np.testing.assert_array_equal(w_down, down)
    assert found.activation == "swiglu"
    assert found.transposed
    assert not found.interleaved


def test_a_part_of_the_experts():
    tensors = layer(plain)
    whole = moe.Experts.from_checkpoint(tensors, MLP)
    for part in (range(1, 3), range(0, 3, 2)):
        found = moe.Experts.from_checkpoint(tensors, MLP, experts=part)
        np.testing.assert_array_equal(found.w_gate_up, whole.w_gate_up[list(part)])
        np.testing.assert_array_equal(found.w_down, whole.w_down[list(part)])


def test_experts_of_other_devices_may_be_missing():
    tensors = {name: of for name, of in layer(plain).items() if ".0." not in name}
    found = moe.Experts.from_checkpoint(tensors, MLP, experts=range(1, 3))
    assert found.w_down.shape == (2, HIDDEN, WIDTH)


def test_one_format_for_gate_and_up_and_another_for_down():
    tensors, others = layer(plain), layer(in_8_bits("weight_scale_inv", 128, 128))
    down = {name: of for name, of in tensors.items() if "down_proj" in name}
    mixed = {name: of for name, of in others.items() if "down_proj" not in name} | down
    found = moe.Experts.from_checkpoint(mixed, MLP)
    plain_down = moe.Experts.from_checkpoint(tensors, MLP).w_down
    scaled = moe.Experts.from_checkpoint(others, MLP).w_gate_up
    np.testing.assert_array_equal(found.w_down, plain_down)
    np.testing.assert_array_equal(exactly(found.w_gate_up), exactly(scaled))


def test_progress():
    seen = []

    def progress(experts):
        for expert in experts:
            seen.append(expert)
            yield expert

    how = {"experts": range(1, 3), "progress": progress}
    moe.Experts.from_checkpoint(layer(plain), MLP, **how)
    assert seen == [1, 2]


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize("name", ["plain", "gptq", "awq", "packed", "wide_blocks"])
def test_memory_is_one_stack_and_few_tensors(name, tmp_path):
    make, _, quantization = FORMATS[name]
    tensors = layer(make, experts=100)
    checkpoint = moe.Checkpoint(write(tmp_path, tensors))
    list(checkpoint.values())
    tracemalloc.start()
    config = {"quantization_config": quantization}
    found = moe.Experts.from_checkpoint(checkpoint, MLP, config=config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stacks = sum(array.nbytes for array in jax.tree.leaves(found))
    assert peak < stacks + 10 * stacks / 100 + 100_000


# --- stacked in the checkpoint -------------------------------------------------------------------


def gpt_oss(quantized):
    stem, tensors = f"{MLP}.experts", {}
    for name, depth, out in (("gate_up_proj", HIDDEN, 2 * WIDTH), ("down_proj", WIDTH, HIDDEN)):
        tensors[f"{stem}.{name}_bias"] = floats(EXPERTS, out)
        if not quantized:
            tensors[f"{stem}.{name}"] = floats(EXPERTS, depth, out)
            continue
        blocks = rng.integers(0, 256, (EXPERTS, out, depth // 32, 16), np.uint8)
        scales = rng.integers(118, 130, (EXPERTS, out, depth // 32), np.uint8)
        tensors |= {f"{stem}.{name}_blocks": blocks, f"{stem}.{name}_scales": scales}
    return tensors


@pytest.mark.parametrize("part", [None, range(1, 3), range(0, 3, 2)])
@pytest.mark.parametrize("quantized", [False, True])
def test_gpt_oss(quantized, part, tmp_path):
    tensors = gpt_oss(quantized)
    config = {"hidden_act": "silu", "swiglu_limit": 5.0}
    checkpoint = moe.Checkpoint(write(tmp_path, tensors, config))
    found = moe.Experts.from_checkpoint(checkpoint, MLP, experts=part)
    assert found.activation == moe.Swiglu(alpha=1.702, limit=5.0, up_offset=1.0)
    assert found.interleaved
    assert not found.transposed
    chosen = list(part or range(EXPERTS))
    for name, weights, bias in (
        ("gate_up_proj", found.w_gate_up, found.b_gate_up),
        ("down_proj", found.w_down, found.b_down),
    ):
        stem = f"{MLP}.experts.{name}"
        np.testing.assert_array_equal(bias, tensors[f"{stem}_bias"][chosen])
        if quantized:
            whole = exactly(moe.from_mxfp4(tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"]))
            np.testing.assert_array_equal(exactly(weights), whole[chosen])
        else:
            np.testing.assert_array_equal(weights, tensors[stem][chosen])
            assert weights.base is not None  # no copy of the file


@pytest.mark.parametrize("quantized", [False, True])
def test_gpt_oss_has_biases(quantized):
    """Neither a config nor biases must be there to tell it from plain SwiGLU."""
    config = {} if quantized else {"model_type": "gpt_oss"}
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        tensors = gpt_oss(quantized)
        del tensors[f"{MLP}.experts.{name}"]
        with pytest.raises(CheckpointError, match=f"`{MLP}.experts.{name}` is missing"):
            moe.Experts.from_checkpoint(tensors, MLP, config=config)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_without_biases(transposed):
    order = (0, 2, 1) if transposed else (0, 1, 2)
    shapes = {"gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH), "down_proj": (EXPERTS, WIDTH, HIDDEN)}
    tensors = {
        f"{MLP}.experts.{name}": floats(*shape).transpose(order) for name, shape in shapes.items()
    }
    found = moe.Experts.from_checkpoint(tensors, MLP)
    assert (found.transposed, found.interleaved) == (transposed, False)
    assert found.activation == "swiglu"


# --- what config.json says -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "swiglu"),
        ({"hidden_act": "silu"}, "swiglu"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "geglu"),
        ({"text_config": {"hidden_act": "gelu_pytorch_tanh"}}, "geglu"),
    ],
)
def test_activation(config, activation):
    assert moe.Experts.from_checkpoint(layer(plain), MLP, config=config).activation == activation


@pytest.mark.parametrize("config", [{"hidden_act": "relu6"}, {"swiglu_limit": 7.0}])
def test_an_activation_that_is_not_known(config):
    with pytest.raises(CheckpointError, match="formula is not known"):
        moe.Experts.from_checkpoint(layer(plain), MLP, config=config)
    limited = moe.Swiglu(limit=7.0)
    how = {"config": config, "activation": limited}
    assert moe.Experts.from_checkpoint(layer(plain), MLP, **how).activation is limited


@pytest.mark.parametrize("quantization", [{}, {"quant_method": "auto-round"}])
def test_words_of_an_unknown_format(quantization):
    with pytest.raises(
        CheckpointError, match=r"quant_method.* must be one of 'gptq', 'awq'.*config="
    ):
        moe.Experts.from_checkpoint(layer(awq), MLP, config={"quantization_config": quantization})


def test_quantization_in_the_configuration_of_the_text():
    config = {"text_config": {"quantization_config": {"quant_method": "awq"}}}
    assert moe.Experts.from_checkpoint(layer(awq), MLP, config=config).transposed


def gptq_in_8_bits(out, depth):
    return gptq(out, depth) | {
        "qweight": words(depth // 4, out),
        "qzeros": words(depth // GROUP, out // 4),
    }


def awq_gemv(out, depth):
    return {
        "qweight": words(out, depth // 8),
        "qzeros": words(out, 1),
        "scales": floats(out, 8, dtype=np.float16),
    }


@pytest.mark.parametrize(
    ("make", "method", "message"),
    [
        (gptq_in_8_bits, "gptq", "`qzeros` must have shape .* Only 4 bits"),
        (awq_gemv, "awq", "`scales` must have shape"),
    ],
)
def test_shapes_tell_other_layouts_of_words(make, method, message):
    config = {"quantization_config": {"quant_method": method}}
    with pytest.raises(CheckpointError, match=message):
        moe.Experts.from_checkpoint(layer(make), MLP, config=config)


# --- what is wrong with the tensors --------------------------------------------------------------

FIRST = f"{MLP}.experts.1.up_proj"


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, array):
    return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plain", without(f"{FIRST}.weight"), "up_proj.weight` is missing"),
        ("gptq", without(f"{FIRST}.scales"), "up_proj.scales` is missing"),
        (
            "blocks",
            without(f"{FIRST}.weight_scale_inv"),
            "must be an array of float32 .* got float8_e4m3.* must have scales",
        ),
        ("packed", without(f"{FIRST}.weight_scale"), "up_proj.weight_scale` is missing"),
        (
            "gptq",
            put(f"{FIRST}.g_idx", rng.permutation(np.arange(HIDDEN, dtype=np.int32) // GROUP)),
            "`g_idx` must be in order, in groups of 32",
        ),
        ("plain", put(f"{FIRST}.bias", floats(WIDTH)), "have no `bias` but zeros"),
        (
            "channels",
            put(f"{FIRST}.weight_zero_point", floats(1)),
            "have no `weight_zero_point` but zeros",
        ),
        ("plain", put(f"{FIRST}.weight", np.zeros((WIDTH, HIDDEN), np.uint8)), "got uint8"),
        (
            "plain",
            put(f"{FIRST}.weight", floats(WIDTH, 8)),
            r"alike: `.*\.0\.gate_proj\.…` has \[bfloat16\[96,64\]\]; got \[bfloat16\[96,8\]\]",
        ),
        ("plain", put(f"{FIRST}.weight", floats(HIDDEN)), r"`weight` must have shape \(out, in\)"),
        (
            "plain",
            put(f"{FIRST}.weight", floats(WIDTH, HIDDEN, dtype=np.float32)),
            r"must be alike: .* got \[float32\[96,64\]\]",
        ),
        ("packed", put(f"{FIRST}.weight_scale", floats(WIDTH, 5)), "must be .* of a power of two"),
        ("packed", put(f"{FIRST}.weight_scale", floats(WIDTH, 4)), "must be alike"),
        ("awq", put(f"{FIRST}.qweight", words(HIDDEN // 8, WIDTH)), "`scales` must have shape"),
    ],
)
def test_damaged_experts(name, change, message, tmp_path):
    make, _, quantization = FORMATS[name]
    tensors = layer(make)
    change(tensors)
    write(tmp_path, tensors, {"quantization_config": quantization}, files=1)
    with pytest.raises(CheckpointError, match=message) as caught:
        moe.Experts.from_checkpoint(moe.Checkpoint(tmp_path), MLP)
    assert FIRST in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value) or "missing" in message


ACT_ORDER = {
    "gptq": {"quant_method": "gptq", "desc_act": True},
    "packed": {"config_groups": {"group_0": {"weights": {"actorder": "group"}}}},
}


@pytest.mark.parametrize("name", ACT_ORDER)
def test_act_order_without_the_groups(name):
    tensors = {n: of for n, of in layer(FORMATS[name][0]).items() if "g_idx" not in n}
    how = {"config": {"quantization_config": ACT_ORDER[name]}}
    with pytest.raises(CheckpointError, match=r"\.0\.gate_proj\.\w*g_idx` is missing"):
        moe.Experts.from_checkpoint(tensors, MLP, **how)


def test_biases_of_zeros():
    tensors = layer(gptq)
    zeros = {f"{MLP}.experts.{e}.up_proj.bias": np.zeros(WIDTH, np.float16) for e in range(EXPERTS)}
    how = {"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}
    found = moe.Experts.from_checkpoint(tensors | zeros, MLP, **how)
    wanted = moe.Experts.from_checkpoint(tensors, MLP, **how)
    assert found.b_gate_up is None
    np.testing.assert_array_equal(exactly(found.w_gate_up), exactly(wanted.w_gate_up))


def test_shapes_in_errors_are_those_of_the_file():
    tensors = layer(gptq) | {f"{MLP}.experts.0.up_proj.qzeros": words(2, 9)}
    how = {"config": {"quantization_config": {"quant_method": "gptq"}}}
    message = r"Argument `qzeros` must have shape \(2, 12\) .*; got \(2, 9\)"
    with pytest.raises(CheckpointError, match=message):
        moe.Experts.from_checkpoint(tensors, MLP, **how)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_missing_last_experts(key):
    tensors = {name: of for name, of in layer(plain).items() if ".2." not in name}
    with pytest.raises(CheckpointError, match=f"has 3 experts, and `{MLP}.experts.…` has 2"):
        moe.Experts.from_checkpoint(tensors, MLP, config={key: EXPERTS})
    moe.Experts.from_checkpoint(layer(plain), MLP, config={key: EXPERTS})


@pytest.mark.parametrize(
    ("make", "quantization", "message"),
    [
        (
            gptq,
            {"quant_method": "gptq", "bits": 3},
            r'_config\["bits"\]` must be one of 4; got 3',
        ),
        (gptq, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "'gptq_v2'; got 'marlin'"),
        (awq, {"quant_method": "awq", "version": "gemv"}, "version.* must be one of 'gemm'"),
        (packed, {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "num_bits.* must be one"),
    ],
)
def test_other_widths_and_formats(make, quantization, message):
    config = {"quantization_config": quantization}
    with pytest.raises(CheckpointError, match=message):
        moe.Experts.from_checkpoint(layer(make), MLP, config=config)


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_zeros_of_a_symmetric_checkpoint(checkpoint_format):
    """They are all 8 and can be left out; others are of a version that is not said."""
    config = {"quant_method": "gptq", "sym": True, "checkpoint_format": checkpoint_format}
    eights = {"gptq": 0x77777777, "gptq_v2": 0x88888888 - 2**32}
    drawn = layer(gptq)
    symmetric = lambda of: {
        name: np.full_like(array, eights[of]) if name.endswith("qzeros") else array
        for name, array in drawn.items()
    }
    found, with_zeros = (
        moe.Experts.from_checkpoint(
            symmetric(checkpoint_format), MLP, config={"quantization_config": config | {"sym": sym}}
        )
        for sym in (True, False)
    )
    assert found.w_down.zeros is None
    assert not with_zeros.w_down.zeros.any()
    np.testing.assert_array_equal(exactly(found.w_down), exactly(with_zeros.w_down))
    (other,) = eights.keys() - {checkpoint_format}
    with pytest.raises(CheckpointError, match=r"checkpoint_format.*config="):
        moe.Experts.from_checkpoint(symmetric(other), MLP, config={"quantization_config": config})


def test_a_missing_expert():
    tensors = {name: of for name, of in layer(plain).items() if ".1." not in name}
    with pytest.raises(CheckpointError, match=f"`{MLP}.experts.1.gate_proj.weight` is missing"):
        moe.Experts.from_checkpoint(tensors, MLP)


def test_names_of_another_layout():
    with pytest.raises(CheckpointError, match=r"one of \[\], .* those of Hugging Face's layout"):
        moe.Experts.from_checkpoint({"block.0.mlp.mlp1_weight.blocks": words(2, 2)}, MLP)


def test_a_matrix_that_does_not_fit_the_others():
    tensors = layer(plain)
    for name in tensors:
        if "down_proj" in name:
            tensors[name] = floats(HIDDEN, WIDTH + 2)
    with pytest.raises(CheckpointError, match=f"`{MLP}.experts` in the tensors: Argument `w_gate"):
        moe.Experts.from_checkpoint(tensors, MLP)


def test_damaged_stacks():
    tensors = gpt_oss(True)
    scales = tensors.pop(f"{MLP}.experts.gate_up_proj_scales")
    with pytest.raises(CheckpointError, match="gate_up_proj_scales` is missing"):
        moe.Experts.from_checkpoint(tensors, MLP)
    tensors[f"{MLP}.experts.gate_up_proj_scales"] = scales[:2]
    with pytest.raises(CheckpointError, match=r"`scales` must have shape \(3, 192, 2\)"):
        moe.Experts.from_checkpoint(tensors, MLP)
    in_8_bits = {name: of.astype(ml_dtypes.float8_e5m2) for name, of in gpt_oss(False).items()}
    with pytest.raises(
        CheckpointError, match=r"must be an array of float32 .*; got float8_e5m2.* have scales"
    ):
        moe.Experts.from_checkpoint(in_8_bits, MLP)


def test_a_prefix_without_experts():
    for tensors, known in ((layer(plain), f"['{MLP}']"), ({"mlp.mlp1_bias": floats(3)}, "[]")):
        message = (
            f"must be one of {known}, which are before `.experts.` in names of the tensors; got"
        )
        with pytest.raises(CheckpointError, match=re.escape(f"{message} 'a'")):
            moe.Experts.from_checkpoint(tensors, "a")


def test_arguments():
    tensors = layer(plain)
    for given in (tensors, gpt_oss(True)):
        for part in (range(4), range(-1, 2), range(2, 2), range(2, 0, -1)):
            with pytest.raises(ArgumentValueError, match=r"must be a part of range\(0, 3\)"):
                moe.Experts.from_checkpoint(given, MLP, experts=part)
        for part in (2, [1]):
            with pytest.raises(ArgumentTypeError, match=r"must be a part of range\(0, 3\)"):
                moe.Experts.from_checkpoint(given, MLP, experts=part)
    for given in ("models/gpt-oss-20b", [1]):
        with pytest.raises(ArgumentTypeError, match=r"such as moe.Checkpoint\(folder\); got"):
            moe.Experts.from_checkpoint(given, MLP)
    with pytest.raises(CheckpointError, match=r"`activation`, 'silu', has no gate.*='swiglu'`"):
        moe.Experts.from_checkpoint(gpt_oss(True), MLP, activation="silu")


# --- the layer -----------------------------------------------------------------------------------


@pytest.mark.slow("compiles a layer; its arrays are compared above")
def test_feed_forward(tmp_path):
    """Qwen3-MoE in float8 by blocks: all experts of each token, in float64."""
    tensors = layer(in_8_bits("weight_scale_inv", 128, 128))
    experts = moe.Experts.from_checkpoint(moe.Checkpoint(write(tmp_path, tensors)), MLP)
    x, logits = floats(5, HIDDEN, dtype=np.float32) / 100, floats(5, EXPERTS, dtype=np.float32)
    found = moe.feed_forward(x, logits, jax.device_put(experts), moe.Router(EXPERTS))
    total = np.zeros((5, HIDDEN))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for expert in range(EXPERTS):
        gate_up, down = wanted(tensors, "wide_blocks", USUAL, expert)
        gate, up = np.split(x.astype(np.float64) @ gate_up, 2, axis=1)
        total += shares[:, [expert]] * ((gate / (1 + np.exp(-gate)) * up) @ down)
    np.testing.assert_allclose(found.tokens, total, rtol=2e-5, atol=1e-5 * np.abs(total).max())
