"""`Experts.from_checkpoint`: every layout and format against each expert's own tensors."""

from __future__ import annotations

import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.moe.checkpoint import layers
from tests.moe.checkpoint.files import write
from tests.moe.checkpoint.layers import (
    EXPERTS,
    FORMATS,
    GPT_OSS,
    GROUP,
    HIDDEN,
    MIXTRAL,
    MLP,
    QWEN,
    USUAL,
    WIDTH,
    exact,
    floats,
    gpt_oss,
    gptq,
    in_8_bits,
    layer,
    plain,
    read,
    rng,
    wanted,
    words,
)
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError


@pytest.mark.parametrize("linears", [USUAL, MIXTRAL], ids=["usual", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, linears, tmp_path):
    make, _, quantization = FORMATS[name]
    tensors = layer(make, linears)
    config = QWEN | {"quantization_config": quantization}
    write(tmp_path, tensors, config, files=2)
    checkpoint = moe.Checkpoint(tmp_path)
    for given, how in ((checkpoint, {}), (tensors, {"config": config})):
        found = read(given, **how)
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


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("plain", "wide_blocks")])
def test_tiles(name, monkeypatch):
    """Experts are put into tiles one by one, as they are read."""
    monkeypatch.setattr(layers, "SHAPES", ((128, 192), (128, 192), (192, 128)))
    make, _, quantization = FORMATS[name]
    config = {"quantization_config": quantization}
    tensors = layer(make)
    found, stored = read(tensors, config), read(tensors, config, tiles=False)
    for tiled, other in ((found.w_gate_up, stored.w_gate_up), (found.w_down, stored.w_down)):
        assert (tiled.tiled, other.tiled) == (True, False)
        assert tiled.shape == other.shape
        np.testing.assert_array_equal(exactly(tiled), exactly(other))


def test_tiles_of_gpt_oss():
    """A part of the experts is put into tiles, without what is not quantized."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(0, 120, (3, *shape), np.uint8)
    stem = f"{MLP}.experts."
    tensors = {
        f"{stem}gate_up_proj_blocks": draw(256, 2, 16),
        f"{stem}gate_up_proj_scales": draw(256, 2),
        f"{stem}gate_up_proj_bias": floats(3, 256),
        f"{stem}down_proj_blocks": draw(64, 4, 16),
        f"{stem}down_proj_scales": draw(64, 4),
        f"{stem}down_proj_bias": floats(3, 64),
    }
    part = range(1, 3)
    found, stored = (read(tensors, GPT_OSS, experts=part, tiles=of) for of in (True, False))
    for tiled, other in ((found.w_gate_up, stored.w_gate_up), (found.w_down, stored.w_down)):
        assert (tiled.tiled, other.tiled) == (True, False)
        assert other.values.base is not None  # no copy of the file
        np.testing.assert_array_equal(exactly(tiled), exactly(other))
    with pytest.raises(ArgumentTypeError, match="`tiles` must be a bool"):
        read(tensors, GPT_OSS, tiles="no")


def test_a_part_of_the_experts():
    tensors = layer(plain)
    whole = read(tensors)
    for part in (range(1, 3), range(0, 3, 2)):
        found = read(tensors, experts=part)
        np.testing.assert_array_equal(found.w_gate_up, whole.w_gate_up[list(part)])
        np.testing.assert_array_equal(found.w_down, whole.w_down[list(part)])


def test_experts_of_other_devices_may_be_missing():
    tensors = {name: of for name, of in layer(plain).items() if ".0." not in name}
    found = read(tensors, experts=range(1, 3))
    assert found.w_down.shape == (2, HIDDEN, WIDTH)


def test_one_format_for_gate_and_up_and_another_for_down():
    tensors, others = layer(plain), layer(in_8_bits("weight_scale_inv", 128, 128))
    down = {name: of for name, of in tensors.items() if "down_proj" in name}
    mixed = {name: of for name, of in others.items() if "down_proj" not in name} | down
    found = read(mixed)
    plain_down = read(tensors).w_down
    scaled = read(others).w_gate_up
    np.testing.assert_array_equal(found.w_down, plain_down)
    np.testing.assert_array_equal(exactly(found.w_gate_up), exactly(scaled))


def test_progress():
    seen = []

    def progress(experts):
        for expert in experts:
            seen.append(expert)
            yield expert

    how = {"experts": range(1, 3), "progress": progress}
    read(layer(plain), **how)
    assert seen == [1, 2]


def test_progress_in_another_order():
    tensors = layer(plain)
    for part in (range(3), range(0, 3, 2)):
        wanted, found = (
            read(tensors, experts=part, progress=progress) for progress in (None, reversed)
        )
        np.testing.assert_array_equal(found.w_gate_up, wanted.w_gate_up)
        np.testing.assert_array_equal(found.w_down, wanted.w_down)


@pytest.mark.parametrize(
    ("progress", "error", "message"),
    [
        (lambda experts: experts[:-1], ArgumentValueError, r"of range\(0, 3\) once; it left out 2"),
        (lambda experts: [*experts, 1], ArgumentValueError, "once; got 1 again"),
        (lambda experts: [0, 3], ArgumentValueError, "once; got 3"),
        (lambda experts: [0.0, 1, 2], ArgumentValueError, "once; got 0.0"),
        (lambda experts: [False, 1, 2], ArgumentValueError, "once; got False"),
        (enumerate, ArgumentValueError, r"once; got \(0, 0\)"),
        (lambda experts: [np.zeros(2)], ArgumentValueError, r"once; got float64\[2\]\."),
        (lambda experts: None, ArgumentTypeError, "must return an iterator of .*; got None"),
        (True, ArgumentTypeError, "`progress` must be a function; got True"),
    ],
)
def test_progress_that_leaves_out_experts_or_gives_others(progress, error, message):
    with pytest.raises(error, match=message):
        read(layer(plain), progress=progress)


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize("name", ["plain", "gptq", "awq", "packed", "wide_blocks"])
def test_memory_is_one_stack_and_few_tensors(name, tmp_path):
    make, _, quantization = FORMATS[name]
    tensors = layer(make, experts=100)
    checkpoint = moe.Checkpoint(write(tmp_path, tensors))
    list(checkpoint.values())
    tracemalloc.start()
    config = {"quantization_config": quantization}
    found = read(checkpoint, config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stacks = sum(array.nbytes for array in jax.tree.leaves(found))
    # A few kilobytes for each expert may wait for Python's collector; a second stack is 1 MB.
    assert peak < stacks + 500_000 < 1.5 * stacks


# --- stacked in the checkpoint -------------------------------------------------------------------


@pytest.mark.parametrize("part", [None, range(1, 3), range(0, 3, 2)])
@pytest.mark.parametrize("quantized", [False, True])
def test_gpt_oss(quantized, part, tmp_path):
    tensors = gpt_oss(quantized)
    checkpoint = moe.Checkpoint(write(tmp_path, tensors, GPT_OSS | {"swiglu_limit": 5.0}))
    found = read(checkpoint, experts=part)
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
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        tensors = gpt_oss(quantized)
        del tensors[f"{MLP}.experts.{name}"]
        with pytest.raises(CheckpointError, match=f"`{MLP}.experts.{name}` is missing"):
            read(tensors, GPT_OSS)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        tensors.pop(f"{MLP}.experts.{name}", None)
    with pytest.raises(CheckpointError, match="gate_up_proj_bias` is missing"):
        read(tensors, GPT_OSS)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_without_biases(transposed):
    order = (0, 2, 1) if transposed else (0, 1, 2)
    shapes = {"gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH), "down_proj": (EXPERTS, WIDTH, HIDDEN)}
    tensors = {
        f"{MLP}.experts.{name}": floats(*shape).transpose(order) for name, shape in shapes.items()
    }
    found = read(tensors)
    assert (found.transposed, found.interleaved) == (transposed, False)
    assert found.activation == "swiglu"
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        with pytest.raises(CheckpointError, match=f"has `{key}` 4, and .* has 3 experts"):
            read(tensors, {key: EXPERTS + 1})
        assert len(read(tensors, {key: EXPERTS}, experts=range(2)).w_down) == 2


@pytest.mark.parametrize("quantized", [False, True])
def test_biases_beside_columns_that_do_not_alternate(quantized):
    """Biases say nothing about the order of gate and up: the model type does, or the caller."""
    tensors = gpt_oss(quantized)
    found = read(tensors)
    assert (found.interleaved, found.activation) == (False, "swiglu")
    np.testing.assert_array_equal(found.b_gate_up, tensors[f"{MLP}.experts.gate_up_proj_bias"])
    np.testing.assert_array_equal(found.b_down, tensors[f"{MLP}.experts.down_proj_bias"])
    of_caller = {"model_type": None}, {"model_type": "new", "hidden_act": "silu"}
    for config in of_caller:
        with pytest.raises(
            CheckpointError, match=r"`interleaved` must say .*gate_up_proj.*True as"
        ):
            read(tensors, config, activation="swiglu")
        for interleaved in (False, True):
            found = read(tensors, config, activation="swiglu", interleaved=interleaved)
            assert found.interleaved is interleaved
    assert read(tensors, interleaved=True).interleaved
    assert not read(tensors, GPT_OSS, interleaved=False).interleaved


def test_interleaved_is_for_stacks():
    assert not read(layer(plain), interleaved=False).interleaved
    with pytest.raises(ArgumentValueError, match=r"`interleaved` must be False or None for .*True"):
        read(layer(plain), interleaved=True)
    with pytest.raises(ArgumentTypeError, match="`interleaved` must be a bool; got 'yes'"):
        read(gpt_oss(True), GPT_OSS, interleaved="yes")


@pytest.mark.parametrize(
    "name",
    [
        "experts.gate_up_proj_scale_inv",
        "experts.0.gate_proj.weight",
        "experts.gate_up_proj_blocks",
        "experts.gate_up_proj",
    ],
)
def test_tensors_beside_stacks_that_are_not_known(name):
    tensors = gpt_oss(quantized=name.endswith("gate_up_proj")) | {f"{MLP}.{name}": words(2, 2)}
    with pytest.raises(
        CheckpointError, match=r"not known beside|both in floats and in MXFP4|float8_e4m3fn or f"
    ):
        read(tensors, GPT_OSS)


@pytest.mark.parametrize(
    "name",
    [
        "0.gate_proj.pre_quant_scale",
        "0.w1.bias",
        "0",
        "a.b",
        "0x.up_proj.weight",
        "01.up_proj.weight",
        "\N{ARABIC-INDIC DIGIT ONE}.up_proj.weight",
        f"{'1' * 5000}.up_proj.weight",
    ],
)
def test_tensors_of_experts_that_are_not_known(name):
    tensors = layer(in_8_bits("weight_scale"))
    with pytest.raises(CheckpointError, match=rf"`{MLP}.experts.\S*` is not known beside"):
        read(tensors | {f"{MLP}.experts.{name}": floats(1)})
    of_tokens = {f"{MLP}.experts.{e}.up_proj.input_scale": floats(1) for e in range(EXPERTS)}
    of_tokens |= {f"{MLP}.experts.0.up_proj.{of}_scale": floats(1) for of in ("k", "input_global")}
    assert read(tensors | of_tokens).w_down.shape == read(tensors).w_down.shape


def test_tensors_of_two_formats():
    other = {f"{MLP}.experts.{e}.up_proj.weight_scale_2": floats(1) for e in range(EXPERTS)}
    with pytest.raises(CheckpointError, match="`weight` must be an array of uint8; got float8_e4m"):
        read(layer(in_8_bits("weight_scale")) | other)
    other = {f"{MLP}.experts.{e}.up_proj.weight_scale_inv": floats(1) for e in range(EXPERTS)}
    with pytest.raises(CheckpointError, match="No known format has all of these tensors: weight"):
        read(layer(in_8_bits("weight_scale")) | other)
    with pytest.raises(CheckpointError, match=r"quant_method.* must be one of 'gptq'; got 'awq'"):
        read(layer(gptq), {"quantization_config": {"quant_method": "awq"}})


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
        (
            "packed",
            put(f"{FIRST}.weight_scale", floats(WIDTH, 5)),
            r"must have a scale for each block of `group_size` 32; got \(96, 5\)",
        ),
        (
            "packed",
            put(f"{FIRST}.weight_scale", floats(WIDTH, 2, dtype=np.float16)),
            "must be alike",
        ),
        ("awq", put(f"{FIRST}.qweight", words(HIDDEN // 8, WIDTH)), "`scales` must have shape"),
    ],
)
def test_damaged_experts(name, change, message, tmp_path):
    make, _, quantization = FORMATS[name]
    tensors = layer(make)
    change(tensors)
    write(tmp_path, tensors, QWEN | {"quantization_config": quantization}, files=1)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(moe.Checkpoint(tmp_path))
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
        read(tensors, **how)


def test_biases_of_zeros():
    tensors = layer(gptq)
    zeros = {f"{MLP}.experts.{e}.up_proj.bias": np.zeros(WIDTH, np.float16) for e in range(EXPERTS)}
    how = {"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}
    found = read(tensors | zeros, **how)
    wanted = read(tensors, **how)
    assert found.b_gate_up is None
    np.testing.assert_array_equal(exactly(found.w_gate_up), exactly(wanted.w_gate_up))


def test_experts_whose_groups_differ():
    """Scales have the same shapes: 64 rows are 40 + 24 or 32 + 32."""
    tensors = layer(gptq)
    name = f"{MLP}.experts.2.up_proj.g_idx"
    tensors[name] = np.arange(HIDDEN, dtype=np.int32) // 40
    with pytest.raises(CheckpointError, match="All experts must be alike"):
        read(tensors, {"quantization_config": {"quant_method": "gptq"}})


def test_shapes_in_errors_are_those_of_the_file():
    tensors = layer(gptq) | {f"{MLP}.experts.0.up_proj.qzeros": words(2, 9)}
    how = {"config": {"quantization_config": {"quant_method": "gptq"}}}
    message = r"Argument `qzeros` must have shape \(2, 12\) .*; got \(2, 9\)"
    with pytest.raises(CheckpointError, match=message):
        read(tensors, **how)


def test_a_missing_expert():
    tensors = {name: of for name, of in layer(plain).items() if ".1." not in name}
    with pytest.raises(CheckpointError, match=f"`{MLP}.experts.1` is missing: no tensor"):
        read(tensors)


def test_names_of_another_layout():
    with pytest.raises(CheckpointError, match=r"one of \[\], .* those of Hugging Face's layout"):
        read({"block.0.mlp.mlp1_weight.blocks": words(2, 2)})


def test_a_matrix_that_does_not_fit_the_others():
    tensors = layer(plain)
    for name in tensors:
        if "down_proj" in name:
            tensors[name] = floats(HIDDEN, WIDTH + 2)
    with pytest.raises(CheckpointError, match=f"`{MLP}.experts` in the tensors: Argument `w_gate"):
        read(tensors)


def test_damaged_stacks():
    tensors = gpt_oss(True)
    scales = tensors.pop(f"{MLP}.experts.gate_up_proj_scales")
    with pytest.raises(CheckpointError, match="gate_up_proj_scales` is missing"):
        read(tensors)
    tensors[f"{MLP}.experts.gate_up_proj_scales"] = scales[:2]
    with pytest.raises(CheckpointError, match=r"`weight_scale` must have shape \(3, 192, 2\)"):
        read(tensors)
    in_8_bits = {name: of.astype(ml_dtypes.float8_e5m2) for name, of in gpt_oss(False).items()}
    with pytest.raises(
        CheckpointError, match=r"must be an array of float32 .*; got float8_e5m2.* have scales"
    ):
        read(in_8_bits)


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
                read(given, experts=part)
        for part in (2, [1]):
            with pytest.raises(ArgumentTypeError, match=r"must be a part of range\(0, 3\)"):
                read(given, experts=part)
    for given in ("models/gpt-oss-20b", [1]):
        with pytest.raises(ArgumentTypeError, match=r"such as moe.Checkpoint\(folder\); got"):
            read(given)
    for tensors in (gpt_oss(True), gpt_oss(False)):
        for name in ("silu", "relu2"):
            with pytest.raises(
                ArgumentValueError, match=f"`activation` must have a gate.*'{name}'"
            ):
                read(tensors, activation=name)
    for activation in ("swish", 3):
        with pytest.raises(CheckpointError, match="Argument `activation` must be"):
            read(gpt_oss(True), activation=activation)
    with pytest.raises(CheckpointError, match="`activation` must have a gate, because `w_gate_up`"):
        read(layer(plain), activation="relu2")


# --- the layer -----------------------------------------------------------------------------------


@pytest.mark.slow("compiles a layer; its arrays are compared above")
def test_feed_forward(tmp_path):
    """Qwen3-MoE in float8 by blocks: all experts of each token, in float64."""
    tensors = layer(in_8_bits("weight_scale_inv", 128, 128))
    experts = read(moe.Checkpoint(write(tmp_path, tensors, QWEN)))
    x, logits = floats(5, HIDDEN, dtype=np.float32) / 100, floats(5, EXPERTS, dtype=np.float32)
    found = moe.feed_forward(x, logits, jax.device_put(experts), moe.Router(EXPERTS))
    total = np.zeros((5, HIDDEN))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for expert in range(EXPERTS):
        gate_up, down = wanted(tensors, "wide_blocks", USUAL, expert)
        gate, up = np.split(x.astype(np.float64) @ gate_up, 2, axis=1)
        total += shares[:, [expert]] * ((gate / (1 + np.exp(-gate)) * up) @ down)
    np.testing.assert_allclose(found.tokens, total, rtol=2e-5, atol=1e-5 * np.abs(total).max())


@pytest.mark.parametrize("name", FORMATS)
def test_one_linear_layer(name):
    """Of attention, say: as the format's own function reads it, transposed to [out, in]."""
    make, one, quantization = FORMATS[name]
    own = make(WIDTH, HIDDEN)
    tensors = {f"a.q_proj.{end}": of for end, of in own.items()}
    config = {"quantization_config": quantization}
    found = moe.linear_from_checkpoint(
        tensors | {"a.q_proj.bias": floats(WIDTH), "b.weight": floats(3)}, "a.q_proj", config=config
    )
    is_plain = one is moe.Experts
    assert isinstance(found, moe.ScaledArray) != is_plain
    assert found.shape == (WIDTH, HIDDEN)
    if is_plain:
        assert found is tensors["a.q_proj.weight"]
    else:
        np.testing.assert_array_equal(exactly(found), exactly(one(*own.values())).T)


def test_one_linear_layer_that_is_not_there_or_not_known():
    tensors = {f"layers.0.q_proj.{end}": of for end, of in gptq(WIDTH, HIDDEN).items()}
    with pytest.raises(CheckpointError, match=r"got 'layers.0.qproj'\. The nearest are `layers.0"):
        moe.linear_from_checkpoint(tensors, "layers.0.qproj")
    lora = {"layers.0.q_proj.lora_A": floats(2, 2)}
    with pytest.raises(CheckpointError, match=r"`layers\.0\.q_proj\.lora_A` is not known beside"):
        moe.linear_from_checkpoint(tensors | lora, "layers.0.q_proj")
    del tensors["layers.0.q_proj.qzeros"]
    with pytest.raises(CheckpointError, match=r"in the tensors: `layers\.0\.q_proj\.qzeros`"):
        moe.linear_from_checkpoint(tensors, "layers.0.q_proj")
    with pytest.raises(ArgumentTypeError, match="`tensors`"):
        moe.linear_from_checkpoint([], "layers.0.q_proj")
