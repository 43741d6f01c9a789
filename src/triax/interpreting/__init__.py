"""Runs kernels on the CPU with Triton's interpreter, and checks every access they make.

`run` takes a `Launch` and NumPy arrays and returns NumPy arrays. `memory` holds the
arrays and knows what a kernel may touch; `builder` carries out the operations of
Triton's IR, `reductions` reductions and scans; `rewriting` turns jitted functions into
Python functions, `syntax` rewrites their source, and the new source calls `inside`.
Neither torch nor TRITON_INTERPRET is involved.
"""
