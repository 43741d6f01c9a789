"""What `tests/moe/test_cases.py` does not see of grouped_dense."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from triax.moe import transformer_engine as te

SIZES = [5, 0, 17, 3]  # and six rows past the groups
ROWS, DEPTH, COLUMNS = 31, 24, 10
LAST = ((1,), (2,))


def draw():
    rng = np.random.default_rng(0)
    shapes = (ROWS, DEPTH), (len(SIZES), DEPTH, COLUMNS), (len(SIZES), COLUMNS)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_bias_is_the_fifth_argument_and_may_be_left_out():
    x, kernel, bias = draw()
    where = ((1,), (1,))
    both = [te.grouped_dense(x, kernel, np.array(SIZES), where, *of) for of in ((bias,), ())]
    rows = np.repeat(bias, SIZES, axis=0)
    np.testing.assert_allclose((both[0] - both[1])[: len(rows)], rows, atol=1e-5)


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
