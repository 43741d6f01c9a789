"""What a tuned config's key says of the kernel's source."""

import jax
import numpy as np
import pytest
import triton
import triton.language as tl

from tests.cases import blockwise
from tests.same_name import first, second
from tests.tuning.conftest import DEVICE
from triax.binding.launch import ArrayType
from triax.tuning.key import make_key

X = np.zeros(100, np.float32)
OFFSET = tl.constexpr(1)


@triton.jit
def helper(x):
    return x + OFFSET


def source(closed_over=1):
    scale = tl.constexpr(closed_over)

    @triton.jit
    def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        value = helper(tl.load(x_ptr)) * first.FACTOR * scale
        first.scale_kernel(x_ptr, out_ptr, n, BLOCK)
        tl.store(out_ptr, value)

    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    tuned = triton.autotune(configs, key=[])(kernel)
    (equation,) = jax.make_jaxpr(lambda x: blockwise(tuned, x))(X).eqns
    call, array = equation.params["call"], ArrayType(X.shape, X.dtype)
    return make_key(call, call.launches((array,), (array,)), 90, DEVICE).source


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (None, "OFFSET", tl.constexpr(2)),
        (None, "helper", second.scale_kernel),
        (first, "FACTOR", tl.constexpr(99)),
        (first, "scale_kernel", second.scale_kernel),
    ],
)
def test_it_covers_helpers_and_constants_of_other_modules_too(monkeypatch, holder, name, value):
    before = source()
    assert source() == before
    if holder is None:
        monkeypatch.setitem(globals(), name, value)
    else:
        monkeypatch.setattr(holder, name, value)
    assert source() != before


def test_it_covers_closures():
    assert source(1) == source(1) != source(2)
