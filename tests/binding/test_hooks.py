"""Hooks of configs, run ahead of time: what they zero, block shapes, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TritonDescriptor

import triax
from tests import kernels
from tests.cases import cuda_call as lowered
from tests.primitives import own
from triax import testing
from triax.binding.launch import ArrayType, Operand, TensorMap
from triax.compiling import compiler
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

X = np.random.default_rng(2).standard_normal((48, 64)).astype(np.float32)
OUT = jax.ShapeDtypeStruct((64,), jnp.float32)


def bound(function, *args):
    """The one call that a function makes."""
    (call,) = [
        equation.params["call"]
        for equation in jax.make_jaxpr(function)(*args).eqns
        if "call" in equation.params
    ]
    return call


# --- zeroing ------------------------------------------------------------------------


@triton.jit
def column_sums_kernel(x_ptr, out_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sums columns: in one program, or in several that add up."""
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, COLS)
    x = tl.load(x_ptr + lines[:, None] * cols + places[None, :], mask=lines[:, None] < rows)
    if rows > ROWS:
        tl.atomic_add(out_ptr + places, tl.sum(x, axis=0))
    else:
        tl.store(out_ptr + places, tl.sum(x, axis=0))


def zero_where_programs_add_up(nargs):
    if nargs["ROWS"] < nargs["rows"]:
        nargs["out_ptr"].zero_()


def column_sums(x, hook=zero_where_programs_add_up, rows=(16, 64), **options):
    configs = [triton.Config({"ROWS": n}, pre_hook=hook) for n in rows]
    return triax.triton_call(
        x,
        rows=48,
        cols=64,
        COLS=64,
        kernel=triton.autotune(configs, key=[])(column_sums_kernel),
        out_type=options.pop("out_type", OUT),
        grid=lambda meta: triton.cdiv(48, meta["ROWS"]),
        **options,
    )


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_zeroes_an_output(rows, jit):
    function = functools.partial(column_sums, rows=(rows,))
    actual = (jax.jit(function) if jit else function)(jnp.asarray(X))
    testing.assert_close(actual, X.sum(axis=0, dtype=np.float64), terms=48)


def test_may_look_at_arrays():
    """As hooks do that serve kernels with pointers and with descriptors alike."""
    seen = []

    def hook(nargs):
        x = nargs["x_ptr"]
        seen.append(
            (x.numel(), x.size(), x.size(0), x.size(1), x.stride(), x.stride(0), x.element_size())
        )
        if any(hasattr(x, n) for n in ("base", "block_shape", "padding", "strides")):
            x.block_shape = [1, 1]
        if x.is_contiguous():
            zero_where_programs_add_up(nargs)

    actual = column_sums(jnp.asarray(X), hook, rows=(16,))
    testing.assert_close(actual, X.sum(axis=0, dtype=np.float64), terms=48)
    assert seen[0] == (48 * 64, (48, 64), 48, 64, (64, 1), 64, 4)


def test_each_config_has_its_own_hook():
    several, one = bound(column_sums, X).candidates
    assert (several.zeroed, one.zeroed) == ((0,), ())


def test_runs_once_for_each_config():
    seen = []
    column_sums(X, hook=lambda nargs: seen.append(nargs))
    assert [nargs["ROWS"] for nargs in seen] == [16, 64]
    assert seen[0]["num_warps"] == 4
    assert (seen[0]["rows"], seen[0]["COLS"]) == (48, 64)
    assert (seen[0]["x_ptr"].shape, seen[0]["x_ptr"].ndim) == ((48, 64), 2)
    assert seen[0]["out_ptr"].dtype == np.float32


def test_zeroes_beside_zeroed_outputs():
    kernel = triton.autotune(
        [triton.Config({"BLOCK": 64}, pre_hook=lambda nargs: nargs["sum_ptr"].zero_())], key=[]
    )(kernels.outputs_first_kernel)

    def call(x):
        return triax.triton_call(
            x_ptr=x,
            y_ptr=x,
            n=64,
            kernel=kernel,
            out_type=(OUT, OUT),
            grid=1,
            zeroed_outputs=(1,),
        )

    assert bound(call, X[0]).candidates[0].zeroed == (0, 1)


@pytest.mark.cuda_plugin
def test_zeroes_an_operand_that_an_output_is_aliased_to():
    kernel = triton.autotune(
        [triton.Config({"BLOCK": 64}, pre_hook=lambda nargs: nargs["y_ptr"].zero_())], key=[]
    )(kernels.accumulate_kernel)

    def call(x, y):
        return triax.triton_call(
            x, y, n=64, kernel=kernel, out_type=OUT, grid=1, input_output_aliases={"y_ptr": 0}
        )

    testing.assert_same_bits(jax.jit(call)(X[0], X[1]), X[0])
    assert lowered(call, X[0], X[1]).zeroed_bytes[0] == (0, 256)


@pytest.mark.cuda_plugin
def test_zeroes_in_a_primitive_of_ones_own():
    def sums_columns(ctx, x):
        configs = [triton.Config({"ROWS": 16}, pre_hook=zero_where_programs_add_up)]
        return triax.triton_call_lowering(
            ctx,
            triton.autotune(configs, key=[])(column_sums_kernel),
            x,
            grid=3,
            constexprs={"rows": 48, "cols": 64, "COLS": 64},
        )

    function = own(sums_columns, lambda x: [jax.core.ShapedArray(OUT.shape, OUT.dtype)])
    (total,) = jax.jit(function)(X)
    testing.assert_close(total, X.sum(axis=0, dtype=np.float64), terms=48)
    assert lowered(function, X).zeroed_bytes[0] == (0, 256)


# --- block shapes ---------------------------------------------------------------------


@triton.jit
def double_kernel(desc, out_ptr, n_cols, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    rows, cols = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    tl.store(out_ptr + rows[:, None] * n_cols + cols[None, :], desc.load([i * BM, j * BN]) * 2)


def set_block_shape(nargs):
    if not isinstance(nargs["desc"], TritonDescriptor):
        return
    nargs["desc"].block_shape = [nargs["BM"], nargs["BN"]]


def set_block_shape_by_others(nargs):
    desc = nargs["desc"]
    rows, columns = desc.shape
    assert desc.strides == [columns, 1]
    desc.block_shape = [min(nargs["BM"], rows), min(nargs["BN"], columns)]


def set_block_shape_in_place(nargs):
    nargs["desc"].block_shape[:] = nargs["BM"], nargs["BN"]


def doubled(x, block_shape=(1, 1), hook=None, blocks=((16, 32), (8, 64)), **options):
    configs = [triton.Config({"BM": m, "BN": n}, pre_hook=hook) for m, n in blocks]
    return triax.triton_call(
        triax.TensorDescriptor.from_array(x, block_shape),
        n_cols=64,
        kernel=triton.autotune(configs, key=[])(double_kernel),
        out_type=jax.ShapeDtypeStruct((48, 64), jnp.float32),
        grid=lambda meta: (48 // meta["BM"], 64 // meta["BN"]),
        **options,
    )


def by_callable(meta):
    return meta["BM"], meta["BN"]


WAYS = {
    "hook": {"hook": set_block_shape},
    "in_place": {"hook": set_block_shape_in_place},
    "by_others": {"hook": set_block_shape_by_others},
    "callable": {"block_shape": by_callable},
    "callable_then_hook": {"block_shape": lambda meta: (2, meta["BN"]), "hook": set_block_shape},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_sets_a_block_shape(way, jit):
    function = functools.partial(doubled, **WAYS[way])
    testing.assert_same_bits((jax.jit(function) if jit else function)(jnp.asarray(X)), 2 * X)


@pytest.mark.parametrize("way", WAYS)
def test_each_config_has_its_own_block_shape(way):
    call = bound(functools.partial(doubled, **WAYS[way]), X)
    of = [dict(candidate.block_shapes) for candidate in call.candidates]
    assert of == [{Operand(0): (16, 32)}, {Operand(0): (8, 64)}]
    array = ArrayType(X.shape, X.dtype)
    for candidate, block in zip(call.candidates, [(16, 32), (8, 32)], strict=True):
        kernel = compiler.compile_launch(call.launch(candidate, (array,), (array,)), 90)
        # The driver copies at most 128 bytes of a row at once.
        (tensor_map,) = (a for _, a in kernel.parameters if isinstance(a, TensorMap))
        assert tensor_map.block_shape == block


def test_equal_calls_with_fresh_callables_are_equal():
    def arguments():
        return bound(lambda x: doubled(x, lambda meta: (16, 32)), X).arguments

    assert arguments() == arguments()


@pytest.mark.parametrize(
    ("block_shape", "kind", "message"),
    [
        (lambda meta: (16,), ArgumentValueError, r"`desc` must have 2 sizes.*got \(16,\)"),
        (lambda meta: 16, ArgumentValueError, r"`desc` must have 2 sizes.*got 16"),
        (lambda meta: (16, 0), ArgumentTypeError, r"`desc` must be positive ints; got \(16, 0\)"),
        (lambda meta: (16, 2.0), ArgumentTypeError, r"`desc` must be positive ints"),
    ],
)
def test_a_block_shape_is_checked(block_shape, kind, message):
    with pytest.raises(kind, match=message):
        doubled(X, block_shape)


@pytest.mark.cuda_plugin
def test_a_zeroed_output_behind_a_descriptor_is_refused():
    @triton.jit
    def store_kernel(desc, BM: tl.constexpr, BN: tl.constexpr):
        desc.store([0, 0], tl.zeros((BM, BN), tl.float32))

    def call(x):
        return triax.triton_call(
            triax.TensorDescriptor.from_array(x, (16, 32)),
            BM=16,
            BN=32,
            kernel=store_kernel,
            out_type=x,
            grid=1,
            input_output_aliases={0: 0},
            zeroed_outputs=(0,),
        )

    with pytest.raises(UnsupportedError, match="zeroed output through a host TMA descriptor"):
        lowered(call, X)


# --- what is refused ------------------------------------------------------------------


def suppressed(nargs):
    try:
        nargs["out_ptr"].fill_(1)
    except Exception:
        return


REFUSED = {
    "zeroes an operand": (
        lambda nargs: nargs["x_ptr"].zero_(),
        r"zeroes `x_ptr`, which is neither an output nor aliased to one",
    ),
    "another method": (lambda nargs: nargs["out_ptr"].fill_(1), r"uses `out_ptr\.fill_`"),
    "another attribute": (lambda nargs: nargs["x_ptr"].device, r"uses `x_ptr\.device`"),
    "a caught refusal": (suppressed, r"uses `out_ptr\.fill_`"),
    "an attribute set": (
        lambda nargs: setattr(nargs["out_ptr"], "data", 1),
        r"sets `out_ptr\.data`",
    ),
    "a missing name": (
        lambda nargs: nargs["n"],
        r"reads `n`, which the call does not have\. It may",
    ),
    "items set": (
        lambda nargs: nargs["out_ptr"].__setitem__(0, 1),
        r"raised AttributeError",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    hook, message = REFUSED[what]
    with pytest.raises(UnsupportedError) as caught:
        column_sums(X, hook=hook)
    text = str(caught.value)
    assert text.startswith("The `pre_hook` of config [ROWS=16, num_warps=4"), text
    assert "of kernel 'column_sums_kernel' " in text
    assert "may only zero outputs" in text
    with pytest.raises(UnsupportedError, match=message):
        raise caught.value


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda nargs: setattr(nargs["desc"], "shape", [1, 1]), r"changes `desc\.shape`"),
        (lambda nargs: setattr(nargs["desc"], "other", 3), r"changes `desc\.other`"),
        (lambda nargs: nargs["desc"].base.zero_(), r"zeroes `desc\.base`, which is neither"),
    ],
)
def test_refused_of_a_descriptor(hook, message):
    with pytest.raises(UnsupportedError, match=message):
        doubled(X, (16, 32), hook=hook)


@pytest.mark.parametrize("name", ["pre_hook", "post_hook"])
def test_hooks_of_the_autotuner_are_refused(name):
    kernel = triton.autotune(
        [triton.Config({"ROWS": 16})], key=[], **{name: lambda *args, **kwargs: None}
    )(column_sums_kernel)
    with pytest.raises(UnsupportedError) as caught:
        triax.triton_call(X, rows=48, cols=64, COLS=64, kernel=kernel, out_type=OUT, grid=3)
    text = str(caught.value)
    assert "'column_sums_kernel' has host hooks" in text
    assert f"@triton.autotune({name}=…)" in text
    assert "to zero an output in the program, use `zeroed_outputs`" in text
