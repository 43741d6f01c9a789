"""The primitive under JAX's transformations, on the CPU and on eight virtual devices."""

import concurrent.futures
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import triax
from tests import kernels
from tests.cases import accumulate_by_alias, blockwise, cuda_calls, gather, vector_add
from tests.primitives import sum_and_accumulate
from triax import testing
from triax.compiling import compiler
from triax.errors import (
    ArgumentValueError,
    DifferentiationError,
    OutOfBounds,
    UnsupportedError,
)

X = np.arange(300, dtype=np.float32)
Y = 2 * X + 1  # another, so that neither is taken for the other


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("d",))


def shard_map(function, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def accumulate(x, y, **changes):
    """Adds `x` to a Ref."""
    arguments = {"n": 300, "BLOCK": 64, "kernel": kernels.accumulate_kernel, "grid": 5}
    return triax.triton_call(x, y, out_type=(), **{**arguments, **changes})


class TestEagerly:
    def test_results_stay_on_their_device(self):
        device = jax.devices()[3]
        out = vector_add(jax.device_put(X, device), jax.device_put(X, device))
        assert out.devices() == {device}
        assert out.committed
        assert vector_add(jax.device_put(X, jax.devices()[0]), X).committed

    def test_numpy_operands(self):
        testing.assert_same_bits(vector_add(X, Y), X + Y)

    def test_sharded_operands(self, mesh):
        x = jax.device_put(np.arange(320, dtype=np.float32), NamedSharding(mesh, P("d")))
        testing.assert_same_bits(vector_add(x, 2 * x), 3 * np.asarray(x))

    def test_under_disable_jit(self, mesh):
        with jax.disable_jit():
            testing.assert_same_bits(vector_add(X, Y), X + Y)
            ref = jax.new_ref(jnp.asarray(Y))
            accumulate(X, ref)
            testing.assert_same_bits(ref[...], X + Y)
            x = jax.device_put(np.arange(320, dtype=np.float32), NamedSharding(mesh, P("d")))
            testing.assert_same_bits(vector_add(x, 2 * x), 3 * np.asarray(x))

    def test_new_lambdas_do_not_compile_again(self):
        """The grid is evaluated when a call is bound, so a fresh callable is no fresh program."""
        before = compiler.compile_count()
        for _ in range(3):
            vector_add(X, X)
        assert compiler.compile_count() == before


class TestMemoryErrors:
    @staticmethod
    def overrun(x, **options):
        @triton.jit
        def overrun_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))

        out_type = jax.ShapeDtypeStruct((512,), jnp.float32)
        return triax.triton_call(
            x, BLOCK=512, kernel=overrun_kernel, out_type=out_type, grid=1, **options
        )

    def test_without_operands(self):
        @triton.jit
        def fill_kernel(out_ptr, SIZE: tl.constexpr):
            tl.store(out_ptr + tl.arange(0, SIZE), 1)

        def fill(size):
            out_type = jax.ShapeDtypeStruct((16,), jnp.float32)
            return triax.triton_call(SIZE=size, kernel=fill_kernel, out_type=out_type, grid=1)

        with pytest.raises(OutOfBounds, match=r"fill_kernel.*out_ptr"):
            fill(32)
        with jax.default_device(jax.devices()[3]):
            out = fill(16)
        testing.assert_same_bits(out, np.ones(16, np.float32))
        assert out.devices() == {jax.devices()[3]}

    def test_everything_works_after_an_error(self):
        with pytest.raises(OutOfBounds):
            self.overrun(X)
        testing.assert_same_bits(jax.jit(vector_add)(X, Y), X + Y)


class TestRefs:
    def test_in_scan(self):
        def f(x):
            ref = jax.new_ref(jnp.zeros_like(x))

            def step(carry, _):
                accumulate(x, ref)
                return carry, None

            jax.lax.scan(step, 0, None, length=4)
            return ref[...]

        testing.assert_same_bits(jax.jit(f)(X), 4 * X)

    def test_as_argument_of_jit(self):
        ref = jax.new_ref(jnp.asarray(Y))

        @jax.jit
        def f(ref):
            accumulate(X, ref)

        f(ref)
        testing.assert_same_bits(ref[...], X + Y)

    def test_in_fori_loop_eagerly(self):
        """Outside of `jit` too the body is traced, and the Ref is one from outside of it."""
        ref = jax.new_ref(jnp.zeros_like(X))

        def body(_, carry):
            accumulate(X, ref)
            return carry

        jax.lax.fori_loop(0, 3, body, 0)
        testing.assert_same_bits(ref[...], 3 * X)

    def test_errors_arrive_as_they_are_when_run_eagerly(self):
        with pytest.raises(OutOfBounds, match=r"accumulate_kernel.*y_ptr"):
            accumulate(X, jax.new_ref(jnp.zeros(10)))

    @pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
    def test_vmap(self, method):
        def f(x):
            ref = jax.new_ref(2 * x)
            accumulate(x, ref, vmap_method=method)
            return ref[...]

        xs = np.stack([X, X + 1])
        testing.assert_same_bits(jax.jit(jax.vmap(f))(xs), 3 * xs)

    def test_vmap_over_a_ref_from_outside(self):
        ref = jax.new_ref(jnp.stack([X, Y]))
        jax.vmap(functools.partial(accumulate, vmap_method="sequential"))(np.stack([X, X + 3]), ref)
        testing.assert_same_bits(ref[...], np.stack([2 * X, X + 3 + Y]))

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_given_twice(self, wrap):
        """Of two values written back to one Ref the later would win, and an update be lost."""
        ref = jax.new_ref(jnp.asarray(X))
        message = r"`y_ptr` of kernel 'accumulate_kernel' is the same Ref as `x_ptr`.*`ref\[...\]`"
        with pytest.raises(ArgumentValueError, match=message):
            wrap(lambda: accumulate(ref, ref))()
        wrap(lambda: accumulate(ref[...], ref))()
        testing.assert_same_bits(ref[...], 2 * X)

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_two_in_one_call(self, wrap):
        """Each gets back what the kernel left in it."""

        @triton.jit
        def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
            tl.store(x_ptr + offsets, y)
            tl.store(y_ptr + offsets, x + y)

        def both(x, y):
            refs = jax.new_ref(x), jax.new_ref(y)
            triax.triton_call(*refs, BLOCK=256, kernel=kernel, out_type=(), grid=1)
            return refs[0][...], refs[1][...]

        x, y = jnp.asarray(X[:256]), jnp.asarray(Y[:256])
        first, second = wrap(both)(x, y)
        testing.assert_same_bits(first, y)
        testing.assert_same_bits(second, x + y)

    def test_inside_a_tuple_and_beside_aliases(self):
        @triton.jit
        def kernel(pair, y_ptr, BLOCK: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            tl.store(pair[0] + offsets, tl.load(pair[0] + offsets) + tl.load(pair[1] + offsets))
            tl.store(y_ptr + offsets, 7.0)

        def f(x, y):
            ref = jax.new_ref(2 * x)
            out = triax.triton_call(
                (ref, x),
                y,
                BLOCK=256,
                kernel=kernel,
                out_type=y,
                grid=1,
                input_output_aliases={"y_ptr": 0},
            )
            return ref[...], out

        x, y = X[:256], Y[:256]
        total, out = jax.jit(f)(x, y)
        testing.assert_same_bits(total, 3 * x)
        testing.assert_same_bits(out, np.full_like(y, 7))

    def test_grid_without_programs_leaves_it_alone(self):
        ref = jax.new_ref(jnp.asarray(X))
        accumulate(X, ref, grid=0)
        testing.assert_same_bits(ref[...], X)

    def test_in_shard_map(self, mesh):
        def local(x):
            ref = jax.new_ref(2 * x)
            accumulate(x, ref, n=40)
            return ref[...]

        x = np.arange(320, dtype=np.float32)
        testing.assert_same_bits(shard_map(local, mesh, P("d"), P("d"))(x), 3 * x)


class TestVmap:
    @pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
    def test_sequential_equals_the_loop(self, method, axes):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((9, 5)).astype(np.float32)
        index = rng.permutation(9).astype(np.int32)
        xs = x if axes[0] is None else np.stack([x, x + 1, -x], axis=axes[0])
        indices = index if axes[1] is None else np.stack([index, index[::-1], index])

        def f(x, index):
            return triax.triton_call(
                x,
                index,
                n_cols=5,
                BLOCK=16,
                kernel=kernels.gather_kernel,
                out_type=x,
                grid=9,
                vmap_method=method,
            )

        actual = jax.jit(jax.vmap(f, in_axes=axes))(xs, indices)
        expected = np.stack(
            [
                (x if axes[0] is None else np.take(xs, i, axes[0]))[
                    index if axes[1] is None else indices[i]
                ]
                for i in range(3)
            ]
        )
        testing.assert_same_bits(actual, expected)

    def test_nested(self):
        xs = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)

        def f(x):
            return blockwise(kernels.copy_kernel, x, BLOCK=8, vmap_method="sequential")

        testing.assert_same_bits(jax.vmap(jax.vmap(f))(xs), xs)

    @pytest.mark.parametrize("method", ["expand_dims", "broadcast_all", "sequential"])
    @pytest.mark.parametrize("axes", [(1, None), (None, 1), (1, 1)])
    def test_aliased_operands(self, method, axes):
        """The batch's elements do not update one buffer: each has its own."""

        @triton.jit
        def add_rows_kernel(
            x_ptr, y_ptr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr
        ):
            offsets = tl.arange(0, BLOCK)
            for row in range(ROWS):
                y = y_ptr + row * BLOCK + offsets
                tl.store(y, tl.load(x_ptr + row * STEP + offsets) + tl.load(y))

        def f(x, y):
            return triax.triton_call(
                x,
                y,
                BLOCK=16,
                ROWS=1 if method == "sequential" else 3,
                STEP=0 if method == "expand_dims" and axes[0] is None else 16,
                kernel=add_rows_kernel,
                out_type=y,
                grid=1,
                input_output_aliases={"y_ptr": 0},
                vmap_method=method,
            )

        rows = np.arange(48, dtype=np.float32).reshape(3, 16)
        given = [
            factor * (rows[1] if axis is None else rows)
            for factor, axis in zip((1, 3), axes, strict=True)
        ]
        actual = jax.jit(jax.vmap(f, in_axes=axes))(*(array.T for array in given))
        expected = sum(given)
        testing.assert_same_bits(actual, np.broadcast_to(expected, (3, 16)))

    def test_without_a_method(self):
        with pytest.raises(ArgumentValueError, match=r"Pass `vmap_method` to triton_call: one of"):
            jax.vmap(vector_add)(np.stack([X, X]), np.stack([X, X]))


class TestDifferentiation:
    def test_error_points_to_custom_vjp(self):
        with pytest.raises(DifferentiationError, match=r"jax\.custom_vjp.*stop_gradient"):
            jax.grad(lambda x: vector_add(x, x).sum())(X)

    def test_stop_gradient_on_inputs(self):
        def loss(x):
            return (vector_add(jax.lax.stop_gradient(x), X) * x).sum()

        testing.assert_same_bits(jax.grad(loss)(X), 2 * X)

    def test_custom_vjp_and_remat(self):
        @jax.custom_vjp
        def double(x):
            return vector_add(x, x)

        double.defvjp(lambda x: (double(x), None), lambda _, g: (vector_add(g, g),))
        loss = jax.checkpoint(lambda x: jnp.sum(double(double(x))))
        testing.assert_same_bits(jax.jit(jax.grad(loss))(X), np.full_like(X, 4))


class TestControlFlow:
    def test_scan_while_cond(self):
        def f(x):
            x, _ = jax.lax.scan(lambda c, _: (vector_add(c, X), None), x, None, length=3)
            x = jax.lax.while_loop(lambda c: c[1] < 1500, lambda c: vector_add(c, c), x)
            return jax.lax.cond(x[0] == 0, lambda c: vector_add(c, X), lambda c: c, x)

        expected = X * 4
        while not expected[1] >= 1500:
            expected = expected * 2
        testing.assert_same_bits(jax.jit(f)(X), expected + X)

    def test_unused_calls_vanish_unless_they_have_effects(self):
        def program(effect):
            def f(x):
                blockwise(kernels.copy_kernel, x, BLOCK=64, has_side_effect=effect)
                return x

            return jax.jit(f).trace(X).lower(lowering_platforms=("cpu",)).as_text()

        assert "custom_call" not in program(False)
        assert "custom_call" in program(True)

    def test_donation_changes_nothing(self):
        for donate in ((), (1,)):
            out = jax.jit(accumulate_by_alias, donate_argnums=donate)(X, jnp.asarray(Y))
            testing.assert_same_bits(out, X + Y)


class TestSharding:
    def test_shard_map_keeps_varying_axes(self, mesh):
        x = np.arange(320, dtype=np.float32)
        actual = shard_map(vector_add, mesh, (P("d"), P("d")), P("d"))(x, 2 * x)
        testing.assert_same_bits(actual, 3 * x)
        with pytest.raises(Exception, match=r"(?s)out_specs|replicat|varying"):
            shard_map(vector_add, mesh, (P("d"), P("d")), P())(x, x)

    def test_operands_that_vary_differently(self, mesh):
        x, y = np.arange(320, dtype=np.float32), np.arange(40, dtype=np.float32)
        actual = shard_map(vector_add, mesh, (P("d"), P()), P("d"))(x, y)
        testing.assert_same_bits(actual, x + np.tile(y, 8))

    def test_plain_jit_over_sharded_operands(self, mesh):
        x = jax.device_put(np.arange(320, dtype=np.float32), NamedSharding(mesh, P("d")))
        testing.assert_same_bits(jax.jit(vector_add)(x, 2 * x), 3 * np.asarray(x))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_pmap(self):
        x = np.arange(320, dtype=np.float32).reshape(8, 40)
        testing.assert_same_bits(jax.pmap(vector_add)(x, 2 * x), 3 * x)

    @pytest.mark.cuda_plugin
    def test_eight_devices_with_collectives_while_another_thread_compiles(self, mesh):
        """Callbacks of eight devices and a compiler share a lock; none waits on JAX with it."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8 * 4, 33)).astype(np.float32)
        index = np.tile(rng.permutation(4), 8).astype(np.int32)

        def local(x, index):
            rows = gather(x, index)
            return jax.lax.psum(gather(jax.lax.psum(rows, "d"), index), "d")

        function = shard_map(local, mesh, (P("d"), P("d")), P())
        rows = x.reshape(8, 4, 33)[:, index[:4]]
        expected = 8 * rows.sum(0, dtype=np.float64)[index[:4]]
        stop = threading.Event()

        def compile_forever():
            for block in itertools.cycle((16, 32, 64, 128, 256)):
                if stop.is_set():
                    return
                compiler.clear_cache()
                assert len(cuda_calls(functools.partial(_copy, block), X)) == 1

        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiling = pool.submit(compile_forever)
            try:
                for _ in range(5):
                    testing.assert_close(function(x, index), expected, terms=8)
            finally:
                stop.set()
            compiling.result(60)


def _copy(block, x):
    return blockwise(kernels.copy_kernel, x, BLOCK=block)


@pytest.mark.cuda_plugin
class TestExport:
    def test_cuda(self):
        exported = jax.export.export(
            jax.jit(vector_add), platforms=["cuda"], disabled_checks=triax.export_checks()
        )(X, X)
        assert "triton_kernel_call" in exported.mlir_module()

    def test_cpu_too_exports_and_says_why_it_cannot_run(self):
        exported = jax.export.export(
            jax.jit(vector_add), platforms=["cuda", "cpu"], disabled_checks=triax.export_checks()
        )(X, X)
        with pytest.raises(Exception, match="triax_interpreted_kernel_cannot_be_exported_for_cpu"):
            exported.call(X, X)

    @pytest.mark.parametrize(
        ("platforms", "expected"),
        [
            (["rocm"], "lowered for ROCm, which Triax does not support"),
            (["tpu"], "lowered for 'tpu'; Triton kernels run on CUDA GPUs"),
            (["rocm", "tpu"], "lowered for ROCm"),
            (["cpu"], "exported for 'cpu' to run in Triton's interpreter"),
            (["cpu", "tpu"], "lowered for 'tpu'|exported for 'cpu'"),
        ],
    )
    def test_where_it_could_never_run_is_refused(self, platforms, expected):
        export = jax.export.export(
            jax.jit(vector_add), platforms=platforms, disabled_checks=triax.export_checks()
        )
        with pytest.raises(UnsupportedError, match=f"Kernel 'add_kernel' is .*({expected})"):
            export(X, X)

    @pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
    def test_a_callback_for_the_interpreter_is_refused(self, platforms):
        interpreted = functools.partial(blockwise, BLOCK=128, implementation="interpret")
        function = jax.jit(lambda x, y: interpreted(kernels.add_kernel, x, y))
        export = jax.export.export(
            function, platforms=platforms, disabled_checks=triax.export_checks()
        )
        with pytest.raises(UnsupportedError, match="interpreter, which is not part of an exported"):
            export(X, X)

    @pytest.mark.parametrize("through", ["operands", "out_type", "a rule"])
    def test_symbolic_sizes_are_refused(self, through):
        def function(x):
            if through == "a rule":
                return sum_and_accumulate(x, x)
            known = jax.ShapeDtypeStruct((4,), np.float32)
            out_type = known if through == "operands" else x
            return triax.triton_call(
                x, n=4, BLOCK=64, kernel=kernels.copy_kernel, out_type=out_type, grid=1
            )

        (size,) = jax.export.symbolic_shape("size")
        x = jax.ShapeDtypeStruct((size,), np.float32)
        export = jax.export.export(
            jax.jit(function), platforms=["cuda"], disabled_checks=triax.export_checks()
        )
        with pytest.raises(UnsupportedError, match=r"concrete sizes; got the .*\[size\]"):
            export(x)

    @pytest.mark.parametrize("platforms", [["cuda", "cpu", "tpu"], ["cpu", "tpu", "rocm"], ["tpu"]])
    def test_an_op_with_an_xla_path_exports_for_all_platforms(self, platforms):
        """Exporting lowers the CUDA branch for the other platforms too, where it never runs."""
        x = np.arange(12, dtype=np.float32).reshape(6, 2)
        sizes, order = np.array([2, 4], np.int32), np.array([1, 0], np.int32)
        exported = jax.export.export(
            jax.jit(lambda x: triax.moe.sort_chunks_by_index(x, sizes, order).rows),
            platforms=platforms,
            disabled_checks=triax.export_checks(),
        )(x)
        if "cpu" not in platforms:
            return
        testing.assert_same_bits(exported.call(x), np.concatenate([x[2:], x[:2]]))

    def test_without_the_checks_jax_refuses(self):
        with pytest.raises(ValueError, match="triton_kernel_call"):
            jax.export.export(jax.jit(vector_add), platforms=["cuda"])(X, X)
