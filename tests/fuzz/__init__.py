"""Fuzzes the MoE ops: random routings, values and options, judged element by element in float64."""
