"""RMSNorm for JAX, as a Triton kernel."""

from triax_example_norms.rms_norm import rms_norm as rms_norm

__all__ = ["rms_norm"]
