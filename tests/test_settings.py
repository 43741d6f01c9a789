"""Environment settings: what they take, and what they say otherwise."""

import concurrent.futures
from pathlib import Path

import jax
import pytest

import triax
from triax import settings
from triax.errors import ArgumentTypeError, ArgumentValueError, SettingError


def test_tuning_mode(monkeypatch):
    assert settings.mode_in_force() == "auto"
    monkeypatch.setenv("TRIAX_AUTOTUNE", "off")
    assert settings.mode_in_force() == "off"
    with triax.tuning_mode("runtime"):
        assert settings.mode_in_force() == "runtime"
    assert settings.mode_in_force() == "off"
    monkeypatch.setenv("TRIAX_AUTOTUNE", "")
    assert settings.mode_in_force() == "auto"
    monkeypatch.setenv("TRIAX_AUTOTUNE", "fast")
    with pytest.raises(SettingError, match=r"TRIAX_AUTOTUNE must be one of auto, .*; got 'fast'"):
        settings.mode_in_force()
    with pytest.raises(ArgumentValueError, match=r"`mode` must be one of 'auto', .*; got 'fast'"):
        triax.tuning_mode("fast")  # not only where it is entered


def test_same_bits(monkeypatch):
    assert settings.one_order_of_sums() is False
    with triax.same_bits():
        assert settings.one_order_of_sums() is True
        with triax.same_bits(False):
            assert settings.one_order_of_sums() is False
    monkeypatch.setenv("TRIAX_SAME_BITS", "1")
    assert settings.one_order_of_sums() is True
    with triax.same_bits(False):
        assert settings.one_order_of_sums() is False
    monkeypatch.setenv("TRIAX_SAME_BITS", "yes")
    with pytest.raises(SettingError, match="TRIAX_SAME_BITS must be 0 or 1; got 'yes'"):
        settings.one_order_of_sums()
    with pytest.raises(ArgumentTypeError, match="`on` must be a bool"):
        triax.same_bits("no")  # not only where it is entered


def test_a_function_is_traced_again_under_another_mode():
    modes = []

    def body(carry, _):
        modes.append(settings.mode_in_force())
        return carry, None

    @jax.jit
    def inner(x):
        return jax.lax.scan(body, x, None, length=2)[0]

    outer = jax.jit(lambda x: inner(x))
    for _ in range(2):
        outer(1.0)
        with triax.tuning_mode("off"):
            outer(1.0)
            with triax.tuning_mode("cached"):
                inner(1.0)
        with triax.same_bits():
            outer(1.0)
    assert modes == ["auto", "off", "cached", "auto"]


def test_another_thread_has_a_mode_of_its_own():
    with triax.tuning_mode("off"), concurrent.futures.ThreadPoolExecutor() as threads:
        assert threads.submit(settings.mode_in_force).result() == "auto"


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True), ("", False)])
def test_enforce(monkeypatch, value, expected):
    assert settings.enforce_autotuning() is False
    monkeypatch.setenv("TRIAX_ENFORCE_AUTOTUNING", value)
    assert settings.enforce_autotuning() is expected


@pytest.mark.parametrize("value", ["yes", "2", "true", "1e10"])
def test_enforce_takes_only_0_and_1(monkeypatch, value):
    monkeypatch.setenv("TRIAX_ENFORCE_AUTOTUNING", value)
    with pytest.raises(ValueError, match="TRIAX_ENFORCE_AUTOTUNING must be 0 or 1; got"):
        settings.enforce_autotuning()


def test_architecture(monkeypatch):
    nineties = dict.fromkeys(["90", "9.0", "sm_90", "sm_90a", "sm90", " 90 "], 90)
    for value, expected in {**nineties, "100": 100, "12.1": 121, "": None}.items():
        monkeypatch.setenv("TRIAX_CUDA_ARCH", value)
        assert settings.cuda_arch() == expected


@pytest.mark.parametrize(
    "value", ["hopper", "9", "sm90x", "9.0.1", "-90", "1e10", "inf", "09", "10", "600", "999", "٩٠"]
)
def test_architecture_mistakes(monkeypatch, value):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", value)
    with pytest.raises(SettingError, match="TRIAX_CUDA_ARCH must be a CUDA compute capability"):
        settings.cuda_arch()


@pytest.mark.parametrize(
    ("value", "expected"), [("", None), (" ", None), ("1", 1), ("80000000000", 80_000_000_000)]
)
def test_tuning_bytes(monkeypatch, value, expected):
    monkeypatch.setenv("TRIAX_TUNING_BYTES", value)
    assert settings.tuning_bytes() == expected


@pytest.mark.parametrize("value", ["0", "-1", "1e10", "1.5", "inf", "nan", "1_000", "9" * 5000])
def test_tuning_bytes_mistakes(monkeypatch, value):
    monkeypatch.setenv("TRIAX_TUNING_BYTES", value)
    with pytest.raises(SettingError, match=r"TRIAX_TUNING_BYTES must be a whole number.*; got '"):
        settings.tuning_bytes()


@pytest.mark.parametrize(("value", "expected"), [("", 10), ("0.2", 0.2), ("3600", 3600)])
def test_tuning_timeout(monkeypatch, value, expected):
    monkeypatch.setenv("TRIAX_TUNING_TIMEOUT", value)
    assert settings.tuning_timeout_s() == expected


@pytest.mark.parametrize("value", ["0", "-1", "inf", "-inf", "nan", "1e10", "3601", "10s"])
def test_tuning_timeout_mistakes(monkeypatch, value):
    monkeypatch.setenv("TRIAX_TUNING_TIMEOUT", value)
    with pytest.raises(SettingError, match=r"TRIAX_TUNING_TIMEOUT must be .* up to 3600; got '"):
        settings.tuning_timeout_s()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("TRIAX_CACHE_DIR", "/tuned")
    assert settings.cache_folder() == Path("/tuned")
    monkeypatch.setenv("TRIAX_CACHE_DIR", "")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert settings.cache_folder() == Path("/caches/triax")
    for useless in ("", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert settings.cache_folder() == Path("/home/someone/.cache/triax")
    monkeypatch.setenv("HOME", ".")
    assert settings.cache_folder() is None  # not in the working directory


def test_cache_path(monkeypatch):
    monkeypatch.setenv("TRIAX_CACHE_PATH", ":/a:/b c:")
    assert settings.cache_path() == [Path("/a"), Path("/b c")]
    monkeypatch.setenv("TRIAX_CACHE_PATH", "")
    assert settings.cache_path() == []


@pytest.mark.parametrize("value", ["tuned", "./tuned", "~/tuned", "1e10", " "])
def test_cache_folders_are_absolute(monkeypatch, value):
    monkeypatch.setenv("TRIAX_CACHE_DIR", value)
    with pytest.raises(SettingError, match="TRIAX_CACHE_DIR must hold absolute paths; got"):
        settings.cache_folder()
    monkeypatch.setenv("TRIAX_CACHE_PATH", f"/fine:{value}")
    with pytest.raises(SettingError, match="TRIAX_CACHE_PATH must hold absolute paths; got"):
        settings.cache_path()


@pytest.fixture
def fresh(caplog):
    """As if nothing had been read yet; what is logged."""
    settings._report_unknown.cache_clear()
    settings._report_missing.cache_clear()
    yield caplog
    settings._report_unknown.cache_clear()


@pytest.mark.parametrize("read", [settings.mode_in_force, settings.cache_folder])
def test_a_misspelt_variable_is_logged_once(monkeypatch, fresh, read):
    monkeypatch.setenv("TRIAX_AUTOTUN", "off")
    monkeypatch.setenv("TRIAX_ZZZ", "")
    assert fresh.text == ""
    read()
    assert "TRIAX_AUTOTUN is set, but Triax does not know it. Did you mean TRIAX_AUTOTUNE?" in (
        fresh.text
    )
    assert "TRIAX_ZZZ is set, but Triax does not know it. Known: TRIAX_AUTOTUNE, " in fresh.text
    read()
    assert len(fresh.records) == 2


def test_known_variables_are_not_logged(monkeypatch, fresh):
    for name in settings.VARIABLES:
        monkeypatch.setenv(name, "")
    settings.mode_in_force()
    assert fresh.text == ""


def test_a_cache_path_that_does_not_exist_is_logged_once(monkeypatch, fresh, tmp_path):
    monkeypatch.setenv("TRIAX_CACHE_PATH", f"{tmp_path}:{tmp_path / 'nothing'}")
    for _ in range(2):
        settings.cache_path()
    assert [r.getMessage() for r in fresh.records] == [
        f"TRIAX_CACHE_PATH names {tmp_path / 'nothing'}, which does not exist or cannot be seen"
    ]
