"""Calls of every kind with their references: one suite for the interpreter, lowering and the GPU.

A case makes its own inputs, gives the function to run under `jit`, and the result in
NumPy, float64 where sums are compared and exact where bits are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton

import triax
from tests import kernels
from triax import testing
from triax.compat import versions
from triax.emitting.reading import triton_calls

VARIADIC = versions.VARIADIC_KERNELS.passes(triton.__version__)


@dataclasses.dataclass(frozen=True)
class Case:
    """`terms` is None where the result must be exact, else how many values are summed.

    `aliases` are the custom call's; `donate` are the arguments that an aliased call may donate.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    reference: Callable[..., Any]
    terms: int | None = None
    aliases: tuple[tuple[int, int], ...] = ()
    x64: bool = False
    calls: int = 1

    def check(self, actual: Any, inputs: tuple[np.ndarray, ...]) -> None:
        expected = self.reference(*inputs)
        actual_leaves, expected_leaves = jax.tree.leaves(actual), jax.tree.leaves(expected)
        assert len(actual_leaves) == len(expected_leaves)
        for got, want in zip(actual_leaves, expected_leaves, strict=True):
            if self.terms is None or np.dtype(got.dtype).kind not in "fV":
                testing.assert_same_bits(got, want, self.name)
            else:
                testing.assert_close(got, want, terms=self.terms, err_msg=self.name)


def _f64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _blocks(meta: Any) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def _normal(*shapes: tuple[int, ...], dtype: Any = np.float32) -> Callable[..., Any]:
    return lambda rng: tuple(rng.standard_normal(s).astype(dtype) for s in shapes)


def blockwise(kernel, *arrays, **options):
    """Calls a kernel that takes arrays of one size, `n` and BLOCK; the output is like the first."""
    x = arrays[0]
    defaults = {"n": x.size, "out_type": _like(x), "grid": _blocks}
    return triax.triton_call(*arrays, kernel=kernel, **{**defaults, **options})


def cuda_calls(function, *args):
    """The Triton calls of a function that is lowered for CUDA, each of which must be fenced."""
    calls = triton_calls(jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)))
    assert all(call.fenced for call in calls)
    return calls


def cuda_call(function, *args):
    """The one that there is."""
    (call,) = cuda_calls(function, *args)
    return call


def vector_add(x, y):
    return blockwise(kernels.add_kernel, x, y, BLOCK=128)


def softmax(x):
    return triax.triton_call(
        x,
        n_cols=x.shape[1],
        BLOCK=triton.next_power_of_2(x.shape[1]),
        kernel=kernels.softmax_kernel,
        out_type=_like(x),
        grid=x.shape[0],
    )


def _softmax_reference(x):
    e = np.exp(_f64(x) - _f64(x).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def matmul(a, b):
    m, k = a.shape
    n = b.shape[1]
    return triax.triton_call(
        a,
        b,
        m=m,
        n=n,
        k=k,
        BM=32,
        BN=32,
        BK=16,
        kernel=kernels.matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"])),
    )


def _layer_norm_reference(x, w, b):
    x = _f64(x)
    mean = x.mean(-1)
    centred = x - mean[:, None]
    variance = (centred**2).mean(-1)
    # jax.tree orders a dictionary by key: "mean" before "y".
    return {"mean": mean, "y": centred / np.sqrt(variance + 1e-5)[:, None] * _f64(w) + _f64(b)}


def layer_norm(x, w, b):
    y, mean = triax.triton_call(
        x,
        w,
        b,
        n_cols=x.shape[1],
        eps=1e-5,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        kernel=kernels.layer_norm_kernel,
        out_type=(_like(x), jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)),
        grid=(x.shape[0],),
    )
    return {"y": y, "mean": mean}


def histogram(x):
    return triax.triton_call(
        x,
        n=x.size,
        bins=17,
        BLOCK=64,
        kernel=kernels.histogram_kernel,
        out_type=jax.ShapeDtypeStruct((17,), jnp.int32),
        zeroed_outputs=(0,),
        grid=_blocks,
    )


def accumulate_by_alias(x, y):
    aliases = {"y_ptr": 0}
    return blockwise(kernels.accumulate_kernel, x, y, BLOCK=64, input_output_aliases=aliases)


def accumulate_by_ref(x, y):
    ref = jax.new_ref(y)
    blockwise(kernels.accumulate_kernel, x, ref, BLOCK=64, out_type=())
    return ref[...]


def outputs_first(x, y):
    return triax.triton_call(
        x_ptr=x,
        y_ptr=y,
        n=x.size,
        BLOCK=64,
        kernel=kernels.outputs_first_kernel,
        out_type=(_like(x), _like(x)),
        grid=_blocks,
    )


def variadic(x, y):
    return triax.triton_call(
        x,
        2.0,
        y,
        n=x.size,
        kernel=kernels.variadic_kernel,
        out_type=_like(x),
        grid=_blocks,
    )


def tuple_of_arrays(x, y):
    return triax.triton_call(
        (x, y),
        (2.0, -3.0),
        n=x.size,
        BLOCK=64,
        kernel=kernels.tuple_kernel,
        out_type=_like(x),
        grid=_blocks,
    )


def zero_dimensional(x):
    return triax.triton_call(x, kernel=kernels.scalar_array_kernel, out_type=_like(x), grid=1)


def empty_array(x, y):
    return blockwise(kernels.add_kernel, x, y, BLOCK=64, grid=(1,))


def zero_grid(x, y):
    return blockwise(kernels.add_kernel, x, y, BLOCK=64, grid=(0, 3))


def low_precision(x, y):
    return blockwise(kernels.fused_multiply_kernel, x, y, BLOCK=64)


def move(x):
    return blockwise(kernels.copy_kernel, x, BLOCK=64)


def scalars(x):
    out_type = jax.ShapeDtypeStruct(x.shape, jnp.int64)
    given = {"negate": True, "factor": np.float32(2.0), "shift": 2**40 + 3}
    return blockwise(kernels.scalars_kernel, x, **given, BLOCK=64, out_type=out_type)


def heuristics(x, y):
    return blockwise(kernels.heuristic_add_kernel, x, y)


def autotuned_accumulate(x, y):
    return blockwise(kernels.autotuned_accumulate_kernel, x, y, input_output_aliases={1: 0})


def gather(x, index, **options):
    return triax.triton_call(
        x,
        index,
        n_cols=x.shape[1],
        kernel=kernels.autotuned_gather_kernel,
        out_type=jax.ShapeDtypeStruct((index.shape[0], x.shape[1]), x.dtype),
        grid=index.shape[0],
        **options,
    )


def argsort_then_gather(x, keys):
    return gather(x, jnp.argsort(keys).astype(jnp.int32))


def _gather_inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.standard_normal((37, 101)).astype(np.float32), rng.permutation(37).astype(np.int32)


VARIADIC_CASES = [
    Case(
        "variadic",
        variadic,
        _normal((301,), (301,)),
        lambda x, y: 2 * x + y,
        aliases=((0, 0),),  # the kernel's output stands first
    )
]
CASES = (
    Case("vector_add", vector_add, _normal((1003,), (1003,)), lambda x, y: x + y),
    Case("softmax", softmax, _normal((5, 77)), _softmax_reference, terms=77),
    Case("matmul", matmul, _normal((45, 51), (51, 37)), lambda a, b: _f64(a) @ _f64(b), terms=51),
    Case("layer_norm", layer_norm, _normal((7, 99), (99,), (99,)), _layer_norm_reference, terms=99),
    Case(
        "histogram",
        histogram,
        lambda rng: (rng.integers(-2, 20, 500).astype(np.int32),),
        lambda x: np.bincount(x[(x >= 0) & (x < 17)], minlength=17).astype(np.int32),
    ),
    Case(
        "accumulate_by_alias",
        accumulate_by_alias,
        _normal((301,), (301,)),
        lambda x, y: y + x,
        aliases=((1, 0),),
    ),
    Case(
        "accumulate_by_ref",
        accumulate_by_ref,
        _normal((301,), (301,)),
        lambda x, y: y + x,
        aliases=((1, 0),),
    ),
    Case(
        "outputs_first",
        outputs_first,
        _normal((301,), (301,)),
        lambda x, y: (x + y, x - y),
        aliases=((0, 0), (2, 1)),
    ),
    Case(
        "tuple_of_arrays",
        tuple_of_arrays,
        _normal((301,), (301,)),
        lambda x, y: 2 * _f64(x) - 3 * _f64(y),
        terms=2,
    ),
    Case("zero_dimensional", zero_dimensional, _normal(()), lambda x: np.asarray(2 * x)),
    Case("empty_array", empty_array, _normal((0,), (0,)), lambda x, y: x + y),
    Case("zero_grid", zero_grid, _normal((65,), (65,)), lambda x, y: np.zeros_like(x), calls=0),
    Case(
        "bfloat16",
        low_precision,
        _normal((301,), (301,), dtype=ml_dtypes.bfloat16),
        lambda x, y: _f64(x) * _f64(y) + _f64(x),
        terms=2,
    ),
    Case(
        "float8_move",
        move,
        lambda rng: (testing.hostile_values(rng, (301,), ml_dtypes.float8_e4m3fn),),
        lambda x: x,
    ),
    Case("bool_move", move, lambda rng: (rng.integers(0, 2, 301).astype(bool),), lambda x: x),
    Case("float64_move", move, lambda rng: (rng.standard_normal(301),), lambda x: x, x64=True),
    Case(
        "scalars",
        scalars,
        lambda rng: (rng.integers(-9, 9, 301).astype(np.int64),),
        lambda x: -(x * 2 + 2**40 + 3),
        x64=True,
    ),
    Case("heuristics", heuristics, _normal((1024,), (1024,)), lambda x, y: x + y),
    Case(
        "autotuned_accumulate",
        autotuned_accumulate,
        _normal((1003,), (1003,)),
        lambda x, y: y + x,
        aliases=((1, 0),),
    ),
    *(VARIADIC_CASES if VARIADIC else ()),
    Case("gather", gather, _gather_inputs, lambda x, i: x[i]),
    Case(
        "argsort_then_gather",
        argsort_then_gather,
        lambda rng: (_gather_inputs(rng)[0], rng.permutation(37).astype(np.float32)),
        lambda x, keys: x[np.argsort(keys)],
    ),
)
