"""Kernels under Triton's sanitizers: when they are compiled anew, and what jaxlib is told."""

import functools
import types

import jax
import numpy as np
import pytest
import triton

import triax
from tests import descriptors, kernels
from tests.cases import blockwise, cuda_call
from triax import settings, testing
from triax.compat import jax_private, triton_private, versions
from triax.errors import (
    ArgumentValueError,
    CompilationError,
    TuningError,
    UnsupportedError,
)

X = np.zeros((35, 48), np.float32)
has_sanitizers = pytest.mark.skipif(
    not versions.SANITIZERS.passes(triton.__version__), reason="this Triton has no sanitizers"
)
copy = functools.partial(blockwise, kernels.copy_kernel, BLOCK=256)
from_device = functools.partial(descriptors.call, "device")


@pytest.fixture
def told(monkeypatch):
    """What jaxlib is told of a kernel's pointers."""
    module, values = jax_private.gpu_triton(), []

    def note(name):
        create = getattr(module, name)
        noted = lambda *args: (values.append(args), create(*args))[1]
        monkeypatch.setattr(module, name, noted)

    note("create_array_parameter")
    note("create_scalar_parameter")
    return values


@has_sanitizers
@pytest.mark.cuda_plugin
class TestScratch:
    def test_is_zeroed_and_behind_a_null_pointer(self, told):
        with testing.sanitized("consan"):
            call = cuda_call(lambda x: copy(x), X)
        x, scratch = call.results
        assert x == "tensor<35x48xf32>"
        *arguments, null, (nbytes, _) = told
        assert arguments == [(0, 16), (0, 16), (X.size, "i32")]
        assert null == (0, "i64")
        assert scratch == f"tensor<{nbytes}xui8>"
        assert nbytes % 7 == 0  # there are 7 programs

    def test_follows_that_of_descriptors(self, told):
        with testing.sanitized("consan"):
            call = cuda_call(lambda x: from_device(x), X)
        *_, of_descriptors, (nbytes, _) = told
        assert of_descriptors == (0, 128)
        sizes = "35x48xf32", "1536xui8", f"{nbytes}xui8"
        assert call.results == tuple(f"tensor<{size}>" for size in sizes)
        assert nbytes % 6 == 0

    def test_a_profilers_is_refused(self, monkeypatch):
        """Which is there while Triton's profiler instruments kernels."""
        compile_ = triton_private.compile_to_ptx

        def profiled(*args):
            fields = vars(compile_(*args)) | {"profile_scratch_bytes": 64}
            return types.SimpleNamespace(**fields)

        monkeypatch.setattr(triton_private, "compile_to_ptx", profiled)
        with pytest.raises(CompilationError, match="compiled for Triton's profiler"):
            cuda_call(functools.partial(copy, BLOCK=128), X)


@has_sanitizers
@pytest.mark.cuda_plugin
def test_a_function_traced_outside_is_sanitized_inside():
    function = jax.jit(lambda x: copy(x))

    def text():
        return function.trace(X).lower(lowering_platforms=("cuda",)).as_text()

    plain = text()
    texts = {None: plain}
    for sanitizer in ("fpsan", "consan"):
        with testing.sanitized(sanitizer):
            texts[sanitizer] = text()
        assert f"instrumentation_mode={sanitizer}" in texts[sanitizer]
    assert "instrumentation_mode" not in plain
    assert text() == plain


@has_sanitizers
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("mode", ["auto", "strict", "runtime"])
def test_the_first_config_is_used(mode):
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = triton.autotune(configs, key=[])(kernels.copy_kernel)
    call = functools.partial(blockwise, kernel, tuning=mode)
    with testing.sanitized("fpsan"):
        assert cuda_call(lambda x: call(x), X).grid == ((27, 1, 1),)


@has_sanitizers
def test_kernels_that_are_interpreted_are_refused():
    with testing.sanitized("consan"):
        with pytest.raises(UnsupportedError, match=r"sanitized\('consan'\).*Use `triax.testing.ch"):
            copy(X)
        with pytest.raises(jax.errors.JaxRuntimeError, match="which is for kernels on a GPU"):
            jax.block_until_ready(jax.jit(copy)(X))
    testing.assert_same_bits(copy(X), X)


@has_sanitizers
def test_nothing_is_tuned():
    with testing.sanitized("consan"), pytest.raises(TuningError, match="call it outside of `triax"):
        triax.tune(copy, X)


@has_sanitizers
def test_another_thread_has_it_too():
    with testing.sanitized("fpsan"):
        context = settings.captured()
    assert settings.sanitizer.value is None
    with context():
        assert (settings.sanitizer.value, settings.mode_in_force()) == ("fpsan", "off")


def test_the_compilers_option_is_no_way_around():
    options = {"instrumentation_mode": "consan"}
    if "instrumentation_mode" not in triton_private.option_names():
        pytest.skip("this Triton has no such option")
    with pytest.raises(UnsupportedError, match=r"Use triax\.testing\.sanitized"):
        copy(X, backend_options=options)
    testing.assert_same_bits(
        copy(X, backend_options={"instrumentation_mode": ""}), X
    )  # the default


@has_sanitizers
@pytest.mark.parametrize("name", ["gsan", "ConSan", "", None])
def test_other_names_are_refused(name):
    with pytest.raises(ArgumentValueError, match="`sanitizer` must be one of"):
        testing.sanitized(name).__enter__()


def test_an_older_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    with pytest.raises(UnsupportedError, match=r"sanitized` needs Triton 3\.9\.0 or later"):
        testing.sanitized("fpsan").__enter__()
    assert settings.sanitizer.value is None
