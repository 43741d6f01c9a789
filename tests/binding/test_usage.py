"""Which parameters look like numbers, and who is told."""

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

import triax
from tests import kernels
from tests.cases import cuda_call
from triax.binding.kernel import Kernel
from triax.binding.usage import numbers
from triax.errors import CompilationError

X = jnp.arange(8.0)


@triton.jit
def helper(x_ptr, at, n):
    return tl.load(x_ptr + at, mask=at < n)


@triton.jit
def many_ways(
    masked, flag, count, scale, stride, times, bits, handed_on, compared_too,
    loaded, moved, through, looped, in_a_loop, renamed, in_a_tuple, described, descriptor, unused,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The parameters of the first line are numbers, the others are not, or do not tell."""
    at = tl.arange(0, BLOCK)
    x = tl.load(loaded + at * stride, mask=at < masked, other=0.0)
    if flag:
        x = -x
    for i in range(count):
        x += i
    a, b = moved, through
    pointers = tl.multiple_of(b + at, 8)
    pointers += bits & 3
    a += 1
    tl.store(a + at, x * scale.to(tl.float32))
    tl.atomic_add(pointers, x)
    for pointer in (looped, in_a_loop):
        tl.store(pointer, times // 2)
    renamed = tl.load(renamed + at)
    described = tl.make_tensor_descriptor(described, [8], [1], [8])
    described.store([0], renamed * 2)
    descriptor.store([0], descriptor.load([0]))
    pair = (in_a_tuple, 1)
    tl.store(pair[0], helper(loaded, at, handed_on) + helper(loaded, at, compared_too))
    if compared_too > 3:
        tl.store(loaded, 1)


def test_what_looks_like_a_number():
    names = Kernel.of(many_ways).parameter_names
    first = names.index("loaded")
    expected = [name for name in names[:first] if name != "handed_on"]
    assert numbers(many_ways, names) == expected


@pytest.mark.parametrize(
    "kernel", [kernels.add_kernel, kernels.tuple_kernel, kernels.sum_and_accumulate_kernel]
)
def test_of_kernels_no_pointer_does(kernel):
    view = Kernel.of(kernel)
    names = [p.name for p in view.runtime_parameters]
    found = numbers(view.function, names)
    assert "n" in found
    assert not [name for name in found if name.endswith("_ptr")]


@triton.jit
def increment(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


HINT = r"The call gives no value for `n`, so the kernel gets an output there"


def forgotten(**options):
    """A number takes the output, so that their count is right."""
    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    return triax.triton_call(X, kernel=increment, BLOCK=8, out_type=out, grid=1, **options)


def test_a_number_that_takes_an_output():
    with pytest.raises(Exception, match="pointer") as caught:
        forgotten()
    assert HINT in caught.value.__notes__[0]


@pytest.mark.cuda_plugin
def test_a_number_that_takes_an_output_does_not_compile():
    with pytest.raises(CompilationError, match=HINT):
        cuda_call(lambda: forgotten(compute_capability=90))
