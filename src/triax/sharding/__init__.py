"""Cuts functions that call kernels over devices: `triax.sharded`, and the MoE ops."""
