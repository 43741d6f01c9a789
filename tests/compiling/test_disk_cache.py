"""Where Triton keeps what it compiles, for users whose home folder cannot be written."""

import os
import stat

import jax
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from tests.cases import blockwise
from triax import settings
from triax.compiling import compiler
from triax.errors import CompilationError

pytestmark = pytest.mark.cuda_plugin

NO_HOME = "~/"  # what Triton takes for the home of a user who has none


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """An empty working directory; temporary files have a folder beside it."""
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()  # root may write to any folder
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(settings, "cache_folder", lambda: None)
    compiler.clear_cache()
    yield tmp_path
    vars(triton.knobs.cache).pop("dir", None)
    assert list((tmp_path / "work").iterdir()) == []


def lower():
    x = jax.ShapeDtypeStruct((1003,), np.float32)
    (call,) = triax.explain(lambda x: blockwise(kernels.autotuned_add_kernel, x, x), x)
    assert call.source == "first config (mode auto)"


def compiled_in(folder):
    return [path.name for path in folder.rglob("add_kernel.ptx")]


@pytest.mark.parametrize("home", [NO_HOME, "{here}/file"])
@pytest.mark.parametrize("place", ["its own", "temporary", "nobody else's"])
def test_a_home_that_cannot_be_written(folders, monkeypatch, caplog, home, place):
    monkeypatch.setenv("TRITON_HOME", home.format(here=folders))
    temporary = folders / "temporary" / f"triax-{os.getuid()}"
    if place == "its own":
        monkeypatch.setattr(settings, "cache_folder", lambda: folders / "triax")
    elif place == "nobody else's":  # anybody may have made that folder
        temporary.mkdir()
        temporary.chmod(0o777)
    lower()
    expected = {
        "its own": folders / "triax" / "triton",
        "temporary": temporary / "triton",
        "nobody else's": folders / "temporary",
    }[place]
    assert compiled_in(expected) == ["add_kernel.ptx"]
    assert not compiled_in(temporary) or place == "temporary"
    assert caplog.text.count("set TRITON_CACHE_DIR to use another folder") == 1
    if place != "its own":
        (made,) = [p for p in (folders / "temporary").iterdir() if compiled_in(p)]
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_folder_that_is_given_stays(folders, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "given"))
    lower()
    assert compiled_in(folders / "given")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "file"))
    compiler.clear_cache()
    with pytest.raises(CompilationError, match="Make it a folder that can be written, or set"):
        lower()
    assert "TRITON_CACHE_DIR to use another folder" not in caplog.text


def test_no_folder_at_all(folders, monkeypatch):
    monkeypatch.setenv("TRITON_HOME", NO_HOME)
    monkeypatch.setattr("tempfile.tempdir", str(folders / "file"))
    with pytest.raises(CompilationError, match=r"this user has no home.*Set TRITON_CACHE_DIR"):
        lower()


def test_the_working_directory_is_not_for_temporary_files(folders, monkeypatch):
    """Python takes it where there is no other folder."""
    monkeypatch.setattr("tempfile.tempdir", str(folders / "work"))
    monkeypatch.setenv("TRITON_HOME", NO_HOME)
    with pytest.raises(CompilationError, match="there is no folder for temporary files; set TMPD"):
        lower()
    monkeypatch.setenv("TMPDIR", str(folders / "work"))
    settings.temporary_folder().rmdir()
