"""The whole layer as one function, composed of the package's ops without kernels of its own."""
