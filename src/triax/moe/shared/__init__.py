"""Code shared by several ops."""
