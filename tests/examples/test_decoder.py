"""The decoder against logits that transformers computed from the same checkpoints.

`make models` recorded them. A checkpoint is written here again, from the same seed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import logits as recorded
from tests.examples.test_moe_layer import EXAMPLES, assert_is_in_the_gallery, load
from tests.examples.test_serving import check_served, in_jail, lowered_for_cuda
from tests.moe.checkpoint import layers
from tests.moe.checkpoint.files import write
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.emitting.reading import triton_calls

decoder = recorded.decoder
RECORD = json.loads((EXAMPLES.parent / "benchmarks" / "logits.json").read_text())
PROMPT = recorded.PROMPT.tolist()
GPT_OSS = "gpt-oss in MXFP4"


@functools.cache
def expected(name):
    """The logits [tokens, vocabulary] of the prompt."""
    return np.array([row.split() for row in RECORD["results"][name]["logits"]], np.float32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Each configuration's folder by its name, written on first use."""

    @functools.cache
    def written(name):
        folder = tmp_path_factory.mktemp("checkpoint")
        recorded.write(folder, recorded.CONFIGS[name])
        return folder

    return written


forward = jax.jit(decoder.forward, static_argnums=0)
logits = jax.jit(decoder.logits)


def run(config, params, size, tokens=recorded.PROMPT):
    """The tokens' logits, from parts of `size` that follow each other in the cache."""
    cache = decoder.make_cache(config, params, 1, len(PROMPT))
    found = []
    for part in np.split(tokens[None], len(tokens) // size, axis=1):
        cache, x = forward(config, params, cache, part)
        found.append(logits(params, x[0]))
    return np.concatenate(found)


def off(folder, name, size, **changed):
    """The largest difference from transformers' logits, by a `config.json` with changes."""
    checkpoint = moe.Checkpoint(folder)
    config, params = decoder.load(checkpoint, checkpoint.config | changed)
    return np.abs(run(config, params, size) - expected(name)).max()


slow = pytest.mark.slow("other configurations are quick")
nightly = pytest.mark.nightly("each configuration has another size")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (GPT_OSS, 1),
        ("Qwen3-MoE", 8),
        ("Qwen3-MoE in float8", 6),
        pytest.param("gpt-oss", 12, marks=slow),
        ("Qwen3-MoE with all options", 1),
        *(pytest.param(name, len(PROMPT), marks=nightly) for name in recorded.CONFIGS),
        pytest.param(GPT_OSS, 6, marks=nightly),
        pytest.param("Qwen3-MoE", 1, marks=nightly),
    ],
)
def test_logits_are_those_of_transformers(checkpoints, name, size):
    assert off(checkpoints(name), name, size) < RECORD["limit"]


YARN = recorded.CONFIGS[GPT_OSS]["rope_scaling"]
FULL = ["full_attention"] * 2


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 149000},
        {"sliding_window": 7},
        {"sliding_window": 9},
        {"layer_types": FULL},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rms_norm_eps": 1e-3},
        {"num_experts_per_tok": 3},
        {"swiglu_limit": 1.0},
        {"rope_scaling": None},
        *({"rope_scaling": YARN | {"factor": factor}} for factor in (31.0, 33.0)),
        {"rope_scaling": YARN | {"beta_fast": 16.0}},
        {"rope_scaling": YARN | {"beta_slow": 2.0}},
        {"rope_scaling": YARN | {"truncate": True}},
        {"rope_scaling": YARN | {"attention_factor": 1.0}},
    ],
    ids=str,
)
def test_the_record_tells_what_config_json_says(checkpoints, changed):
    assert off(checkpoints(GPT_OSS), GPT_OSS, 24, **changed) > 5 * RECORD["limit"]


@pytest.mark.slow("its parts have tests of their own")
def test_prompts_of_different_lengths_are_continued(checkpoints):
    """Padding changes nothing: each prompt's first token is the likeliest by its own logits."""
    config, params = decoder.load(moe.Checkpoint(checkpoints(GPT_OSS)))
    tokens = decoder.generate(config, params, [PROMPT, PROMPT[:11]], recorded.STEPS)
    assert " ".join(map(str, tokens[0])) == RECORD["results"][GPT_OSS]["next_tokens"]
    assert tokens[1, 0] == expected(GPT_OSS)[10].argmax()
    alone = np.array([*PROMPT[:11], *tokens[1, :-1]], np.int32)
    assert tokens[1].tolist() == run(config, params, 1, alone)[10:].argmax(1).tolist()


def test_a_prompt_ends_before_its_padding(monkeypatch):
    """The next token is by the prompt's last token, and its place is behind that."""
    states = jnp.tile(jnp.eye(4), (2, 1, 1))  # a token's logits are the largest at its place
    monkeypatch.setattr(decoder, "forward", lambda *_: ({}, states))
    lengths = jnp.array([2, 4])
    cache, tokens = decoder.prefill.__wrapped__(
        None, {"head.weight": jnp.eye(4)}, {}, None, lengths
    )
    assert (tokens.tolist(), cache["length"].tolist()) == ([1, 3], [2, 4])


BATCH, START, STEPS = 2, 4, 3  # of a report, whose program for a step is another test's too


def test_a_step_writes_the_cache_in_place(checkpoints):
    config, params = decoder.load(moe.Checkpoint(checkpoints("Qwen3-MoE")))
    cache = decoder.make_cache(config, params, BATCH, START + STEPS + 1)
    before = [array.unsafe_buffer_pointer() for array in cache["keys"] + cache["values"]]
    after, _ = decoder.decode(config, params, cache, jnp.zeros(BATCH, jnp.int32))
    assert all(array.is_deleted() for array in jax.tree.leaves(cache))
    assert [a.unsafe_buffer_pointer() for a in after["keys"] + after["values"]] == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mixtral"}, "must be gpt_oss or qwen3_moe; got 'mixtral'"),
        ({"mlp_only_layers": [0]}, "Layers without experts"),
        ({"decoder_sparse_step": 2}, "Layers without experts"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "must be default or yarn"),
        ({"rope_parameters": {"rope_theta": 1e6, "type": "linear"}}, "must be default or yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 0.7}}, "without mscale"),
        ({"use_sliding_window": True, "sliding_window": None}, "must be positive; got None"),
        ({"use_sliding_window": True, "sliding_window": 0}, "must be positive; got 0"),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention"]},
            "for each of `num_hidden_layers`",
        ),
    ],
)
def test_other_configurations_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        decoder.read_config(recorded.CONFIGS["Qwen3-MoE"] | changed)


@pytest.mark.parametrize("name", ["Qwen3-MoE", GPT_OSS])
def test_a_configuration_has_all_that_is_read(name):
    given = recorded.CONFIGS[name]
    tensors = recorded.random_checkpoint.draw(given)
    for key in given.keys() & {
        *("model_type", "head_dim", "num_experts_per_tok", "rms_norm_eps", "rope_theta"),
        *("tie_word_embeddings", "vocab_size", "hidden_size", "num_attention_heads"),
        *("num_hidden_layers", "layer_types", "num_experts", "num_local_experts"),
    }:
        without = {of: value for of, value in given.items() if of != key}
        with pytest.raises(ValueError, match=f"has no `{key}`"):
            decoder.load(tensors, without)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("hidden_size", "model.embed_tokens.weight"),
        ("vocab_size", "model.embed_tokens.weight"),
        ("num_attention_heads", "model.layers.0.self_attn.q_proj.weight"),
        ("num_key_value_heads", "model.layers.0.self_attn.k_proj.weight"),
        ("head_dim", "model.layers.0.self_attn.q_proj.weight"),
        ("num_local_experts", "model.layers.0.mlp.router.weight"),
    ],
)
def test_tensors_have_the_configurations_shapes(key, name):
    given = recorded.CONFIGS[GPT_OSS]
    tensors = recorded.random_checkpoint.draw(given)
    with pytest.raises(ValueError, match=f"`{re.escape(name)}` must be of the configuration's"):
        decoder.load(tensors, given | {key: 2 * given[key]})


@pytest.mark.slow("its parts have tests of their own")
def test_tokens_that_the_cache_has_no_room_for(checkpoints):
    config, params = decoder.load(moe.Checkpoint(checkpoints("Qwen3-MoE")))
    for length in (4, 6):
        cache = decoder.make_cache(config, params, 1, length)
        cache, x = forward(config, params, cache, recorded.PROMPT[None, :6])
        is_nan = np.isnan(logits(params, x[0])).all(axis=1)
        assert is_nan.tolist() == [i >= length for i in range(6)]


@pytest.mark.slow("its parts have tests of their own")
def test_no_steps_and_no_prompts(checkpoints):
    config, params = decoder.load(moe.Checkpoint(checkpoints("Qwen3-MoE")))
    assert decoder.generate(config, params, [PROMPT], 0).shape == (1, 0)
    with pytest.raises(ValueError, match=r"at least one token; got lengths \[\]"):
        decoder.generate(config, params, [], 1)


def quantized(name):
    """A Qwen3-MoE whose attention, router and experts are in a format.

    Returns its configuration, its tensors, and those with widened attention and routers.
    """
    make, one, quantization = layers.FORMATS[name]
    given = recorded.CONFIGS["Qwen3-MoE"] | {"quantization_config": quantization}
    stored = recorded.random_checkpoint.draw(recorded.CONFIGS["Qwen3-MoE"])
    wide = dict(stored)
    for weight in [n for n in stored if re.search(r"(_proj|mlp\.gate)\.weight$", n)]:
        stem = weight.removesuffix("weight")
        own = make(*stored.pop(weight).shape)
        stored |= {stem + end: array for end, array in own.items()}
        if ".experts." in weight:
            del wide[weight]
            wide |= {stem + end: array for end, array in own.items()}
        else:
            wide[weight] = exactly(one(*own.values())).T.astype(wide["model.norm.weight"].dtype)
        if name == "gptq":  # AutoGPTQ writes them
            stored[f"{stem}bias"] = np.zeros(len(own["scales"].T), np.float16)
    return given, stored, wide


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "blocks", "channels", "mxfp4", "nvfp4"])
def test_quantized_attention_is_widened(name):
    """As published models have it: each linear layer of attention, and here the experts too."""
    given, stored, wide = quantized(name)
    found, wanted = decoder.load(stored, given), decoder.load(wide, given)
    assert found[0] == wanted[0]
    assert isinstance(found[1]["layers"][0]["experts"].w_down, moe.ScaledArray)
    for a, b in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tensors_of_attention_that_are_not_known():
    given = recorded.CONFIGS["Qwen3-MoE"]
    stored = recorded.random_checkpoint.draw(given)
    prefix = "model.layers.0.self_attn"
    with pytest.raises(ValueError, match=r"`model.layers.0.self_attn.q_proj.lora_A` is not known"):
        decoder.load(stored | {f"{prefix}.q_proj.lora_A": np.ones((1, 1))}, given)
    with pytest.raises(ValueError, match=r"has `model.layers.0.self_attn.q_proj.bias`, which its"):
        decoder.load(stored | {f"{prefix}.q_proj.bias": np.ones(96, np.float32)}, given)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPT_OSS, "model.layers.1.self_attn.sinks"),
        (GPT_OSS, "model.layers.0.self_attn.q_proj.bias"),
        (GPT_OSS, "model.layers.0.self_attn.o_proj.bias"),
        (GPT_OSS, "model.layers.0.mlp.router.bias"),
        (GPT_OSS, "model.layers.0.mlp.router.weight"),
        ("Qwen3-MoE", "model.layers.1.self_attn.k_norm.weight"),
        ("Qwen3-MoE", "model.norm.weight"),
    ],
)
def test_what_the_configuration_asks_for_must_be_there(config, name):
    given = recorded.CONFIGS[config]
    tensors = recorded.random_checkpoint.draw(given)
    del tensors[name]
    with pytest.raises(
        ValueError, match=rf"no `{re.escape(name)}`|: `{re.escape(name)}` is missing"
    ):
        decoder.load(tensors, given)


def test_what_the_configuration_does_not_ask_for_is_refused():
    given = recorded.CONFIGS["Qwen3-MoE"]
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(1, np.float32)}
    with pytest.raises(
        ValueError, match=r"q_proj\.bias`, which its configuration does not ask for"
    ):
        decoder.load(recorded.random_checkpoint.draw(given) | bias, given)


def test_tokens_are_of_the_vocabulary(checkpoints):
    config, params = decoder.load(str(checkpoints("Qwen3-MoE")))
    count = len(params["embedding"])
    with pytest.raises(ValueError, match=rf"must be in range\(0, {count}\); got {count}"):
        decoder.generate(config, params, [[1, count]], 1)


def test_rotary_embedding_is_read_as_transformers_5_writes_it():
    given = recorded.CONFIGS[GPT_OSS]
    of_5 = {k: v for k, v in given.items() if not k.startswith("rope_")}
    of_5["rope_parameters"] = {"rope_theta": given["rope_theta"], **given["rope_scaling"]}
    assert decoder.read_config(of_5) == decoder.read_config(given)


def test_the_number_of_experts_is_read_as_transformers_5_writes_it():
    given = dict(recorded.CONFIGS["Qwen3-MoE"])
    tensors = recorded.random_checkpoint.draw(given)
    given["num_local_experts"] = given.pop("num_experts")
    decoder.load(tensors, given)
    with pytest.raises(ValueError, match=r"`model.layers.0.mlp.gate.weight` must be of the conf"):
        decoder.load(tensors, given | {"num_local_experts": 4})


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"at least one token; got lengths \[2, 0\]"):
        decoder.generate(None, None, [[1, 2], []], 1)


@pytest.mark.cuda_plugin
@pytest.mark.nightly("a layer's export has a test that is slow")
def test_an_exported_step_runs_without_triax(checkpoints, tmp_path):
    exporting = load("serving/export_decoder")
    config, params = decoder.load(moe.Checkpoint(checkpoints(GPT_OSS)))
    # Tokens are float32 here, which the kernel for few rows does not take.
    with pytest.warns(UserWarning, match="ragged_dot dequantizes its weights"):
        exported = exporting.export(config, params, 2, 16, ("cuda", "cpu"))
    exported = jax.export.deserialize(exported.serialize())
    kernels = {call.kernel for call in triton_calls(lowered_for_cuda(exported.call, exported))}
    assert kernels >= {"route", "unpermute"}
    leaves, structure = jax.tree.flatten(params)
    cache = decoder.make_cache(config, params, 2, 16)
    tokens = jnp.array(PROMPT[:2], jnp.int32)
    found = exported.call(leaves, cache, tokens)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5),
        found,
        decoder.step(config, params, cache, tokens),
    )
    step = lambda leaves, *rest: decoder.step(config, structure.unflatten(leaves), *rest)
    check_served(step, exported, tmp_path, "cpu")


@pytest.mark.slow("what it calls has tests of its own")
def test_it_runs_without_a_checkpoint(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["decoder.py"])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    decoder.main()
    if jax.default_backend() != "gpu":
        assert_is_in_the_gallery("decoder", capsys.readouterr().out)


@pytest.mark.slow("it tests a tool, not the package")
def test_a_report_has_the_share_of_the_moe_layers(checkpoints):
    config, params = decoder.load(moe.Checkpoint(checkpoints("Qwen3-MoE")))
    found = decoder.report(config, params, BATCH, START, STEPS)
    assert " tokens/s; " in found
    assert found.endswith("% in MoE layers")


def mesh_of(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("expert",))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_layer_of_experts_over_two_devices(checkpoints):
    config, params = decoder.load(moe.Checkpoint(checkpoints("Qwen3-MoE")))
    x = params["embedding"][recorded.PROMPT[None, :5]]
    mixture = jax.jit(decoder.mixture, static_argnums=0)
    found, wanted = (
        mixture(dataclasses.replace(config, mesh=mesh), params["layers"][0], x)
        for mesh in (mesh_of(2), None)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow("it compiles the decoder twice")
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", [GPT_OSS, "Qwen3-MoE"])
def test_experts_over_two_devices(checkpoints, name):
    alone = decoder.load(moe.Checkpoint(checkpoints(name)))
    spread = decoder.load(moe.Checkpoint(checkpoints(name)), mesh=mesh_of(2))
    experts = spread[1]["layers"][0]["experts"]
    whole = jax.tree.leaves(alone[1]["layers"][0]["experts"])
    for part, of in zip(jax.tree.leaves(experts), whole, strict=True):
        assert part.addressable_shards[1].data.shape[0] == len(of) // 2
    a, b = (decoder.generate(*loaded, [PROMPT, PROMPT[:3]], 5) for loaded in (alone, spread))
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow("it compiles the step twice and starts a process")
@pytest.mark.parametrize(
    ("name", "devices"),
    [(GPT_OSS, 1), (GPT_OSS, 2), ("Qwen3-MoE in float8", 1), ("gptq", 1)],
)
def test_served_with_its_weights(checkpoints, tmp_path, monkeypatch, capsys, name, devices):
    """In a process that has JAX alone: the tokens of `generate`."""
    if jax.device_count() < devices:
        pytest.skip("needs two devices")
    if name in layers.FORMATS:
        given, stored, _ = quantized(name)
        folder = tmp_path / name
        folder.mkdir()
        write(folder, stored, given, files=2)
    else:
        folder = checkpoints(name)
    step, weights = tmp_path / "step.bin", tmp_path / "weights.bin"
    export = load("serving/export_decoder")
    command = ["", str(folder), str(step), str(weights), "--length=64", f"--devices={devices}"]
    monkeypatch.setattr("sys.argv", [*command, "--platforms", "cpu"])
    export.main()
    assert f"{weights.stat().st_size:,} bytes" in capsys.readouterr().out
    serve = EXAMPLES / "serving" / "serve_decoder.py"
    prompt = map(str, PROMPT[:7])
    done = in_jail(tmp_path, serve, step, weights, "--steps", "6", "--prompt", *prompt)
    assert done.returncode == 0, done.stderr
    wanted = decoder.generate(*decoder.load(moe.Checkpoint(folder)), [PROMPT[:7]], 6)[0]
    assert done.stdout.split() == ["next", "tokens:", *map(str, wanted)]
    monkeypatch.setattr(
        "sys.argv", ["", str(folder), "--steps=6", "--prompt", *map(str, PROMPT[:7])]
    )
    decoder.main()  # as the documentation's "Your first model" runs it
    assert capsys.readouterr().out.startswith(done.stdout)


def test_files_of_arrays(tmp_path):
    """Of every dtype that weights have, and at any place in the file."""
    arrays = load("serving/arrays")
    names = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 float8_e8m0fnu int8 uint8 int32"
    codes = np.arange(24, dtype=np.uint8)
    given = [codes.view(jnp.dtype(name)).reshape(-1, 2) for name in names.split()]
    given += [np.zeros((0, 3), np.float32), np.float32(7), codes.reshape(4, 6)[:, ::2]]
    arrays.save(tmp_path / "arrays", given)
    found = [*arrays.load(tmp_path / "arrays")]
    for a, b in zip(found, given, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()
