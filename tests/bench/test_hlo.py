"""The buffers of a program, read off its text: hand-written ones, and what JAX compiles here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from triax.bench.hlo import Array, Program

# What XLA writes for a GPU, with fewer attributes: a route by Triax's kernels, some of it inside
# a command buffer, then what others do: a scatter, a loop, a donated output.
SAMPLE = r"""
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[6,8]{1,0})->f32[6,8]{1,0}}

FileNames
1 "step.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused_scatter (zeros.1: f32[12,8], index.1: s32[12,1], rows.1: f32[12,8]) -> f32[12,8] {
  %zeros.1 = f32[12,8]{1,0} parameter(0)
  %index.1 = s32[12,1]{1,0} parameter(1)
  %rows.1 = f32[12,8]{1,0} parameter(2)
  ROOT %scatter.1 = f32[12,8]{1,0} scatter(%zeros.1, %index.1, %rows.1), to_apply=%region
}

%fused_scale (x.1: f32[12,8]) -> f32[12,8] {
  %x.1 = f32[12,8]{1,0} parameter(0)
  %inside.1 = f32[12,8]{1,0} negate(%x.1)
  ROOT %inside.2 = f32[12,8]{1,0} exponential(%inside.1)
}

%command_buffer (p: f32[6,8], q: s32[6,2]) -> (u16[12,8], f32[6,8]) {
  %p = f32[6,8]{1,0} parameter(0)
  %q = s32[6,2]{1,0} parameter(1)
  %permute.1 = (u16[12,8]{1,0}, /*index=1*/u8[4]{0}) custom-call(%p, %q), custom_call_target="triton_kernel_call_ffi", api_version=API_VERSION_TYPED_FFI, frontend_attributes={triax.config="BLOCK=64",triax.grid="3x1x1",triax.kernel="permute"}, metadata={op_name="jit(step)/jvp()/triton_call" stack_frame_id=1}, backend_config={opaque = "x\9C)} = f32[12,8]{1,0} add(%x)"}
  %sums.1 = f32[6,8]{1,0} custom-call(%permute.1#0, %q), custom_call_target="triton_kernel_call_ffi", frontend_attributes={triax.kernel="unpermute"}
  %rows.2 = u16[12,8]{1,0} get-tuple-element(%permute.1), index=0
  ROOT %both = (u16[12,8]{1,0}, f32[6,8]{1,0}) tuple(%rows.2, %sums.1)
}

%body (carry: (s32[], f32[12,8])) -> (s32[], f32[12,8]) {
  %carry = (s32[], f32[12,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%carry), index=0
  %old = f32[12,8]{1,0} get-tuple-element(%carry), index=1
  %new = f32[12,8]{1,0} fusion(%old), kind=kLoop, calls=%fused_scale, metadata={op_name="jit(step)/while/body/exp"}
  ROOT %next = (s32[], f32[12,8]{1,0}) tuple(%count, %new)
}

%cond (carry.1: (s32[], f32[12,8])) -> pred[] {
  %carry.1 = (s32[], f32[12,8]{1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%carry.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%count.1, %three), direction=LT
}

ENTRY %main (x: f32[6,8], experts: s32[6,2]) -> (f32[6,8], f32[2,6,8]) {
  %x = f32[6,8]{1,0} parameter(0), metadata={op_name="x"}
  %experts = s32[6,2]{1,0} parameter(1)
  %call = (u16[12,8]{1,0}, f32[6,8]{1,0}) call(%x, %experts), to_apply=%command_buffer
  %rows = u16[12,8]{1,0} get-tuple-element(%call), index=0
  %y = f32[6,8]{1,0} get-tuple-element(%call), index=1
  %half = bf16[12,8]{1,0} bitcast(%rows)
  %wide = f32[12,8]{1,0:T(8,128)} fusion(%half), kind=kLoop, calls=%fused_scale, metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %ids = s32[12,1]{1,0} bitcast(%experts)
  %scattered = f32[12,8]{1,0} fusion(%wide, %ids, %wide), kind=kInput, calls=%fused_scatter, metadata={op_name="jit(step)/scatter-add"}
  %updated = f32[12,8]{1,0} custom-call(%scattered), custom_call_target="other", output_to_operand_aliasing={{}: (0, {})}
  %zero = s32[] constant(0)
  %start = (s32[], f32[12,8]{1,0}) tuple(%zero, %updated)
  %loop = (s32[], f32[12,8]{1,0}) while(%start), condition=%cond, body=%body
  %looped = f32[12,8]{1,0} get-tuple-element(%loop), index=1
  %mask = pred[12,8]{1,0} custom-call(%looped), custom_call_target="library$gemm"
  %result = f32[12,8]{1,0} copy(%looped)
  %shaped = f32[2,6,8]{2,1,0} bitcast(%result)
  ROOT %out = (f32[6,8]{1,0}, f32[2,6,8]{2,1,0}) tuple(%y, %shaped)
}
"""  # noqa: E501


def found(text):
    return [(instruction.label, str(array)) for instruction, array in Program(text).buffers()]


def test_sample():
    """No fusion's inside, no view, nothing written in place, no output of the program."""
    assert found(SAMPLE) == [
        ("fusion: transpose(jvp())/mul", "f32[12,8]"),
        ("custom-call", "pred[12,8]"),
        ("kernel permute", "u16[12,8]"),
        ("kernel permute", "u8[4]"),
        ("compare", "pred[]"),
        ("fusion: while/body/exp", "f32[12,8]"),
    ]


def test_branches_run_too():
    text = """
%left (p: f32[3]) -> f32[3] {
  %p = f32[3]{0} parameter(0)
  %a = f32[3]{0} negate(%p)
  ROOT %b = f32[3]{0} copy(%a)
}

%right (q: f32[3]) -> f32[3] {
  %q = f32[3]{0} parameter(0)
  ROOT %c = f32[3]{0} exponential(%q)
}

ENTRY %main (i: s32[], x: f32[3]) -> f32[3] {
  %i = s32[] parameter(0)
  %x = f32[3]{0} parameter(1)
  %chosen = f32[3]{0} conditional(%i, %x, %x), branch_computations={%left, %right}
  ROOT %sum = f32[3]{0} add(%chosen, %x)
}
"""
    assert found(text) == [
        ("negate", "f32[3]"),
        ("copy", "f32[3]"),
        ("exponential", "f32[3]"),
    ]


def test_no_program():
    assert found("") == []


@pytest.mark.parametrize(
    ("dtype", "sizes", "num_bytes", "text"),
    [
        ("bf16", (3, 5), 30, "bf16[3,5]"),
        ("pred", (7,), 7, "pred[7]"),
        ("f8e4m3fn", (7,), 7, "f8e4m3fn[7]"),
        ("s4", (7,), 4, "s4[7]"),
        ("f64", (), 8, "f64[]"),
        ("c64", (2, 0), 0, "c64[2,0]"),
    ],
)
def test_bytes(dtype, sizes, num_bytes, text):
    array = Array(dtype, sizes)
    assert array.bytes == num_bytes
    assert str(array) == text


def test_program_that_is_compiled_here():
    def function(x):
        order = jnp.argsort(x[:, 0])
        return jnp.take(x, order, axis=0, mode="clip"), x.sum(axis=1)

    compiled = jax.jit(function).lower(jax.ShapeDtypeStruct((13, 7), jnp.float32)).compile()
    buffers = list(Program(compiled.as_text()).buffers())
    arrays = [str(array) for _, array in buffers]
    assert arrays.count("s32[13]") >= 1, "what the sort makes"
    assert "f32[13,7]" not in arrays, "the output"
    assert any(instruction.opcode == "sort" for instruction, _ in buffers)
