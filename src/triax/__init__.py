"""Triax calls Triton kernels from JAX, and routes MoE tokens with them.

The names below are the whole public surface: `triax.moe` has the MoE ops, `triax.errors` the
exceptions, and `triax.testing` helpers for testing your kernels.
"""

# ruff: noqa: E402  # the imports below fail obscurely on an older JAX
from triax.compat import versions as _versions

_versions.check_jax(_versions.installed("jax"))

from triax import errors as errors
from triax import moe as moe
from triax import testing as testing
from triax.benchmark import Benchmark as Benchmark
from triax.benchmark import benchmark as benchmark
from triax.binding.descriptor import TensorDescriptor as TensorDescriptor
from triax.binding.descriptor import strides_from_shape as strides_from_shape
from triax.call import triton_call as triton_call
from triax.compat.versions import __version__ as __version__
from triax.emitting.emit import export_checks as export_checks
from triax.errors import TriaxError as TriaxError
from triax.lowering import triton_call_lowering as triton_call_lowering
from triax.settings import same_bits as same_bits
from triax.settings import tuning_mode as tuning_mode
from triax.sharding.api import sharded as sharded
from triax.tools.explain import Explanation as Explanation
from triax.tools.explain import explain as explain
from triax.tools.tune import tune as tune
from triax.tuning.recording import Records as Records
from triax.tuning.recording import record as record

__all__ = [
    "Benchmark",
    "Explanation",
    "Records",
    "TensorDescriptor",
    "TriaxError",
    "__version__",
    "benchmark",
    "errors",
    "explain",
    "export_checks",
    "moe",
    "record",
    "same_bits",
    "sharded",
    "strides_from_shape",
    "testing",
    "triton_call",
    "triton_call_lowering",
    "tune",
    "tuning_mode",
]


def __dir__() -> list[str]:
    """The public names, and not the packages that they come from."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
