"""Multiplies rows by the weights of their groups."""
