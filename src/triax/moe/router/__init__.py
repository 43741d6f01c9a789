"""Chooses the experts of every token, and their weights."""
