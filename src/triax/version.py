"""The version of Triax."""

__version__ = "0.1.0"
