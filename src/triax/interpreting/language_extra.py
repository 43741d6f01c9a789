"""Stand-ins for `triton.language.extra`: libdevice, and the helpers for CUDA.

The generic libdevice is a list of empty stubs, which the compiler swaps for the target's functions;
here CUDA's functions replace the stubs, and the builder computes them. The helpers are inline
assembly or facts about the launch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from triax.compat.triton_interpreter import Change
from triax.interpreting.builder import missing_function
from triax.interpreting.inside import number


def changes(builder: Any, semantic: Any) -> Iterator[Change]:
    """Yields the patches for the modules of `triton.language.extra`."""
    try:
        cuda = importlib.import_module("triton.language.extra.cuda")
    except ImportError:  # a Triton built without NVIDIA's backend
        return
    helpers = _helpers(builder)
    # Triton makes the package twice: `tl.extra.cuda` is not the module in `sys.modules`.
    modules = (cuda, getattr(tl.extra, "cuda", cuda), cuda.libdevice)
    for module in {id(m): m for m in modules}.values():
        for name, member in vars(module).items():
            if name in helpers:
                yield Change(module, name, helpers[name])
            elif tl.core.is_builtin(member):
                yield Change(module, name, functools.partial(member, _semantic=semantic))
    generic = importlib.import_module("triton.language.extra.libdevice")
    for name, member in vars(generic).items():
        if inspect.isfunction(member):
            of_cuda: Any = getattr(cuda.libdevice, name, None)
            bound = functools.partial(of_cuda or _missing(name), _semantic=semantic)
            yield Change(generic, name, bound)


def _helpers(builder: Any) -> dict[str, Callable[..., Any]]:
    return {
        "globaltimer": lambda _semantic=None: number(time.time_ns(), tl.int64),
        "smid": lambda _semantic=None: number(0, tl.int32),  # one processor runs everything
        "num_warps": lambda _semantic=None: tl.constexpr(builder.num_warps),
        "num_threads": lambda _semantic=None: tl.constexpr(builder.num_warps * 32),
        # Kernels run one after another: there is nothing to wait for or to launch early.
        "gdc_wait": lambda _semantic=None: None,
        "gdc_launch_dependents": lambda _semantic=None: None,
    }


def _missing(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise missing_function(name, "libdevice")

    return call
