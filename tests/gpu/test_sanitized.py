"""Triton's sanitizers on a GPU: planted faults in a user's kernels, and a few kernels of ours."""

import pytest
import triton
from tools.sanitize import triton_sanitizers

from triax.compat import versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not versions.SANITIZERS.passes(triton.__version__), reason="this Triton has no sanitizers"
    ),
]


@pytest.mark.parametrize("fault", triton_sanitizers.PLANTED)
def test_planted_faults(fault):
    output = triton_sanitizers.run("tools.sanitize.planted_kernels", fault)
    assert triton_sanitizers.PLANTED[fault] in "".join(output)


def test_kernels_of_the_package():
    names = ["route", "ragged_dot, 8 bits, rows and columns, uneven groups"]
    found = triton_sanitizers.sanitize(names, jobs=2)
    assert found["problems"] == []
    for sanitizer in triton_sanitizers.SANITIZERS:
        assert "_ragged_dot_float32_sums_kernel" in found["sanitizers"][sanitizer]["by_kernel"]
