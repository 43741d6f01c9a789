"""Everything that depends on a version of JAX, jaxlib or Triton, or on their private names.

`versions` is the table of version gates. `jax_private`, `triton_private` and `triton_interpreter`
hold what Triax uses of the insides of JAX, of Triton's compiler and of its interpreter. While Triax
compiles or interprets, some of Triton's functions are patched: `triton_patches` says which,
`patching` undoes it, and `triton_lock` keeps the two apart. `triton_proto` reads jaxlib's bytes.
`workarounds` lists the comments that mark what is only there for a fault in another project.
"""
