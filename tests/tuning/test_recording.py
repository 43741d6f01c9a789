"""Records as objects: what is collected and written."""

import dataclasses
import threading

import pytest

import triax
from tests.tuning.conftest import DEVICE, X, explain
from tests.tuning.records import record
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.tuning import agree, policy, store

LABEL = "BLOCK=256, num_warps=2, num_stages=3, num_ctas=1"
OTHER = "BLOCK=64, num_warps=1, num_stages=3, num_ctas=1"


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

    def test_what_another_process_of_the_job_chose_is_not(self, best, monkeypatch):
        monkeypatch.setattr(agree, "agree", lambda name, config: OTHER)
        with triax.record() as records:
            assert explain().source == "another process of this job"
        assert len(records) == 0

    @pytest.mark.parametrize(
        ("platform", "why"),
        [("cpu", "This process runs on cpu"), ("gpu", "Programs compiled before the block")],
    )
    def test_why_there_is_nothing_to_save(self, platform, why, monkeypatch, tmp_path, caplog):
        monkeypatch.setattr(jax_private, "default_platform", lambda: platform)
        with triax.record() as records:
            pass
        assert records.save(tmp_path / "tuned") == []
        assert why in caplog.text
        assert not (tmp_path / "tuned").exists()

    def test_the_last_of_a_key_counts_in_the_place_of_the_first(self):
        records, again = triax.Records(), dataclasses.replace(record(0), inputs="real operands")
        for each in (record(0), record(1), again):
            records.add(each)
        assert [*records] == [again, record(1)]

    def test_it_ends_with_its_block_whatever_ends_that(self, best):
        with pytest.raises(ZeroDivisionError), triax.record() as records:
            raise ZeroDivisionError
        explain()
        assert len(records) == 0
        with triax.record() as outer, triax.record() as inner:
            explain()
        assert [*outer] == [*inner]

    def test_a_folder_that_is_none(self, tmp_path):
        with triax.record() as records:
            pass
        with pytest.raises(ArgumentTypeError, match="`folder` must be the path of a folder; got 3"):
            records.save(3)
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(ArgumentValueError, match=r"folder; '.*file' is a file"):
            records.save(file)

    def test_saved_and_found_by_path(self, best, monkeypatch, tmp_path, caplog):
        with triax.record() as records:
            explain()
        (path,) = records.save(tmp_path / "tuned")
        assert path.parent == tmp_path / "tuned"
        assert "nothing is saved" not in caplog.text
        forget_all()
        monkeypatch.setenv("TRIAX_CACHE_PATH", str(tmp_path / "tuned"))
        call = explain("strict")
        assert (call.source, call.grid) == (f"store {tmp_path / 'tuned'}", ((4, 1, 1),))
        assert len(best.jobs) == 1
