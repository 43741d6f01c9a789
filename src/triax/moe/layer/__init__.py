"""The whole MoE layer as one function, composed of the package's ops, without own kernels."""
