"""Tuned configs in installed packages: which are found, and what is made of damaged ones."""

import dataclasses
import importlib.metadata
import os
import re
import sys

import pytest
import triton

from tests.tuning.conftest import explain
from tests.tuning.records import key, record
from triax import cli
from triax.errors import TuningError
from triax.tools import doctor
from triax.tuning import packages, policy, store
from triax.tuning.store import Store


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package, with a module that must not be imported; returns its records' folder."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))

    def install(name="norms", value="norms", inside="norms"):
        folder = site / inside / packages.FOLDER
        folder.mkdir(parents=True)
        (site / inside.split("/")[0] / "__init__.py").write_text("raise ImportError('imported')\n")
        metadata = site / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{packages.GROUP}]\n{name} = {value}\n")
        packages.folders.cache_clear()
        return folder

    return install


@pytest.mark.parametrize(("value", "inside"), [("norms", "norms"), ("norms.a.b", "norms/a/b")])
def test_a_package_s_records_are_found_without_importing_it(install, value, inside):
    folder = install(value=value, inside=inside)
    Store(folder, "").put(record(0))
    found, where = store.find(key(0))
    assert found == record(0)
    assert where == Store(folder, "package norms", in_package=True)
    assert "norms" not in sys.modules


def test_two_of_one_name_have_an_order(install, monkeypatch):
    points = [
        importlib.metadata.EntryPoint("same", value, packages.GROUP)
        for value in ("second", "first")
    ]
    for value in ("first", "second"):
        install(name=value, value=value, inside=value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    assert [folder.parent.name for _, folder in packages.folders()] == ["first", "second"]


def test_it_comes_after_the_user_s_and_the_path_s(install, tmp_path, monkeypatch):
    Store(install(), "").put(record(0, 1.0))
    other = Store(tmp_path / "other", "")
    other.put(record(0, 2.0))
    monkeypatch.setenv("TRIAX_CACHE_PATH", f"{other.folder}:{tmp_path / 'last'}")
    assert store.find(key(0))[0] == record(0, 2.0)
    store.user_store().put(record(0, 3.0))
    assert store.find(key(0))[0] == record(0, 3.0)
    path = [f"store {tmp_path / name}" for name in ("other", "last")]
    assert [place.name for place in store.stores()][1:] == [*path, "package norms"]


def test_metadata_is_read_once_and_only_where_nothing_else_is_found(install, monkeypatch):
    install()
    asked = []
    original = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **how: asked.append(how) or original(**how)
    )
    store.user_store().put(record(0))
    assert store.find(key(0)) is not None
    assert asked == []
    for _ in range(2):
        assert store.find(key(1)) is None
    assert asked == [{"group": packages.GROUP}]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("norms.other", "and there is no folder triax_records in a package of that name"),
        ("nothing_of_that_name", "and there is no folder triax_records in a package of that name"),
        ("sys", "and there is no folder triax_records in a package of that name"),
        ("../norms", "which must be the name of a package"),
        ("norms.a:b", "which must be the name of a package"),
    ],
)
def test_an_entry_point_that_names_nothing_is_logged_once(install, caplog, capsys, value, reason):
    install(value=value)
    for _ in range(2):
        assert store.find(key(0)) is None
    (line,) = caplog.messages
    assert line.startswith("tuned configs of package 'norms' are ignored: its entry point of group")
    assert line.endswith(reason)
    machine = dataclasses.replace(doctor.look(), driver=[])
    doctor.doctor(False, machine, {"folders": doctor.SECTIONS["folders"]})
    said = re.search(r"warn  package norms   (.*)\n +→ (.*)", capsys.readouterr().out)
    assert said[1] == line.partition("ignored: ")[2]
    assert said[2] == "its author runs `triax tune … --into src/…/triax_records`"


def test_damaged_metadata_is_logged(monkeypatch, caplog):
    def damaged(**_):
        raise KeyError("Name")

    monkeypatch.setattr(importlib.metadata, "entry_points", damaged)
    assert store.find(key(0)) is None
    assert "metadata of installed packages cannot be read: 'Name'" in caplog.text


def test_a_broken_record_is_a_miss(install, caplog):
    place = Store(install(), "")
    place.put(record(0)).write_bytes(b"\x80\x04.")  # a pickle
    assert store.find(key(0)) is None
    assert "is not usable and is ignored" in caplog.text


def test_links_do_not_lead_out_of_a_package(install, tmp_path, caplog, capsys):
    outside = Store(tmp_path / "outside", "")
    outside.put(record(0))
    folder = install()
    os.symlink(outside.path(key(0)), Store(folder, "").path(key(0)))
    assert store.find(key(0)) is None
    assert caplog.messages[-1].endswith("is not usable and is ignored: it is a link")
    assert cli.main(["cache", "show", key(0).name]) == 1
    assert "it is a link" in capsys.readouterr().err
    Store(folder, "").path(key(0)).unlink()
    folder.rmdir()
    os.symlink(outside.folder, folder)
    packages.folders.cache_clear()
    assert store.find(key(0)) is None
    assert f"{folder} leads out of it" in caplog.messages[-1]


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("place", ["package norms", "store", "user store"])
def test_configs_of_another_triton(install, measurer, monkeypatch, tmp_path, caplog, place):
    """They are used where nothing is measured, else measured anew; every message says why."""
    measurer.times = lambda label: 0.5 if "BLOCK=256" in label else 1.0
    explain()
    (kept,) = [found for _, found in store.user_store().records()]
    store.user_store().path(kept.key).unlink()
    folder = {"package norms": install(), "user store": store.user_store().folder}
    folder = folder.get(place, tmp_path / "a")
    old = dataclasses.replace(kept.key, triton="3.5.7")
    Store(folder, "").put(dataclasses.replace(kept, key=old))
    policy.forget()
    if place == "store":
        monkeypatch.setenv("TRIAX_CACHE_PATH", str(folder))
    where = f"{place} {folder}" if place == "store" else place
    known = f"known for Triton 3.5.7, this is {triton.__version__} ({where})"
    with pytest.raises(TuningError, match=re.escape(f"is {known}.")):
        explain("strict")
    call = explain("cached")
    assert "BLOCK=256" in kept.config
    assert call.config[0].startswith("BLOCK=256, ")
    assert call.source == f"nearest known config ({where})"
    assert f"; using [{kept.config}], the best of the nearest record, {known}" in caplog.text
    caplog.clear()
    call = explain()
    assert call.source == "measured now"
    assert caplog.messages == [f"kernels are measured anew, because their configs are {known}"]


def test_commands_show_them_and_which_are_of_another_triton(install, capsys):
    place = Store(install(), "")
    for index, version in enumerate(("3.5.7", triton.__version__)):
        old = dataclasses.replace(key(index), triton=version)
        place.put(dataclasses.replace(record(index), key=old))
    assert cli.main(["cache", "list"]) == 0
    said = capsys.readouterr().out
    for version in ("3.5.7", triton.__version__):
        assert said.count(f"[Imaginary GPU, Triton {version}, package norms]") == 1
    cli.main(["doctor"])
    said = capsys.readouterr().out
    known = f"known for Triton 3.5.7, this is {triton.__version__}"
    assert "package norms" in said
    assert f"2 configs, 1 of them {known}" in said
