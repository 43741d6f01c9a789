"""How functions that call kernels are cut over devices: `triax.sharded`, and the MoE ops."""
