"""The examples of one subject each: right, or finding what they are to find."""

import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.examples.test_moe_layer import EXAMPLES, assert_is_in_the_gallery, load


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))  # they import `comparing`, as scripts can


@pytest.mark.slow("what it calls has tests of its own")
@pytest.mark.parametrize(
    "name",
    ["vector_add", "softmax", "layer_norm", "flash_attention", "adam_in_place", "own_op"],
)
def test_example_agrees_with_plain_jax(name, capsys):
    on_gpu = jax.default_backend() == "gpu"  # where some take bfloat16
    assert load(name).main() < (1e-2 if on_gpu else 1e-5)
    if not on_gpu:
        assert_is_in_the_gallery(name, capsys.readouterr().out)


@pytest.mark.slow("its parts have tests of their own")
def test_serving_and_training_differ_by_nothing(capsys):
    """Plain JAX promises no order of sums; of so few terms it has one."""
    assert load("same_bits").main() == 0
    assert_is_in_the_gallery("same_bits", capsys.readouterr().out)


@pytest.mark.slow("compiled for a GPU, to look at its code")
@pytest.mark.cuda_plugin
def test_matmul_shows_what_was_compiled(capsys):
    assert load("matmul").main() < 1e-2  # bfloat16
    assert "matmul_kernel: BK=64, BM=128, BN=256" in capsys.readouterr().out


def test_matmul_by_descriptors_agrees(capsys):
    assert load("tma_matmul").main() < 1e-2  # bfloat16
    if jax.default_backend() != "gpu":
        assert_is_in_the_gallery("tma_matmul", capsys.readouterr().out)


@pytest.mark.slow("compiled for a GPU, to look at its code")
@pytest.mark.cuda_plugin
def test_gluon_reads_and_writes_sixteen_bytes_at_a_time():
    # A process of its own: once Triton 3.9 has inferred a layout, it reports leaks when it ends.
    program = """
import jax, triax, gluon_transpose
assert gluon_transpose.main() in (None, 0)  # nothing without a GPU
(call,) = triax.explain(gluon_transpose.transpose, jax.ShapeDtypeStruct((8192, 4000), "float32"))
print(call.ptx[0])
"""
    command = [sys.executable, "-c", program]
    ptx = subprocess.run(command, cwd=EXAMPLES, check=True, capture_output=True, text=True).stdout
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


@pytest.mark.nightly("Equinox is the same")
def test_equinox_layer_learns(capsys):
    losses = load("moe_equinox").main()
    assert losses[-1] < 0.3 * losses[0]
    assert_is_in_the_gallery("moe_equinox", capsys.readouterr().out)


@pytest.mark.slow("moe.dispatch and its scales have tests of their own")
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_float8_rows_differ_by_their_rounding_alone(capsys):
    one, many = load("fp8_dispatch").main()
    assert one == pytest.approx(many, rel=0.01)
    assert 0 < one < 16 / 448  # half a step at the largest value of float8_e4m3fn
    assert "52% of that" in capsys.readouterr().out


@pytest.mark.slow("moe.permute and its scales have tests of their own")
def test_nothing_is_sent_on_one_device(monkeypatch, capsys):
    example = load("fp8_dispatch")
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    assert len(example.main()) == 1
    assert "one device has nothing to send" in capsys.readouterr().out


def test_every_planted_mistake_is_found(capsys):
    assert load("debugging").main() == 3
    assert_is_in_the_gallery("debugging", capsys.readouterr().out)


def test_state_is_handed_on(monkeypatch, capsys):
    comparing = load("comparing")
    monkeypatch.setattr(comparing, "on_gpu", lambda: True)
    add = lambda total, x: (total + x,)
    assert comparing.compare("a sum", add, add, jnp.ones(3), jnp.ones(3), state=1) == 0
    (found,) = comparing.COMPARED
    assert found["name"] == "a sum"
    assert found["ours_us"] > 0
    assert found["plain_us"] > 0


def test_record_has_every_comparison(monkeypatch, capsys):
    gallery = importlib.import_module("benchmarks.gallery")
    comparing = {p.stem for p in EXAMPLES.glob("*.py") if "import compare, on_gpu" in p.read_text()}
    assert set(gallery.EXAMPLES) == comparing
    monkeypatch.setattr(gallery, "EXAMPLES", ("softmax",))
    results = [*gallery.measure()]
    assert [r["name"] for r in results] == ["softmax", "its gradient"]
    assert {r["example"] for r in results} == {"softmax"}


def test_pages_show_what_every_example_prints():
    docs = EXAMPLES.parent / "docs"
    pages = "".join(
        docs.joinpath(name).read_text() for name in ("gallery.md", "guides/flax-nnx.md")
    )
    shown = {p.stem for p in (docs / "outputs").iterdir()}
    assert {name for name in shown if f"<!-- file: docs/outputs/{name}.txt" in pages} == shown
    comparing = {p.stem for p in EXAMPLES.glob("*.py") if "import compare, on_gpu" in p.read_text()}
    assert comparing - shown == {"gluon_transpose"}  # which prints nothing without a GPU
