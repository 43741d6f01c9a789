"""Rows times the weights of their group."""
