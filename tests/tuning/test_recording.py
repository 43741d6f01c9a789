"""Records as objects: what is collected, written and read again."""

import threading

import numpy as np
import pytest

import triax
from tests import kernels
from tests.cases import blockwise
from tests.tuning.conftest import DEVICE
from tests.tuning.records import record
from triax.devices import Device
from triax.errors import ArgumentValueError, TuningError
from triax.tuning import policy, store
from triax.tuning.store import Store

X = np.zeros(1003, np.float32)
LABEL = "BLOCK=256, num_warps=2, num_stages=3, num_ctas=1"
UNKNOWN = "no tuned one is known for .*'strict' requires it"


def explain(mode="auto", x=X):
    with triax.tuning_mode(mode):
        (call,) = triax.explain(lambda x: blockwise(kernels.autotuned_add_kernel, x, x), x)
    return call


@pytest.fixture
def best(measurer):
    measurer.times = lambda label: 0.5 if label == LABEL else 1.0
    return measurer


def forget_all():
    policy.forget()
    for path in store.user_store().paths():
        path.unlink()


@pytest.mark.cuda_plugin
class TestRecord:
    def test_measured_or_known_is_collected_once(self, best):
        with triax.record() as measured:
            explain()
        with triax.record() as from_process:
            explain()
        policy.forget()
        with triax.record() as from_store:
            explain()
            explain()
        explain(x=X[:200])
        for records in (measured, from_process, from_store):
            (found,) = records
            assert (found.config, len(found.timings)) == (LABEL, 3)
        assert repr(measured) == f"add_kernel: {LABEL}  [{DEVICE.name}]"

    def test_of_all_threads(self, best):
        with triax.record() as records:
            thread = threading.Thread(target=explain)
            thread.start()
            thread.join()
        assert len(records) == 1

    def test_what_was_not_measured_is_not(self, measurer):
        with triax.record() as records:
            explain("off")
            explain("cached")
        assert len(records) == 0
        assert repr(records) == "no tuned configs"

    def test_saved_and_loaded(self, best, tmp_path):
        with triax.record() as records:
            explain()
        records.save(tmp_path / "tuned")
        forget_all()
        assert [*triax.Records.load(tmp_path / "tuned")] == [*records]
        call = explain("strict")
        assert (call.source, call.grid) == (f"folder {tmp_path / 'tuned'}", ((4, 1, 1),))

    def test_loaded_after_another_was_known(self, best, tmp_path):
        with triax.record() as records:
            explain()
        records.save(tmp_path)
        forget_all()
        best.times = lambda label: 1.0
        assert explain().grid == ((16, 1, 1),)
        triax.Records.load(tmp_path)
        assert explain().grid == ((4, 1, 1),)
        assert len(best.jobs) == 2


def test_loading_reads_what_is_valid(tmp_path, caplog):
    with pytest.raises(ArgumentValueError, match=r"`folder` must hold tuned configs.*holds none"):
        triax.Records.load(tmp_path / "nothing")
    place = Store(tmp_path, "")
    for index in range(2):
        place.put(record(index))
    place.put(record(2)).write_text("{")
    assert len(triax.Records.load(str(tmp_path))) == 2
    assert "kernel_2" in caplog.text


@pytest.mark.cuda_plugin
class TestAnotherGpu:
    """`TRIAX_GPU_LIKE`."""

    @pytest.fixture(autouse=True)
    def _moved(self, best, monkeypatch):
        explain()
        policy.forget()
        moved = lambda ctx, devices, arch: Device(0, "Other GPU", measurable=False)
        monkeypatch.setattr("triax.devices.for_tuning", moved)

    def test_its_records_are_taken_and_that_is_logged(self, monkeypatch, caplog):
        with pytest.raises(TuningError, match=UNKNOWN):
            explain("strict")
        monkeypatch.setenv("TRIAX_GPU_LIKE", DEVICE.name)
        call = explain("strict")
        assert (call.source, call.grid) == (f"user store, of {DEVICE.name}", ((4, 1, 1),))
        assert caplog.messages == [
            "kernel add_kernel: programs for 'Other GPU' use a config tuned on "
            f"{DEVICE.name!r}, as TRIAX_GPU_LIKE says"
        ]

    def test_those_that_were_loaded_are(self, monkeypatch, tmp_path):
        (kept,) = [record for _, record in store.user_store().records()]
        Store(tmp_path, "").put(kept)
        forget_all()
        triax.Records.load(tmp_path)
        monkeypatch.setenv("TRIAX_GPU_LIKE", DEVICE.name)
        assert explain("strict").source == f"folder {tmp_path}, of {DEVICE.name}"

    def test_those_of_another_architecture_are_not(self, monkeypatch, caplog):
        monkeypatch.setenv("TRIAX_GPU_LIKE", DEVICE.name)
        monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
        with pytest.raises(TuningError, match=UNKNOWN):
            explain("strict")
        assert "for a GPU of that name and compute capability 80." in caplog.text

    def test_a_name_that_nothing_is_stored_for_is_logged_once(self, monkeypatch, caplog):
        monkeypatch.setenv("TRIAX_GPU_LIKE", DEVICE.name.lower())
        for _ in range(2):
            with pytest.raises(TuningError, match=UNKNOWN):
                explain("strict")
        (line,) = caplog.messages
        assert line.startswith(f"TRIAX_GPU_LIKE is {DEVICE.name.lower()!r}, and no stored config")
        assert line.endswith(f"Did you mean `{DEVICE.name}`?")

    def test_a_program_for_no_known_gpu_takes_none(self, monkeypatch):
        unknown = lambda ctx, devices, arch: Device(0, "", measurable=False)
        monkeypatch.setattr("triax.devices.for_tuning", unknown)
        monkeypatch.setenv("TRIAX_GPU_LIKE", DEVICE.name)
        with pytest.raises(TuningError, match=UNKNOWN):
            explain("strict")

    def test_its_own_come_first(self, monkeypatch, measurer):
        own = lambda ctx, devices, arch: Device(0, "Other GPU")
        monkeypatch.setattr("triax.devices.for_tuning", own)
        measurer.times = lambda label: 1.0
        explain()
        policy.forget()
        monkeypatch.setenv("TRIAX_GPU_LIKE", DEVICE.name)
        assert explain().grid == ((16, 1, 1),)
