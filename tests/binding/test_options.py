"""Options of the compiler and of Triton's launcher: passed on, or refused, never left out."""

import numpy as np
import pytest
import triton

from tests import kernels
from tests.cases import blockwise, cuda_call
from triax.compat import triton_private
from triax.errors import ArgumentValueError, CompilationError, UnsupportedError

X = np.arange(300, dtype=np.float32)


def copy(x, kernel=kernels.copy_kernel, **options):
    if kernel is kernels.copy_kernel:
        options["BLOCK"] = 128
    return blockwise(kernel, x, **options)


def lower(**options):
    return cuda_call(lambda x: copy(x, **options), X)


LAUNCH_OPTIONS = [
    ("launch_cooperative_grid", True, "Split the kernel"),
    ("launch_pdl", True, "XLA decides when a kernel starts"),
    ("cluster_dims", (2, 1, 1), "Use `num_ctas`"),
    ("ptx_options", "--maxrregcount=32", "JAX_TRITON_PTXAS_EXTRA_FLAGS"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), LAUNCH_OPTIONS)
def test_what_only_tritons_launcher_does_is_refused(name, value, remedy):
    if name not in triton_private.option_names():
        with pytest.raises(ArgumentValueError, match=f"{name!r}, which Triton's CUDA compiler"):
            copy(X, backend_options={name: value})
        return
    message = rf"'copy_kernel' has the option `{name}`=.*{remedy}"
    with pytest.raises(UnsupportedError, match=message):
        copy(X, backend_options={name: value})
    config = triton.Config({"BLOCK": 128, name: value})
    kernel = triton.autotune([config], key=[])(kernels.copy_kernel)
    with pytest.raises(UnsupportedError, match=message):
        copy(X, kernel=kernel)


@pytest.mark.parametrize("name", ["launch_cooperative_grid", "launch_pdl"])
def test_an_option_that_is_off_asks_for_nothing(name):
    np.testing.assert_array_equal(copy(X, backend_options={name: False}), X)


@pytest.mark.cuda_plugin
class TestClusters:
    @pytest.mark.parametrize("num_ctas", [1, 2, 8])
    def test_as_large_as_the_target_has_them(self, num_ctas):
        assert f"num_ctas={num_ctas}" in lower(num_ctas=num_ctas).config[0]

    @pytest.mark.parametrize(
        ("capability", "num_ctas", "reason"),
        [
            (90, 16, r"clusters of 16 blocks.*at most 8"),
            (80, 2, r"num_ctas|clusters of 2 blocks.*clusters need 90"),
        ],
    )
    def test_no_larger(self, capability, num_ctas, reason):
        with pytest.raises(CompilationError, match=reason):
            lower(num_ctas=num_ctas, compute_capability=capability)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_warps", 0, "an int, a power of two; got 0"),
        ("num_warps", 3, "an int, a power of two; got 3"),
        ("num_warps", -4, "an int, a power of two; got -4"),
        ("num_ctas", 6, "an int, a power of two; got 6"),
        ("num_warps", True, "an int, a power of two; got True"),
        ("num_stages", -1, "an int of at least 0; got -1"),
        ("num_stages", 2.0, "an int of at least 0; got 2.0 of type float"),
    ],
)
def test_counts(name, value, message):
    with pytest.raises(ArgumentValueError, match=f"`{name}` must be {message}"):
        copy(X, **{name: value})
    for good in (1, 8, 32):
        np.testing.assert_array_equal(copy(X, num_warps=good, num_stages=3), X)
