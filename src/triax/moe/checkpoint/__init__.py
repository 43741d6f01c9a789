"""Reads the experts of a model's layer from a folder of safetensors files."""
