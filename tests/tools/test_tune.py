"""What `tune` meets in a function, with the measuring replaced."""

import jax
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from tests.cases import blockwise
from tests.tuning.conftest import DEVICE, replace_measurer
from triax import cli, testing
from triax.compat import versions
from triax.errors import TuningError
from triax.tools import tune as tools
from triax.tuning import policy, store
from triax.tuning.store import Store

pytestmark = pytest.mark.cuda_plugin


@pytest.fixture
def measurer(monkeypatch):
    monkeypatch.setattr(tools, "_device", lambda call, operands: (DEVICE, 90))
    policy.forget()
    yield replace_measurer(monkeypatch)
    policy.forget()


def add(x, n):
    return blockwise(kernels.autotuned_add_kernel, x, x, n=n)


def test_each_key_is_measured_once(measurer):
    """`n` is in the kernel's key: equal shapes do not make equal keys."""
    x = np.zeros(300, np.float32)
    tuned = triax.tune(
        lambda x: (add(x, 300), add(x, 200), jax.jit(add, static_argnums=1)(x, 300)), x
    )
    assert len(tuned) == 2
    assert len(measurer.jobs) == 2


@pytest.mark.skipif(
    not versions.SANITIZERS.passes(triton.__version__), reason="this Triton has no sanitizers"
)
def test_nothing_sanitized_is_measured(measurer):
    """Nor stored: also if the function itself turns the sanitizer on."""
    x = np.zeros(300, np.float32)

    def sanitized():
        with testing.sanitized("fpsan"):
            return add(x, 300)

    with pytest.raises(TuningError, match="'add_kernel' is under a sanitizer"):
        triax.tune(sanitized)
    assert not measurer.jobs
    assert not store.user_store().paths()


def test_into_a_folder(measurer, tmp_path, capsys):
    """What is found, and nothing else: also in the user's store, as always."""
    file = tmp_path / "program.py"
    file.write_text(
        "import numpy as np\n"
        "from tests.tools.test_tune import add\n"
        "def main():\n"
        "    return [add(np.zeros(n, np.float32), n) for n in (300, 300, 20)]\n"
        "def nothing():\n"
        "    return 1\n"
    )
    into = tmp_path / "package" / "triax_records"
    assert cli.main(["tune", f"{file}:main", "--into", str(into)]) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote 2 configs to {into}\n")
    names = [path.name for path in Store(into, "").paths()]
    assert names == [path.name for path in store.user_store().paths()]
    assert len(names) == 2
    assert cli.main(["tune", f"{file}:nothing", "--into", str(into)]) == 0
    assert "wrote" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_found_out_first(measurer, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["tune", "nothing.py:main", "--into", str(tmp_path / "file" / "in")]) == 1
    assert "Not a directory" in capsys.readouterr().err
