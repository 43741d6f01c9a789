"""grouped_dense by TransformerEngine's name, against float64 group by group."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from triax.moe import transformer_engine as te
from triax.testing import assert_close

SIZES = [5, 0, 17, 3]  # and six rows past the groups
ROWS, DEPTH, COLUMNS = 31, 24, 10
LAST = ((1,), (2,))


def draw(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (ROWS, DEPTH), (len(SIZES), DEPTH, COLUMNS), (len(SIZES), COLUMNS), (ROWS, COLUMNS)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def expected(x, kernel, bias, gradient):
    """The result, and the gradients of x, kernel and bias."""
    x, kernel, bias, gradient = (np.asarray(a, np.float64) for a in (x, kernel, bias, gradient))
    out, d_x = np.zeros_like(gradient), np.zeros_like(x)
    d_kernel, d_bias = np.zeros_like(kernel), np.zeros_like(bias)
    for group, end in enumerate(np.cumsum(SIZES)):
        rows = slice(end - SIZES[group], end)
        out[rows] = x[rows] @ kernel[group] + bias[group]
        d_x[rows] = gradient[rows] @ kernel[group].T
        d_kernel[group] = x[rows].T @ gradient[rows]
        d_bias[group] = gradient[rows].sum(0)
    return out, d_x, d_kernel, d_bias


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contracting_dims", [None, LAST])
def test_result_and_gradients(contracting_dims, dtype, implementation):
    x, kernel, bias, gradient = draw(dtype)
    wanted = expected(x, kernel, bias, gradient)
    options = {"implementation": implementation, "precision": jax.lax.Precision.HIGHEST}
    if contracting_dims:
        options["contracting_dims"] = contracting_dims
        kernel = np.ascontiguousarray(kernel.swapaxes(1, 2))

    @jax.jit
    def run(x, kernel, bias, gradient):
        op = lambda x, kernel, bias: te.grouped_dense(
            x, kernel, np.array(SIZES), bias=bias, **options
        )
        out, pull = jax.vjp(op, x, kernel, bias)
        return out, *pull(gradient)

    out, d_x, d_kernel, d_bias = run(x, kernel, bias, gradient)
    if contracting_dims:
        d_kernel = d_kernel.swapaxes(1, 2)
    for found, want, terms in zip(
        (out, d_x, d_kernel, d_bias), wanted, (DEPTH, COLUMNS, 17, 17), strict=True
    ):
        assert found.dtype == dtype
        assert_close(found, want, terms=terms)
    assert not np.any(out[sum(SIZES) :])


def test_bias_is_the_fifth_argument_and_may_be_left_out():
    x, kernel, bias, gradient = draw("bfloat16")
    sizes = np.array(SIZES)
    out = jax.jit(
        lambda *args: te.grouped_dense(
            *args[:3], ((1,), (1,)), *args[3:], preferred_element_type="float32"
        )
    )(x, kernel, sizes, bias)
    assert out.dtype == jnp.float32
    assert_close(out, expected(x, kernel, bias, gradient)[0], terms=DEPTH)
    plain = jax.jit(te.grouped_dense)(x, kernel, sizes)
    assert plain.dtype == x.dtype
    assert_close(plain, expected(x, kernel, 0 * bias, gradient)[0], terms=DEPTH)


def test_precision_is_the_default_unless_one_is_given():
    """Not the one in force, which TransformerEngine does not look at."""
    x, kernel, *_ = draw()

    def precisions(**options):
        run = functools.partial(te.grouped_dense, implementation="xla", **options)
        with jax.default_matmul_precision("float32"):
            text = jax.jit(run).lower(x, kernel, np.array(SIZES)).as_text()
        return set(re.findall(r"precision = \[(\w+), \1\]", text))

    assert precisions() == {"DEFAULT"}
    assert precisions(precision="highest") == {"HIGHEST"}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"group_offset": np.zeros(1, int)}, UnsupportedError, "`group_offset` of grouped_dense"),
        ({"quantizer_set": object()}, UnsupportedError, "`quantizer_set` of grouped_dense is not"),
        (
            {"quantizer_set": SimpleNamespace(x=None, kernel=object(), dgrad=None)},
            UnsupportedError,
            "`quantizer_set` of grouped_dense is not supported. For 8 bits",
        ),
        ({"kernel_fsdp_info": ("fsdp", 1)}, UnsupportedError, "`kernel_fsdp_info` of grouped_den"),
        ({"kernel_amax": np.ones(4)}, UnsupportedError, "`kernel_amax` of grouped_dense is not"),
        ({"contracting_dims": ((0,), (1,))}, ArgumentValueError, "must be ((1,), (1,)), or ((1,)"),
        ({"contracting_dims": 1}, ArgumentValueError, "must be ((1,), (1,)), or ((1,), (2,))"),
        ({"contracting_dims": LAST}, ArgumentValueError, "depth of `x`, 24, in dimension 2; got"),
        ({"x": np.ones((2, 31, 24))}, ArgumentValueError, "`x` must have shape [rows, depth]"),
        ({"kernel": np.ones((24, 10))}, ArgumentValueError, "`kernel` must have shape [groups, "),
        ({"kernel": np.ones((4, 24, 10), int)}, ArgumentTypeError, "`kernel` must have a float"),
        ({"bias": np.ones((4, 9))}, ArgumentValueError, "`bias` must have shape (4, 10)"),
        (
            {"group_sizes": np.ones(3, int)},
            ArgumentValueError,
            "`group_sizes` must have shape",
        ),
    ],
)
def test_what_is_refused_is_named(change, error, text):
    x, kernel, *_ = draw()
    arguments = {"x": x, "kernel": kernel, "group_sizes": np.array(SIZES), **change}
    with pytest.raises(error) as caught:
        te.grouped_dense(**arguments)
    assert text in str(caught.value)


def test_what_is_nothing_is_taken():
    """The defaults of TransformerEngine, passed on by a caller."""
    x, kernel, *_ = draw()
    nothing = SimpleNamespace(x=None, kernel=None, dgrad=None)
    how = {"quantizer_set": nothing, "kernel_fsdp_info": (None, -1)}
    out = jax.eval_shape(functools.partial(te.grouped_dense, **how), x, kernel, np.array(SIZES))
    assert out.shape == (ROWS, COLUMNS)
    with pytest.raises(TypeError, match="positional"):
        te.grouped_dense(x, kernel, np.array(SIZES), ((1,), (1,)), None, None)
