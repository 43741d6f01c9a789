"""Everything that depends on a version of JAX, jaxlib or Triton, or on their private names.

`versions` is the table of version gates. `jax_private`, `triton_private` and `triton_interpreter`
wrap the internals of JAX, of Triton's compiler and of its interpreter. While Triax compiles or
interprets, some of Triton's functions are patched: `triton_patches` has the patches for compiling,
`patching` makes and undoes patches, and `triton_lock` keeps compiling and interpreting apart.
`triton_proto` decodes jaxlib's Triton calls.
"""
