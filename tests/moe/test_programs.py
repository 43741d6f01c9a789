"""Every op in programs for other platforms: what they hold, what is exported, what is compiled."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import triax
from tests.moe.cases import NAMED, ORDINARY
from tests.moe.plans.case import Sizes
from triax.emitting import reading
from triax.errors import UnsupportedError

OPS = {name: NAMED[name] for name in ORDINARY}
WITH_KERNELS = [name for name in OPS if OPS[name](None).kernels]


def lowered(case, platform):
    """The program of an op and its gradients."""
    return jax.jit(case.everything).trace(case.inputs(0)).lower(lowering_platforms=(platform,))


@pytest.mark.sampled(3, 3)
@pytest.mark.parametrize("name", OPS)
def test_cpu_gets_plain_jax_alone(name):
    text = lowered(OPS[name](None), "cpu").as_text()
    assert "triton" not in text
    assert "callback" not in text


@pytest.mark.sampled(2, 3)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("arch", ["90", "80", "100"])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_cuda_gets_kernels_alone(name, arch, monkeypatch):
    if name == "ragged_dot" and arch != "90":
        pytest.skip("tests/moe/products has them")
    monkeypatch.setenv("TRIAX_CUDA_ARCH", arch)
    case = OPS[name](None)
    program = lowered(case, "cuda")
    assert sorted(call.kernel for call in reading.triton_calls(program)) == sorted(case.kernels)
    text = program.as_text()
    for other in ("dot_general", "gather", "scatter", "sort", "top_k", "transpose", "callback"):
        assert f"stablehlo.{other}" not in text


def forward(case):
    """The results as one function, and what it is called with."""
    arrays = {name: a for name, a in case.inputs(0).items() if name[:2] != "g_"}
    return jax.jit(lambda arrays: case.forward(arrays)[1]), arrays


def equal(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), actual, expected)


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_export_for_both_platforms_runs_on_the_cpu(name):
    run, arrays = forward(OPS[name](None))
    checks = triax.export_checks()
    export = jax.export.export(run, platforms=("cpu", "cuda"), disabled_checks=checks)
    exported = export(arrays)
    assert "triton_kernel_call" in exported.mlir_module()
    equal(exported.call(arrays), run(arrays))


SYMBOLIC = {"glu", "quantize", "route"}  # exported with sizes left open, as plain JAX


@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("path", [None, "xla"])
def test_export_of_symbolic_sizes_works_or_is_refused(name, path):
    run, arrays = forward(OPS[name](path))
    (tokens,) = jax.export.symbolic_shape("tokens")
    count = len(next(iter(arrays.values())))
    types = {
        name: jax.ShapeDtypeStruct((tokens, *a.shape[1:]) if len(a) == count else a.shape, a.dtype)
        for name, a in arrays.items()
    }
    export = jax.export.export(run, platforms=("cpu",))
    if name in SYMBOLIC and path == "xla":
        equal(export(types).call(arrays), run(arrays))
        return
    remedy = ", or pass `implementation='xla'`" if name in SYMBOLIC else ""
    with pytest.raises(UnsupportedError, match=rf"\[tokens, \d+\]\. Export once .* size{remedy}\."):
        export(types)


def of_shapes(name, **shapes):
    """An ordinary case, and its arrays in other shapes."""
    arrays = OPS[name](None).inputs(0)
    return {n: jax.ShapeDtypeStruct(shapes.get(n, a.shape), a.dtype) for n, a in arrays.items()}


def moved(tokens):
    rows = Sizes(tokens, 3, 5, align=8).rows
    by_token = {"x": (tokens, 33), "ids": (tokens, 3), "weights": (tokens, 3)}
    by_row = {"g_rows": (rows, 33), "g_weights": (rows,), "g_scales": (rows, 3)}
    return of_shapes("permute", scales=(tokens, 3), **by_token, **by_row)


def moved_back(tokens):
    rows = Sizes(tokens, 3, 5, align=8).rows
    by_token = {"g_out": (tokens, 33), "ids": (tokens, 3), "weights": (tokens, 3)}
    return of_shapes("unpermute", rows=(rows, 33), **by_token)


def sorted_chunks(rows, count):
    shapes = dict.fromkeys(("x", "g_rows"), (rows, 33))
    shapes |= dict.fromkeys(("probs", "g_probs"), (rows,))
    return of_shapes("chunks", sizes=(count,), order=(count,), **shapes)


FEW_AND_MANY = [(1,), (4096,)]  # many pairs have kernels of their own
NEW_SIZES = {
    "permute": (moved, FEW_AND_MANY, [(16,), (17,), (513,), (4097,)]),
    "unpermute": (moved_back, FEW_AND_MANY, [(16,), (17,), (513,), (4097,)]),
    "chunks": (sorted_chunks, [(1, 1)], [(16, 16), (17, 1000), (2**31 - 1, 1)]),
    "ragged_dot": (
        lambda rows: of_shapes(
            "ragged_dot", rows=(rows, 16), bias_weights=(rows,), g_out=(rows, 16)
        ),
        [(640,), (100_001,)],  # with many rows, sums for the bias have parts
        [(641,), (50_000,), (2**30,)],
    ),
    "route": (
        lambda tokens: of_shapes("route", logits=(tokens, 12), g_weights=(tokens, 3)),
        [(1,)],
        [(16,), (17,), (4097,)],
    ),
}


@pytest.mark.slow("Triton is the same, and most of its time is Triton's")
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("name", NEW_SIZES)
def test_new_sizes_compile_nothing(name):
    from triax.compiling import compiler

    types, before, after = NEW_SIZES[name]
    run = jax.jit(OPS[name](None).everything)
    for sizes in before:
        run.trace(types(*sizes)).lower(lowering_platforms=("cuda",))
    count = compiler.compile_count()
    assert count
    for sizes in after:
        run.trace(types(*sizes)).lower(lowering_platforms=("cuda",))
    assert compiler.compile_count() == count
