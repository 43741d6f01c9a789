"""Environment settings: what they take, and what they say otherwise."""

import pytest

import triax
from triax.bridge import settings
from triax.bridge.errors import ArgumentValueError, SettingError


def test_tuning_mode(monkeypatch):
    assert settings.tuning_mode() == "auto"
    monkeypatch.setenv("TRIAX_AUTOTUNE", "off")
    assert settings.tuning_mode() == "off"
    with triax.tuning("runtime"):
        assert settings.tuning_mode() == "runtime"
    assert settings.tuning_mode() == "off"
    monkeypatch.setenv("TRIAX_AUTOTUNE", "fast")
    with pytest.raises(SettingError, match=r"TRIAX_AUTOTUNE must be one of auto, .*; got 'fast'"):
        settings.tuning_mode()
    with pytest.raises(ArgumentValueError, match=r"`mode` must be one of auto, .*; got 'fast'"):
        triax.tuning("fast").__enter__()


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_enforce(monkeypatch, value, expected):
    assert settings.enforce_autotuning() is False
    monkeypatch.setenv("TRIAX_ENFORCE_AUTOTUNING", value)
    assert settings.enforce_autotuning() is expected


@pytest.mark.parametrize("value", ["", "yes", "2", "true"])
def test_enforce_takes_only_0_and_1(monkeypatch, value):
    monkeypatch.setenv("TRIAX_ENFORCE_AUTOTUNING", value)
    with pytest.raises(ValueError, match="TRIAX_ENFORCE_AUTOTUNING must be 0 or 1; got"):
        settings.enforce_autotuning()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("90", 90),
        ("9.0", 90),
        ("sm_90", 90),
        ("sm_90a", 90),
        ("100", 100),
        ("12.1", 121),
        ("", None),
    ],
)
def test_architecture(monkeypatch, value, expected):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", value)
    assert settings.cuda_arch() == expected


@pytest.mark.parametrize("value", ["hopper", "9", "sm90x", "9.0.1"])
def test_architecture_mistakes(monkeypatch, value):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", value)
    with pytest.raises(SettingError, match="TRIAX_CUDA_ARCH must be a CUDA compute capability"):
        settings.cuda_arch()
