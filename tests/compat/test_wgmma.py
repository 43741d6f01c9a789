"""Products of registers end before their loop begins again, in PTX and in machine code."""

import time

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

import triax
from tests import sass
from tests.cases import cuda_call
from triax.compat import ptxas, wgmma
from triax.compiling import compiler

COMMIT = "\twgmma.commit_group.sync.aligned;"
MULTIPLY = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r1,%r2}}, {}, %rd1, p;"
PRODUCT = f"{MULTIPLY.format('{%r3,%r4}')}\n{COMMIT}"
OF_MEMORY = f"{MULTIPLY.format('%rd2')}\n{COMMIT}"
LOAD = "\tld.shared.b32 \t%r3, [%r5];"
WAIT = "\twgmma.wait_group.sync.aligned {};"
WAITS_FOR_ALL = WAIT.format(0)


@triton.jit
def widened_product_kernel(
    w_ptr, x_ptr, depth, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    rows, columns, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, STEP):
        w = tl.load(w_ptr + rows[:, None] * depth + start + step[None, :])
        x = tl.load(x_ptr + (start + step)[:, None] * COLUMNS + columns[None, :])
        total = tl.dot(w.to(x.dtype), x, total)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], total)


@triton.jit
def two_widened_products_kernel(
    w_ptr, x_ptr, depth, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    """Of one sum: nothing but the loop's end stands behind the second."""
    rows, columns, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, 2 * STEP):
        w = tl.load(w_ptr + rows[:, None] * depth + start + step[None, :]).to(tl.bfloat16)
        x = tl.load(x_ptr + (start + step)[:, None] * COLUMNS + columns[None, :])
        next_w = tl.load(w_ptr + rows[:, None] * depth + start + STEP + step[None, :])
        next_w = next_w.to(tl.bfloat16)
        next_x = tl.load(x_ptr + (start + STEP + step)[:, None] * COLUMNS + columns[None, :])
        total = tl.dot(w, x, total)
        total = tl.dot(next_w, next_x, total)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], total)


@triton.jit
def product_of_memory_first_kernel(
    w_ptr, x_ptr, depth, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    """A loop that begins with a product of shared memory, which is not waited for."""
    rows, columns, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, STEP):
        y = tl.load(x_ptr + rows[:, None] * depth + start + step[None, :])
        w = tl.load(w_ptr + rows[:, None] * depth + start + step[None, :])
        x = tl.load(x_ptr + (start + step)[:, None] * COLUMNS + columns[None, :])
        other = tl.dot(y, x, other)
        total = tl.dot(w.to(x.dtype), x, total)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], total + other)


def ptx(*lines):
    return "".join(f"{line}\n" for line in lines)


def loop(*body, wait=1):
    """A loop whose last products may go on while it begins again."""
    return ptx("$L__BB0_1:", *body, WAIT.format(wait), "\t@%p1 bra \t$L__BB0_1;", "\tret;")


@pytest.mark.parametrize(
    "text",
    [
        loop(PRODUCT, PRODUCT),
        loop(LOAD, PRODUCT, WAITS_FOR_ALL, PRODUCT),  # the last one is not waited for
        loop(OF_MEMORY, LOAD, PRODUCT, wait=2),  # as two sums that go on beside each other
        loop(LOAD, WAITS_FOR_ALL, PRODUCT),  # the wait comes too late
        loop(PRODUCT.replace("bf16 {", "bf16\n\t\t{")),
        loop(LOAD, PRODUCT, f"\t@%p2 {WAITS_FOR_ALL.strip()}"),  # some threads may not wait
        loop("\t@%p2 ret;", LOAD, PRODUCT),  # what follows is reached all the same
        # Written by arithmetic alone, before the wait.
        loop("\tmul.bf16x2 %r3, %r7, %r8;", WAITS_FOR_ALL, PRODUCT),
        loop("\tselp.b32 %r4, %r7, 0, %p2;", WAITS_FOR_ALL, PRODUCT),
        loop("\tmov.b32 {%h1, %r3}, %r7;", WAITS_FOR_ALL, PRODUCT),
        loop("\tsub.f32 %r8, %r7, %r6;", WAITS_FOR_ALL, "\tcvt.bf16.f32 %r3, %r8;", PRODUCT),
        loop("\tcall (%r9), f, (%r8);", WAITS_FOR_ALL, PRODUCT),  # may write to any register
        # Comments may stand anywhere.
        loop("\tmul.bf16x2 %r3, %r7, %r8;", WAITS_FOR_ALL, PRODUCT.replace("}, {", "}, /*;*/ {")),
        loop(PRODUCT.replace("}, {", "}, // the left; {\n{"), "/* wgmma.wait_group 0;", "*/"),
        loop(PRODUCT.replace("{%r3,%r4}", "of_a_macro(%r3)").replace("%r2}", "%r2{}}")),
    ],
)
def test_a_loop_waits_where_it_begins(text):
    begin, *lines = text.splitlines()
    assert wgmma.drain_at_loops(text) == ptx(begin, WAITS_FOR_ALL, *lines)


@pytest.mark.parametrize(
    "back",
    [
        "\tbrx.idx %r9, ways;\nways: .branchtargets $L__BB0_2,\n\t$L__BB0_1;",
        "\t@%p1 brx.idx.uni %r9, ways;\nways:\n\t.branchtargets $L__BB0_1;",
        "\t@ ! %p1 bra $L__BB0_1;",
    ],
)
def test_branches_to_where_a_loop_begins(back):
    begin = "$L__BB0_1:\n"
    text = ptx(LOAD, PRODUCT, WAIT.format(1), back, "$L__BB0_2:", LOAD, PRODUCT, "\tret;")
    assert wgmma.drain_at_loops(begin + text) == f"{begin}{WAITS_FOR_ALL}\n{text}"


def test_a_branch_to_anywhere_makes_every_label_wait():
    """None can be followed whose table of targets is elsewhere."""
    labels = "$L__BB0_1:", "%2:"
    text = ptx(labels[0], LOAD, PRODUCT, WAIT.format(1), "\tbrx.idx %r9, ways;", labels[1], LOAD)
    drained = text
    for label in labels:
        drained = drained.replace(f"{label}\n", f"{label}\n{WAITS_FOR_ALL}\n")
    assert wgmma.drain_at_loops(text) == drained


def test_a_label_that_begins_with_a_percent_sign():
    behind = ptx(PRODUCT, "%behind:", LOAD)  # a label that no branch goes to
    text = loop(PRODUCT, PRODUCT).replace("$L__BB0_1", "%loop") + behind
    begin, *lines = text.splitlines()
    assert wgmma.drain_at_loops(text) == ptx(begin, WAITS_FOR_ALL, *lines)


def test_products_that_no_group_holds_yet_become_a_group():
    """Otherwise nothing can wait for them."""
    text = loop(LOAD, MULTIPLY.format("{%r3,%r4}"))
    begin, *lines = text.splitlines()
    assert wgmma.drain_at_loops(text) == ptx(begin, COMMIT, WAITS_FOR_ALL, *lines)


def test_a_loop_s_pragma_stays_its_first_statement():
    text = loop('\t.pragma "nounroll";', PRODUCT, PRODUCT)
    begin, pragma, *lines = text.splitlines()
    assert wgmma.drain_at_loops(text) == ptx(begin, pragma, WAITS_FOR_ALL, *lines)


def test_a_loop_whose_end_stands_elsewhere():
    """Blocks may stand in any order; a label of a loop within inline assembly is none of it."""
    text = ptx(
        "$L__BB0_1:",
        "waitLoop:",
        "\t@!complete bra.uni waitLoop;",
        LOAD,
        PRODUCT,
        WAIT.format(3),
        "\t@!%p2 bra \t$L__BB0_3;",
        "\tbra.uni \t$L__BB0_4;",
        "$L__BB0_3:",
        "\tret;",
        "$L__BB0_4:",
        "\tadd.s32 \t%r1, %r2, 1;",
        "\tbra.uni \t$L__BB0_1;",
    )
    found = wgmma.drain_at_loops(text).splitlines()
    assert found[:2] == ["$L__BB0_1:", WAITS_FOR_ALL]
    assert [*found[:1], *found[2:]] == text.splitlines()


def test_a_loop_that_is_entered_in_its_middle():
    """It begins where the program comes in, whatever stands above."""
    above = ["\tbra.uni \t$L__BB0_3;", "$L__BB0_2:", PRODUCT, WAIT.format(1)]
    below = ["\t@!%p1 bra \t$L__BB0_4;", "$L__BB0_3:", LOAD, "\tbra.uni \t$L__BB0_2;"]
    text, end = ptx(*above, *below), ptx("$L__BB0_4:", "\tret;")
    drained = text.replace("$L__BB0_3:\n", f"$L__BB0_3:\n{WAITS_FOR_ALL}\n")
    assert wgmma.drain_at_loops(text + end) == drained + end


def test_labels_of_inline_assembly():
    """They stand anywhere in a line, and one name may stand for several."""
    skip = "\t{ .reg .pred p; @p bra $Lend; add.f32 %r1, %r1, %r1;\n\t  $Lend: }"
    text = loop(skip, LOAD, PRODUCT) + skip + "\n" + skip
    begin, *lines = text.splitlines(keepends=True)
    assert wgmma.drain_at_loops(text) == "".join([begin, f"{WAITS_FOR_ALL}\n", *lines])


def test_a_label_of_a_scope_that_has_ended():
    begin, *lines = loop(LOAD, PRODUCT).splitlines()
    lines.insert(-3, "\t{ $L__BB0_1: }")
    assert wgmma.drain_at_loops(ptx(begin, *lines)) == ptx(begin, WAITS_FOR_ALL, *lines)


@pytest.mark.parametrize(
    "text",
    [
        loop(PRODUCT, PRODUCT, wait=0),  # nothing is in flight
        loop(LOAD, OF_MEMORY),  # shared memory is waited for otherwise
        # As in attention: nothing gets into registers before the first product is waited for.
        loop("\tcvt.u64.u32 \t%rd2, %r5;", OF_MEMORY, WAITS_FOR_ALL, LOAD, PRODUCT),
        ptx(PRODUCT, WAIT.format(1), PRODUCT, WAITS_FOR_ALL, "\tret;"),  # no loop
        ptx("$L__BB0_1:", LOAD, "\t@%p1 bra \t$L__BB0_1;", PRODUCT, "\tret;"),
        # Addresses, conditions and numbers are no data.
        loop(
            "\tadd.s32 %r5, %r5, 2;",
            "\tsetp.lt.s32 %p2, %r5, %r6;",
            "\tst.shared.b32 [%r3], %r5;",
            "\tcp.async.wait_group 2;",
            WAITS_FOR_ALL,
            "\tld.shared.b32 %r8, [%r5];",
            "\tshl.b32 %r9, %r8, 2;",
            "\tselp.b32 %r3, %r9, 0, %p2;",
            PRODUCT,
        ),
        # Labels of the same name, each of its own scope.
        loop(PRODUCT, "\t{ @%p2 bra $End; $End: }", WAITS_FOR_ALL, "\t{ bra $End; $End: }"),
        PRODUCT + "\n" + ptx("\t{", "$L:", "\t}", "\t{", LOAD, "\t@%p bra $L;", "$L:", "\t}"),
        "",
    ],
)
def test_what_stays_as_it_is(text):
    assert wgmma.drain_at_loops(text) == text


def test_an_outer_loop_waits_before_an_inner_one():
    """Not at each of the inner loop's iterations."""
    outer, inner = "$L__BB0_1:", "$L__BB0_2:"
    back = ["\t@%p1 bra $L__BB0_2;", PRODUCT, "\t@%p2 bra $L__BB0_1;", "\tret;"]
    text = ptx(outer, inner, LOAD, *back)
    assert wgmma.drain_at_loops(text) == ptx(outer, WAITS_FOR_ALL, inner, LOAD, *back)


def one_after_the_other(loops):
    body = LOAD, PRODUCT, WAIT.format(1)
    return ptx(*[ptx(f"$L{n}:", *body, f"\t@%p1 bra $L{n};") for n in range(loops)])


def one_in_the_other(loops):
    begins = [ptx(f"$L{n}:", LOAD) for n in range(loops)]
    ends = [ptx(PRODUCT, WAIT.format(1), f"\t@%p1 bra $L{n};") for n in reversed(range(loops))]
    return ptx(*begins, *ends)


def of_one_name(loops):
    return ptx("$L:", PRODUCT, *["\t{ $L: " + LOAD + " @%p1 bra $L; }"] * loops, "\tbra $L;")


def to_anywhere(loops):
    return one_after_the_other(loops).replace("bra", "brx.idx %r9,")


@pytest.mark.parametrize(
    "program", [one_after_the_other, one_in_the_other, of_one_name, to_anywhere]
)
def test_time_grows_with_the_length_of_the_program(program):
    def seconds(loops):
        text, times = program(loops), []
        for _ in range(3):
            begin = time.process_time()
            drained = wgmma.drain_at_loops(text)
            times.append(time.process_time() - begin)
        assert drained != text
        return min(times)

    before = seconds(16)
    for loops in (80, 400, 2000):  # the cube of loops fails long before the last
        now = seconds(loops)
        assert now < 12 * before  # a program five times as long; the square would be 25 times
        before = now


@pytest.mark.sampled(0, 1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("kernel", "dtype", "block"),
    [
        (widened_product_kernel, "int8", (64, 64, 64, 4)),
        (widened_product_kernel, "float8_e4m3fn", (64, 64, 64, 4)),
        (widened_product_kernel, "float8_e5m2", (64, 64, 64, 4)),
        (widened_product_kernel, "int8", (128, 128, 128, 8)),
        (widened_product_kernel, "float8_e4m3fn", (128, 128, 128, 8)),
        (two_widened_products_kernel, "int8", (64, 64, 64, 4)),
        (product_of_memory_first_kernel, "int8", (64, 64, 64, 4)),
    ],
)
def test_no_register_is_overwritten(kernel, dtype, block, tmp_path, monkeypatch):
    """In the machine code, which is wrong without the wait."""
    rows, columns, step, num_warps = block

    def overwritten():
        compiler.clear_cache()
        product = lambda w, x: triax.triton_call(
            w,
            x,
            w.shape[1],
            kernel=kernel,
            out_type=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
            grid=1,
            ROWS=rows,
            COLUMNS=columns,
            STEP=step,
            num_warps=num_warps,
            num_stages=3,
        )
        call = cuda_call(
            product,
            jax.ShapeDtypeStruct((rows, 4096), dtype),
            jax.ShapeDtypeStruct((4096, columns), "bfloat16"),
        )
        cubin, _ = ptxas.assemble(call.ptx[0], tmp_path)
        return sass.hazards(sass.disassemble(cubin))

    assert overwritten() == []
    monkeypatch.setattr(wgmma, "drain_at_loops", lambda text: text)
    assert overwritten()
