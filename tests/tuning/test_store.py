"""The store: what it writes, and what it makes of files that others wrote."""

import dataclasses
import functools
import json
import operator
import os
import re
import stat
import time

import pytest

from tests.tuning.records import key, record
from triax import settings
from triax.compat import versions
from triax.tuning import store
from triax.tuning.store import Record, Store, Timing

BRACKETS = 5000


@pytest.fixture
def place(tmp_path):
    return Store(tmp_path / "store", "test")


def put_text(place, text):
    """Writes `text` in the place of the record of `key(0)`."""
    path = place.put(record(0))
    path.write_text(text)


def test_round_trip(place):
    written = dataclasses.replace(
        record(0),
        timings=(Timing("BLOCK=64", 1.5, 7), Timing("BLOCK=128", error="out of resources")),
    )
    place.put(written)
    assert place.find(key(0)) == written
    assert place.find(key(1)) is None


def test_the_nearest_size_is_found_whatever_its_file_is_called(place):
    """By name 12288 comes before 4097, which is nearer to 4096."""
    for number, size in enumerate((12288, 4097, 2048)):
        near = record(0, time=1.0 + number)
        place.put(dataclasses.replace(near, key=dataclasses.replace(near.key, moved_bytes=size)))
    found = place.find(key(0))
    assert found is not None
    assert found.key.moved_bytes == 4097
    place.path(found.key).write_text("{")
    second = place.find(key(0))
    assert second is not None
    assert second.key.moved_bytes == 2048


def places_in(value, path=()):
    """Every place in parsed JSON."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from places_in(item, (*path, name))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_the_type_of_every_field_is_checked():
    small = dataclasses.replace(
        record(0),
        key=dataclasses.replace(key(0), candidates=("BLOCK=64",), options={"a": "b"}),
        timings=(Timing("BLOCK=64", 1.5, 3, "none"),),
    )
    data = json.loads(small.to_json())
    assert Record.from_json(json.dumps(data)) == small
    samples = (True, 7, 1.5, "x", [None], {"x": None}, None)
    also = {("median_ms", int), ("median_ms", type(None)), ("error", type(None))}
    tried = 0
    for path in places_in(data):
        before = functools.reduce(operator.getitem, path, data)
        wrong = [
            sample
            for sample in samples
            if type(sample) not in (bool, int, float, str) or type(sample) is not type(before)
            if not path or (path[-1], type(sample)) not in also
        ]
        for sample in (*wrong, float("nan"), "\ud800"):
            tried += 1
            names = [str(name) for name in path if not isinstance(name, int)]
            where = re.escape(names[-1] if names else "it") + r"\b|surrogates not allowed$"
            with pytest.raises(ValueError, match=where):
                Record.from_json(json.dumps(replaced(data, path, sample)))
    assert tried > 200


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.pop("inputs"), "it lacks inputs"),
        (lambda d: d.update(more=1), "it has an unknown field 'more'"),
        (lambda d: d["key"].update(format=1), "format 1 is not 3"),
        (lambda d: d["key"].pop("format"), "key lacks format"),
        (lambda d: d["timings"][3].update(median_ms=10**400), "median_ms is inf"),
        (lambda d: d.update(config="BLOCK=1"), "its config 'BLOCK=1' is not one of its candidates"),
        (lambda d: d["key"].update(moved_bytes=10**400), "bytes moved is out of range"),
        (lambda d: d["key"].update(moved_bytes=-1), "bytes moved is out of range"),
        (lambda d: d.update(date="\ud800"), "surrogates not allowed"),
    ],
)
def test_reasons(place, caplog, change, reason):
    data = json.loads(record(0).to_json())
    change(data)
    put_text(place, json.dumps(data))
    assert place.find(key(0)) is None
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match=reason):
        place.read(place.path(key(0)))


@pytest.mark.parametrize(
    "kernel", ["../../x", "../x", "/tmp/x", "..", ".x", "a/b", "a\\b", "x\0", "a b", "x\n", ""]
)
def test_kernels_that_would_lead_elsewhere(kernel):
    """A kernel's name becomes a part of a file's name."""
    bad = dataclasses.replace(record(0), key=dataclasses.replace(key(0), kernel=kernel))
    with pytest.raises(ValueError, match="is not the name of a function"):
        Record.from_json(bad.to_json())


@pytest.mark.parametrize(
    "text", ["[" * BRACKETS + "]" * BRACKETS, '{"key": ' + "[" * BRACKETS, "9" * 5000, "\ud800"]
)
def test_text_that_no_parser_takes_is_a_miss(place, caplog, text):
    path = place.put(record(0))
    path.write_bytes(text.encode(errors="surrogatepass"))
    assert place.find(key(0)) is None
    assert "is not usable and is ignored" in caplog.text


def test_a_pipe_is_a_miss(place, caplog):
    place.folder.mkdir()
    os.mkfifo(place.path(key(0)))
    assert place.find(key(0)) is None
    assert "it is not a regular file" in caplog.text
    assert [str(found) for _, found in place.records()] == ["it is not a regular file"]


def test_a_folder_is_a_miss(place, caplog):
    place.path(key(0)).mkdir(parents=True)
    assert place.find(key(0)) is None
    assert "Is a directory" in caplog.text


def test_a_huge_file_is_not_read(place, caplog):
    path = place.put(record(0))
    os.truncate(path, 300 << 20)
    assert place.find(key(0)) is None
    assert f"it is larger than {store._MAX_BYTES} bytes" in caplog.text


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_what_the_umask_lets_them(place, umask, mode):
    before = os.umask(umask)
    try:
        path = place.put(record(0))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_link_is_replaced_and_not_followed(place, tmp_path):
    place.folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    place.path(key(0)).symlink_to(outside)
    place.put(record(0))
    assert outside.read_text() == "theirs"
    assert place.find(key(0)) == record(0)


def test_a_write_that_fails_leaves_nothing(place):
    path = place.path(key(0))
    path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        place.put(record(0))
    assert list(place.folder.iterdir()) == [path]
    assert path.is_dir()


def test_a_write_that_is_interrupted_leaves_nothing(place, monkeypatch):
    def interrupted(descriptor):
        assert [path.suffix for path in place.folder.iterdir()] == [".part"]
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.put(record(0))
    assert list(place.folder.iterdir()) == []


def test_what_a_killed_writer_leaves_is_in_nobody_s_way(place, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "unlink", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            place.put(record(0))
    assert [path.suffix for path in place.folder.iterdir()] == [".part"]
    place.put(record(0))
    assert place.find(key(0)) == record(0)


def test_leftovers_are_what_no_living_writer_has(place):
    place.put(record(0))
    names = ".triax-0.part", ".triax-1.part", ".triax-folder", ".movie.part"
    for name in names:
        (place.folder / name).touch()
    for name, age_s in zip(names, (50, 70, 70, 70), strict=True):
        os.utime(place.folder / name, (time.time() - age_s,) * 2)
    assert [path.name for path in place.leftovers()] == [".triax-1.part"]
    (place.folder / ".hidden-0.json").touch()  # as some systems keep beside a file
    (place.folder / "notes.txt").touch()
    assert len(place.paths()) == 1


def test_records_of_a_kernel_are_not_those_of_one_whose_name_begins_alike(place):
    for name in ("norm", "norm_gated"):
        of = record(0)
        place.put(dataclasses.replace(of, key=dataclasses.replace(of.key, kernel=name)))
    assert [found.key.kernel for _, found in place.records("norm")] == ["norm"]
    assert len([*place.records()]) == 2


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("TRIAX_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # in no list of users
    assert settings.cache_folder() is None
    assert store.stores() == []
    assert store.find(key(0)) is None
    with pytest.raises(OSError, match=r"has no home folder.*set TRIAX_CACHE_DIR"):
        store.user_store()


def test_a_record_has_the_version_of_a_checkout_too(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda _: None)
    made = Record.now(record(0).key, record(0).config, (), "")
    assert made.versions == {"jax": "", "jaxlib": "", "triton": "", "triax": versions.__version__}
