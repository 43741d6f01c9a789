"""Orders two computations that do not depend on each other.

Otherwise XLA may hold the operands of both in memory at the same time.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from triax.compat import jax_private
from triax.sharding import explicit


def after(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `x`, scheduled after `other`.

    Programs that XLA itself partitions over several devices keep XLA's own order: there `other` may
    be a sum over devices, for which `x` should not wait.
    """
    if explicit.sharding_of(x) is not None:
        return x
    ordered: jax.Array = _after_p.bind(x, other)
    return ordered


_after_p = Primitive("triax_after")
_after_p.def_impl(lambda x, other: x)
_after_p.def_abstract_eval(lambda x, other: x)


def _lower(ctx: Any, x: Any, other: Any) -> Any:
    if jax_private.is_partitioned(ctx):
        return [x]
    return mlir.lower_fun(lambda *both: jax.lax.optimization_barrier(both)[0], False)(ctx, x, other)


def _jvp(primals: Any, tangents: Any) -> Any:
    return after(*primals), tangents[0]


mlir.register_lowering(_after_p, _lower)
ad.primitive_jvps[_after_p] = _jvp
batching.primitive_batchers[_after_p] = lambda args, axes: (after(*args), axes[0])
