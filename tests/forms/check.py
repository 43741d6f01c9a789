"""Runs one cell of the table, and compares."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.forms.calls import KERNELS, OPS, call_of
from tests.forms.forms import FORMS, LENGTH, alone, gradient


def cells() -> list[tuple[str, str]]:
    """Every call in every form that is possible for it, (call, form)."""
    return [
        (name, form_name)
        for form_name, form in FORMS.items()
        for name, call in ((name, call_of(name, True)) for name in (*KERNELS, *OPS))
        if not {*form.needs} & {*call.lacks}
        if not (form.differentiates and "gradient" in call.lacks)
    ]


def drawn(name: str, is_round: bool) -> Any:
    """The arrays of a call, stacked."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    draws = [call_of(name, is_round).draw(rng, is_round) for _ in range(LENGTH)]
    return tuple(np.stack(arrays) for arrays in zip(*draws, strict=True))


def check(name: str, form_name: str, is_round: bool, implementation: Any) -> None:
    """Compares a form of a call with the call alone, and with NumPy where that is one line.

    Forms share kernels and shapes, and so, but for what XLA computes around a kernel, bits: the
    bound is a few roundings of the dtype, of the largest element.
    """
    call, form = call_of(name, is_round), FORMS[form_name]
    function = functools.partial(call.run, implementation=implementation)
    stacked = jax.tree.map(jnp.asarray, drawn(name, is_round))
    wanted = alone(gradient(function) if form.differentiates else function, stacked)
    numbers = [np.asarray(of).astype(np.float64) for of in jax.tree.leaves(wanted)]
    assert any(map(np.any, numbers))  # a reference of zeros would let zeros pass
    assert all(np.isfinite(of).all() for of in numbers)
    given = jax.tree.map(np.array, stacked)
    found = form.run(function, stacked)
    _compare(found, wanted)
    for array, before in zip(stacked, given, strict=True):
        np.testing.assert_array_equal(
            np.asarray(array).view(np.uint8), before.view(np.uint8), "an argument was overwritten"
        )
    if call.expect is not None and not form.differentiates:
        oracle = [call.expect(*(a[i] for a in given)) for i in range(LENGTH)]
        _compare(found, jax.tree.map(lambda *parts: np.stack(parts), *oracle))


def _compare(found: Any, wanted: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for index, (got, want) in enumerate(pairs):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), index
        bound = 0.0
        if jnp.issubdtype(got.dtype, jnp.floating):
            bound = max(4 * float(jnp.finfo(got.dtype).eps), 2.0**-18)
        got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
        # Of all steps: one's sums may cancel, and what is left of them is mostly rounding.
        most = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            np.testing.assert_allclose(
                a, b, rtol=0, atol=bound * most, err_msg=f"result {index} of step {i}"
            )
