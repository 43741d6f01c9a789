"""Tokens to the rows of their experts, and back."""
