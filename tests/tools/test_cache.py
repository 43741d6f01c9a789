"""`triax cache`: what it prints, deletes, writes and takes over, whoever wrote the files."""

import dataclasses
import io
import json
import os
import re
import stat
import time
import zipfile

import pytest

from tests.tuning.records import key, record
from triax import cli
from triax.tools import cache
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


def everything_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def archive(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return path


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


def test_nothing_yet(tmp_path, capsys):
    assert cli.main(["cache", "list"]) == 0
    assert "no tuned configs yet: kernels with several" in capsys.readouterr().out
    assert cli.main(["cache", "export", str(tmp_path / "tuned.zip")]) == 0
    assert "`triax tune FILE:FUNCTION`" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert "nothing to delete: there are no tuned configs in" in capsys.readouterr().out
    assert cli.main(["cache", "show", "kernel"]) == 1
    assert "`triax cache list` shows the names" in one_line(capsys)


def test_dir(capsys):
    assert cli.main(["cache", "dir"]) == 0
    assert capsys.readouterr().out == f"{store.user_store().folder}\n"


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

    def test_without_a_name_somebody_must_say_yes(self, filled, monkeypatch, capsys):
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        assert cli.main(["cache", "clear"]) == 1
        assert "Give `--all`, or a name." in one_line(capsys)
        for answer, status, left in (("", 1, 3), ("\n", 1, 3), ("no\n", 1, 3), ("y\n", 0, 0)):
            terminal = io.StringIO(answer)
            terminal.isatty = lambda: True
            monkeypatch.setattr("sys.stdin", terminal)
            assert cli.main(["cache", "clear"]) == status
            assert "delete all 3 configs from" in capsys.readouterr().out
            assert len(filled.paths()) == left

    def test_a_name_and_all(self, filled, capsys):
        with pytest.raises(SystemExit):
            cli.main(["cache", "clear", "kernel_1", "--all"])
        assert "not allowed with argument" in capsys.readouterr().err
        assert len(filled.paths()) == 3


class TestExport:
    def test_and_import(self, filled, tmp_path, capsys):
        (filled.folder / "broken-0.json").write_text("{")
        file = tmp_path / "tuned.zip"
        assert cli.main(["cache", "export", str(file)]) == 0
        assert "wrote 3 configs" in capsys.readouterr().out
        cli.main(["cache", "clear", "--all"])
        assert cli.main(["cache", "import", str(file)]) == 0
        assert "added 3 configs" in capsys.readouterr().out
        assert all(filled.find(key(index)) == record(index, time=0.25) for index in range(3))

    @pytest.mark.parametrize("name", ["", "nothing/tuned.zip", "file/tuned.zip", "x" * 300])
    def test_where_nothing_can_be_written(self, filled, tmp_path, capsys, name):
        (tmp_path / "file").touch()
        assert cli.main(["cache", "export", str(tmp_path / name)]) == 1
        one_line(capsys)


class TestImport:
    def test_into_a_store_that_cannot_be_written(self, filled, tmp_path, monkeypatch, capsys):
        file = tmp_path / "tuned.zip"
        cli.main(["cache", "export", str(file)])
        monkeypatch.setenv("TRIAX_CACHE_DIR", str(file / "below"))
        assert cli.main(["cache", "import", str(file)]) == 1
        said = one_line(capsys)
        assert f"{file}/below cannot be written: Not a directory. Set TRIAX_CACHE_DIR" in said

    @pytest.mark.parametrize(
        "kernel", ["../../x", "../x", "/tmp/x", "..", ".x", "a/b", "a\\b", "x\0", "a b", "x\n", ""]
    )
    def test_kernels_that_would_lead_elsewhere(self, tmp_path, monkeypatch, capsys, kernel):
        monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path / "a" / "b" / "store"))
        bad = dataclasses.replace(record(0), key=dataclasses.replace(key(0), kernel=kernel))
        entries = {"bad.json": bad.to_json(), "good.json": record(1).to_json()}
        file = archive(tmp_path / "tuned.zip", entries)
        before = everything_below(tmp_path)
        assert cli.main(["cache", "import", str(file)]) == 1
        assert "'bad.json' in" in one_line(capsys)
        written = everything_below(tmp_path).keys() - before.keys()
        assert written == {store.user_store().path(key(1))}

    @pytest.mark.parametrize("name", ["../../x.json", "/tmp/x.json", "x", ".json", "a/b/c.json"])
    def test_names_of_entries_mean_nothing(self, tmp_path, monkeypatch, name):
        monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path / "a" / "b" / "store"))
        file = archive(tmp_path / "tuned.zip", {name: record(0).to_json(), "folder/": ""})
        before = everything_below(tmp_path)
        assert cli.main(["cache", "import", str(file)]) == 0
        written = everything_below(tmp_path).keys() - before.keys()
        assert written == {store.user_store().path(key(0))}

    def test_a_link_in_the_store_is_replaced_and_not_followed(self, tmp_path):
        place = store.user_store()
        place.folder.mkdir(parents=True)
        outside = tmp_path / "outside"
        outside.write_text("theirs")
        place.path(key(0)).symlink_to(outside)
        file = archive(tmp_path / "tuned.zip", {"x.json": record(0).to_json()})
        assert cli.main(["cache", "import", str(file)]) == 0
        assert outside.read_text() == "theirs"
        assert place.find(key(0)) is not None

    def test_a_link_in_the_archive_is_no_record(self, tmp_path, capsys):
        file = tmp_path / "tuned.zip"
        with zipfile.ZipFile(file, "w") as entries:
            link = zipfile.ZipInfo("link.json")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            entries.writestr(link, "/etc/passwd")
        assert cli.main(["cache", "import", str(file)]) == 1
        assert "'link.json' in" in one_line(capsys)
        assert store.user_store().paths() == []

    def test_bombs_are_not_unpacked(self, tmp_path, monkeypatch, capsys):
        good = record(0).to_json()
        one = archive(tmp_path / "one.zip", {"good.json": good, "x.json": b" " * (64 << 20)})
        monkeypatch.setattr(cache, "MAX_ARCHIVE_BYTES", 5 << 20)
        many = archive(
            tmp_path / "many.zip",
            {"good.json": good, **{f"{i}.json": b" " * (3 << 20) for i in range(2)}},
        )
        large = archive(tmp_path / "large.zip", {"good.json": good})
        with large.open("r+b") as file:
            file.truncate(6 << 20)
        for path, reason in (
            (one, "'x.json' is too large"),
            (many, "'1.json' is too large"),
            (large, "it is larger than"),
        ):
            assert cli.main(["cache", "import", str(path)]) == 1
            assert reason in one_line(capsys)
            assert store.user_store().paths() == []

    def test_archives_that_are_none(self, filled, tmp_path, capsys):
        file = tmp_path / "tuned.zip"
        assert cli.main(["cache", "export", str(file)]) == 0
        whole = file.read_bytes()
        cli.main(["cache", "clear", "--all"])
        capsys.readouterr()
        middle = whole.index(b"kernel_1") + 100
        damaged = [b"", b"no archive", whole[: len(whole) // 2], whole[:-30]]
        damaged.append(whole[:middle] + b"\0" * 50 + whole[middle + 50 :])
        # The first entry's flags say that it is encrypted, here and in the directory at the end.
        at = whole.index(b"PK\x01\x02") + 8
        damaged.append(whole[:6] + b"\x01" + whole[7:at] + b"\x01" + whole[at + 1 :])
        # ... and that it is packed by a method that there is not.
        damaged.append(whole[:8] + b"\x63" + whole[9 : at + 2] + b"\x63" + whole[at + 3 :])
        for content in damaged:
            file.write_bytes(content)
            assert cli.main(["cache", "import", str(file)]) == 1
            assert "cannot be read" in one_line(capsys)
            assert filled.paths() == []

    def test_files_that_are_none(self, tmp_path, capsys):
        os.mkfifo(tmp_path / "pipe")
        for name, reason in (
            ("pipe", "it is not a regular file"),
            ("nothing", "No such file"),
            ("", "Is a directory"),
        ):
            assert cli.main(["cache", "import", str(tmp_path / name)]) == 1
            assert reason in one_line(capsys)

    def test_a_store_that_cannot_be_written(self, tmp_path, monkeypatch, capsys):
        file = archive(tmp_path / "tuned.zip", {"x.json": record(0).to_json()})
        monkeypatch.setenv("TRIAX_CACHE_DIR", str(file / "below"))
        for words in (["import", str(file)], ["clear", "--all"], ["list"]):
            assert cli.main(["cache", *words]) == 1
            assert "Not a directory" in one_line(capsys)


def test_a_user_without_a_home(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("triax.settings.cache_folder", lambda: None)
    assert cli.main(["cache", "list"]) == 0
    for words in (["export", str(tmp_path / "tuned.zip")], ["clear", "--all"], ["dir"]):
        assert cli.main(["cache", *words]) == 1
        assert "no home folder" in one_line(capsys)
