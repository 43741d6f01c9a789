"""Which operands a kernel writes to: found in its code, and refused where XLA is unaware."""

import functools

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import triax
from tests import kernels
from triax.binding.launch import ArrayType
from triax.compat import versions
from triax.compiling import compiler, writes
from triax.errors import ReadOnlyOperand

pytestmark = pytest.mark.cuda_plugin
X = np.zeros((16, 32), np.float32)


def lower(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


# --- following pointers ---------------------------------------------------------------


@triton.jit(noinline=True)
def set_one(pointer):
    tl.store(pointer, 1.0)


@triton.jit
def direct(x_ptr, y_ptr, z_ptr, n, flag):
    tl.store(x_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], 1.0)
    tl.atomic_add(z_ptr, tl.load(y_ptr))


@triton.jit
def choice(x_ptr, y_ptr, z_ptr, n, flag):
    tl.store(y_ptr if flag else z_ptr, 1.0)
    tl.store(tl.where(tl.arange(0, 16) < n, x_ptr, y_ptr), 1.0)


@triton.jit
def branches(x_ptr, y_ptr, z_ptr, n, flag):
    target = x_ptr
    if flag:
        if tl.load(x_ptr) > 1.0:
            return
        target = z_ptr
        tl.store(y_ptr, 1.0)
    tl.store(target, tl.load(x_ptr))


@triton.jit
def loops(x_ptr, y_ptr, z_ptr, n, flag):
    here, there = y_ptr, z_ptr + tl.arange(0, 16)
    for _ in range(n):
        tl.store(here, 1.0)
        here += 1
    i = 0
    source = x_ptr
    while i < n:
        tl.store(there, tl.load(source + tl.arange(0, 16)))
        there += 16
        source += 16
        i += 1


@triton.jit
def after_loops(x_ptr, y_ptr, z_ptr, n, flag):
    a, b = x_ptr, y_ptr
    for _ in range(n):
        a, b = b, a
    tl.store(a, tl.load(z_ptr))
    c = y_ptr
    while tl.load(c) > 0:
        c += 1
    tl.store(c, 1.0)


@triton.jit
def function_call(x_ptr, y_ptr, z_ptr, n, flag):
    set_one(y_ptr + n)
    set_one(z_ptr)


@triton.jit
def from_memory(x_ptr, y_ptr, z_ptr, n, flag):
    address = tl.load(x_ptr.to(tl.pointer_type(tl.int64)))
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)
    either = address.to(tl.pointer_type(tl.float32)) if flag else x_ptr
    tl.store(either, tl.load(y_ptr))
    tl.store(z_ptr.to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def compare_and_swap(x_ptr, y_ptr, z_ptr, n, flag):
    tl.atomic_cas(x_ptr.to(tl.pointer_type(tl.int32)), 0, 1)
    tl.atomic_max(z_ptr + tl.arange(0, 16), tl.load(y_ptr + tl.arange(0, 16)))


@triton.jit
def reductions(x_ptr, y_ptr, z_ptr, n, flag):
    offsets = tl.arange(0, 16)
    total = tl.sum(tl.load(x_ptr + offsets), axis=0) + tl.max(tl.load(y_ptr + offsets), axis=0)
    tl.store(z_ptr + offsets, tl.cumsum(tl.load(x_ptr + offsets), axis=0) + total)


@triton.jit
def same_names_in_branches(x_ptr, y_ptr, z_ptr, n, flag):
    if flag:
        tl.store(x_ptr + n + tl.arange(0, 16), 1.0)
    else:
        tl.store(z_ptr + n * 2 + tl.arange(0, 16), tl.load(y_ptr + n * 2 + tl.arange(0, 16)))


FOLLOWED = {
    direct: [(0,), (2,)],
    choice: [(0, 1), (1, 2)],
    branches: [(0, 2), (1,)],
    loops: [(1,), (2,)],
    after_loops: [(0, 1), (1,)],
    function_call: [(1, 2)],  # the function is one, whoever calls it
    from_memory: [(2,)],
    compare_and_swap: [(0,), (2,)],
    reductions: [(2,)],
    same_names_in_branches: [(0,), (2,)],
}


def aliased_everywhere(kernel):
    """A call of a kernel of five parameters that may write to all of its three arrays."""

    def function(*arrays):
        return triax.triton_call(
            *arrays,
            n=7,
            flag=3,
            kernel=kernel,
            out_type=tuple(arrays),
            grid=1,
            input_output_aliases={0: 0, 1: 1, 2: 2},
        )

    return function


def compile_only(function, *args):
    """The kernel of the one call that a function makes, compiled as lowering would."""
    (call,) = [e.params["call"] for e in jax.make_jaxpr(function)(*args).eqns if "call" in e.params]
    array = ArrayType(X.shape, X.dtype)
    launch = call.launch(call.candidates[0], (array,) * 3, (array,) * 3)
    return functools.partial(compiler.compile_launch, launch)


@pytest.mark.parametrize("kernel", FOLLOWED, ids=lambda kernel: kernel.__name__)
def test_followed(kernel):
    compiled = compile_only(aliased_everywhere(kernel), X, X, X)(90)
    assert list(compiled.writes) == FOLLOWED[kernel]


def test_a_text_that_is_no_code_says_nothing():
    assert writes.origins("") == (0, [])
    assert writes.origins("}}} {\n^bb0(\n%0 = scf.for\ntt.store\n  tt.func {\n% = ptr")[1] == []


# --- refusing ---------------------------------------------------------------------------


@triton.jit
def forgotten_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def test_an_operand_in_the_place_of_an_output():
    def function(x):
        return triax.triton_call(x, n=16, BLOCK=16, kernel=forgotten_kernel, out_type=x, grid=1)

    with pytest.raises(ReadOnlyOperand) as caught:
        lower(function, X)
    text = str(caught.value)
    assert text.startswith("Kernel 'forgotten_kernel' writes to `y_ptr`, an operand that no output")
    assert "pass operands that follow one by name" in text

    def right(x):
        return triax.triton_call(
            x_ptr=x, n=16, BLOCK=16, kernel=forgotten_kernel, out_type=x, grid=1
        )

    lower(right, X)


def partly_aliased(kernel, *aliased):
    def function(*arrays):
        return triax.triton_call(
            *arrays,
            n=7,
            flag=3,
            kernel=kernel,
            out_type=[arrays[i] for i in aliased],
            grid=1,
            input_output_aliases={i: k for k, i in enumerate(aliased)},
        )

    return function


@pytest.mark.parametrize(
    ("kernel", "aliased", "written"),
    [
        (direct, (0,), "`z_ptr`"),
        (direct, (2,), "`x_ptr`"),
        (choice, (0,), "`y_ptr` or `z_ptr`"),
        # What may go to an output is let through.
        (choice, (1,), None),
        (after_loops, (1,), None),
        (after_loops, (0,), "`y_ptr`"),
        (from_memory, (2,), None),
        (from_memory, (0, 1), "`z_ptr`"),
        (function_call, (2,), None),
        (function_call, (0,), "`y_ptr` or `z_ptr`"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_where_no_operand_written_to_is_an_output(kernel, aliased, written):
    function = partly_aliased(kernel, *aliased)
    if written is None:
        lower(function, X, X, X)
        return
    with pytest.raises(ReadOnlyOperand, match=rf"'{kernel.__name__}' writes to {written}, an"):
        lower(function, X, X, X)


def test_the_same_code_is_right_in_one_call_and_wrong_in_another():
    lower(partly_aliased(direct, 0, 2), X, X, X)
    count = compiler.compile_count()
    with pytest.raises(ReadOnlyOperand, match="writes to `x_ptr`"):
        lower(partly_aliased(direct, 2), X, X, X)
    assert compiler.compile_count() == count


@triton.jit
def tuple_kernel(pair, out_ptr):
    tl.store(pair[1], tl.load(pair[0]))
    tl.store(out_ptr, 1.0)


def test_part_of_a_tuple():
    def function(x):
        return triax.triton_call((x, x), kernel=tuple_kernel, out_type=x, grid=1)

    with pytest.raises(ReadOnlyOperand, match=r"writes to `pair\[1\]`"):
        lower(function, X)


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BM, BN])
    x.store([0, 0], x.load([0, 0]) * 2)
    tl.store(out_ptr, 1.0)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BM, BN])
    x.atomic_add([0, 0], tl.full((BM, BN), 1.0, tl.float32))
    tl.store(out_ptr, 1.0)


@pytest.mark.parametrize("kernel", [descriptor_kernel, reduce_kernel])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_descriptors_made_in_the_kernel(kernel, capability):
    def function(x, **options):
        return triax.triton_call(
            x,
            m=16,
            n=32,
            BM=16,
            BN=16,
            kernel=kernel,
            grid=1,
            compute_capability=capability,
            **options,
        )

    with pytest.raises(ReadOnlyOperand, match=rf"'{kernel.__name__}' writes to `x_ptr`"):
        lower(functools.partial(function, out_type=X), X)
    lower(
        functools.partial(function, out_type=(X, X), input_output_aliases={0: 0}),
        X,
    )


@triton.jit
def host_descriptor_kernel(desc, out_ptr, BM: tl.constexpr, BN: tl.constexpr):
    desc.store([0, 0], tl.zeros((BM, BN), tl.float32))
    tl.store(out_ptr, 1.0)


@pytest.mark.parametrize("capability", [80, 90])
def test_host_descriptors_keep_parameters_in_step(capability):
    """A descriptor comes with sizes and strides, which are no pointers."""

    def function(x):
        descriptor = triax.TensorDescriptor.from_array(x, (16, 32))
        return triax.triton_call(
            descriptor, BM=16, BN=32, kernel=host_descriptor_kernel, out_type=x, grid=1
        )

    assert compile_only(function, X)(capability).writes == ((0,), (1,))


@gluon.jit
def gluon_kernel(x_ptr, out_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    gl.store(x_ptr + offsets, gl.load(out_ptr + offsets))


def test_gluon():
    def function(x):
        return triax.triton_call(x, BLOCK=128, kernel=gluon_kernel, out_type=x, grid=1)

    with pytest.raises(ReadOnlyOperand, match="'gluon_kernel' writes to `x_ptr`"):
        lower(function, X)


def test_in_a_primitive_of_ones_own():
    primitive = Primitive("forgets")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x: [x])

    def rule(ctx, x):
        return triax.triton_call_lowering(
            ctx, forgotten_kernel, x, grid=1, constexprs={"n": 16, "BLOCK": 16}
        )

    mlir.register_lowering(primitive, rule, platform="cuda")
    with pytest.raises(ReadOnlyOperand, match="'forgotten_kernel' writes to `y_ptr`"):
        lower(primitive.bind, X)


def test_every_config_that_xla_gets():
    kernel = triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 32)], key=[])(
        forgotten_kernel
    )

    def function(x):
        return triax.triton_call(x, n=16, kernel=kernel, out_type=x, grid=1)

    to_xla = versions.RUNTIME_AUTOTUNING.passes(versions.gated_version())
    for mode in ("off", "auto", *(["runtime"] if to_xla else [])):
        with triax.tuning_mode(mode), pytest.raises(ReadOnlyOperand, match="writes to `y_ptr`"):
            lower(lambda x: function(x), X)


def test_reset_to_zero_is_a_write():
    """To zero an operand between timed runs makes sense only where it is an output."""
    kernel = triton.autotune([triton.Config({"BLOCK": 64})], key=[], reset_to_zero=["x_ptr"])(
        kernels.copy_kernel
    )

    def function(x):
        return triax.triton_call(x, n=16, kernel=kernel, out_type=x, grid=1)

    with pytest.raises(ReadOnlyOperand, match="'copy_kernel' writes to `x_ptr`"):
        lower(function, X)
