"""Runs the tests' cases on a GPU under one of Triton's sanitizers, in this process.

    python -m tools.sanitize.in_jax consan|fpsan NAME...

Prints a line of JSON when a case ends: the kernels that were compiled, and what was found. Under
ConSan the values must be right too. Under FpSan, whose values mean nothing, they must be the same
bits with other warps, and in products with other kernels in place of those in Gluon, and smaller
blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from tests.moe.case import Arrays, Case, widths
from tests.moe.cases import LARGE, NAMED
from tests.moe.products.chosen import without
from tests.moe.test_cases import made

from triax import lowering, testing
from triax.binding.launch import BoundCall, Launch, Scalar
from triax.emitting import emit
from triax.moe.products.any_gpu_configs import DotConfig, OuterConfig
from triax.moe.shared import launching

NAMES = [*NAMED, *LARGE]
Launched = tuple[str, ...]  # a kernel, and the dtypes of its arrays


def launches(name: str) -> list[Launch]:
    """What a case launches on a GPU; nothing is compiled."""
    found = []

    def note(platform: str, ctx: Any, *operands: Any, call: BoundCall) -> Any:
        found.extend(call.launches(*lowering._array_types(ctx))[:1])
        return emit.placeholder(ctx, operands, emit.NO_CODE)

    case = made(name, "triton")
    arrays = case.inputs(0)
    with mock.patch.object(lowering, "lower_for", note), widths(arrays), case.within():
        case.jitted.trace(arrays).lower(lowering_platforms=("cuda",))
    return found


def launched(name: str) -> set[Launched]:
    """The kernels that a case launches."""
    return {
        (
            launch.kernel.name,
            *(
                launch.array_type(leaf).dtype.name
                for _, leaf in launch.named_leaves
                if not isinstance(leaf, Scalar)
            ),
        )
        for launch in launches(name)
    }


def covering(names: Iterable[str] = NAMES) -> list[str]:
    """Cases that launch whatever the named ones do."""
    by_case = {name: launched(name) for name in names}
    left, chosen = set[Launched]().union(*by_case.values()), []
    while left:
        chosen.append(max(by_case, key=lambda name: len(by_case[name] & left)))
        left -= by_case[chosen[-1]]
    return chosen


class Compiled(logging.Handler):
    """Collects the kernels that Triax compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("compiled"):
            assert isinstance(record.args, tuple)
            self.kernels.add(str(record.args[0]))


def under_consan(case: Case, arrays: Arrays) -> Iterator[str]:
    with testing.sanitized("consan"):
        (found,) = case.run([arrays])
    if (wrong := case.judge(arrays, found)) is not None:
        yield f"wrong: {wrong}"


def _smaller(heuristic: Callable[..., Any]) -> Any:
    """A heuristic whose blocks are half as large."""

    def halved(cls: type, *args: Any, **keywords: Any) -> Any:
        config = heuristic(*args, **keywords)
        blocks = [field.name for field in dataclasses.fields(config) if "block" in field.name]
        halves = {name: max(16, getattr(config, name) // 2) for name in blocks}
        return dataclasses.replace(config, **halves)

    return classmethod(halved)


@contextlib.contextmanager
def others() -> Iterator[None]:
    """Other kernels in place of those in Gluon, with smaller blocks; all with other warps."""
    call = launching.triton_call

    def with_other_warps(*operands: Any, **keywords: Any) -> Any:
        warps = keywords.get("num_warps") or 4
        return call(*operands, **keywords | {"num_warps": warps // 2 if warps >= 8 else warps * 2})

    with contextlib.ExitStack() as stack:
        for name in ("sm90_8_bits", "sm90_16_bits"):
            stack.enter_context(without(name))
        for config in (DotConfig, OuterConfig):
            smaller = _smaller(config.heuristic)
            stack.enter_context(mock.patch.object(config, "heuristic", smaller))
        stack.enter_context(mock.patch.object(launching, "triton_call", with_other_warps))
        yield


def under_fpsan(case: Case, arrays: Arrays) -> Iterator[str]:
    (plain,) = case.run([arrays])
    with np.errstate(all="ignore"):
        wanted = case.expect(arrays, plain)
    found = []
    for context in (contextlib.nullcontext(), others()):
        jax.clear_caches()
        with testing.sanitized("fpsan"), context:
            found += dataclasses.replace(case).run([arrays])
    for name, (one, other) in {name: [each[name] for each in found] for name in wanted}.items():
        specified = np.broadcast_to(getattr(wanted[name], "where", True), one.shape)
        differing = (_bits(one) != _bits(other))[specified]
        if differing.any():
            yield f"{name} differs in {np.sum(differing)} of {differing.size} elements"


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def main(sanitizer: str, names: Sequence[str]) -> None:
    logger = logging.getLogger("triax.compiling.compiler")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    run = {"consan": under_consan, "fpsan": under_fpsan}[sanitizer]
    for name in names:
        logger.handlers = [compiled := Compiled()]
        case = made(name, "triton")
        findings = [*run(case, case.inputs(0))]
        print(json.dumps({"findings": findings, "kernels": [*compiled.kernels]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
