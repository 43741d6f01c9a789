"""What a tuned config's key says of the kernel's source and of its arrays."""

import jax
import numpy as np
import triton

from tests.cases import blockwise
from tests.kernels import copy_kernel
from tests.tuning.conftest import DEVICE
from triax.binding.launch import ArrayType
from triax.binding.sources import fingerprint
from triax.tuning.key import _text, make_key

X = np.zeros(100, np.float32)


def key_of(kernel, out_type=X, **how):
    configs = [triton.Config({"BLOCK": block}, num_warps=2) for block in (64, 128)]
    tuned = triton.autotune(configs, key=[])(kernel)
    (equation,) = jax.make_jaxpr(lambda x: blockwise(tuned, x, out_type=out_type, **how))(X).eqns
    operands = tuple(ArrayType.of(value.aval) for value in equation.invars)
    call = equation.params["call"]
    return make_key(call, call.launches(operands, (ArrayType.of(out_type),)), 90, DEVICE)


def test_it_has_the_dtypes_of_outputs_too():
    found = key_of(copy_kernel, X.astype(np.float16)).dtypes
    assert found == {"x_ptr.0": "float32", "out_ptr.0": "float16"}


def test_it_has_the_fingerprint_of_the_source():
    """Which `tests/binding/test_sources.py` tests."""
    assert key_of(copy_kernel).source == fingerprint(copy_kernel)


def test_an_argument_is_what_it_does_and_not_where_it_is():
    assert _text(None, copy_kernel) == fingerprint(copy_kernel)
    assert _text(None, (copy_kernel, 3)) == f"({fingerprint(copy_kernel)}, 3)"
    here = object()
    assert f"{id(here):x}" in repr(here)
    assert _text(None, here) == "<object object>"


def test_it_has_the_options_of_the_caller_beside_those_of_configs():
    key = key_of(copy_kernel, backend_options={"enable_fp_fusion": False})
    assert key.options == {"enable_fp_fusion": "False"}
    assert all("num_warps=2" in of for of in key.candidates)


def test_memory_that_an_output_shares_counts_once():
    own = key_of(copy_kernel, out_ptr=np.zeros_like(X), input_output_aliases={"out_ptr": 0})
    assert own.moved_bytes == key_of(copy_kernel).moved_bytes == 2 * X.nbytes
