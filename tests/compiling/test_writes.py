"""Which operands a kernel writes to: found in its code, and refused where XLA is unaware."""

import functools
import re
import textwrap

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import triax
from tests import kernels
from tests.primitives import own
from triax.binding.launch import ArrayType
from triax.compat import triton_private, versions
from triax.compiling import compiler, writes
from triax.errors import CompilationError, ReadOnlyOperand

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
    from_memory: [(0,), (2,)],
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


CODE = """
module attributes {{"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32}} {{
  tt.func public @kernel(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %z: !tt.ptr<f32>, %n: i32) {{
    %v = arith.constant 1.0 : f32
    %zero = arith.constant 0 : i32
    %c = arith.cmpi eq, %n, %zero : i32
    {}
    tt.return
  }}
}}
"""


def read(tmp_path, body):
    path = tmp_path / "kernel.ttir"
    path.write_text(CODE.format(textwrap.dedent(body)))
    return writes.origins(triton_private.read_ir(str(path), 90))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Where a jump goes is seen by how many values it hands on.
        (
            """
            cf.cond_br %c, ^a(%x : !tt.ptr<f32>), ^b
            ^a(%p: !tt.ptr<f32>):
            tt.store %p, %v : !tt.ptr<f32>
            cf.br ^d(%y, %z : !tt.ptr<f32>, !tt.ptr<f32>)
            ^b:
            cf.br ^d(%z, %y : !tt.ptr<f32>, !tt.ptr<f32>)
            ^d(%q: !tt.ptr<f32>, %r: !tt.ptr<f32>):
            tt.store %q, %v : !tt.ptr<f32>
            """,
            [(0,), (1, 2)],
        ),
        # Where that does not tell, to all that it may be.
        (
            """
            cf.cond_br %c, ^a(%x : !tt.ptr<f32>), ^b(%y : !tt.ptr<f32>)
            ^a(%p: !tt.ptr<f32>):
            tt.store %p, %v : !tt.ptr<f32>
            cf.br ^b(%z : !tt.ptr<f32>)
            ^b(%q: !tt.ptr<f32>):
            """,
            [(0, 1, 2)],
        ),
        # An operation that the module does not know.
        (
            """
            %p = builtin.unrealized_conversion_cast %x, %z
                : !tt.ptr<f32>, !tt.ptr<f32> to !tt.ptr<f32>
            tt.store %p, %v : !tt.ptr<f32>
            """,
            [(0, 2)],
        ),
        # A descriptor that a Gluon kernel makes lies in scratch memory.
        (
            """
            %s = ttg.global_scratch_alloc {alignment = 128 : i32, nbytes = 128 : i32} : !tt.ptr<i8>
            %l = arith.constant 4 : i64
            ttng.tensormap_create %s, %y, [%n, %n], [%n, %n], [%l], [%n, %n]
                {elem_type = 7 : i32, fill_mode = 0 : i32, interleave_layout = 0 : i32,
                 swizzle_mode = 0 : i32}
                : (!tt.ptr<i8>, !tt.ptr<f32>, i32, i32, i32, i32, i64, i32, i32) -> ()
            %p = tt.bitcast %s : !tt.ptr<i8> -> !tt.ptr<f32>
            tt.store %p, %v : !tt.ptr<f32>
            """,
            [(1,)],
        ),
        # Code whose arguments are not one for each operand.
        (
            """
            %t = tt.splat %x : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
            %i = tt.ptr_to_int %t : tensor<4x!tt.ptr<f32>> -> tensor<4xi64>
            %m = "tt.reduce"(%i) <{axis = 0 : i32}> ({
            ^e(%a: i64, %b: i64):
              %r = arith.maxsi %a, %b : i64
              tt.reduce.return %r : i64
            }) : (tensor<4xi64>) -> i64
            %p = tt.int_to_ptr %m : i64 -> !tt.ptr<f32>
            tt.store %p, %v : !tt.ptr<f32>
            """,
            [(0,)],
        ),
        # Gluon's warps with code of their own.
        (
            """
            ttg.warp_specialize(%x, %y)
            default { ttg.warp_yield }
            partition0(%p: !tt.ptr<f32>, %q: !tt.ptr<f32>) num_warps(1) {
              %w = tt.load %p : !tt.ptr<f32>
              tt.store %q, %w : !tt.ptr<f32>
              ttg.warp_return
            } : (!tt.ptr<f32>, !tt.ptr<f32>) -> ()
            """,
            [(1,)],
        ),
        # A pointer that is stored is a value like others.
        (
            """
            %o = tt.bitcast %y : !tt.ptr<f32> -> !tt.ptr<i64>
            %i = tt.ptr_to_int %x : !tt.ptr<f32> -> i64
            tt.store %o, %i : !tt.ptr<i64>
            """,
            [(1,)],
        ),
    ],
)
def test_code_that_kernels_seldom_have(tmp_path, body, expected):
    assert read(tmp_path, body) == (3, expected)


def test_what_results_in_nothing_is_a_write_unless_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(writes, "_WRITES", re.compile("nothing"))
    assert read(tmp_path, "tt.store %x, %v : !tt.ptr<f32>") == (3, [(0,)])


@pytest.mark.parametrize("body", ["tt.store %y", "tt.unheard"])
def test_what_cannot_be_read_is_an_error(tmp_path, body):
    with pytest.raises(CompilationError, match=r"cannot read .*kernel\.ttir"):
        read(tmp_path, body)


def test_another_number_of_pointers_is_an_error(monkeypatch):
    monkeypatch.setattr(writes, "origins", lambda module: (2, []))
    with pytest.raises(CompilationError, match="writes: 3 arrays, 2 IR pointers"):
        compile_only(aliased_everywhere(direct), X, X, X)(89)


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
    assert "pass the operands after an output by name" in text

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
        (choice, (0, 1), "may `z_ptr`"),
        (choice, (1, 2), "may `x_ptr`"),
        (choice, (0, 1, 2), None),
        (after_loops, (1,), "may `x_ptr`"),
        (after_loops, (0,), "`y_ptr`"),
        (after_loops, (0, 1), None),
        (from_memory, (0, 2), None),
        (from_memory, (2,), "`x_ptr`"),
        (from_memory, (0, 1), "`z_ptr`"),
        (function_call, (2,), "may `y_ptr`"),
        (function_call, (0,), "`y_ptr` or `z_ptr`"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_where_an_operand_written_to_is_no_output(kernel, aliased, written):
    function = partly_aliased(kernel, *aliased)
    if written is None:
        lower(function, X, X, X)
        return
    does = "may write" if written.startswith("may") else "writes"
    written = written.removeprefix("may ")
    with pytest.raises(ReadOnlyOperand, match=rf"'{kernel.__name__}' {does} to {written}, an"):
        lower(function, X, X, X)


# --- what may reach an operand or an output ---------------------------------------------


@triton.jit
def exchanged(x_ptr, n, out_ptr):
    source, target = x_ptr, out_ptr
    for _ in range(n):
        tl.store(target, tl.load(source))
        source, target = target, source


@triton.jit
def while_exchanged(x_ptr, n, out_ptr):
    source, target, i = x_ptr, out_ptr, 0
    while i < n:
        tl.store(target, tl.load(source) + i)
        source, target = target, source
        i += 1


@triton.jit
def joined(x_ptr, n, out_ptr):
    offsets = tl.arange(0, 16)
    tl.store(tl.join(out_ptr + offsets, x_ptr + offsets), 1.0)


@triton.jit
def by_number(x_ptr, n, out_ptr):
    distance = tl.where(n > 5, x_ptr.to(tl.int64) - out_ptr.to(tl.int64), 0)
    tl.store((out_ptr.to(tl.int64) + distance).to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit(noinline=True)
def either(x_ptr, out_ptr, n):
    result = out_ptr
    if n > 5:
        result = x_ptr
    return result


@triton.jit
def called(x_ptr, n, out_ptr):
    tl.store(either(x_ptr, out_ptr, n), 1.0)


@triton.jit
def assembled(x_ptr, n, out_ptr):
    tl.inline_asm_elementwise(
        "st.global.f32 [$1], 0f3F800000; mov.u32 $0, 0;",
        "=r,l",
        [x_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr, 1.0)


def with_output(kernel, n=7):
    return lambda x: triax.triton_call(x, n=n, kernel=kernel, out_type=x, grid=1)


@pytest.mark.parametrize(
    "kernel",
    [exchanged, while_exchanged, joined, by_number, called],
)
def test_what_may_reach_an_operand_is_refused(kernel):
    text = rf"'{kernel.__name__}' may write to `x_ptr`, an .*counts as all pointers it may be: give"
    with pytest.raises(ReadOnlyOperand, match=text):
        lower(with_output(kernel), X)
    in_place = lambda x, y: triax.triton_call(
        x,
        7,
        y,
        kernel=kernel,
        out_type=(x, x),
        input_output_aliases={"x_ptr": 0, "out_ptr": 1},
        grid=1,
    )
    lower(in_place, X, X)


@pytest.mark.parametrize("kernel", [exchanged, while_exchanged, by_number])
def test_the_interpreter_refuses_what_does(kernel):
    with pytest.raises(ReadOnlyOperand, match="store to `x_ptr` at element 0, an operand that no"):
        with_output(kernel)(X)


def test_assembly_that_may_write_does():
    with pytest.raises(ReadOnlyOperand, match="'assembled' writes to `x_ptr`"):
        lower(with_output(assembled), X)


@triton.jit
def apart(x_ptr, y_ptr, n, out_ptr):
    """Pointers that are carried, chosen and returned side by side, each for its own use."""
    offsets = tl.arange(0, 16)
    source, target = x_ptr + offsets, out_ptr + offsets
    if n > 100:
        tl.store(target, 0.0)
        return
    i = 0
    while i < n:
        for j in range(n):
            other = tl.load(y_ptr + j if j > 3 else x_ptr + j)
            tl.store(target, tl.load(source) + other, mask=tl.load(y_ptr + offsets) > 0)
            source += 16
            target += 16
        i += 1
    address = tl.load(x_ptr.to(tl.pointer_type(tl.int64)))
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)
    tl.device_assert(x_ptr.to(tl.int64) != 0)
    doubled = tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [x_ptr.to(tl.int64)], tl.int32, is_pure=True, pack=1
    )
    tl.store(out_ptr + x_ptr.to(tl.int64) % 16, doubled.to(tl.float32))


def test_pointers_side_by_side_stay_apart():
    def function(x, y):
        return triax.triton_call(x, y, n=7, kernel=apart, out_type=x, grid=1, debug=True)

    lower(function, X, X)


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
    def forgets(ctx, x):
        return triax.triton_call_lowering(
            ctx, forgotten_kernel, x, grid=1, constexprs={"n": 16, "BLOCK": 16}
        )

    with pytest.raises(ReadOnlyOperand, match="'forgotten_kernel' writes to `y_ptr`"):
        lower(own(forgets), X)


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
