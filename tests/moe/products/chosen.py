"""Which kernels may be chosen for products."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from triax.compat import jax_private, versions
from triax.moe.products import choose
from triax.moe.shared import launching


def without(name):
    """A context in which the kernels of a name are never chosen."""
    lists = ("RAGGED_DOT", "GROUP_OUTER")
    left = {of: tuple(k for k in getattr(choose, of) if k.name != name) for of in lists}
    assert any(len(left[of]) < len(getattr(choose, of)) for of in lists)
    return mock.patch.multiple(choose, **left)


def chosen(monkeypatch, card, case, launches=None):
    """The kernels of a program's products, with what others need; nothing is compiled.

    The arguments of launches are added to the list `launches`.
    """
    if not versions.GLUON.passes(versions.installed("triton")):
        pytest.skip(f"needs Triton {versions.GLUON.stable}")

    def launched(*operands, out_type, **arguments):
        if launches is not None:
            launches.append({**arguments, "operands": operands})
        return jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), out_type)

    function, arrays = case
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(card))
    monkeypatch.setattr(jax_private, "supports_tensor_maps", lambda: True)
    monkeypatch.setattr(launching, "triton_call", launched)
    run = jax.jit(functools.partial(function, implementation=None))
    with choose.noted() as choices:
        jax.make_jaxpr(run)(*arrays)
        assert not choices  # the GPU is not known yet
        run.trace(*arrays).lower(lowering_platforms=("cuda",))
    return [(each.kernel, dict(each.needs)) for each in choices]
