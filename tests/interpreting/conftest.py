"""`interpret`: a kernel on arrays through the interpreter, without the rest of the bridge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from triax.binding.kernel import Kernel
from triax.binding.launch import (
    Alias,
    Argument,
    ArrayType,
    Candidate,
    Descriptor,
    Launch,
    Operand,
    Result,
    Scalar,
    rebuild,
)
from triax.binding.values import Config, Static, pack_values
from triax.compiling.compiler import compile_launch
from triax.interpreting.run import run


@dataclasses.dataclass
class HostDescriptor:
    """A host TMA descriptor of `array`; strides are those of a dense array by default."""

    array: np.ndarray
    block_shape: tuple[int, ...]
    padding: str = "zero"
    strides: tuple[int, ...] | None = None


def make_launch(
    kernel: Any,
    arguments: Mapping[str, Any],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    aliases: Mapping[int, int] | None = None,
    zeroed: tuple[int, ...] = (),
    **constants: Any,
) -> tuple[Launch, list[np.ndarray]]:
    """A launch and its operands.

    Arrays among `arguments` become operands in order, equal objects one operand;
    `Result`s stay; anything else is a scalar.
    """
    arrays: list[np.ndarray] = []

    def operand(array: np.ndarray) -> int:
        known = [index for index, seen in enumerate(arrays) if seen is array]
        if not known:
            arrays.append(array)
        return known[0] if known else len(arrays) - 1

    def bind(value: Any) -> Argument:
        if isinstance(value, np.ndarray):
            return Operand(operand(value))
        if isinstance(value, Result):
            return value
        if isinstance(value, tuple):
            return rebuild(value, [bind(part) for part in value])
        if isinstance(value, HostDescriptor):
            shape = value.array.shape
            dense = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
            return Descriptor(
                Operand(operand(value.array)),
                shape,
                value.strides or dense,
                value.block_shape,
                None,
                value.padding,
                False,
            )
        return Scalar(Static(value))

    bound = tuple((name, bind(value)) for name, value in arguments.items())
    candidate = Candidate(Config(), pack_values(constants), (), grid, zeroed)
    view = Kernel.of(kernel)
    launch = Launch(
        view,
        bound,
        candidate,
        tuple(ArrayType(a.shape, a.dtype) for a in arrays),
        tuple(ArrayType(shape, np.dtype(dtype)) for shape, dtype in outputs),
        tuple(Alias(o, r) for o, r in (aliases or {}).items()),
        view.name,
    )
    return launch, arrays


@pytest.fixture(scope="session")
def interpret() -> Callable[..., tuple[np.ndarray, ...]]:
    def interpret(*args: Any, **kwargs: Any) -> tuple[np.ndarray, ...]:
        launch, operands = make_launch(*args, **kwargs)
        return run(launch, operands)

    return interpret


@pytest.fixture(scope="session")
def agree() -> Callable[..., tuple[np.ndarray, ...]]:
    """Like `interpret`, of a kernel that compiles."""

    def agree(*args: Any, **kwargs: Any) -> tuple[np.ndarray, ...]:
        launch, operands = make_launch(*args, **kwargs)
        compile_launch(launch, 90)
        return run(launch, operands)

    return agree


@pytest.fixture(scope="session")
def launch_of() -> Callable[..., tuple[Launch, list[np.ndarray]]]:
    return make_launch


@pytest.fixture
def host_descriptor() -> type[HostDescriptor]:
    return HostDescriptor


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
