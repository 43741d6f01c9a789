"""libdevice in the interpreter against libdevice on a GPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax

pytestmark = pytest.mark.gpu

# Name and inputs' range: functions whose errors libdevice documents as a few units in the last
# place of float32.
UNARY = [
    *[(name, 0.05, 4.0) for name in ("rsqrt", "log1p", "log2", "cbrt", "rcbrt", "tgamma", "y0")],
    *[(name, -0.95, 0.95) for name in ("asin", "acos", "atanh", "erfinv", "expm1", "sinpi")],
    *[(name, -3.0, 3.0) for name in ("tanh", "erf", "erfc", "erfcx", "exp10", "cospi", "normcdf")],
    *[(name, -9.0, 9.0) for name in ("rint", "round", "llround", "float2int_rz", "logb", "ilogb")],
    *[(name, -9.0, 9.0) for name in ("signbit", "float_as_int", "saturatef", "cyl_bessel_i0")],
]
EXACT = ("rint", "round", "llround", "float2int_rz", "logb", "ilogb", "signbit", "float_as_int")
BINARY = ["pow", "atan2", "hypot", "fmod", "remainder", "fdim", "copysign", "nextafter", "rhypot"]
INTEGER = ["clz", "popc", "ffs", "brev"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """One kernel for each function: a kernel's source must stand in a file."""
    lines = ["import triton", "import triton.language as tl"]
    lines += ["from triton.language.extra import libdevice", ""]
    names = [name for name, _, _ in UNARY] + INTEGER
    for name in names:
        lines += ["@triton.jit", f"def {name}_kernel(x_ptr, y_ptr, o_ptr, BLOCK: tl.constexpr):"]
        lines += ["    at = tl.arange(0, BLOCK)"]
        lines += [f"    tl.store(o_ptr + at, libdevice.{name}(tl.load(x_ptr + at)))", ""]
    for name in BINARY:
        lines += ["@triton.jit", f"def {name}_kernel(x_ptr, y_ptr, o_ptr, BLOCK: tl.constexpr):"]
        lines += ["    at = tl.arange(0, BLOCK)"]
        lines += ["    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)"]
        lines += [f"    tl.store(o_ptr + at, libdevice.{name}(x, y))", ""]
    path = tmp_path_factory.mktemp("libdevice") / "libdevice_kernels.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("libdevice_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(kernels, name, x, y, dtype):
    results = []
    for implementation in ("triton", "interpret"):

        @jax.jit
        def call(x, y, implementation=implementation):
            return triax.triton_call(
                x,
                y,
                kernel=getattr(kernels, f"{name}_kernel"),
                grid=1,
                out_type=jax.ShapeDtypeStruct(x.shape, dtype),
                BLOCK=x.size,
                implementation=implementation,
            )

        results.append(np.asarray(call(jnp.asarray(x), jnp.asarray(y))))
    return results


@pytest.mark.parametrize(("name", "low", "high"), UNARY)
def test_functions_of_one_float(kernels, name, low, high):
    x = np.linspace(low, high, 512, dtype=np.float32)
    gpu, cpu = both(kernels, name, x, x, np.int32 if name in EXACT else np.float32)
    if name in EXACT:
        np.testing.assert_array_equal(gpu, cpu)
    else:
        np.testing.assert_allclose(gpu, cpu, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_floats(kernels, name):
    rng = np.random.default_rng(3)
    x, y = rng.uniform(0.1, 9, (2, 512)).astype(np.float32)
    gpu, cpu = both(kernels, name, x, y, np.float32)
    np.testing.assert_allclose(gpu, cpu, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", INTEGER)
def test_functions_of_one_integer(kernels, name):
    x = np.random.default_rng(4).integers(-(2**31), 2**31, 512).astype(np.int32)
    x[:4] = [0, 1, -1, -(2**31)]
    gpu, cpu = both(kernels, name, x, x, np.int32)
    np.testing.assert_array_equal(gpu, cpu)
