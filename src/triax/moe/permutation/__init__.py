"""Moves tokens to the rows of their experts, and back."""
