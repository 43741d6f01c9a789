"""The order in which buffers are passed, and what jaxlib is told of them."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.extend.mlir import ir

import triax
from tests import descriptors, kernels
from tests.cases import (
    autotuned_accumulate,
    blockwise,
    cuda_call,
    cuda_calls,
    outputs_first,
    vector_add,
)
from triax import testing
from triax.binding.launch import Alias, ArrayType, Operand, Result, Scalar
from triax.binding.values import Static
from triax.compat import jax_private, versions
from triax.emitting.custom_call import _saved_buffers, cost_estimate, order_buffers, scratch_bytes
from triax.emitting.reading import triton_calls
from triax.errors import CompilationError, UnsupportedError, VersionError

A = ArrayType((4,), np.dtype(np.float32))


def launch(leaves, aliases=(), results=0):
    """As much of a Launch as the order of buffers depends on."""
    named = [("", leaf) for leaf in leaves]
    return types.SimpleNamespace(named_leaves=named, aliases=aliases, results=(A,) * results)


I, O, S = Operand, Result, Scalar(Static(3))  # noqa: E741


@pytest.mark.parametrize(
    ("leaves", "aliases", "results", "expected"),
    [
        ([I(0), I(1), S, O(0)], (), 1, ((I(0), I(1)), (0,), ())),
        # Keywords may bind operands in another order than they were flattened in.
        ([I(1), S, I(0), O(1), O(0)], (), 2, ((I(1), I(0)), (1, 0), ())),
        # An aliased output has no parameter; it must not take the place of one that has.
        ([I(0), I(1), O(1)], (Alias(1, 0),), 2, ((I(0), I(1)), (1, 0), ((1, 1),))),
        # Outputs before operands go in as uninitialised operands.
        ([O(0), I(0), O(1)], (), 2, ((O(0), I(0)), (1, 0), ((0, 1),))),
        ([O(0), I(0), O(1), I(1)], (), 2, ((O(0), I(0), O(1), I(1)), (0, 1), ((0, 0), (2, 1)))),
        ([O(0)], (), 1, ((), (0,), ())),
        # triton_call_lowering: the aliased output keeps a parameter of its own.
        ([I(0), I(1), O(0), O(1)], (Alias(1, 1),), 2, ((I(0), I(1)), (0, 1), ((1, 1),))),
    ],
)
def test_order(leaves, aliases, results, expected):
    order = order_buffers(launch(leaves, aliases, results))
    assert (order.operands, order.results, order.aliases) == expected


def test_what_is_saved_while_configs_are_timed_has_its_own_size():
    """Of operands that are passed in another order than they were flattened in."""
    crossed = launch([I(1), I(2), I(0)], (Alias(0, 1), Alias(1, 0)), 2)
    crossed.operands = tuple(ArrayType((size,), np.dtype(np.float32)) for size in (3, 5, 7))
    saved = _saved_buffers(crossed, order_buffers(crossed))
    assert sorted(saved) == [(0, 3 + 0, 4 * 5), (2, 3 + 1, 4 * 3)]


@pytest.mark.parametrize(
    ("leaves", "aliases", "results", "expected"),
    [
        # Right behind the outputs that are parameters, before those that are not.
        ([I(0), S, O(0)], (), 1, (0, None)),
        ([I(0), I(1), O(1)], (Alias(1, 0),), 2, (1, None, 0)),
        ([O(0), I(0)], (), 1, (None, 0)),
        ([I(0)], (Alias(0, 0),), 1, (None, 0)),
    ],
)
def test_order_with_scratch(leaves, aliases, results, expected):
    order = order_buffers(launch(leaves, aliases, results), scratches=1)
    assert order.results == expected
    plain = order_buffers(launch(leaves, aliases, results))
    assert order.operands == plain.operands
    assert [(i, order.results[o]) for i, o in order.aliases] == [
        (i, plain.results[o]) for i, o in plain.aliases
    ]


@triton.jit
def mixed_kernel(first_ptr, x_ptr, y_ptr, last_ptr, n, BLOCK: tl.constexpr):
    """first = x + y; last = x - y; y += 1"""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(first_ptr + offsets, x + y, mask=mask)
    tl.store(last_ptr + offsets, x - y, mask=mask)
    tl.store(y_ptr + offsets, y + 1, mask=mask)


def mixed(x, y):
    """The aliased output stands between the two others in out_type."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triax.triton_call(
        y_ptr=y,
        x_ptr=x,
        n=x.size,
        BLOCK=64,
        kernel=mixed_kernel,
        out_type=(like, like, like),
        input_output_aliases={"y_ptr": 1},
        grid=1,
    )


def check_mixed():
    x, y = np.arange(50, dtype=np.float32), np.arange(50, dtype=np.float32) ** 2
    first, updated, last = jax.jit(mixed)(x, y)
    testing.assert_same_bits(first, x + y)
    testing.assert_same_bits(last, x - y)
    testing.assert_same_bits(updated, y + 1)


def test_outputs_aliases_and_keywords_in_any_order():
    check_mixed()


@pytest.mark.cuda_plugin
def test_operands_have_their_own_types_in_any_order():
    wide = jax.ShapeDtypeStruct((50,), jnp.float32)
    narrow = jax.ShapeDtypeStruct((5, 10), jnp.float16)

    def f(y, x):
        how = {"n": 50, "BLOCK": 64, "kernel": mixed_kernel, "grid": 1}
        results = {"out_type": (wide, narrow, wide), "input_output_aliases": {"y_ptr": 1}}
        return triax.triton_call(y_ptr=y, x_ptr=x, **how, **results)

    call = cuda_call(f, np.zeros((5, 10), np.float16), np.zeros(50, np.float32))
    assert call.operands == ("tensor<50xf32>", "tensor<50xf32>", "tensor<5x10xf16>")
    assert call.results == ("tensor<50xf32>", "tensor<50xf32>", "tensor<5x10xf16>")


@pytest.mark.cuda_plugin
class TestScratch:
    """Descriptors that are made in the kernel need memory, which XLA gives."""

    X = np.zeros((35, 48), np.float32)

    def test_is_one_more_result(self):
        call = cuda_call(functools.partial(descriptors.call, "device"), self.X)
        # Two descriptors of 128 bytes in each of 3 x 2 programs.
        assert call.results == ("tensor<35x48xf32>", "tensor<1536xui8>")
        assert call.operands == ("tensor<35x48xf32>",)
        assert call.aliases == ()
        assert len(call.zeroed_bytes[0]) == 3

    def test_is_aligned_as_the_kernel_wants_it(self, monkeypatch):
        module, told = jax_private.gpu_triton(), []
        create = module.create_array_parameter
        noted = lambda *values: (told.append(values), create(*values))[1]
        monkeypatch.setattr(module, "create_array_parameter", noted)
        cuda_call(functools.partial(descriptors.call, "device"), self.X)
        assert told == [(0, 16), (0, 16), (0, 128)]

    @pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
    def test_under_vmap(self, method):
        function = functools.partial(descriptors.call, "device", vmap_method=method)
        for call in cuda_calls(jax.vmap(function), np.stack([self.X] * 2)):
            assert call.results == ("tensor<35x48xf32>", "tensor<1536xui8>")

    def test_counts_the_blocks_of_a_cluster(self):
        call = cuda_call(functools.partial(descriptors.call, "device", num_ctas=2), self.X)
        assert call.results[1] == "tensor<3072xui8>"

    def test_the_largest_of_several_configs(self):
        if not versions.RUNTIME_AUTOTUNING.passes(versions.gated_version()):
            pytest.skip("configs are not handed to XLA on this jaxlib")
        configs = [triton.Config({"BM": bm, "BN": 16}) for bm in (16, 8, 32)]
        kernel = triton.autotune(configs, key=[])(descriptors.device_kernel)

        def call(x):
            return triax.triton_call(
                x,
                m=35,
                n=48,
                kernel=kernel,
                out_type=x,
                grid=lambda meta: (triton.cdiv(35, meta["BM"]), triton.cdiv(48, meta["BN"])),
                tuning="runtime",
            )

        found = cuda_call(call, self.X)
        assert found.grid == ((3, 3, 1), (5, 3, 1), (2, 3, 1))
        assert found.results == ("tensor<35x48xf32>", f"tensor<{5 * 3 * 256}xui8>")

    def test_as_much_as_there_can_be(self):
        most = types.SimpleNamespace(
            num_ctas=2, global_scratch_bytes=1 << 9, sanitizer_scratch_bytes=1 << 9
        )
        of = lambda grid: types.SimpleNamespace(
            name="a kernel", candidate=types.SimpleNamespace(grid=grid)
        )
        assert scratch_bytes(of((1 << 10, 1 << 10, 1 << 9)), most) == (1 << 39, 1 << 39)
        with pytest.raises(CompilationError, match=r"needs 1024 bytes .* for each of 1075838976"):
            scratch_bytes(of((1 << 10, 1 << 10, (1 << 9) + 1)), most)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("kind", "fill", "tf32", "element"), [("host", 0, True, 11), ("host_nan", 1, False, 7)]
)
def test_what_jaxlib_is_told_of_a_descriptor(kind, fill, tf32, element, monkeypatch):
    """With a stand-in for the function that only some jaxlibs have."""
    module, told = jax_private.gpu_triton(), []

    def create(**fields):
        told.append(fields)
        return module.create_array_parameter(0, 16)

    monkeypatch.setattr(module, "create_tma_descriptor_parameter", create, raising=False)
    if tf32 and not versions.TF32_DESCRIPTORS.passes(triton.__version__):
        pytest.skip("this Triton does not round to tf32")
    create_scalar, scalars = module.create_scalar_parameter, []
    noted = lambda *values: (scalars.append(values), create_scalar(*values))[1]
    monkeypatch.setattr(module, "create_scalar_parameter", noted)
    call = functools.partial(descriptors.call, kind, tf32=tf32)
    cuda_call(call, np.zeros((35, 44), np.float32))
    assert scalars == [(35, "i32"), (44, "i32"), (44, "i64"), (1, "i64"), (64, "i32")]
    (fields,) = told
    assert fields == {
        "elem_type": element,  # of CUtensorMapDataType
        "swizzle": 3,
        "shape": (35, 44),
        "strides": (44, 1),
        "block_shape": (16, 32),
        "oob_fill": fill,
    }


@triton.jit
def mixed_scalars_kernel(x_ptr, out_ptr, n, none, one, scale, flag, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), x * n + scale + flag)


@pytest.mark.cuda_plugin
def test_what_jaxlib_is_told_of_parameters(monkeypatch):
    """In the kernel's order, without those that are compiled in."""
    module, told = jax_private.gpu_triton(), []

    def note(name):
        create = getattr(module, name)

        def noted(*values):
            told.append((name.split("_")[1], *values))
            return create(*values)

        monkeypatch.setattr(module, name, noted)

    note("create_scalar_parameter")
    note("create_array_parameter")
    x = np.zeros(64, np.float32)
    given = {"n": 7, "none": None, "one": 1, "scale": 0.5, "flag": True, "BLOCK": 64}
    zeroed = {"out_type": x, "zeroed_outputs": (0,), "grid": 1}
    cuda_call(lambda x: triax.triton_call(x, kernel=mixed_scalars_kernel, **given, **zeroed), x)
    scalars = ("scalar", 7, "i32"), ("scalar", 0.5, "fp32"), ("scalar", True, "i1")
    assert told == [("array", 0, 16), ("array", 256, 16), *scalars]
    told.clear()
    unaligned = triton.jit(do_not_specialize=["x_ptr"])(mixed_scalars_kernel.fn)
    cuda_call(lambda x: triax.triton_call(x, kernel=unaligned, **given, **zeroed), x)
    assert told == [("array", 0, 0), ("array", 256, 16), *scalars]


@pytest.mark.cuda_plugin
def test_zeroed_bytes_and_aliases_are_of_the_right_arrays():
    like = jax.ShapeDtypeStruct((50,), jnp.float32)

    def f(x, y):
        return triax.triton_call(
            y_ptr=y,
            x_ptr=x,
            n=50,
            BLOCK=64,
            kernel=mixed_kernel,
            out_type=(like, like, like),
            input_output_aliases={"y_ptr": 1},
            zeroed_outputs=(1, 2),
            grid=1,
        )

    x = np.zeros(50, np.float32)
    call = cuda_call(f, x, x)
    assert call.zeroed_bytes[0] == (0, 0, 200, 200)
    assert call.aliases == ((0, 1), (2, 2))  # results are last, first, updated


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(%0, %arg0, %1)", "(%0, %arg0, %arg1)"),
        ("return %3, %4, %5", "return %3, %2#2, %5"),
        # A barrier over several arrays, which XLA looks through.
        (
            "%4 = stablehlo.optimization_barrier %2#2 : tensor<50xf32>",
            "%4, %6 = stablehlo.optimization_barrier %2#2, %3 : tensor<50xf32>, tensor<50xf32>",
        ),
        ("%1 = stablehlo.optimization_barrier %arg1", "%1 = stablehlo.negate %arg1"),
    ],
    ids=["an aliased argument", "a result", "several arrays", "another operation"],
)
def test_a_call_without_a_fence_is_told(old, new):
    x = np.zeros(50, np.float32)
    lowered = jax.jit(mixed).trace(x, x).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    text = str(module)
    assert text.count(old) == 1

    def is_fenced(text):
        parsed = ir.Module.parse(text, context=module.context)
        (call,) = triton_calls(types.SimpleNamespace(compiler_ir=lambda dialect: parsed))
        return call.fenced

    assert is_fenced(text)
    assert not is_fenced(text.replace(old, new))


@pytest.mark.cuda_plugin
def test_what_people_read_of_a_call():
    """A key, only where there was a choice; the configs and their grids."""
    x = np.zeros(301, np.float32)
    one = jax.jit(vector_add).trace(x, x).lower(lowering_platforms=("cuda",))
    assert "triax.key" not in one.as_text()
    assert 'triax.grid = "3x1x1"' in one.as_text()
    assert cuda_call(vector_add, x, x).key == ""
    assert cuda_call(autotuned_accumulate, x, x).key.startswith("accumulate_kernel")


@pytest.mark.cuda_plugin
def test_two_configs_are_enough_to_choose_from(monkeypatch):
    passes = versions.Gate.passes
    gate = versions.RUNTIME_AUTOTUNING
    monkeypatch.setattr(versions.Gate, "passes", lambda of, v: of is gate or passes(of, v))
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = triton.autotune(configs, key=[])(kernels.copy_kernel)
    x = np.zeros(301, np.float32)
    call = cuda_call(functools.partial(blockwise, kernel, tuning="runtime"), x)
    assert call.grid == ((5, 1, 1), (3, 1, 1))
    assert call.target == versions.LEGACY_TARGET  # which alone tunes
    assert [config.partition(",")[0] for config in call.config] == ["BLOCK=64", "BLOCK=128"]


@pytest.mark.cuda_plugin
def test_buffers_that_nobody_writes_to_first_are_made_as_jax_makes_them():
    x = np.zeros(301, np.float32)
    lowered = jax.jit(outputs_first).trace(x, x).lower(lowering_platforms=("cuda",))
    lines = [line for line in lowered.as_text().splitlines() if "@AllocateBuffer" in line]
    assert len(lines) == 2
    assert all(line.endswith('{backend_config = ""} : () -> tensor<301xf32>') for line in lines)


@pytest.mark.cuda_plugin
def test_a_gpu_without_tma_takes_no_descriptors(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    with pytest.raises((UnsupportedError, VersionError), match="takes a host TMA descriptor"):
        cuda_call(functools.partial(descriptors.call, "host"), np.zeros((35, 44), np.float32))


@pytest.mark.parametrize(
    ("target", "version", "handed"),
    [
        (versions.NEW_TARGET, "0.10.1", None),
        (versions.NEW_TARGET, "0.11.0", '{"flops": 7}'),
        (versions.LEGACY_TARGET, "0.11.0", None),
    ],
)
def test_a_cost_is_handed_to_what_takes_one(target, version, handed):
    call = types.SimpleNamespace(display_name="a kernel", cost_estimate=(("flops", Static(7)),))
    assert cost_estimate(call, versions.CallTarget(target, 4), version) == handed


@pytest.mark.cuda_plugin
def test_a_cost_is_handed_on_only_where_there_is_one(monkeypatch):
    x = np.zeros(301, np.float32)

    def text(**how):
        function = functools.partial(blockwise, kernels.copy_kernel, BLOCK=64, **how)
        return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    assert "cost_estimate_json" not in text()
    handed = versions.COST_ESTIMATE.passes(versions.gated_version())
    assert ("cost_estimate_json" in text(cost_estimate={"flops": 7})) == handed
    assert "has_side_effect = true" in text(has_side_effect=True)
    assert "has_side_effect = true" not in text()


@pytest.mark.cuda_plugin
def test_the_text_of_a_call_is_short():
    x = np.zeros(301, np.float32)
    text = repr(cuda_call(vector_add, x, x))
    assert "opaque" not in text
    assert "ptx=" not in text
    assert "kernel='add_kernel'" in text
