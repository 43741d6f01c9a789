"""What is told of a route's memory: XLA's numbers, and the buffers as large as the rows."""

from __future__ import annotations

import pytest

from tests.bench.test_hlo import SAMPLE
from triax.bench.memory import IMPLEMENTATIONS, measure_memory, row_buffers
from triax.bench.presets import PRESETS, Preset
from triax.bridge.errors import ArgumentValueError

SHAPE = Preset("odd", hidden=48, experts=11, top_k=3)
TOKENS = 37


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_record(implementation):
    record = measure_memory(SHAPE, TOKENS, "bfloat16", implementation)
    tokens, pairs = TOKENS * 48 * 2, TOKENS * 3 * 4
    assert record["argument_bytes"] == 2 * tokens + 2 * pairs
    # XLA adds its table of pointers to what the program returns.
    assert 0 <= record["output_bytes"] - (2 * tokens + pairs) < 64
    rows = record["row_buffers"]
    assert rows
    for buffer in rows:
        assert buffer["bytes"] in (2 * 48 * 37 * 3, 4 * 48 * 37 * 3)
        assert buffer["count"] >= 1
    assert record["temporary_bytes"] >= max(buffer["bytes"] for buffer in rows)
    names = ("program", "preset", "tokens", "dtype", "implementation")
    expected = ["route+grad", "odd", TOKENS, "bfloat16", implementation]
    assert [record[name] for name in names] == expected


def test_expected_buffers():
    record = measure_memory(PRESETS["mixtral-8x7b"], 20, "float16")
    assert [(b["shape"], b["bytes"], b["count"]) for b in record["expected"]] == [
        ("f16[40,4096]", 40 * 4096 * 2, 1),
        ("f16[40,4096]", 40 * 4096 * 2, 1),
    ]


def test_row_buffers_of_a_gpu_s_program():
    assert row_buffers(SAMPLE, num_rows=12, hidden=8) == [
        {"shape": "f32[12,8]", "bytes": 384, "count": 1, "what": "fusion: transpose(jvp())/mul"},
        {"shape": "pred[12,8]", "bytes": 96, "count": 1, "what": "custom-call"},
        {"shape": "u16[12,8]", "bytes": 192, "count": 1, "what": "kernel permute"},
        {"shape": "f32[12,8]", "bytes": 384, "count": 1, "what": "fusion: while/body/exp"},
    ]


def test_rows_by_slot_count_and_others_do_not():
    text = """
ENTRY %main (x: f32[24]) -> f32[24] {
  %x = f32[24]{0} parameter(0)
  %slots = f32[2,3,4]{2,1,0} custom-call(%x), custom_call_target="a"
  %again = f32[2,3,4]{2,1,0} custom-call(%x), custom_call_target="a"
  %across = f32[4,6]{1,0} custom-call(%slots, %again), custom_call_target="b"
  ROOT %y = f32[24]{0} custom-call(%across), custom_call_target="c"
}
"""
    assert row_buffers(text, num_rows=6, hidden=4) == [
        {"shape": "f32[2,3,4]", "bytes": 96, "count": 2, "what": "custom-call"}
    ]


def test_unknown_implementation():
    with pytest.raises(ArgumentValueError, match=r"`implementation` must be one of.*'jnp\.take'"):
        measure_memory(SHAPE, TOKENS, "float32", "jnp.take")
