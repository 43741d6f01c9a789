"""Shortcuts of the interpreter's typing rules give what Triton's rules give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic

from triax.binding.launch import ArrayType
from triax.compat import triton_interpreter as compat
from triax.compat.triton_lock import TRITON
from triax.interpreting import run
from triax.interpreting.memory import Buffer, Memory

DTYPES = ["int1", "uint8", "int32", "uint32", "int64", "fp16", "bf16", "fp32", "fp64"]
SHAPES = [(), (4,), (4, 4), (1, 4), (4, 1)]
NUMBERS = [0, 3, 2**31, 2**40, -1, True, 0.0, -0.0, 2.5, 1e300]
OPERATIONS = ["add", "sub", "mul", "truediv", "mod", "floordiv", "less_than", "and_", "equal"]


def operands(pointer):
    """Pointers, tensors of all types and shapes, and numbers."""
    numbers = np.arange(1, 17)
    made = [compat.tensor(np.full(shape, pointer, np.uint64), POINTER) for shape in SHAPES]
    for name, shape in itertools.product(DTYPES, SHAPES):
        dtype = tl.dtype(name)
        values = numbers[: int(np.prod(shape))].reshape(shape).astype(compat.numpy_dtype(dtype))
        made.append(compat.tensor(values, dtype))
    return made + NUMBERS


POINTER = tl.pointer_type(tl.float32)


def outcome(semantic, operation, *arguments):
    more = (False,) if operation in ("add", "sub", "mul") else ()
    try:
        result = getattr(semantic, operation)(*arguments, *more)
    except Exception as error:
        return type(error).__name__, str(error)
    data = result.handle.data
    return str(result.type), str(result.handle.dtype), data.dtype, data.shape, data.tobytes()


@pytest.mark.sampled(5, 4)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_and_errors(operation):
    type = ArrayType((4096,), np.dtype(np.float32))
    memory = Memory("kernel", [Buffer("x", type, np.zeros(type.nbytes, np.uint8), writable=True)])
    machine = run._machine()

    def compare():
        with machine.running(memory), np.errstate(all="ignore"):
            own = TritonSemantic(machine.builder)
            made = operands(memory.address(0))
            for pair in itertools.product(made, made):
                if all(isinstance(value, (int, float)) for value in pair):
                    continue  # Python's own
                expected = outcome(own, operation, *pair)
                assert outcome(machine.semantic, operation, *pair) == expected, pair

    TRITON.alone(compare)
