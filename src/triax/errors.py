"""The exceptions Triax raises.

Every one derives from `TriaxError` and from the built-in type a caller would
expect, so ``except TypeError`` and ``except triax.TriaxError`` both work. A
message names the argument in backticks, what it was, and what to do about it.
"""

from __future__ import annotations


class TriaxError(Exception):
    """Base class of every exception that Triax raises on purpose."""


class ArgumentTypeError(TriaxError, TypeError):
    """An argument has the wrong type."""


class ArgumentValueError(TriaxError, ValueError):
    """An argument has the right type and an impossible value."""


class SettingError(TriaxError, ValueError):
    """An environment variable or setting has a value it cannot have."""


class UnsupportedError(TriaxError, NotImplementedError):
    """A request that is well formed and that Triax cannot carry out."""


class DifferentiationError(UnsupportedError):
    """A Triton kernel was differentiated without a rule of its own."""


class VersionError(TriaxError, RuntimeError):
    """An installed package is too old, too new, or does not match another."""


class MissingDependencyError(TriaxError, ImportError):
    """A package that the request needs is not installed or not usable."""


class CompilationError(TriaxError, RuntimeError):
    """Triton could not compile a kernel, or none of its configs."""


class CompilationTimeout(CompilationError):
    """A kernel was not compiled in the time it was given; nothing is known against it."""


class TuningError(TriaxError, RuntimeError):
    """No config could be chosen under the tuning mode in force."""


class OutOfBounds(TriaxError, IndexError):
    """A kernel touched memory outside its operands (interpreter only)."""


class DataRace(TriaxError, RuntimeError):
    """What a kernel computes depends on which of its programs is first (checked runs only)."""


class UninitializedRead(TriaxError, ValueError):
    """A kernel read an element of an output before it was written (checked runs only)."""


class ReadOnlyOperand(TriaxError, ValueError):
    """A kernel writes to an operand that no output is aliased to."""
