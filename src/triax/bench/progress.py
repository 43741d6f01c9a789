"""Says how far a run has come, on standard error: a bar for people, plain lines for logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def steps(items: Iterable[T], total: int, label: Callable[[T], str]) -> Iterator[T]:
    """The items, each announced by its label before it is handed out."""
    if sys.stderr.isatty() and (bar := _bar(total)) is not None:
        with bar:
            for item in items:
                bar.set_postfix_str(label(item))
                yield item
                bar.update()
        return
    for number, item in enumerate(items, 1):
        print(f"case {number}/{total}: {label(item)}", file=sys.stderr, flush=True)
        yield item


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # it comes with the `bench` extra; lines will do
        return None
    return tqdm(total=total, unit="case", dynamic_ncols=True)
