"""Mistakes in a call, each with an error of its own; and how arguments bind."""

import collections
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import triax
from tests import kernels
from tests.cases import cuda_call
from triax import testing
from triax.binding import candidates
from triax.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CompilationError,
    TriaxError,
    UnsupportedError,
)

X = jnp.arange(100, dtype=jnp.float32)
Y = 2 * X + 1  # another, so that neither is taken for the other
SUM = np.asarray(X + Y)
OUT = jax.ShapeDtypeStruct((100,), jnp.float32)


def add(*operands, **changes):
    arguments = {"n": 100, "BLOCK": 64, "kernel": kernels.add_kernel, "out_type": OUT, "grid": 2}
    return triax.triton_call(*(operands or (X, Y)), **{**arguments, **changes})


def without(name, **changes):
    arguments = {"n": 100, "BLOCK": 64, "kernel": kernels.add_kernel, "out_type": OUT, "grid": 2}
    del arguments[name]
    return triax.triton_call(X, Y, **arguments, **changes)


@triton.jit
def renamed_kernel(x_ptr, out_ptr, n: tl.int64, flag=True, BLOCK: tl.constexpr = 64):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if flag:
        x = -x
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@triton.jit
def pair_kernel(pair, out_ptr):
    tl.store(out_ptr, tl.load(pair[0]))


@triton.jit
def reductions_kernel(x_ptr, out_ptr, max_ptr=None, sum_ptr=None, SIZE: tl.constexpr = 128):
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < 100, other=0)
    tl.store(out_ptr + offsets, -x, mask=offsets < 100)
    if max_ptr is not None:
        tl.store(max_ptr, tl.max(x))
    if sum_ptr is not None:
        tl.store(sum_ptr, tl.sum(x))


def optional_outputs(out_type, **keywords):
    return triax.triton_call(X, kernel=reductions_kernel, out_type=out_type, grid=1, **keywords)


def hooked(**arguments):
    return triton.autotune(configs=[triton.Config({"BLOCK": 64}, **arguments)], key=["n"])(
        kernels.add_kernel
    )


class Foreign:
    """An array of another library."""

    shape, dtype = (100,), "torch.float32"

    def __dlpack__(self):
        raise NotImplementedError


GRID = r"Argument `grid` must be an int, a tuple or a callable but received: "

WRONG_TYPES = {
    "grid_float": (lambda: add(grid=1.5), GRID + r"type=float, value=1\.5\."),
    "grid_bool": (lambda: add(grid=True), GRID + r"type=bool, value=True\."),
    "grid_none": (lambda: add(grid=None), GRID + r"type=NoneType, value=None\."),
    "grid_dict": (lambda: add(grid={1: 2}), GRID + r"type=dict, value=\{1: 2\}\."),
    "grid_list_of_bools": (lambda: add(grid=[2, True]), GRID + r"type=list, value=\[2, True\]\."),
    "grid_of_floats": (lambda: add(grid=(1, 2.0)), GRID + r"type=tuple, value=\(1, 2\.0\)"),
    "grid_callable_result": (
        lambda: add(grid=lambda meta: True),
        GRID + r"type=bool, value=True from its callable",
    ),
    "grid_callable_string": (
        lambda: add(grid=lambda meta: "4"),
        GRID + r"type=str, value='4' from its callable",
    ),
    "grid_constexpr": (
        lambda: add(grid=tl.constexpr(2)),
        GRID + r"type=constexpr, value=.*2.*\. Use the Python int that is its `value`\.",
    ),
    "grid_of_constexprs": (
        lambda: add(grid=lambda meta: (tl.constexpr(2),)),
        GRID + r"type=tuple, value=\(.*2.*\) from its callable\. Use the Python int",
    ),
    "grid_divided": (lambda: add(grid=100 / 64), r"value=1\.5625\. Divide ints with // or"),
    "grid_array": (
        lambda: add(grid=(jnp.int32(2),)),
        GRID + r"type=tuple, value=\(int32\[\],\)\. Use Python ints, from shapes or static",
    ),
    "grid_traced": (
        lambda: jax.jit(lambda n: add(grid=(n,)))(2),
        r"`grid` must be known when the function is traced",
    ),
    "grid_missing": (lambda: without("grid"), r"grid"),
    "unknown_keyword": (
        lambda: add(BLOK=64),
        r"Kernel 'add_kernel' has no parameter `BLOK`.*Did you mean `BLOCK`",
    ),
    "option_as_keyword": (
        lambda: add(maxnreg=32),
        r"no parameter `maxnreg`.*compiler option: pass it in `backend_options`",
    ),
    "missing_constexpr": (
        lambda: without("BLOCK"),
        r"Kernel 'add_kernel' needs a value for its constexpr `BLOCK`: pass it as a keyword",
    ),
    "missing_operand": (
        lambda: without("n"),
        r"`out_type` has 1 output not aliased.*2 parameters not supplied \(out_ptr, n\)\. "
        r"A parameter without a value is an output: supply the parameters that are not outputs",
    ),
    "misspelt_operand": (
        lambda: add(X, y_prt=X),
        r"2 parameters not supplied \(y_ptr, out_ptr\).*no parameter `y_prt`.*`y_ptr`",
    ),
    "operand_twice": (lambda: add(X, X, x_ptr=X), r"got `x_ptr` both as a positional"),
    "too_many_operands": (
        lambda: add(X, X, X, 1, 2, 3),
        r"has 5 parameters .*and got 6 positional operands",
    ),
    "out_type_missing": (lambda: without("out_type"), r"Argument `out_type` is missing"),
    "out_type_too_many": (
        lambda: add(out_type=(OUT, OUT)),
        r"`out_type` has 2 outputs.*1 parameter not supplied \(out_ptr\)",
    ),
    "out_type_not_a_type": (
        lambda: add(out_type=3),
        r"Argument `out_type` must have `shape` and `dtype`; got 3 of type int",
    ),
    "out_type_complex": (
        lambda: add(out_type=jax.ShapeDtypeStruct((100,), jnp.complex64)),
        r"Argument `out_type` has dtype complex64, which Triton kernels do not support",
    ),
    "out_type_x64": (
        lambda: add(out_type=jax.ShapeDtypeStruct((100,), np.float64)),
        r"dtype float64, which JAX has disabled.*jax_enable_x64",
    ),
    "operand_complex": (
        lambda: add(X.astype(jnp.complex64), X),
        r"Argument `x_ptr` has dtype complex64, which Triton kernels do not support. Cast it to",
    ),
    "operand_int4": (
        lambda: add(np.zeros(100, ml_dtypes.int4), X),
        r"Argument `x_ptr` has dtype int4",
    ),
    "operand_key": (lambda: add(jax.random.key(0), X), r"Argument `x_ptr` has dtype key"),
    "operand_string": (
        lambda: add("x", X),
        r"Argument `x_ptr` of kernel 'add_kernel' must be an array.*got 'x' of type str",
    ),
    "operand_list": (
        lambda: add(list(range(1000)), X),
        r"`x_ptr`.*got \[0, 1, 2, 3, \.\.\.\] of type list. Make it an array with jnp.asarray",
    ),
    "operand_array_of_torch": (
        lambda: add(Foreign(), X),
        r"`x_ptr`.*got torch.float32\[100\] of type Foreign. .* with jax.dlpack.from_dlpack",
    ),
    "output_as_operand": (
        lambda: add(X, X, X),
        r"0 parameters not supplied. Triax makes the outputs and passes them to the "
        r"kernel: leave out the operands that the kernel writes to \(`out_ptr`\?\), and pass the "
        r"operands after them by name. To update an operand, alias an output to it",
    ),
    "output_as_keyword": (lambda: add(out_ptr=X), r"leave out .* \(`out_ptr`\?\)"),
    "alias_list": (
        lambda: add(input_output_aliases=[(0, 0)]),
        r"must be a mapping from operands.*such as \{0: 0\}; got \[\(0, 0\)\] of type list",
    ),
    "alias_key_tuple": (
        lambda: add(input_output_aliases={(0, 1): 0}),
        r"must name operands by parameter or by index; got \(0, 1\) of type tuple",
    ),
    "alias_key_float": (
        lambda: add(input_output_aliases={0.0: 0}),
        r"must name operands by parameter or by index; got 0\.0 of type float",
    ),
    "alias_to_a_tuple": (
        lambda: add(input_output_aliases={0: (0,)}),
        r"must map to the index of an output; got \(0,\) for operand 0",
    ),
    "alias_to_a_bool": (
        lambda: add(input_output_aliases={0: False}),
        r"must map to the index of an output; got False",
    ),
    "traced_constexpr": (
        lambda: jax.jit(lambda b: add(BLOCK=b))(64),
        r"Argument `BLOCK` must be known when the function is traced.*static_argnames",
    ),
    "array_constexpr": (
        lambda: add(BLOCK=jnp.int32(64)),
        r"Argument `BLOCK` must be known.*got int32\[\] of type jax.Array\. Pass a Python value",
    ),
    "large_array_constexpr": (
        lambda: add(BLOCK=(64, np.arange(1000))),
        r"`BLOCK\[1\]` must be known.*got int64\[1000\] of type ndarray\. Pass",
    ),
    "traced_option": (
        lambda: jax.jit(lambda n: add(num_warps=n))(4),
        r"`num_warps` must be known.*got traced int32\[\] of type jax.Array.*static_argnames",
    ),
    "misspelt_constexpr": (
        lambda: without("BLOCK", BLOK=8),
        r"constexpr `BLOCK`: pass it as a keyword. It has no parameter `BLOK`. Did you mean "
        r"`BLOCK`\? Its parameters are x_ptr, y_ptr, out_ptr, n, BLOCK\.",
    ),
    "misspelt_option": (lambda: add(num_wraps=4), r"`num_wraps`.*Did you mean `num_warps`"),
    "misspelt_argument": (
        lambda: add(zeroed_output=(0,)),
        r"no parameter `zeroed_output`.*Did you mean `zeroed_outputs`",
    ),
    "misspelt_out_type": (
        lambda: without("out_type", out_typ=OUT),
        r"`out_type` is missing.*There is no argument `out_typ`",
    ),
    "unhashable_constexpr": (
        lambda: add(BLOCK={"a": 1}),
        r"Argument `BLOCK` must be hashable.*got \{'a': 1\} of type dict",
    ),
    "kernel_not_jitted": (
        lambda: add(kernel=lambda x_ptr: None),
        r"Argument `kernel` must be a function decorated with @triton.jit.*type function. Decorate",
    ),
    "kernel_subscripted": (
        lambda: add(kernel=kernels.add_kernel[(2,)]),
        r"Argument `kernel` must be .*Pass the kernel without \[grid\], and give `grid` beside it",
    ),
    "kernel_array": (lambda: add(kernel=X), r"got float32\[100\] of type jax.Array\.$"),
    "kernel_none": (lambda: add(kernel=None), r"Argument `kernel`.*got None of type NoneType"),
    "zeroed_int": (
        lambda: add(zeroed_outputs=0),
        r"`zeroed_outputs` must be a sequence of output indices.*got 0 of type int",
    ),
    "zeroed_array": (
        lambda: add(zeroed_outputs=X[0]),
        r"`zeroed_outputs` must be a sequence of output indices.*got float32\[\] of type",
    ),
    "zeroed_callable_result": (
        lambda: add(zeroed_outputs=lambda meta: None),
        r"`zeroed_outputs` must be.*got None of type NoneType",
    ),
    "zeroed_bool": (
        lambda: add(zeroed_outputs=(False,)),
        r"`zeroed_outputs` must be.*got \(False,\)",
    ),
    "name": (lambda: add(name=3), r"`name` must be a string; got 3 of type int"),
    "serialized_metadata": (
        lambda: add(serialized_metadata="x"),
        r"Argument `serialized_metadata` must be bytes; got 'x' of type str",
    ),
    "backend_options": (
        lambda: add(backend_options=["maxnreg"]),
        r"Argument `backend_options` must be a mapping; got \['maxnreg'\] of type list",
    ),
    "cost_estimate": (
        lambda: add(cost_estimate=3),
        r"Argument `cost_estimate` must be a mapping; got 3 of type int",
    ),
    "optional_outputs": (
        lambda: optional_outputs((OUT, OUT)),
        r"`out_type` has 2 outputs.*1 parameter not supplied \(out_ptr\).*with a "
        r"default of None \(max_ptr, sum_ptr\) can take outputs too, but only all of them: pass",
    ),
    "cost_estimate_value": (
        lambda: add(cost_estimate={"flops": 1.5}),
        r"non-negative ints; got flops=1\.5",
    ),
    "ref_view": (
        lambda: jax.jit(lambda: add(jax.new_ref(X).at[:10], X))(),
        r"`x_ptr` of kernel 'add_kernel' is a view of a Ref. Pass the whole Ref",
    ),
}

WRONG_VALUES = {
    "implementation_array": (
        lambda: add(implementation=X),
        r"`implementation` must be one of None, 'triton'.*got float32\[100\]",
    ),
    "grid_four_dimensions": (
        lambda: add(grid=(1, 2, 3, 4)),
        r"`grid` must have one to three dimensions; got 4: \(1, 2, 3, 4\)",
    ),
    "grid_no_dimension": (lambda: add(grid=()), r"one to three dimensions; got 0"),
    "grid_negative": (lambda: add(grid=(-1,)), r"must not be negative; got \(-1,\)"),
    "grid_y_too_large": (
        lambda: add(grid=(1, 65536)),
        r"`grid` has 65536 programs along y, but CUDA allows 65535.*Put the long dimension first",
    ),
    "grid_z_too_large": (lambda: add(grid=(1, 1, 65536)), r"65536 programs along z"),
    "grid_x_too_large": (lambda: add(grid=2**31), r"along x, but CUDA allows 2147483647"),
    "operand_too_large": (lambda: add(n=2**64), r"Argument `n` must fit 64 bits"),
    "alias_no_such_operand": (
        lambda: add(input_output_aliases={7: 0}),
        r"names operand 7, but there are 3, scalars included \(x_ptr, y_ptr, n\)",
    ),
    "alias_no_such_name": (
        lambda: add(input_output_aliases={"y": 0}),
        r"names operand 'y', which was not given. Known: n, x_ptr, y_ptr",
    ),
    "alias_of_an_output": (
        lambda: add(input_output_aliases={"out_ptr": 0}),
        r"operand 'out_ptr', which was not given. Pass the array whose memory the output takes",
    ),
    "alias_scalar": (
        lambda: add(input_output_aliases={2: 0}),
        r"names operand 2, which is the scalar `n`",
    ),
    "alias_of_a_whole_tuple": (
        lambda: triax.triton_call(
            (X, X), kernel=pair_kernel, out_type=OUT, grid=1, input_output_aliases={"pair": 0}
        ),
        r"names operand 'pair', which is a tuple. Name one of its parts: pair\[0\], pair\[1\]",
    ),
    "alias_twice": (
        lambda: add(input_output_aliases={0: 0, "x_ptr": 0}),
        r"names operand `x_ptr` twice, by its name and by its index",
    ),
    "alias_no_such_output": (
        lambda: add(input_output_aliases={0: 1}),
        r"names output 1, but the call has 1 output\.",
    ),
    "alias_other_size": (
        lambda: add(X[:50], input_output_aliases={0: 0}),
        r"operand `x_ptr` \(float32\[50\]\) the buffer of output 0 \(float32\[100\]\)",
    ),
    "alias_other_dtype": (
        lambda: add(X.astype(jnp.int32), X, input_output_aliases={0: 0}),
        r"`x_ptr` \(int32\[100\]\).*\(float32\[100\]\); they must have the same shape and dtype",
    ),
    "alias_output_twice": (
        lambda: add(input_output_aliases={0: 0, 1: 0}),
        r"gives output 0 to two operands, `x_ptr` and `y_ptr`",
    ),
    "zeroed_no_such_output": (
        lambda: add(zeroed_outputs=(1,)),
        r"`zeroed_outputs` has index 1, but the call has 1 output\.",
    ),
    "unknown_option": (
        lambda: add(backend_options={"max_nreg": 3}),
        r"`backend_options` has 'max_nreg', which Triton.*Did you mean `maxnreg`",
    ),
    "option_twice": (
        lambda: add(num_warps=4, backend_options={"num_warps": 4}),
        r"Argument `num_warps` is also in `backend_options` \(4\); give it once",
    ),
    "implementation": (
        lambda: add(implementation="cuda"),
        r"`implementation` must be one of None, 'triton', 'interpret'; got 'cuda'",
    ),
    "vmap_method": (lambda: add(vmap_method="loop"), r"`vmap_method` must be one of"),
    "tuning": (lambda: add(tuning="fast"), r"`tuning` must be one of None, 'auto', 'cached'"),
    "compute_capability": (
        lambda: add(compute_capability="sm_90"),
        r"`compute_capability` must be an int such as 90.*got 'sm_90'",
    ),
    "cost_estimate_name": (
        lambda: add(cost_estimate={"time": 1}),
        r"must only have flops, .*; got 'time'",
    ),
    "ref_aliased": (
        lambda: jax.jit(lambda: add(jax.new_ref(X), X, input_output_aliases={0: 0}))(),
        r"names `x_ptr`, a Ref, which is updated in place anyway",
    ),
}

UNSUPPORTED = {
    "pre_hook": (
        lambda: add(kernel=hooked(pre_hook=lambda args: args["x_ptr"].cpu())),
        r"The `pre_hook` of config .*of kernel 'add_kernel' uses `x_ptr\.cpu`",
    ),
    "triton_on_cpu": (
        lambda: jax.jit(lambda: add(implementation="triton"))(),
        r"`implementation` is 'triton', and the program is lowered for the CPU",
    ),
}

MISTAKES = {
    name: (kind, *mistake)
    for kind, mistakes in (
        (TypeError, WRONG_TYPES),
        (ValueError, WRONG_VALUES),
        (NotImplementedError, UNSUPPORTED),
    )
    for name, mistake in mistakes.items()
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    kind, call, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message) as caught:
        call()
    if mistake != "grid_missing":  # Python's own message for a missing keyword says it well
        assert isinstance(caught.value, TriaxError)


@pytest.mark.parametrize(
    ("platform", "reason"),
    [("rocm", "ROCm, which Triax does not support"), ("tpu", "'tpu'; Triton kernels run on CUDA")],
)
def test_other_platforms_are_refused(platform, reason):
    traced = jax.jit(lambda: add()).trace()
    with pytest.raises(UnsupportedError, match=f"is lowered for {reason}"):
        traced.lower(lowering_platforms=(platform,))


@pytest.mark.cuda_plugin
def test_no_gpu_and_no_architecture(monkeypatch):
    monkeypatch.delenv("TRIAX_CUDA_ARCH")
    with pytest.raises(
        ArgumentValueError, match=r"Set TRIAX_CUDA_ARCH.*you can pass `compute_capability`"
    ):
        jax.jit(lambda: add()).trace().lower(lowering_platforms=("cuda",))
    monkeypatch.setattr("triax.devices.versions.cuda_plugin", lambda: None)
    plugin = rf"and run `pip install --no-deps jax-cuda13-plugin=={jax.__version__}`; for a kernel"
    with pytest.raises(ArgumentValueError, match=rf"Set TRIAX_CUDA_ARCH .* {plugin}"):
        jax.jit(lambda: add()).trace().lower(lowering_platforms=("cuda",))


@triton.jit
def _is_inside(offsets, n):
    return offsets < n


class TestScalarsComputedByJax:
    """They are arrays, and the kernel gets pointers."""

    @staticmethod
    def kernels():
        @triton.jit
        def compares_kernel(x_ptr, n, scale_ptr, out_ptr, BLOCK: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            mask = offsets < n
            tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)

        @triton.jit
        def compares_in_a_helper_kernel(x_ptr, n, scale_ptr, out_ptr, BLOCK: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            mask = _is_inside(offsets, n)
            tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)

        @triton.jit
        def loops_kernel(x_ptr, n, scale_ptr, out_ptr, BLOCK: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            for _ in range(n):
                offsets += 1
            tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))

        return compares_kernel, compares_in_a_helper_kernel, loops_kernel

    MESSAGE = r"(?s)gets a pointer for `n`, `scale_ptr`,.*pass a Python int or float, or.*tl\.load"

    @staticmethod
    def call(kernel):
        def f(x, n, scale):
            return triax.triton_call(
                x, n, scale, BLOCK=64, kernel=kernel, out_type=x, grid=1, compute_capability=90
            )

        return f, (X, jnp.int32(64), jnp.ones(1))

    @pytest.mark.cuda_plugin
    @pytest.mark.parametrize("index", range(3))
    def test_in_the_compiler(self, index):
        function, operands = self.call(self.kernels()[index])
        with pytest.raises(CompilationError, match=self.MESSAGE):
            cuda_call(function, *operands)

    @pytest.mark.parametrize("index", range(3))
    def test_in_the_interpreter(self, index):
        function, operands = self.call(self.kernels()[index])
        with pytest.raises(Exception, match="pointer") as caught:
            function(*operands)
        assert re.search(self.MESSAGE, "\n".join(caught.value.__notes__))

    @pytest.mark.cuda_plugin
    def test_other_errors_are_left_alone(self):
        @triton.jit
        def broken_kernel(x_ptr, n, scale_ptr, out_ptr, BLOCK: tl.constexpr):
            tl.store(out_ptr, tl.load(x_ptr) + no_such_name)  # noqa: F821

        function, operands = self.call(broken_kernel)
        message = r"(?s)'broken_kernel' does not compile.*no_such_name"
        with pytest.raises(CompilationError, match=message) as caught:
            cuda_call(function, *operands)
        assert "gets a pointer" not in str(caught.value)


@triton.jit
def increment_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1, mask=mask)


def test_a_number_that_is_left_out_takes_an_output():
    """So that their count is right."""
    with pytest.raises(Exception, match="pointer") as caught:
        triax.triton_call(X, kernel=increment_kernel, BLOCK=128, out_type=OUT, grid=1)
    assert "gives no value for `n`, so the kernel gets outputs there" in caught.value.__notes__[0]


def test_none_where_the_kernel_wants_an_array():
    with pytest.raises(AttributeError, match="NoneType") as caught:
        add(X, None)
    assert caught.value.__notes__[0].endswith("The kernel gets None for `y_ptr`.")


@pytest.mark.parametrize("tool", [triax.explain, triax.tune])
def test_tools_take_functions(tool):
    with pytest.raises(ArgumentTypeError, match=r"`function` must be a function; got float32\[100"):
        tool(X)


def test_unknown_keyword_is_fine_where_the_grid_reads_it():
    out = add(programs=2, grid=lambda meta: (meta["programs"],))
    testing.assert_same_bits(out, SUM)


def test_the_grid_s_dictionary_is_one_of_its_own():
    def grid(meta):
        assert isinstance(meta, dict)  # as Triton's
        blocks = 100 // meta.pop("BLOCK") + 1
        meta["BLOCK"] = 1
        return (blocks,)

    testing.assert_same_bits(add(grid=grid), SUM)


def test_out_type_takes_anything_with_shape_and_dtype():
    for out_type in (X, OUT, np.empty(100, np.float32)):
        testing.assert_same_bits(add(out_type=out_type), SUM)
    assert add(out_type={"a": [OUT]})["a"][0].shape == (100,)


def test_a_kernels_own_enable_fp_fusion_is_its_own(recwarn):
    @triton.jit
    def kernel(out_ptr, enable_fp_fusion: tl.constexpr):
        tl.store(out_ptr, enable_fp_fusion)

    output = jax.ShapeDtypeStruct((), np.int32)
    assert triax.triton_call(enable_fp_fusion=7, kernel=kernel, out_type=output, grid=1) == 7
    assert not recwarn


def test_positional_scalars_and_constexprs():
    out = triax.triton_call(
        X, Y, n=np.int64(100), BLOCK=np.int32(64), kernel=kernels.add_kernel, out_type=OUT, grid=2
    )
    testing.assert_same_bits(out, SUM)


def test_defaults_and_annotations():
    x = np.asarray(X) + 1  # without a zero: Triton before 3.7 negates it to 0.0

    def call(**keywords):
        return triax.triton_call(x, n=100, kernel=renamed_kernel, out_type=OUT, grid=2, **keywords)

    testing.assert_same_bits(call(), -x)
    testing.assert_same_bits(call(flag=False), x)
    testing.assert_same_bits(call(BLOCK=128), -x)


Pair = collections.namedtuple("Pair", "left right")


def named_tuples():
    @triton.jit
    def kernel(pair, out_ptr, n, SHAPE: tl.constexpr):
        offsets = tl.arange(0, SHAPE.left)
        total = tl.load(pair.left + offsets, mask=offsets < n) * pair.right.left
        tl.store(out_ptr + offsets, total + SHAPE.right[0], mask=offsets < n)

    def f(x):
        return triax.triton_call(
            Pair(x, Pair(3.0, None)),
            n=100,
            SHAPE=Pair(128, (7,)),
            kernel=kernel,
            out_type=OUT,
            grid=1,
            compute_capability=90,
        )

    return f


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_named_tuples_keep_their_names(wrap):
    testing.assert_same_bits(wrap(named_tuples())(X), 3 * np.asarray(X) + 7)


@pytest.mark.cuda_plugin
def test_named_tuples_keep_their_names_in_the_compiler():
    assert cuda_call(named_tuples(), X).kernel == "kernel"


def test_grid_as_a_list():
    for grid in ([2], [2, 1, 1], lambda meta: [triton.cdiv(meta["n"], meta["BLOCK"])]):
        testing.assert_same_bits(add(grid=grid), SUM)


def test_values_that_compare_equal_are_not_confused():
    """1 == 1.0 == True and 0.0 == -0.0 for Python; kernels compiled for them differ."""

    @triton.jit
    def fill_kernel(out_ptr, value):
        tl.store(out_ptr, value)

    def fill(value):
        out_type = jax.ShapeDtypeStruct((1,), jnp.float32)
        return triax.triton_call(value=value, kernel=fill_kernel, out_type=out_type, grid=1)[0]

    assert not np.signbit(jax.jit(lambda: fill(0.0))())
    assert np.signbit(jax.jit(lambda: fill(-0.0))())
    assert fill(1) == fill(1.0) == 1.0


def test_parameters_with_a_default_of_none_as_outputs():
    one = jax.ShapeDtypeStruct((), jnp.float32)
    x = np.asarray(X) + 1  # without a zero: Triton before 3.7 negates it to 0.0

    def call(out_type, **keywords):
        return triax.triton_call(x, kernel=reductions_kernel, out_type=out_type, grid=1, **keywords)

    testing.assert_same_bits(call(OUT), -x)
    out, largest, total = call((OUT, one, one))
    testing.assert_same_bits(out, -x)
    assert (largest, total) == (100, 5050)
    out, total = call((OUT, one), max_ptr=None)
    assert total == 5050
    out, largest = call((OUT, one), sum_ptr=None)
    assert largest == 100
    # An operand there is none of them; an alias of it takes no parameter.
    out, total, largest = call(
        (OUT, one, one), max_ptr=jnp.float32(3), input_output_aliases={"max_ptr": 2}
    )
    assert (largest, total) == (100, 5050)


class TestNamesThatAreTheKernels:
    """Parameters of a kernel that are named like arguments of `triton_call`."""

    @staticmethod
    def rows(*operands, **keywords):
        """Softmax with programs that take several rows each, pipelined over them."""

        @triton.jit
        def softmax_rows_kernel(
            out_ptr, x_ptr, stride, rows, columns, BLOCK: tl.constexpr, num_stages: tl.constexpr
        ):
            step = tl.num_programs(0)
            for row in tl.range(tl.program_id(0), rows, step, num_stages=num_stages):
                offsets = tl.arange(0, BLOCK)
                mask = offsets < columns
                x = tl.load(x_ptr + row * stride + offsets, mask=mask, other=float("-inf"))
                e = tl.exp(x - tl.max(x))
                tl.store(out_ptr + row * stride + offsets, e / tl.sum(e), mask=mask)

        x = np.random.default_rng(0).standard_normal((9, 50)).astype(np.float32)
        seen = []

        def grid(meta):
            seen.append({n: meta[n] for n in ("num_stages", "num_warps") if n in meta})
            return 4

        arguments = {"x_ptr": x, "stride": 50, "rows": 9, "columns": 50, "BLOCK": 64}
        kernel = keywords.pop("decorate", lambda kernel: kernel)(softmax_rows_kernel)
        run = keywords.pop("run", lambda function: function())
        out = run(
            lambda: triax.triton_call(kernel=kernel, out_type=x, grid=grid, **arguments, **keywords)
        )
        if out is not None:
            testing.assert_close(out, jax.nn.softmax(x), terms=50)
        return seen

    def test_an_option_reaches_kernel_and_compiler(self, monkeypatch):
        calls = []
        monkeypatch.setattr(
            candidates,
            "build",
            lambda request, build=candidates.build: calls.append(request) or build(request),
        )
        assert self.rows(num_stages=2, num_warps=8) == [{"num_stages": 2, "num_warps": 8}]
        assert calls[0].keywords["num_stages"] == calls[0].options["num_stages"] == 2
        assert "num_warps" not in calls[0].keywords

    def test_a_configs_option_reaches_the_kernel(self):
        def tuned(kernel):
            configs = [triton.Config({}, num_stages=n, num_warps=2) for n in (2, 3)]
            return triton.autotune(configs, key=[])(kernel)

        assert [seen["num_stages"] for seen in self.rows(decorate=tuned)] == [2, 3]
        assert [seen["num_stages"] for seen in self.rows(decorate=tuned, num_stages=3)] == [3]

    @pytest.mark.cuda_plugin
    def test_in_the_compiler(self):
        lowered = []

        def lower(function):
            lowered.append(cuda_call(function))

        self.rows(run=lower, num_stages=4, num_warps=8)
        assert [c.config for c in lowered] == [("BLOCK=64, num_stages=4, num_warps=8",)]

    def test_without_a_value_it_is_missing(self):
        with pytest.raises(ArgumentTypeError, match="needs a value for its constexpr `num_stages`"):
            self.rows()

    def test_other_arguments(self):
        """Also where the value is the default of the argument, or none that it could take."""

        @triton.jit
        def kernel(x_ptr, out_ptr, name, debug: tl.constexpr, tuning: tl.constexpr = 5):
            tl.static_assert(not debug)
            tl.store(out_ptr, tl.load(x_ptr) + name + tuning)

        def call(**keywords):
            return triax.triton_call(
                jnp.float32(1), kernel=kernel, out_type=jnp.float32(0), grid=1, **keywords
            )

        assert call(name=10, debug=False) == 16
        assert call(name=10, debug=False, tuning=0) == 11

    def test_given_in_place_and_by_name(self):
        @triton.jit
        def kernel(x_ptr, name, out_ptr):
            tl.store(out_ptr, tl.load(x_ptr) + name)

        with pytest.raises(ArgumentTypeError, match="got `name` both as a positional operand"):
            triax.triton_call(X, 3, name=3, kernel=kernel, out_type=OUT, grid=1)


def test_zeroed_outputs_as_a_callable():
    @triton.jit
    def half_kernel(out_ptr, BLOCK: tl.constexpr):
        tl.store(out_ptr + tl.arange(0, BLOCK), 1.0)

    out = triax.triton_call(
        BLOCK=32,
        kernel=half_kernel,
        out_type=OUT,
        grid=1,
        zeroed_outputs=lambda meta: (0,) if meta["BLOCK"] == 32 else (),
    )
    testing.assert_same_bits(out, (np.arange(100) < 32).astype(np.float32))


def test_config_filter_by_keyword_and_option(caplog):
    caplog.set_level("INFO", logger="triax")

    def blocks(**keywords):
        seen = []

        def grid(meta):
            seen.append((meta["BLOCK"], meta["num_warps"]))
            return (triton.cdiv(meta["n"], meta["BLOCK"]),)

        out = triax.triton_call(
            X, Y, n=100, kernel=kernels.autotuned_add_kernel, out_type=OUT, grid=grid, **keywords
        )
        testing.assert_same_bits(out, SUM)
        return seen

    assert blocks() == [(64, 1), (256, 2), (1024, 4)]
    assert caplog.messages == []
    assert blocks(BLOCK=256) == [(256, 2)]
    assert blocks(num_warps=4) == [(1024, 4)]
    assert "1 of its 3 configs agree" in caplog.text
    with pytest.raises(
        ArgumentValueError, match=r"No config of kernel 'add_kernel' agrees.*`BLOCK`=32"
    ):
        blocks(BLOCK=32)


@pytest.mark.parametrize(
    ("top_k", "left"), [(0.5, [256, 1024]), (0.74, [256, 1024]), (0.1, [256]), (1.0, None)]
)
def test_a_fraction_of_the_configs_that_perf_model_likes_best(top_k, left):
    times = {64: 3.0, 1024: 2.0, 512: 4.0, 256: 1.0}
    kernel = triton.autotune(
        [triton.Config({"BLOCK": block}) for block in times],
        key=["n"],
        prune_configs_by={"perf_model": lambda BLOCK, **_: times[BLOCK], "top_k": top_k},
    )(kernels.add_kernel)
    seen = []
    grid = lambda meta: seen.append(meta["BLOCK"]) or (2,)
    jax.make_jaxpr(lambda: triax.triton_call(X, X, n=100, kernel=kernel, out_type=OUT, grid=grid))()
    assert seen == (list(times) if left is None else left)


@pytest.mark.parametrize(
    "aliases", [{0: 1, 1: 0}, {"x_ptr": 1, "y_ptr": 0}, {0: 1, "y_ptr": 0}, {"y_ptr": 0, 0: 1}]
)
def test_aliases_by_index_and_by_name(aliases):
    total, other = jax.jit(
        lambda x, y: triax.triton_call(
            *(x, y),
            n=100,
            BLOCK=64,
            kernel=kernels.accumulate_kernel,
            out_type=(OUT, OUT),
            input_output_aliases=aliases,
            grid=2,
        )
    )(X, X + 1)
    testing.assert_same_bits(total, X + X + 1)
    testing.assert_same_bits(other, X)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
def test_an_empty_grid_hands_on_the_operand_that_is_aliased(jit):
    fresh, *others = jit(
        lambda x, y: triax.triton_call(
            x_ptr=x,
            y_ptr=y,
            n=100,
            BLOCK=64,
            kernel=kernels.add_kernel,
            out_type=(OUT, OUT, OUT),
            input_output_aliases={"x_ptr": 1, "y_ptr": 2},
            grid=0,
        )
    )(X, X + 1)
    testing.assert_same_bits(fresh, np.zeros_like(X))
    testing.assert_same_bits(others, [X, X + 1])


def test_heuristics_outside_and_inside_autotune():
    order = []

    def outer(args):
        order.append(("outer", "BLOCK" in dict(args)))
        return 7

    def inner(args):
        order.append(("inner", args["BLOCK"]))
        return args["BLOCK"] * 2

    @triton.jit
    def kernel(x_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
        tl.store(out_ptr, tl.load(x_ptr) + A + B)

    configs = [triton.Config({"BLOCK": b}) for b in (16, 32)]
    wrapped = triton.heuristics({"A": outer})(
        triton.autotune(configs, key=[])(triton.heuristics({"B": inner})(kernel))
    )
    out = triax.triton_call(
        jnp.zeros(1), kernel=wrapped, out_type=jax.ShapeDtypeStruct((1,), jnp.float32), grid=1
    )
    assert out[0] == 7 + 32
    assert order == [("outer", False), ("inner", 16), ("inner", 32)]


def test_the_users_kernel_is_not_modified():
    kernel = kernels.autotuned_add_kernel
    before = {k: v for k, v in vars(kernel).items() if k != "configs"}, list(kernel.configs)
    triax.triton_call(
        X, X, n=100, kernel=kernel, out_type=OUT, grid=lambda m: (triton.cdiv(m["n"], m["BLOCK"]),)
    )
    assert (
        {k: v for k, v in vars(kernel).items() if k != "configs"},
        list(kernel.configs),
    ) == before


def test_strides_from_shape():
    assert triax.strides_from_shape((2, 3, 4)) == (12, 4, 1)
    assert triax.strides_from_shape((5, 0, 4)) == (0, 4, 1)
    assert triax.strides_from_shape(()) == ()
