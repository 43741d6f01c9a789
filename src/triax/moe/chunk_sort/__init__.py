"""Chunks of rows into another order."""
