"""Launches the package's kernels."""

from __future__ import annotations

from typing import Any

from triax.call import triton_call


def launch(kernel: Any, *operands: Any, config: Any = (), **arguments: Any) -> Any:
    """Calls `triton_call`, under the kernel's name without `_` and `_kernel`.

    `config`, an object or a tuple of objects, has attributes for the kernel's constexprs, in lower
    case, and for `num_warps` and `num_stages`. `arguments` take precedence.
    """
    names = {name: name.lower() for name in kernel.arg_names if name.isupper()}
    names |= {"num_warps": "num_warps", "num_stages": "num_stages"}
    options: dict[str, Any] = {"name": kernel.__name__.strip("_").removesuffix("_kernel")}
    for part in config if type(config) is tuple else (config,):
        options |= {n: getattr(part, at) for n, at in names.items() if hasattr(part, at)}
    return triton_call(*operands, kernel=kernel, vmap_method="sequential", **options | arguments)
