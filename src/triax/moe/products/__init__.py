"""Multiplies rows by the weights of their groups, and sums the gradients of these weights."""
