"""Chooses the scheme and the exchange of `dispatch`, unless they are given."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax

from triax.compat import jax_private
from triax.errors import ArgumentValueError
from triax.moe.shared import arguments
from triax.sharding.explicit import explicit_mesh

Scheme = Literal["token", "choice"]
ExchangeMethod = Literal["padded", "ragged"]
# The most GPUs, all of one process, that XLA's kernel for ragged exchanges supports; with more XLA
# of JAX 0.11 wants flags, or stops with an error.
_MOST_GPUS = 8
# The fewest bytes of a device's tokens for a ragged exchange, which first needs more messages: on
# two H200s 15 MB go there and back in 0.38 ms padded and 0.45 ragged, 59 MB in 1.19 and 1.11.
_MIN_RAGGED_BYTES = 1 << 25
# If a token goes to more devices than this share of its choices, rows go straight to experts.
_WORTH_A_TOKEN = 0.9


def is_better_ragged(x: jax.Array, num_devices: int) -> bool:
    """Whether a ragged exchange of the tokens `x` is possible, and faster."""
    job = jax_private.key_value_client()  # `jax.process_count` would start a backend
    local = 1 < num_devices <= _MOST_GPUS and (job is None or job.num_processes == 1)
    # Ragged exchanges have not been tried on GPUs beside explicit axes.
    return local and x.size * x.dtype.itemsize >= _MIN_RAGGED_BYTES and explicit_mesh(x) is None


def check(scheme: Any, exchange: Any) -> None:
    """Raises unless the caller's choices are known and go together."""
    arguments.check_choice("scheme", scheme, (None, *get_args(Scheme)))
    arguments.check_choice("exchange", exchange, (None, *get_args(ExchangeMethod)))
    if scheme == "choice" and exchange == "padded":
        raise ArgumentValueError(
            'Argument `exchange` must be "ragged" or None with scheme "choice", whose rows go '
            'straight to their places; got "padded".'
        )


def choose(
    scheme: Scheme | None,
    exchange: ExchangeMethod | None,
    top_k: int,
    num_devices: int,
    ragged: bool,
) -> tuple[Scheme, ExchangeMethod]:
    """Chooses what the caller did not, as `dispatch` documents."""
    needed = num_devices * (1 - (1 - 1 / num_devices) ** top_k)
    if scheme is None:
        many = num_devices > 1 and needed > _WORTH_A_TOKEN * top_k
        may_be_ragged = exchange == "ragged" or (exchange is None and ragged)
        scheme = "choice" if many and may_be_ragged else "token"
    if scheme == "choice":
        return "choice", "ragged"
    return scheme, exchange or ("ragged" if ragged else "padded")
