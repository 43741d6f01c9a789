"""Kernels with a fault each, which the tools must report: else their silence means nothing.

They are PTX for compute capability 9.0, jobs of the tuning worker like those of the real kernels.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from triax.tuning.worker import messages

_COUNT, _ROW = 1024, 64  # floats of the buffers, and of a row

_HEAD = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry {name}(
    .param .u64 first, .param .u64 second, .param .u64 scratch, .param .u64 profile)
{{
    .reg .u64 %a<8>;
    .reg .u32 %t<8>;
    .reg .f32 %f<4>;
    .reg .pred %p<2>;
    .shared .align 4 .b8 shared[512];
    ld.param.u64 %a0, [first];
    ld.param.u64 %a1, [second];
    cvta.to.global.u64 %a0, %a0;
    cvta.to.global.u64 %a1, %a1;
    mov.u32 %t0, %tid.x;
    mul.wide.u32 %a2, %t0, 4;
    cvt.rn.f32.u32 %f0, %t0;
{body}
    ret;
}}
"""

# By the tool that must report it, what is wrong and how. `first` holds numbers, `second` what
# nobody has written.
FAULTS = {
    "planted_overrun": f"""
    add.u64 %a3, %a1, %a2;
    st.global.f32 [%a3 + {4 * _COUNT}], %f0;""",
    "planted_unwritten": """
    add.u64 %a3, %a1, %a2;
    ld.global.f32 %f1, [%a3];
    add.u64 %a4, %a0, %a2;
    st.global.f32 [%a4], %f1;""",
    # Each warp reads what the other one writes, and does not wait.
    "planted_race": """
    shl.b32 %t1, %t0, 2;
    mov.u32 %t2, shared;
    add.u32 %t3, %t2, %t1;
    st.shared.f32 [%t3], %f0;
    xor.b32 %t4, %t1, 128;
    add.u32 %t5, %t2, %t4;
    ld.shared.f32 %f1, [%t5];
    add.u64 %a3, %a1, %a2;
    st.global.f32 [%a3], %f1;""",
    # Half of a warp waits where the other half never comes.
    "planted_barrier": """
    setp.ge.u32 %p0, %t0, 16;
    @%p0 bra past;
    bar.sync 0;
past:
    add.u64 %a3, %a1, %a2;
    st.global.f32 [%a3], %f0;""",
}
REPORTED_BY = {
    "canaries": "planted_overrun",
    "memcheck": "planted_overrun",
    "initcheck": "planted_unwritten",
    "racecheck": "planted_race",
    "synccheck": "planted_barrier",
}


def plant(name: str, folder: Path) -> None:
    """Writes the job of one of these kernels: 64 threads, a row of which each writes a number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.bin").write_bytes(bytes(4 * _COUNT))
    candidate = messages.CompiledCandidate(
        label="",
        cubin=_HEAD.format(name=name, body=FAULTS[name]).encode() + b"\0",
        entry=name,
        grid=(1, 1, 1),
        num_warps=_ROW // 32,
        num_ctas=1,
        shared_bytes=0,
        scratch_bytes=0,
        parameters=(messages.Pointer(0), messages.Pointer(1)),
    )
    buffers = (
        messages.BufferSpec(4 * _COUNT, path="numbers.bin"),
        messages.BufferSpec(4 * _COUNT),
    )
    job = messages.Job(buffers, (candidate,), limit_bytes=None, timeout_s=10.0, budget_s=10.0)
    (folder / "jobs.pickle").write_bytes(pickle.dumps([("planted", job)]))
