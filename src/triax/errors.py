"""The exceptions Triax raises.

Each derives from `TriaxError` and from the built-in type a caller would expect, so ``except
TypeError`` and ``except triax.TriaxError`` both work. A message names the argument in backticks,
then says which value it got and what to do.
"""

from __future__ import annotations


class TriaxError(Exception):
    """Base class of every exception that Triax raises on purpose."""


class ArgumentTypeError(TriaxError, TypeError):
    """An argument has the wrong type."""


class ArgumentValueError(TriaxError, ValueError):
    """An argument has the right type but a value that is not allowed."""


class MissingName(ArgumentValueError, KeyError):
    """A grid, heuristic or hook reads a name that is not among its meta-parameters."""

    __str__ = Exception.__str__  # a KeyError shows the `repr` of its message


class CheckpointError(TriaxError, ValueError):
    """A file or a tensor of a checkpoint is missing, damaged, or not in a known format."""


class SettingError(TriaxError, ValueError):
    """An environment variable or setting has a value that is not allowed."""


class UnsupportedError(TriaxError, NotImplementedError):
    """A valid request that Triax does not support."""


class DifferentiationError(UnsupportedError):
    """A Triton kernel without a derivative was differentiated."""


class VersionError(TriaxError, RuntimeError):
    """An installed package is too old, too new, or does not match another."""


class MissingDependencyError(TriaxError, ImportError):
    """A required package is not installed, or does not work."""


class CompilationError(TriaxError, RuntimeError):
    """Triton could not compile a kernel, or any of its configs."""


class CompilationTimeout(CompilationError):
    """Compiling a kernel took too long. The kernel itself may be fine."""


class TuningError(TriaxError, RuntimeError):
    """No config could be chosen under the tuning mode in force."""


class OutOfBounds(TriaxError, IndexError):
    """A kernel touched memory outside its operands (interpreter only)."""


class DataRace(TriaxError, RuntimeError):
    """A kernel's result depends on the order its programs run in (checked runs only)."""


class UninitializedRead(TriaxError, ValueError):
    """A kernel read an element of an output before it was written (checked runs only)."""


class ReadOnlyOperand(TriaxError, ValueError):
    """A kernel writes to an operand that no output is aliased to."""
