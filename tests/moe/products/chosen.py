"""Which kernels may be chosen for products."""

from __future__ import annotations

from unittest import mock

from triax.moe.products import choose


def without(name):
    """A context in which the kernels of a name are never chosen."""
    lists = ("RAGGED_DOT", "GROUP_OUTER")
    left = {of: tuple(k for k in getattr(choose, of) if k.name != name) for of in lists}
    assert any(len(left[of]) < len(getattr(choose, of)) for of in lists)
    return mock.patch.multiple(choose, **left)
