"""What functions that run before there are arrays may ask of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton

import triax
from tests import kernels
from tests.cases import blockwise
from triax.binding.stand_in import Array

X = np.zeros((48, 64), np.float16)


def fits(configs, named_args, **kwargs):
    """As in the matmuls of xformers and bitsandbytes: what fits into shared memory."""
    # Triton names what was positional and hands on keywords; `n` is one or the other.
    assert named_args["n"] == kwargs["n"] == X.size
    assert named_args["x_ptr"].dtype == kwargs["x_ptr"].dtype == jnp.float16
    limit = named_args["out_ptr"].element_size() * 256
    return [c for c in configs if c.kwargs["BLOCK"] * kwargs["y_ptr"].element_size() <= limit]


def model(x_ptr, n, BLOCK, num_warps, **_):
    """As in `estimate_matmul_time`."""
    return x_ptr.element_size() * x_ptr.numel() / BLOCK


def run(x=X, **options):
    configs = [triton.Config({"BLOCK": block}) for block in (64, 256, 1024)]
    kernel = triton.autotune(configs, key=[], **options)(kernels.add_kernel)
    found = []
    grid = lambda meta: found.append(meta["BLOCK"]) or triton.cdiv(meta["n"], meta["BLOCK"])
    jax.make_jaxpr(lambda x: blockwise(kernel, x, x, grid=grid))(x)
    return found


def test_pruning():
    assert run(prune_configs_by={"early_config_prune": fits, "top_k": 1}) == [64, 256]
    assert run(prune_configs_by={"perf_model": model, "top_k": 1}) == [1024]
    both = {"early_config_prune": fits, "perf_model": model, "top_k": 1}
    assert run(prune_configs_by=both) == [256]


def test_heuristics_and_grids():
    seen = []

    def block(args):
        seen.append(args["x_ptr"].stride(0))
        return 16 * args["out_ptr"].element_size()

    kernel = triton.heuristics({"BLOCK": block})(kernels.add_kernel)
    grid = lambda meta: triton.cdiv(meta["y_ptr"].numel(), meta["BLOCK"])
    call = jax.jit(lambda x: triax.triton_call(x, x, n=100, kernel=kernel, out_type=x, grid=grid))
    np.testing.assert_array_equal(call(np.ones(100, np.float32)), 2)
    assert seen == [1]


def test_what_is_known():
    array = Array((48, 64), np.dtype(np.float16))
    assert isinstance(array, jax.ShapeDtypeStruct)
    assert array == jax.ShapeDtypeStruct((48, 64), jnp.float16)
    assert (array.size, array.ndim, array.dim(), array.numel()) == (3072, 2, 2, 3072)
    assert (array.itemsize, array.element_size(), array.nbytes) == (2, 2, 6144)
    assert (array.stride(), array.stride(dim=0), array.stride(-1)) == ((64, 1), 64, 1)
    assert array.is_contiguous()
    assert jax.eval_shape(lambda x: x.sum(0), array).shape == (64,)


@pytest.mark.parametrize("name", ["data_ptr", "device"])
def test_what_is_not(name):
    prune = lambda configs, named_args, **_: getattr(named_args["x_ptr"], name)
    with pytest.raises(AttributeError, match=f"'{name}' of an array is not known .* aligned to 16"):
        run(prune_configs_by={"early_config_prune": prune})


def test_libraries_that_probe():
    assert not hasattr(Array((2,), np.dtype(np.int8)), "__array__")
