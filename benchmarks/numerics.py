"""How far results of the MoE ops are from float64's, in units of their last place.

A unit is the distance of the result's dtype at an element, or at the root mean square of all
elements for those that are smaller: sums that cancel have no last place of their own. Operands are
normal, and exact in their dtype. Beside Triax's kernels stand plain JAX (`implementation="xla"`, on
the same device) and, where it is installed, torch.

    python -m benchmarks.numerics [--output FILE]
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.harness import record
from triax import moe

WAYS = {"kernels": "triton", "plain JAX": "xla"}
DEPTHS = 256, 2048, 7168, 16384
DTYPES = "bfloat16", "float16", "float32"
ROWS, COLUMNS, GROUPS = 512, 256, 3
TOP_K, EXPERTS, HIDDEN = 8, 64, 512
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


def normal(seed, *shape, dtype="float32", scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )


def wide(array):
    return np.asarray(array).astype(np.float64)


def units(found, exact):
    """Mean, 99.9th percentile and maximum of the error in units of the last place."""
    dtype = ml_dtypes.finfo(found.dtype)
    rms = np.sqrt(np.mean(exact**2))
    exponent = np.floor(np.log2(np.maximum(np.maximum(abs(exact), rms), float(dtype.tiny))))
    error = abs(wide(found) - exact) / np.exp2(exponent - dtype.nmant)
    return {
        "mean": float(error.mean()),
        "p999": float(np.quantile(error, 0.999)),
        "max": float(error.max()),
    }


def sizes_of(rows):
    return np.array([rows // 2, rows // 8, rows - rows // 2 - rows // 8], np.int32)


def torch_product(rows, weights, sizes):
    """torch's grouped matmul; None where there is none for these operands."""
    try:
        import torch
    except ImportError:
        return None
    if rows.dtype != ml_dtypes.bfloat16 or not torch.cuda.is_available():
        return None
    on_gpu = lambda a: torch.from_numpy(wide(a)).cuda().to(torch.bfloat16)
    offsets = torch.from_numpy(np.cumsum(sizes, dtype=np.int32)).cuda()
    return on_gpu(rows), on_gpu(weights), offsets


def products():
    """`ragged_dot` and its gradients, by dtype and number of terms."""
    for dtype in DTYPES:
        for depth in DEPTHS:
            rows = normal(0, ROWS, depth, dtype=dtype)
            weights = normal(1, GROUPS, depth, COLUMNS, dtype=dtype)
            sizes = sizes_of(ROWS)
            of = np.repeat(np.arange(GROUPS), sizes)
            parts = [wide(rows)[of == g] @ wide(weights)[g] for g in range(GROUPS)]
            exact = np.concatenate(parts)
            for way, implementation in WAYS.items():
                run = functools.partial(moe.ragged_dot, implementation=implementation)
                yield f"ragged_dot, {dtype}", depth, way, units(run(rows, weights, sizes), exact)
            given = torch_product(rows, weights, sizes)
            if given is not None:
                import torch

                found = torch._grouped_mm(given[0], given[1], offs=given[2])
                found = found.float().cpu().numpy().astype(ml_dtypes.bfloat16)
                yield f"ragged_dot, {dtype}", depth, "torch", units(found, exact)
            # The weights' gradient sums over rows: as many as the depth above.
            rows, gradient = normal(2, depth, 256, dtype=dtype), normal(3, depth, 128, dtype=dtype)
            zeros = jnp.zeros((1, 256, 128), rows.dtype)
            for way, implementation in WAYS.items():
                product = lambda w, i=implementation, rows=rows, n=depth: moe.ragged_dot(
                    rows, w, np.array([n], np.int32), implementation=i
                )
                found = jax.vjp(product, zeros)[1](jnp.asarray(gradient))[0][0]
                exact_gradient = wide(rows).T @ wide(gradient)
                yield f"weights' gradient, {dtype}", depth, way, units(found, exact_gradient)


def eight_bits():
    """Products of numbers in float8_e4m3fn, whose own rounding is not counted."""
    for depth in DEPTHS:
        rows = moe.quantize(normal(0, ROWS, depth, dtype="bfloat16"), block=(1, None))
        weights = moe.quantize(
            normal(1, 1, depth, COLUMNS, dtype="bfloat16"), block=(1, None, 1), transposed=True
        )
        sizes = np.array([ROWS], np.int32)
        values = np.swapaxes(wide(weights.values), 1, 2)[0] * wide(weights.scales)[0, :, 0]
        exact = wide(rows.values) * wide(rows.scales) @ values
        for name, precision in (("float32 sums", None), ("tensor cores' sums", FAST)):
            for way, implementation in WAYS.items():
                if precision and way != "kernels":
                    continue
                found = moe.ragged_dot(
                    rows,
                    weights,
                    sizes,
                    precision=precision,
                    preferred_element_type=jnp.bfloat16,
                    implementation=implementation,
                )
                yield f"ragged_dot, float8_e4m3fn, {name}", depth, way, units(found, exact)


def others():
    """The activation, the sum of a token's rows, and the router's weights."""
    tokens = 2048
    logits = normal(4, tokens, EXPERTS)
    chosen = np.argsort(-wide(logits), axis=1, kind="stable")[:, :TOP_K]
    score = np.exp(wide(logits) - wide(logits).max(1, keepdims=True))
    score /= score.sum(1, keepdims=True)
    picked = np.take_along_axis(score, chosen, 1)
    for way, implementation in WAYS.items():
        how = {"implementation": implementation}
        weights = moe.route(jnp.asarray(logits), moe.Router(TOP_K), **how).weights
        yield "route, softmax, float32", EXPERTS, way, units(weights, picked)
        for dtype in DTYPES:
            gate_up = normal(5, tokens, 2 * HIDDEN, dtype=dtype)
            gate, up = np.split(wide(gate_up), 2, axis=1)
            found = moe.glu(jnp.asarray(gate_up), **how)
            yield f"glu, {dtype}", 1, way, units(found, gate / (1 + np.exp(-gate)) * up)
            plan = moe.make_plan(jnp.asarray(chosen, jnp.int32), EXPERTS, **how)
            rows = normal(6, plan.num_rows, HIDDEN, dtype=dtype)
            found = moe.unpermute(jnp.asarray(rows), plan, **how)
            exact = np.zeros((tokens, HIDDEN))
            row_of = np.asarray(moe.make_plan(jnp.asarray(chosen, jnp.int32), EXPERTS).row_of)
            for slot in range(TOP_K):
                exact += wide(rows)[row_of[:, slot]]
            yield f"unpermute, {dtype}", TOP_K, way, units(found, exact)


def measure():
    """By op, the errors by number of terms and way."""
    for part in (products, eight_bits, others):
        found = {}
        for op, terms, way, errors in part():
            found.setdefault(op, {}).setdefault(str(terms), {})[way] = errors
        yield from found.items()


if __name__ == "__main__":
    record.main(measure)
