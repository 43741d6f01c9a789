"""Messages about launches that fail to compile."""

from __future__ import annotations

from triax.binding.launch import Launch, Operand


def pointer_as_number(launch: Launch, error: BaseException) -> str:
    """A hint about arrays of one element, if the error is about a pointer; else "".

    A scalar that JAX computes is an array, so the kernel gets a pointer to it. Triton's error comes
    from deep inside an expression and does not name the parameter.
    """
    names = [
        f"`{name}`"
        for name, leaf in launch.named_leaves
        if isinstance(leaf, Operand) and launch.array_type(leaf).size == 1
    ]
    reason: BaseException | None = error
    while reason is not None and "pointer" not in str(reason):  # an error in a helper has a cause
        reason = reason.__cause__
    if not names or reason is None:
        return ""
    return (
        f" The kernel gets a pointer for {', '.join(names)}, as for every array. If it needs the "
        "number, pass a Python int or float, or read the array in the kernel with tl.load."
    )


def failure(launch: Launch, error: Exception) -> str:
    """One paragraph on why a launch does not compile."""
    return (
        f"Kernel {launch.kernel.name!r} does not compile with config "
        f"[{launch.candidate.config}]: {type(error).__name__}: {str(error).strip()}"
        f"{pointer_as_number(launch, error)}"
    )
