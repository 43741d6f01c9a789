"""What a host descriptor may be made of."""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from tests import kernels
from tests.cases import cuda_call
from triax import TensorDescriptor
from triax.compat import jax_private, versions
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

ROUNDS = versions.TF32_DESCRIPTORS.passes(triton.__version__)
X = jnp.zeros((8, 16))


@pytest.mark.parametrize("lacking", ["shape", "dtype"])
def test_what_is_no_array(lacking):
    fields = {"shape": (8, 16), "dtype": jnp.dtype("float32")}
    del fields[lacking]
    with pytest.raises(ArgumentTypeError, match="`array` of TensorDescriptor must be an array"):
        TensorDescriptor.from_array(types.SimpleNamespace(**fields), (8, 16))


def test_of_a_whole_array():
    found = TensorDescriptor.from_array(X, [4, 16])
    assert (found.shape, found.strides, found.block_shape) == ((8, 16), (16, 1), (4, 16))
    assert (found.layout, found.padding, found.round_f32_to_tf32) == (None, "zero", False)
    assert TensorDescriptor.from_array(jnp.zeros((2, 3, 4)), (1, 1, 4)).strides == (12, 4, 1)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"shape": [8, 16]}, ArgumentTypeError, "`shape` .* must be a tuple of Python ints"),
        ({"shape": (8, -1)}, ArgumentTypeError, "`shape` .* each at least 0"),
        ({"strides": (16.0, 1)}, ArgumentTypeError, "`strides` .* each at least 0"),
        ({"block_shape": (0, 16)}, ArgumentTypeError, "`block_shape` .* each at least 1"),
        ({"block_shape": 16}, ArgumentTypeError, "`block_shape` .*; got 16 of type int"),
        ({"block_shape": (16, X)}, ArgumentTypeError, r"; got \(16, float32\[8,16\]\) of type tup"),
        ({"block_shape": (16,)}, ArgumentValueError, "the same length, one to five"),
        (
            {"shape": (), "strides": (), "block_shape": ()},
            ArgumentValueError,
            "the same length, one to five",
        ),
        (
            {"shape": (1,) * 6, "strides": (1,) * 6, "block_shape": (1,) * 6},
            ArgumentValueError,
            "the same length, one to five",
        ),
        ({"padding": "one"}, ArgumentValueError, "`padding` .* must be 'zero' or 'nan'; got 'one'"),
        ({"strides": (16, 2)}, ArgumentValueError, "must end in 1 and be multiples of 16 bytes"),
        ({"strides": (18, 1)}, ArgumentValueError, r"got \(18, 1\) of float32 \(4 bytes\)"),
        (
            {"base": X.astype("int32"), "round_f32_to_tf32": True},
            ArgumentTypeError,
            "needs a float32 array; got int32",
        ),
    ],
)
def test_what_is_refused(changes, error, match):
    fields = {"base": X, "shape": (8, 16), "strides": (16, 1), "block_shape": (4, 16)}
    TensorDescriptor(**fields)
    with pytest.raises(error, match=match):
        TensorDescriptor(**fields | changes)


@triton.jit
def copy_kernel(desc, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + at, desc.load([0, 0]))


@pytest.mark.parametrize("runs", ["interpret", "cuda"])
@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_rows_that_jax_makes_shorter(dtype, runs):
    """Without 64-bit types rows of 48 bytes have only 24."""
    described = TensorDescriptor.from_array(np.zeros((8, 6), dtype), (8, 4))
    narrow = dtype.replace("64", "32")
    options = {"out_type": jax.ShapeDtypeStruct((8, 4), narrow), "grid": 1, "ROWS": 8, "COLUMNS": 4}
    options["implementation"] = "interpret" if runs == "interpret" else None
    call = lambda: triax.triton_call(described, kernel=copy_kernel, **options)
    message = rf"`strides` .* multiples of 16 bytes .* got \(6, 1\) of {narrow} \(4 bytes\)"
    with pytest.raises(ArgumentValueError, match=message):
        cuda_call(call) if runs == "cuda" else call()


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0"])
def test_rounding_where_triton_does_not(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(
        UnsupportedError,
        match=r"^Argument `round_f32_to_tf32` of TensorDescriptor needs Triton 3\.7\.0 or later; "
        rf"{re.escape(version)} is installed\. Leave it out",
    ):
        TensorDescriptor.from_array(X, (4, 16), round_f32_to_tf32=True)
    TensorDescriptor.from_array(X, (4, 16))


@pytest.mark.skipif(not ROUNDS, reason="this Triton does not round")
def test_rounding_in_the_interpreter():
    @triton.jit
    def kernel(desc, out_ptr):
        at = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + at, desc.load([0, 0]))

    x = TensorDescriptor.from_array(X + (1 + 2.0**-12), (4, 16), round_f32_to_tf32=True)
    out = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    assert (triax.triton_call(x, kernel=kernel, out_type=out, grid=1) == 1).all()


def test_only_the_array_is_a_leaf():
    """All else is known when a program is traced."""
    descriptor = TensorDescriptor(X, (8, 16), (16, 1), (4, 16), "layout", "nan", ROUNDS)
    leaves, tree = jax.tree.flatten(descriptor)
    assert [leaf is X for leaf in leaves] == [True]
    again = jax.tree.unflatten(tree, leaves)
    assert [*vars(again).values()] == [*vars(descriptor).values()]
    other = jax.jit(lambda d: d)(descriptor)
    assert (other.layout, other.padding, other.block_shape) == ("layout", "nan", (4, 16))


@pytest.mark.parametrize("rank", [1, 5])
def test_ranks(rank):
    shape = (1,) * (rank - 1) + (16,)
    assert TensorDescriptor.from_array(jnp.zeros(shape), shape).shape == shape


def test_zero_sizes_and_strides():
    """Descriptors of arrays without elements, and of rows that are all the same."""
    empty = TensorDescriptor.from_array(jnp.zeros((0, 16)), (4, 16))
    assert empty.shape == (0, 16)
    assert TensorDescriptor(X, (8, 16), (0, 1), (4, 16)).strides == (0, 1)


@triton.jit
def _copy_kernel(desc, out):
    out.store([0, 0], desc.load([0, 0]))


@triton.jit
def _copy_to_first_kernel(desc, outs):
    outs[0].store([0, 0], desc.load([0, 0]))


OUT = jax.ShapeDtypeStruct((8, 16), "float32")


def copied(kernel=_copy_kernel, of=OUT):
    shown = TensorDescriptor.from_array(of, (8, 16))
    keywords = {"outs": (shown,)} if kernel is _copy_to_first_kernel else {"out": shown}
    return triax.triton_call(
        TensorDescriptor.from_array(X + 1, (8, 16)),
        kernel=kernel,
        out_type=OUT,
        grid=1,
        **keywords,
    )


def test_an_output_is_written_through_a_descriptor():
    assert (copied() == 1).all()
    assert (jax.jit(copied)() == 1).all()


def test_the_output_that_is_described_has_the_type_of_out_type():
    with pytest.raises(ArgumentValueError, match=r"`out` .* output .*int32.*output 0 .*float32"):
        copied(of=jax.ShapeDtypeStruct((8, 16), "int32"))
    with pytest.raises(ArgumentValueError, match=r"`out` .*\[4,16\].*\[8,16\]"):
        copied(of=jax.ShapeDtypeStruct((4, 16), "float32"))


def test_a_type_of_jax_describes_an_output():
    assert (copied(of=jax.typeof(X)) == 1).all()


def test_a_batch_behind_a_descriptor_is_refused():
    def of_batch(method):
        call = functools.partial(triax.triton_call, kernel=_copy_kernel, out_type=OUT, grid=1)
        shown = functools.partial(TensorDescriptor.from_array, block_shape=(8, 16))
        return jax.vmap(lambda x: call(shown(x), out=shown(OUT), vmap_method=method))(batch)

    batch = jnp.arange(3.0 * 8 * 16).reshape(3, 8, 16)
    for method in ("broadcast_all", "expand_dims"):
        with pytest.raises(ArgumentValueError, match=r"`desc` .*descriptor.*Pass 'sequential'"):
            of_batch(method)
    for method in ("sequential", "sequential_unrolled"):
        assert (of_batch(method) == batch).all()
    given = {"out_type": OUT, "grid": 1, "n": 1, "BLOCK": 1, "vmap_method": "broadcast_all"}
    add = functools.partial(triax.triton_call, kernel=kernels.add_kernel, **given)
    with pytest.raises(ArgumentValueError, match=r"`x_ptr` .*descriptor"):
        jax.vmap(functools.partial(add, TensorDescriptor.from_array(batch[0], (8, 16))))(batch)


def test_an_output_that_is_described_cannot_be_aliased():
    with pytest.raises(ArgumentTypeError, match=r"\(out\) take outputs that are not aliased"):
        triax.triton_call(
            TensorDescriptor.from_array(X, (8, 16)),
            out=TensorDescriptor.from_array(OUT, (8, 16)),
            kernel=_copy_kernel,
            out_type=OUT,
            input_output_aliases={"desc": 0},
            grid=1,
        )


def test_an_output_in_a_tuple_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"`outs\[0\]` .*Pass it as a parameter of its own"):
        copied(_copy_to_first_kernel)


@pytest.mark.cuda_plugin
def test_an_output_that_is_described_needs_no_alias():
    if not jax_private.supports_tensor_maps():
        pytest.skip("descriptors of the host need JAX 0.11")
    call = cuda_call(copied)
    assert (call.aliases, len(call.operands), len(call.results)) == ((), 1, 1)
