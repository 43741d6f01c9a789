"""`triax cache`: what it prints and deletes, whoever wrote the files."""

import json
import os
import re
import time

import pytest

from tests.tuning.records import key, record
from triax import cli
from triax.tuning import store
from triax.tuning.store import Record, Store


@pytest.fixture
def filled():
    place = store.user_store()
    for index in range(3):
        place.put(record(index, time=0.25))
    return place


def kernels(place):
    return [found.key.kernel for _, found in place.records() if isinstance(found, Record)]


def one_line(capsys):
    said = capsys.readouterr().err
    assert said.startswith("triax: ")
    assert said.count("\n") == 1
    return said


def test_list_and_show(filled, capsys):
    (filled.folder / "broken-0.json").write_text("{")
    assert cli.main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert out.count("0.2500 ms") == 3
    found = record(0, time=0.25)
    size = f"{len(found.to_json()) / 1e3:.1f} kB"
    assert re.search(rf"^kernel_0-\S+ +{found.date[:10]} +{size} +0.2500 ms  BLOCK=64", out, re.M)
    assert re.search(r"^3 configs, \d+\.\d kB$", out, re.M)
    assert "broken-0" in out
    assert "(not usable: Expecting property name" in out
    assert cli.main(["cache", "show", "kernel_1"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown[shown.index("{") :])["config"] == "BLOCK=64"
    assert cli.main(["cache", "show", "kernel_9"]) == 1
    assert "no tuned config named 'kernel_9'" in one_line(capsys)


def test_nothing_yet(capsys):
    assert cli.main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "no tuned configs yet: kernels with several" in out
    assert "`triax tune FILE:FUNCTION`" in out
    assert cli.main(["cache", "clear", "--all"]) == 0
    assert "deleted 0 configs from" in capsys.readouterr().out
    assert cli.main(["cache", "show", "kernel"]) == 1
    assert "`triax cache list` shows the names" in one_line(capsys)


def test_show_of_files_that_are_no_records(filled, capsys):
    os.mkfifo(filled.folder / "pipe.json")
    (filled.folder / "bytes.json").write_bytes(b"\xff\xfe")
    for name, reason in (("pipe", "it is not a regular file"), ("bytes", "can't decode byte 0xff")):
        assert cli.main(["cache", "show", name]) == 1
        assert reason in one_line(capsys)


def test_one_store_that_cannot_be_read_hides_no_other(filled, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIAX_CACHE_PATH", str(tmp_path / "file"))
    assert cli.main(["cache", "list"]) == 1
    out, err = capsys.readouterr()
    assert out.count("user store") == 3
    assert err.count("\n") == 1
    assert "Not a directory" in err


class TestClear:
    def test_a_kernel_or_a_name(self, filled, capsys):
        assert cli.main(["cache", "clear", "kernel_1"]) == 0
        assert kernels(filled) == ["kernel_0", "kernel_2"]
        assert cli.main(["cache", "clear", filled.path(key(2)).stem]) == 0
        assert kernels(filled) == ["kernel_0"]
        assert cli.main(["cache", "clear", "kernel_1"]) == 1
        assert "no tuned config named 'kernel_1'" in one_line(capsys)

    def test_only_records_go(self, filled, tmp_path, capsys):
        names = ("notes.json", "kernel_0-0.json", ".hidden.json", "photo.png", ".movie.part")
        theirs = [filled.folder / name for name in names]
        for path in theirs:
            path.write_text("{}")
        (filled.folder / "folder.json").mkdir()
        outside = Store(tmp_path / "outside", "test").put(record(9))
        (filled.folder / "link.json").symlink_to(outside)
        assert cli.main(["cache", "clear", "kernel_0-0"]) == 1
        assert cli.main(["cache", "clear", "--all"]) == 0
        out, err = capsys.readouterr()
        assert "deleted 4 configs" in out
        assert "left 3 files there that hold no config" in err
        assert all(path.exists() for path in theirs)
        assert outside.exists()
        assert sorted(path.name for path in filled.paths()) == [
            "folder.json",
            "kernel_0-0.json",
            "notes.json",
        ]

    def test_leftovers_of_writers_go_too(self, filled):
        old, new = filled.folder / ".triax-a.part", filled.folder / ".triax-b.part"
        for path in (old, new):
            path.touch()
        os.utime(old, (time.time() - 3600,) * 2)
        assert cli.main(["cache", "clear", "--all"]) == 0
        assert list(filled.folder.iterdir()) == [new]

    def test_a_name_or_all(self, filled, capsys):
        for words, said in ((["kernel_1", "--all"], "not allowed with"), ([], "is required")):
            with pytest.raises(SystemExit):
                cli.main(["cache", "clear", *words])
            assert said in capsys.readouterr().err
        assert len(filled.paths()) == 3


def test_a_store_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path / "file" / "below"))
    for words in (["clear", "--all"], ["list"]):
        assert cli.main(["cache", *words]) == 1
        assert "Not a directory" in one_line(capsys)


def test_a_user_without_a_home(monkeypatch, capsys):
    monkeypatch.setattr("triax.settings.cache_folder", lambda: None)
    assert cli.main(["cache", "list"]) == 0
    assert cli.main(["cache", "clear", "--all"]) == 1
    assert "no home folder" in one_line(capsys)
