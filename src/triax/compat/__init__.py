"""Everything that depends on a version of JAX, jaxlib or Triton, or on their private names.

`versions` holds the table of version gates; `jax_private` and `triton_private` what Triax takes
from the insides of JAX and Triton, `triton_interpreter` the same for Triton's interpreter; `wire`
reads jaxlib's bytes back. `triton_prepared` is what is replaced in Triton while it compiles,
`replaced` the list of all replacements, and `exclusion` keeps compiling and interpreting apart.
No other file names a private symbol or a version.
"""
