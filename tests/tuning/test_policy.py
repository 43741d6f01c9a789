"""Which config is used, by mode and by version."""

import logging

import numpy as np
import pytest

import triax
from tests.cases import CASES, cuda_call
from triax.compat import versions
from triax.errors import VersionError
from triax.tuning import policy

pytestmark = pytest.mark.cuda_plugin
CASE = next(case for case in CASES if case.name == "autotuned_accumulate")


def lower(mode):
    inputs = CASE.inputs(np.random.default_rng(0))
    with triax.tuning_mode(mode):
        return cuda_call(lambda *args: CASE.function(*args), *inputs)


@pytest.mark.parametrize("mode", ["auto", "cached", "off"])
def test_first_config(mode, caplog):
    with caplog.at_level(logging.INFO, "triax"):
        call = lower(mode)
    assert call.grid == ((16, 1, 1),)
    lines = [r.getMessage() for r in caplog.records if "no tuned config is known" in r.getMessage()]
    assert len(lines) == (0 if mode == "off" else 1)
    reason = (
        "does not measure" if mode == "cached" else "not lowered to run on a GPU of this process"
    )
    for line in lines:
        assert "accumulate_kernel" in line
        assert "BLOCK=64" in line
        assert reason in line
    assert ("triax tune FILE:FUNCTION" in caplog.text) == bool(lines)


def test_what_is_missing_is_said_once_for_a_kernel(caplog):
    caplog.set_level("INFO", "triax")
    for size in (0, 1 << 20):
        inputs = [np.zeros(1000 + size, np.float32)] * 2
        cuda_call(lambda *args: CASE.function(*args), *inputs)
    levels = [r.levelname for r in caplog.records if "no tuned config is known" in r.message]
    assert levels == ["WARNING", "INFO"]
    assert caplog.text.count("triax tune FILE:FUNCTION") == 1


def test_all_that_is_remembered_is_forgotten():
    names = ("_resolved", "_measured", "_unmeasurable", "_noted", "_near")
    for memory in [getattr(policy, name) for name in names]:
        memory["a key"] = memory
    policy._reported.add("a kernel")
    policy.forget()
    assert not any(getattr(policy, name) for name in (*names, "_reported"))


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_the_claim_on_a_config_is_withdrawn_whatever_ends_the_search(problem, monkeypatch):
    """Else the job's other processes wait for one that will not measure."""
    withdrawn = []

    def interrupted(request, labels):
        raise problem

    monkeypatch.setattr(policy, "_known", interrupted)
    monkeypatch.setattr(policy.agree, "release", withdrawn.append)
    with pytest.raises(problem):
        lower("auto")
    (name,) = withdrawn
    assert name.startswith("accumulate_kernel-")


# Below and above the floor, with any version installed: the target of a run-time autotuned call is
# the legacy one, and its argument lists are those of the installed jaxlib.
@pytest.mark.parametrize("version", ["0.9.2", "0.9.2.dev20260316", "0.9.0", "0.8.3"])
def test_runtime_below_the_floor(version, monkeypatch):
    monkeypatch.setattr(versions.RUNTIME_AUTOTUNING.__class__, "passes", _passes(version))
    with pytest.warns(
        UserWarning, match=r"'accumulate_kernel': tuning at run time needs jaxlib 0\.9\.3"
    ):
        call = lower("runtime")
    assert len(call.entries) == 1
    monkeypatch.setenv("TRIAX_ENFORCE_AUTOTUNING", "1")
    with pytest.raises(VersionError, match="TRIAX_ENFORCE_AUTOTUNING=1 forbids"):
        lower("runtime")
    monkeypatch.setenv("TRIAX_ENFORCE_AUTOTUNING", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1; got 'yes'"):
        lower("runtime")


@pytest.mark.parametrize("version", ["0.9.2.dev20260317", "0.9.3", "0.10.0"])
def test_runtime_above_the_floor(version, monkeypatch):
    monkeypatch.setattr(versions.RUNTIME_AUTOTUNING.__class__, "passes", _passes(version))
    call = lower("runtime")
    assert len(call.entries) == 3
    assert call.target == "triton_kernel_call"
    assert call.saved == ((1, 2, 4 * 1003),)


def _passes(pretended):
    """As if `pretended` were installed, for the one gate under test."""
    original = versions.Gate.passes

    def passes(gate, version):
        return original(gate, pretended if gate is versions.RUNTIME_AUTOTUNING else version)

    return passes


def test_never_on_the_new_target(monkeypatch):
    """Should the legacy target vanish, an error; the FFI target tunes before inputs exist."""
    from triax.errors import UnsupportedError

    monkeypatch.setattr(versions.RUNTIME_AUTOTUNING.__class__, "passes", _passes("0.10.0"))
    new = versions.CallTarget(versions.NEW_TARGET, api_version=4)
    monkeypatch.setattr(versions, "choose_target", lambda *_, **__: new)
    with pytest.raises(
        UnsupportedError, match="tuning mode 'runtime' needs the custom-call target"
    ):
        lower("runtime")
