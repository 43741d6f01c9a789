"""Products of registers end before their loop begins again, in PTX and in machine code."""

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

import triax
from tests import sass
from tests.cases import cuda_call
from triax.compat import wgmma
from triax.compiling import compiler

PRODUCT = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, {%r3,%r4}, %rd1, p;"
OF_MEMORY = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, %rd2, %rd1, p;"
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


def ptx(*lines):
    return "".join(f"{line}\n" for line in lines)


def loop(*body, first=PRODUCT, wait=1):
    """A loop whose last products may go on while it begins again."""
    return ptx("$L__BB0_1:", first, *body, WAIT.format(wait), "\t@%p1 bra \t$L__BB0_1;", "\tret;")


def test_a_loop_waits_where_it_begins():
    assert wgmma.drain_at_loops(loop()) == ptx(
        "$L__BB0_1:", WAITS_FOR_ALL, *loop().splitlines()[1:]
    )


def test_a_loop_whose_end_stands_elsewhere():
    """Blocks may stand in any order; a label of a loop within inline assembly is none of it."""
    text = ptx(
        "$L__BB0_1:",
        "waitLoop:",
        "\t@!complete bra.uni waitLoop;",
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


@pytest.mark.parametrize(
    "text",
    [
        loop(wait=0),  # nothing is in flight
        loop(first=OF_MEMORY),  # shared memory is waited for otherwise
        loop(PRODUCT, first=OF_MEMORY),  # as in attention: the first product's result is waited for
        ptx(PRODUCT, WAIT.format(1), PRODUCT, WAITS_FOR_ALL, "\tret;"),  # no loop
        ptx("$L__BB0_1:", "\tadd.s32 \t%r1, %r2, 1;", "\t@%p1 bra \t$L__BB0_1;", PRODUCT, "\tret;"),
    ],
)
def test_what_stays_as_it_is(text):
    assert wgmma.drain_at_loops(text) == text


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("block", [(64, 64, 64, 4), (128, 128, 128, 8)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_no_register_is_overwritten(dtype, block, tmp_path, monkeypatch):
    """In the machine code, which is wrong without the wait."""
    rows, columns, step, num_warps = block

    def overwritten():
        compiler.clear_cache()
        product = lambda w, x: triax.triton_call(
            w,
            x,
            w.shape[1],
            kernel=widened_product_kernel,
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
        cubin, _ = sass.assemble(call.payload.calls[0].ptx, 90, tmp_path)
        return sass.hazards(sass.disassemble(cubin))

    assert overwritten() == []
    monkeypatch.setattr(wgmma, "drain_at_loops", lambda text: text)
    assert overwritten()
