"""`triax bench`: how fast the MoE ops are, against the memory they run on and against others."""
