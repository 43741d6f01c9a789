"""Finds a user's function by FILE:FUNCTION or package.module:FUNCTION on the command line."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.messages import near_misses

FORMS = "FILE:FUNCTION or package.module:FUNCTION"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function in a user's file, or in a module: `path` is empty for a module that has no file.

    `command` is for error messages.
    """

    command: str
    path: str
    module: str
    function: str

    def load(self) -> Callable[[], Any]:
        """Imports the program; returns its function.

        Raises:
          ArgumentValueError: the program has no such function.
          ArgumentTypeError: the function cannot be called without arguments.
          Exception: any error that the program raises.
        """
        module = importlib.import_module(self.module) if self.module else _load_file(self.path)
        function = getattr(module, self.function, None)
        if not callable(function):
            own = [n for n, v in vars(module).items() if _is_function_of(module, v)]
            raise ArgumentValueError(
                f"`{self.command}` finds no function {self.function!r} in "
                f"{self.path or self.module}.{near_misses(self.function, own)}"
            )
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ArgumentTypeError(
                f"`{self.command}` calls {self.function!r} of {self.path or self.module} without "
                f"arguments: {error}. Name a function that makes its arrays itself."
            ) from None
        except ValueError:  # it has no signature
            pass
        called: Callable[[], Any] = function
        return called


def find(target: str, command: str) -> Program:
    """Finds the program that `target` names. Modules are imported from the working directory, too.

    Raises:
      ArgumentValueError: there is no such file or module, or no function is named.
    """
    where, _, function = target.rpartition(":")
    if not where and function:
        raise ArgumentValueError(
            f"`{command}` needs {FORMS}; {target!r} names no function. Add one that takes no "
            f"arguments, as in `{command} {target}:main`."
        )
    if os.path.isfile(where):
        return Program(command, os.path.abspath(where), "", function)
    problem = f"there is no file {where!r}"
    if all(part.isidentifier() for part in where.split(".")):
        sys.path.insert(0, os.getcwd())
        spec = _spec(where)
        if spec is not None:
            return Program(command, spec.origin or "", where, function)
        problem += f", and no module of that name in {os.getcwd()} or installed"
    raise ArgumentValueError(f"`{command}` needs {FORMS}; got {target!r}, and {problem}.")


def _spec(module: str) -> Any:
    """Finds where a module is, None if nowhere; imports the packages around it."""
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise


def _load_file(path: str) -> ModuleType:
    """Loads a user's file as a module; it may have any suffix."""
    sys.path.insert(0, os.path.dirname(path))
    name = Path(path).stem
    while name in sys.modules:  # such as types.py
        name += "_"
    loader = SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except ImportError as error:
        if error.name is None and "relative import" in str(error):
            raise ArgumentValueError(
                f"{path} is in a package, because it has relative imports. Name it as "
                "package.module:FUNCTION, in the folder that the package is in."
            ) from error
        raise
    return module


def _is_function_of(module: ModuleType, value: Any) -> bool:
    is_kernel = hasattr(value, "__getitem__")  # Triton's, which `kernel[grid]` launches
    own = getattr(value, "__module__", None) == module.__name__
    return callable(value) and own and not is_kernel
