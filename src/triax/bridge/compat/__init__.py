"""Everything that depends on a version of JAX, jaxlib or Triton, or on their private names.

`versions` holds the table of version gates, `jax_private` and `triton_private`
what Triax takes from JAX's and Triton's insides, `triton_interpreter` the same
for Triton's interpreter. No other file names a private symbol or a version.
"""
