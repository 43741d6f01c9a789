"""Messages about launches that fail to compile."""

from __future__ import annotations

import re
from typing import Any

from triax import messages
from triax.binding.launch import Launch, Operand, Result, Scalar
from triax.compat import triton_private


def hint(launch: Launch, error: BaseException | None) -> str:
    """Guesses which parameters a compile error is about; Triton only shows an inner expression.

    A common mistake is a number computed by JAX: it is an array, so the kernel gets a pointer to
    it.
    """
    if isinstance(error, OSError):
        folder = triton_private.cache_folder()
        return (
            f". Triton caches compiled kernels in {folder}; set TRITON_CACHE_DIR to a folder that "
            "can be written."
        )
    text = ""
    while error is not None:  # without the source that Triton's errors quote: any word may be in it
        text += f"{type(error).__name__}: {getattr(error, 'error_message', error)}\n"
        error = error.__cause__
    leaves = [(f"`{name}`", leaf) for name, leaf in launch.named_leaves]
    pointers = [
        n for n, leaf in leaves if isinstance(leaf, Operand) and launch.array_type(leaf).size == 1
    ]
    nones = [n for n, leaf in leaves if isinstance(leaf, Scalar) and leaf.value is None]
    if pointers and "pointer" in text:
        return (
            f" The kernel gets a pointer for {', '.join(pointers)}, as for every array. If it "
            "needs the number, pass a Python int or float, or read the array in the kernel with "
            "tl.load. Under jax.jit, a number must be a static argument."
        )
    outputs = [n for n, leaf in leaves if isinstance(leaf, Result)]
    if outputs and "pointer" in text:
        return (
            f" The call gives no value for {', '.join(outputs)}, so the kernel gets outputs there. "
            "Pass a number by name."
        )
    numbers = [n for n, leaf in leaves if isinstance(leaf, Scalar) and leaf.value is not None]
    if numbers and "Unsupported ptr type" in text:
        return (
            f" The kernel gets a number for {', '.join(numbers)}. If it reads it with tl.load, "
            "pass an array, such as jnp.asarray(number)."
        )
    ones = [n for n, leaf in leaves if isinstance(leaf, Scalar) and leaf.value == 1]
    if ones and "'int' object has no attribute" in text:
        return (
            f" Triton compiles an argument equal to 1 as a constant, which is not a tensor: "
            f"{', '.join(ones)}. Annotate the parameter (`: tl.int32`), or list it in "
            "`@triton.jit(do_not_specialize=…)`."
        )
    tuples = [f"`{name}`" for name, argument in launch.arguments if isinstance(argument, tuple)]
    if tuples and "'tuple'" in text:
        return f" The kernel gets a tuple for {', '.join(tuples)}."
    if launch.constants and any(
        words in text
        for words in ("arange", "power of 2", "'str' object", "CompileTimeAssertionFailure")
    ):
        values = ", ".join(f"{n}={messages.short(v)}" for n, v in launch.constants.items())
        return f" The kernel's constexprs are {values}."
    return f" The kernel gets None for {', '.join(nones)}." if nones and "NoneType" in text else ""


def failure(launch: Launch, error: BaseException) -> str:
    """Writes the message for a launch that does not compile: first the reason, then the place."""
    about = hint(launch, error)
    calls: list[str] = []
    # For an error in a helper, Triton shows the calling line; the reason is in the cause.
    while getattr(error, "error_message", error) is None and error.__cause__ is not None:
        calls.insert(0, _call_site(error))
        error = error.__cause__
    reason = getattr(error, "error_message", None) or str(error)
    place = str(error).removesuffix(reason).strip("\n")  # in the source, as Triton shows it
    text = "\n".join(filter(None, [reason.strip(), place, *calls, *causes(error)]))
    if "\n" in text and about.startswith(" "):
        about = f"\n{about[1:]}"
    return (
        f"Kernel {launch.kernel.name!r} does not compile with config "
        f"[{launch.candidate.config}]: {type(error).__name__}: {text}{about}"
    )


def causes(error: BaseException) -> list[str]:
    """A line for each cause of an error, but for those whose text was already shown."""
    said, lines = str(error), []
    while (cause := error.__cause__) is not None:
        if (text := str(cause).strip()) not in said:
            lines.append(f"Because of {type(cause).__name__}: {text}")
        said, error = f"{said}\n{text}", cause
    return lines


def _call_site(error: Any) -> str:
    """A line about the call in which Triton's compiler raised an error."""
    name, line = re.search(r"def (\w+)", error.src or ""), getattr(error.node, "lineno", 0)
    code = (error.src or "").splitlines()[line - 1 : line]
    return f"Called by `{name[1] if name else '?'}`, in line {line}: {''.join(code).strip()}"
