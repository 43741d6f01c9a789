"""Reorders chunks of rows."""
