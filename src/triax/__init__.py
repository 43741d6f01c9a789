"""Triax calls Triton kernels from JAX, and routes MoE tokens with them.

The names below are the whole public surface; `triax.moe` holds the MoE ops and
`triax.testing` helpers for the tests of your kernels.
"""

from triax import moe as moe
from triax.bridge.call import triton_call as triton_call
from triax.bridge.descriptor import TensorDescriptor as TensorDescriptor
from triax.bridge.descriptor import strides_from_shape as strides_from_shape
from triax.bridge.errors import TriaxError as TriaxError
from triax.bridge.export import export_checks as export_checks
from triax.bridge.lowering import triton_call_lowering as triton_call_lowering
from triax.bridge.settings import tuning as tuning
from triax.tools.explain import explain as explain
from triax.tools.tune import tune as tune
from triax.version import __version__ as __version__

__all__ = [
    "TensorDescriptor",
    "TriaxError",
    "__version__",
    "explain",
    "export_checks",
    "moe",
    "strides_from_shape",
    "triton_call",
    "triton_call_lowering",
    "tune",
    "tuning",
]
