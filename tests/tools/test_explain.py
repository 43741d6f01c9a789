"""How calls are shown."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import triax
from tests import kernels
from tests.interrupts import run_program
from triax.compat import ptxas
from triax.errors import CompilationError, MissingDependencyError
from triax.tools.explain import Explanations
from triax.tuning.store import Timing

CALL = triax.Explanation(
    kernel="add<kernel>",
    config=("BLOCK=128", "BLOCK=256"),
    source="measured now",
    timings=(Timing("BLOCK=128", 0.0125, 3), Timing("BLOCK=256", error="needs 'a' < b & c")),
    target="triton_kernel_call_ffi",
    grid=((8, 1, 1), (4, 1, 1)),
    aliases=((0, 0),),
    entries=("add_1", "add_2"),
    ptx=("", ""),
    zeroed_bytes=((), ()),
    shared_bytes=(0, 0),
    num_warps=(4, 4),
    saved=(),
    operands=("tensor<8x256xbf16>", "tensor<f32>"),
    results=("tensor<8x256xbf16>",),
    fenced=True,
    opaque=b"",
    key="add-4096",
    measured_bytes=8192,
)


def test_text():
    assert str(CALL).splitlines() == [
        "add<kernel>: BLOCK=128 | BLOCK=256  (measured now)",
        "  triton_kernel_call_ffi, grid 8×1×1 | 4×1×1, aliases [(0, 0)]",
        "  8x256xbf16, f32 → 8x256xbf16",
        "  key add-4096, measured on 8192 bytes",
        "     0.0125 ms  BLOCK=128",
        "  needs 'a' < b & c  BLOCK=256",
    ]
    assert repr(Explanations([CALL, CALL])) == f"{CALL}\n{CALL}"


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("card", [80, 90, 120])
def test_resources(monkeypatch, card):
    """Of a kernel with all registers that it wants, and of the same with fewer."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(card))

    def used(**options):
        run = lambda x: triax.triton_call(
            x,
            n_cols=4000,
            BLOCK=4096,
            kernel=kernels.softmax_kernel,
            out_type=x,
            grid=2,
            num_warps=2,
            **options,
        )
        (call,) = triax.explain(run, jax.ShapeDtypeStruct((2, 4000), jnp.float32))
        (resources,) = call.resources()
        return resources

    free, few = used(), used(backend_options={"maxnreg": 32})
    assert 64 < free.registers <= 255
    assert free.spilled_bytes == 0
    assert few.registers <= 32 < few.spilled_bytes
    assert free.warps == few.warps == 2
    assert free.shared_bytes == few.shared_bytes > 0  # the rows' sums, over two warps
    assert str(free).startswith(f"{free.registers} registers, 0 bytes spilled, ")


@pytest.mark.cuda_plugin
def test_resources_without_an_assembler(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    run = lambda x: triax.triton_call(
        x, n=x.size, BLOCK=64, kernel=kernels.copy_kernel, out_type=x, grid=1
    )
    (call,) = triax.explain(run, jnp.arange(64.0))
    with pytest.raises(CompilationError, match=r"ptxas refuses the kernel for sm_90a?: .*syntax"):
        dataclasses.replace(call, ptx=(call.ptx[0] + "nonsense",)).resources()
    without = types.SimpleNamespace(knobs=types.SimpleNamespace(nvidia=None))
    monkeypatch.setattr(ptxas, "triton", lambda: without)
    with pytest.raises(MissingDependencyError, match="Triton has no ptxas for sm_90"):
        call.resources()


def test_a_function_without_calls():
    found = triax.explain(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert found == []
    assert repr(found) == "no Triton calls"


@pytest.mark.cuda_plugin
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_calls_that_xla_cuts_are_not_listed(monkeypatch, axis_type):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    run = lambda x: triax.triton_call(
        x, n=x.size, BLOCK=64, kernel=kernels.copy_kernel, out_type=x, grid=1
    )
    cut = triax.sharded(run, "t -> t", cut="t")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axis_type,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.arange(64.0), NamedSharding(mesh, PartitionSpec("d")))
    assert len(triax.explain(cut, jnp.arange(32.0))) == 1
    if axis_type is AxisType.Explicit:
        assert len(triax.explain(cut, x)) == 1
    else:
        with pytest.warns(UserWarning, match="1 functions are partitioned .* not listed"):
            assert triax.explain(cut, x) == []


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from triax import cli
sys.exit(cli.main(["explain", sys.argv[1]]))
"""
PROGRAM = """
import jax.numpy as jnp
from triax import moe

def glu():
    return moe.glu(jnp.ones((4, 8)))
"""


def test_without_triton_it_says_what_to_install(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_program(WITHOUT_TRITON, f"{program}:glu")
    assert done.returncode == 1, done.stderr
    assert "needs `triton`, which is not installed. On Linux, `pip install" in done.stderr
    assert "nothing to explain" not in done.stdout
