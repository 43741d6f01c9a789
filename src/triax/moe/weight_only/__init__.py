"""Multiplies few 16-bit rows by 8- or 4-bit weights, where reading the weights dominates."""
