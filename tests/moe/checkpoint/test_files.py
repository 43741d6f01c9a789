"""`Checkpoint`: what it reads, and what it says about damaged files."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.moe.checkpoint.files import NAMES, write, write_file
from triax import moe
from triax.errors import CheckpointError

rng = np.random.default_rng(0)
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
BROKEN = "is truncated or damaged, or Git LFS's pointer to a file: no JSON object,"


def of_dtype(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    return rng.integers(0, 2, (3, 5 * dtype.itemsize), np.uint8).view(dtype)


@pytest.fixture
def tensors():
    found = {f"a.{name}": of_dtype(name) for name in NAMES}
    return found | {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.int32)}


@pytest.mark.parametrize("files", [1, 3])
def test_every_dtype(tmp_path, tensors, files):
    found = moe.Checkpoint(write(tmp_path, tensors, {"model_type": "small"}, files))
    assert sorted(found) == sorted(tensors)
    assert len(found) == len(tensors)
    assert found.config == {"model_type": "small"}
    for name, array in tensors.items():
        assert name in found
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
        assert type(found[name]) is np.ndarray
        assert not found[name].flags.writeable
        assert jnp.asarray(found[name]).shape == array.shape


def test_files_of_the_library(tmp_path, tensors):
    pytest.importorskip("safetensors.numpy").save_file(tensors, tmp_path / "model.safetensors")
    found = moe.Checkpoint(str(tmp_path))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }


def test_arrays_are_maps_of_the_file(tmp_path):
    """An array read before the file changes shows the change."""
    path = write(tmp_path, {"a": np.zeros(4, np.uint8)}) / "model.safetensors"
    found = moe.Checkpoint(tmp_path)["a"]
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    assert found.tolist() == [0, 0, 0, 7]


def test_a_name_that_is_not_there(tmp_path):
    found = moe.Checkpoint(write(tmp_path, {"a": np.zeros(1)[:0].astype(np.int8)}))
    assert found.config == {}
    assert "b" not in found
    assert found.get("b") is None
    with pytest.raises(KeyError, match="'b'"):
        found["b"]


def damaged(folder, what):
    path = folder / "model.safetensors"
    write(folder, {"a.b": np.arange(6, dtype=np.int32), "c": np.zeros(3, np.int8)}, {})
    data = path.read_bytes()
    match what:
        case "empty":
            path.write_bytes(b"")
        case "short":
            path.write_bytes(data[:20])
        case "a pointer":
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
        case "no json":
            path.write_bytes(data[:8] + b"?" + data[9:])
        case "a list":
            path.write_bytes((2).to_bytes(8, "little") + b"[]")
        case "config":
            (folder / "config.json").write_text('{"model_type": ')
        case "index":
            (folder / INDEX).write_text('{"weight_map": {"a.b"')
        case "no map":
            (folder / INDEX).write_text("{}")
        case "map":
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a.b": "gone.safetensors"}}))
        case "a config that is a folder":
            (folder / "config.json").unlink()
            (folder / "config.json").mkdir()
        case "an index that is a folder":
            (folder / INDEX).mkdir()
        case "a file that is a folder":
            path.unlink()
            path.mkdir()
        case "an entry that is a folder":
            (folder / "part").mkdir()
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a.b": "part"}}))
        case "an entry that is too long":
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a.b": "x" * 5000}}))
        case "an entry that is a number" | "an entry that is null" | "an entry without a name":
            entry = {"number": 7, "null": None, "name": ""}[what.rpartition(" ")[2]]
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a.b": entry}}))
        case "a map that is a list":
            (folder / INDEX).write_text('{"weight_map": [1]}')
        case "a map that is text":
            (folder / INDEX).write_text('{"weight_map": "a.b"}')
        case "a name twice":
            text = data[8:].replace(b'"c"', b'"a.b"').partition(b"}}")[0] + b"}}"
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[-27:])
        case "a name twice in the index":
            names = f'"a.b": "{FILE}", "a.b": "other.safetensors"'
            (folder / INDEX).write_text(f'{{"weight_map": {{{names}}}}}')
        case "a key twice in the config":
            (folder / "config.json").write_text('{"hidden_act": "gelu", "hidden_act": "silu"}')
        case "outside":
            write_file(folder.parent / "other.safetensors", {})
            names = {"a.b": "../other.safetensors"}
            (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return path


@pytest.mark.parametrize(
    ("what", "name", "message"),
    [
        ("empty", FILE, BROKEN),
        ("short", FILE, BROKEN),
        ("a pointer", FILE, BROKEN),
        ("no json", FILE, BROKEN),
        ("a list", FILE, BROKEN),
        ("config", "config.json", BROKEN),
        ("index", INDEX, BROKEN),
        ("no map", INDEX, f"{BROKEN} 'weight_map'"),
        ("map", "gone.safetensors", "is missing. A checkpoint is a folder with"),
        ("outside", INDEX, r"names .*\.\./other.safetensors, which is not in the folder"),
        ("a config that is a folder", "config.json", "cannot be read: "),
        ("an index that is a folder", INDEX, "cannot be read: "),
        ("a file that is a folder", FILE, "cannot be read: "),
        ("an entry that is a folder", "part", "cannot be read: "),
        ("an entry that is too long", "x" * 5000, "cannot be read: "),
        ("an entry that is a number", INDEX, r"names .*/7, which is not in the folder, for `a.b`"),
        ("an entry that is null", INDEX, r"names .*/None, which is not in the folder, for `a.b`"),
        ("an entry without a name", INDEX, r"names .*/model, which is not in the folder, for `a"),
        ("a map that is a list", INDEX, BROKEN),
        ("a map that is text", INDEX, BROKEN),
        ("a name twice", FILE, f"{BROKEN} 'a.b' is there twice"),
        ("a name twice in the index", INDEX, f"{BROKEN} 'a.b' is there twice"),
        ("a key twice in the config", "config.json", f"{BROKEN} 'hidden_act' is there twice"),
    ],
)
def test_damaged_files(tmp_path, what, name, message):
    folder = tmp_path / "model"
    folder.mkdir()
    damaged(folder, what)
    with pytest.raises(CheckpointError, match=f"{folder / name} {message}"):
        moe.Checkpoint(folder)["a.b"]


def test_folders_that_have_no_checkpoint(tmp_path, monkeypatch):
    def message(folder):
        with pytest.raises(CheckpointError) as caught:
            moe.Checkpoint(folder)
        return str(caught.value)

    rule = f"is missing. A checkpoint is a folder with {INDEX} and the files that it names, or with"
    repository = message("openai/gpt-oss-20b")
    assert repository.startswith(f"openai/gpt-oss-20b/{FILE} {rule}")
    assert repository.endswith("/openai/gpt-oss-20b: download it first.")
    assert message("x" * 5000).startswith(f"{'x' * 5000} cannot be read: ")
    file = tmp_path / "model-00001-of-00002.safetensors"
    write_file(file, {})
    assert message(tmp_path).startswith(f"{tmp_path}/{FILE} {rule}")
    assert message(tmp_path).endswith(f"This one has ['{file.name}'].")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert message("~/other").startswith(f"{tmp_path}/other/{FILE} {rule}")


def test_one_file(tmp_path):
    """With the configuration that is beside it; an index of others does not count."""
    write(tmp_path, {"a": np.int8([1]), "b": np.int8([2])}, files=2)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    found = moe.Checkpoint(tmp_path / "model-00002-of-00002.safetensors")
    assert [*found] == ["b"]
    assert found["b"] == 2
    assert found.config == {"model_type": "qwen3_moe"}
    assert found.folder == tmp_path


def test_the_configuration_of_modelopt(tmp_path):
    """It is in a file of its own, unless `config.json` has one."""
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    write(tmp_path, {"a": np.int8([1])}, {"model_type": "qwen3_moe"})
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": said})
    (tmp_path / "hf_quant_config.json").write_text(text)
    found = moe.Checkpoint(tmp_path).config
    assert found == {"model_type": "qwen3_moe", "quantization_config": said}
    write(tmp_path, {"a": np.int8([1])}, {"quantization_config": {"quant_method": "modelopt"}})
    assert moe.Checkpoint(tmp_path).config == {"quantization_config": {"quant_method": "modelopt"}}
    write(tmp_path, {"a": np.int8([1])}, {})
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json is truncated or damaged"):
        moe.Checkpoint(tmp_path)


def test_a_name_that_is_not_there_has_its_nearest(tmp_path, monkeypatch):
    names = "model.layers.0.mlp.gate.weight", "model.norm.weight"
    write(tmp_path, {name: np.int8([1]) for name in names}, files=1)
    found = moe.Checkpoint(tmp_path)
    assert "model.layers.0.gate.weight" not in found
    with pytest.raises(KeyError, match=f"The nearest are `{re.escape(names[0])}`"):
        found["model.layers.0.gate.weight"]
    with pytest.raises(KeyError, match="is not among the tensors"):
        found[3]
    monkeypatch.delattr("difflib.get_close_matches")  # slow, and for messages alone
    assert found.get("model.layers.0.gate.weight") is None
    assert found.get(names[0]) == 1


def test_a_file_is_missing_for_its_own_tensors_alone(tmp_path):
    write(tmp_path, {"a": np.int8([1]), "b": np.int8([2])}, files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    found = moe.Checkpoint(tmp_path)
    assert {name: file.name for name, file in found.files.items()} == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert found["a"] == 1
    with pytest.raises(CheckpointError, match=r"2-of-00002.safetensors is missing"):
        found["b"]


ENTRY = {"dtype": "I32", "shape": [6], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "entry",
    [
        ENTRY | {"dtype": "F4"},
        ENTRY | {"data_offsets": [8, 32]},
        ENTRY | {"dtype": ["I32"]},
        ENTRY | {"shape": [5]},
        ENTRY | {"shape": [7]},
        ENTRY | {"shape": [-2, -3]},
        ENTRY | {"shape": [2**70]},
        ENTRY | {"shape": None},
        ENTRY | {"shape": [6.0]},
        ENTRY | {"data_offsets": [-8, 16]},
        ENTRY | {"data_offsets": [0]},
        ENTRY | {"data_offsets": [-24, -1], "dtype": "U8", "shape": [23]},
        ENTRY | {"data_offsets": [24, 0]},
        ENTRY | {"data_offsets": [25, 25], "shape": [0]},
        ENTRY | {"data_offsets": [0.0, 24.0]},
        ENTRY | {"data_offsets": [False, 24]},
        ENTRY | {"data_offsets": [0, 2**70]},
        ENTRY | {"data_offsets": "ab"},
        ENTRY | {"data_offsets": {"0": 0, "24": 24}},
        {"dtype": "I32"},
        7,
    ],
)
def test_damaged_tensors(tmp_path, entry):
    path = tmp_path / "model.safetensors"
    write_file(path, {"a.b": np.arange(6, dtype=np.int32)}, {"a.b": entry})
    message = (
        f"`a.b` of {path} is missing, damaged or of an unknown dtype: the header has {entry}, "
    )
    with pytest.raises(CheckpointError, match=re.escape(f"{message}and 24 bytes follow.")):
        moe.Checkpoint(tmp_path)["a.b"]


def written(folder, *places):
    """A file of int8 tensors `a`, `b`, … in these places."""
    entries = {
        name: {"dtype": "I8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in zip("abc", places, strict=False)
    }
    write_file(folder / FILE, {"a": np.arange(24, dtype=np.int8)}, entries)
    return folder


@pytest.mark.parametrize(
    "places", [[(0, 8), (4, 12)], [(4, 12), (0, 24)], [(1, 2), (8, 9), (1, 2)]]
)
def test_tensors_that_overlap(tmp_path, places):
    with pytest.raises(CheckpointError, match=rf"{FILE} is damaged: `.*` and `.*` overlap\."):
        moe.Checkpoint(written(tmp_path, *places))


def test_tensors_in_another_order_and_empty_ones(tmp_path):
    found = moe.Checkpoint(written(tmp_path, (8, 12), (0, 8), (4, 4)))
    assert (found["a"].tolist(), found["b"].tolist()) == ([*range(8, 12)], [*range(8)])
    assert found["c"].shape == (0,)


def test_a_checkpoint_goes_to_another_process(tmp_path):
    write(tmp_path, {"a": np.int8([1]), "b": np.int8([2])}, {"model_type": "small"}, files=2)
    found = moe.Checkpoint(tmp_path)
    assert found["a"] == 1
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), copy.copy(found)):
        assert again == found
        assert (again.folder, again.config, again.files) == (tmp_path, found.config, found.files)
        assert (again["a"], again["b"]) == (1, 2)


def test_equal_checkpoints(tmp_path):
    """They have the same folder, files and configuration; arrays are not compared."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {"a": np.arange(3, dtype=np.int8)}, {"hidden_act": "silu"})
    one, same, other = (moe.Checkpoint(tmp_path / name) for name in ("one", "one", "other"))
    assert one == same
    assert one != other
    assert one != dict(one)
    assert one != 3
    same.config["hidden_act"] = "gelu"
    assert one != same
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_truncated_tensors(tmp_path):
    path = damaged(tmp_path, "nothing")
    path.write_bytes(path.read_bytes()[:-1])
    found = moe.Checkpoint(tmp_path)
    assert found["a.b"].tolist() == [*range(6)]
    with pytest.raises(
        CheckpointError, match=rf"`c` of {path} .* \[24, 27\].*, and 26 bytes follow"
    ):
        found["c"]


def test_a_file_of_another_kind_is_not_read_whole(tmp_path):
    """Its first bytes would be the length of a header."""
    path = tmp_path / FILE
    path.write_bytes(b"PK\x03\x04" * 4)
    os.truncate(path, 50_000_000)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=BROKEN):
        moe.Checkpoint(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_an_index_that_names_another_file(tmp_path):
    write(tmp_path, {"a": np.zeros(3, np.int8), "b": np.zeros(3, np.int8)}, files=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["a"] = index["weight_map"]["b"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"`a` of .*2-of-00002.* the header has no such tensor"
    ):
        moe.Checkpoint(tmp_path)["a"]
