"""Computes the gradient of weights from 8-bit rows and gradients."""
