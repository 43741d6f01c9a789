"""`benchmarks/scans.py` at a small size: every format, and wrong scans, which get no speed."""

import json

import jax
import pytest

from benchmarks import scans

pytestmark = pytest.mark.slow("it tests a tool, not the package")


def run(monkeypatch, path, formats):
    options = f"--implementation xla --shapes tiny --layers 2 --rounds 2 --json {path} --formats"
    monkeypatch.setattr("sys.argv", ["scans", *options.split(), *formats])
    return scans.main(), json.loads(path.read_text())


@pytest.mark.parametrize("formats", [["bfloat16", "rows"], ["int4", "MXFP4"]], ids="-".join)
def test_a_scan_is_measured_against_the_layers_unrolled(monkeypatch, tmp_path, formats):
    status, found = run(monkeypatch, tmp_path / "scans.json", formats)
    assert status == 0
    assert (found["layers"], found["shapes"]) == (2, {"tiny": [*scans.TINY]})
    names = [f"tiny, {name}{kind}" for name in formats for kind in ("", ", checkpoint")]
    assert [*found["results"]] == names
    for figures in found["results"].values():
        assert figures["of_unrolled"] == figures["scan_ms"] / figures["unrolled_ms"]
        assert figures["scan_temporary_bytes"] > 0
        assert figures["unrolled_temporary_bytes"] > 0
        assert figures["difference"] <= scans.TOLERANCE


def zeros(body, x, logits, experts):
    return scans.scanned(lambda *layer: 0 * body(*layer), x, logits, experts)


def no_gradient_of_experts(body, x, logits, experts):
    return scans.scanned(body, x, logits, jax.lax.stop_gradient(experts))


def gradients_of_the_other_layer(body, x, logits, experts):
    """The result is right, and each gradient is one of the right ones."""

    @jax.custom_vjp
    def same(tree):
        return tree

    turned = lambda _, tree: (jax.tree.map(lambda a: a[::-1], tree),)
    same.defvjp(lambda tree: (tree, None), turned)
    return scans.scanned(body, x, *same((logits, experts)))


@pytest.mark.parametrize("wrong", [zeros, no_gradient_of_experts, gradients_of_the_other_layer])
def test_a_wrong_scan_gets_no_speed(monkeypatch, tmp_path, capsys, wrong):
    monkeypatch.setitem(scans.WAYS, "scan", wrong)
    status, found = run(monkeypatch, tmp_path / "scans.json", ["bfloat16"])
    assert status == 1
    assert [*found["results"]] == ["tiny, bfloat16", "tiny, bfloat16, checkpoint"]
    for figures in found["results"].values():
        assert [*figures] == ["error"]
        assert "of the largest element; 0.0625 is allowed" in figures["error"]
    assert "ms" not in capsys.readouterr().out


def test_zeros_of_both_are_wrong(monkeypatch, tmp_path):
    """What is compared is not the scan with another fault of the same kind."""
    for way, run_layers in scans.WAYS.items():
        of_zeros = lambda body, *given, run_layers=run_layers: 0 * run_layers(body, *given)
        monkeypatch.setitem(scans.WAYS, way, of_zeros)
    status, found = run(monkeypatch, tmp_path / "scans.json", ["MXFP4"])
    assert status == 1
    assert found["results"]["tiny, MXFP4"] == {
        "error": "off by nan of the largest element; 0.0625 is allowed"
    }
