"""Launches the kernel that exchanges rows between the GPUs of a host."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax.compat import peer_memory
from triax.moe.plans.reference import Plan
from triax.moe.shared.arrays import as_words, from_words
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
    """The blocks of `_exchange_rows_kernel`."""

    block_rows: int
    block_width: int
    block_tokens: int
    readers: int
    num_warps: int

    @classmethod
    def of(cls, target: Target, x: jax.Array, slots: Any, to_tokens: bool) -> ExchangeConfig:
        """Of two H200s' rows of 14 KiB: copies reach 0.81 of a copy's bandwidth by the driver."""
        devices, capacity = slots
        width, itemsize = x.shape[1], x.dtype.itemsize
        block_width = min(1 << max(width - 1, 1).bit_length(), 2048 // itemsize)
        block_tokens = (1 << 14) // (block_width * itemsize)
        block_rows, num_warps = block_tokens, 16
        if to_tokens:  # sums, which need registers
            block_rows, num_warps = block_tokens // 2, 8
        while -(-capacity // block_rows) > peer_memory.PLACES["MOST_FLAGS"] // devices:
            block_rows *= 2
        # At least half of the multiprocessors stay free of programs that wait.
        readers = max(1, target.multiprocessors // 2)
        return cls(block_rows, block_width, block_tokens, readers, num_warps)


def exchange_rows(
    target: Target,
    peers: jax.Array,
    x: jax.Array,
    weights: jax.Array | None,
    received: Plan | None,
    ways: Any,
    *,
    of_tokens: bool,
    to_tokens: bool,
) -> jax.Array:
    """Writes rows to other devices; returns the rows written here, or sums of them.

    Args:
      target: the GPU.
      peers: int32 [devices + 1], of this device in `peer_memory.peers`.
      x: [rows, width]; floats of up to 32 bits if there are sums, which are in float32.
      weights: float [devices * capacity, terms], what terms are multiplied by; or None.
      received: the plan whose rows are `x`, of which each row that is sent is a sum; or None.
      ways: an `exchange.Ways`: of the rows that are sent, each device has a slot, filled from its
        start.
      of_tokens: whether `x` are tokens, of which the ways' `source` are sent, and not slots.
      to_tokens: whether the rows received are summed to tokens.

    Returns:
      [devices * capacity, width], by the sending device, where rows past `ways.received` have any
      values; with `to_tokens` [tokens, width].
    """
    # Kernels are imported where they are launched: importing triax.moe needs no Triton.
    from triax.moe.expert_parallel.kernels import _exchange_rows_kernel

    row_of = ways.sent.row_of if to_tokens else None
    terms = None if received is None else received.row_of
    words = x if to_tokens else as_words(x)
    devices, width = len(ways.received), x.shape[1]
    num_results = len(ways.sent.row_of) if to_tokens else devices * ways.capacity
    config = ExchangeConfig.of(target, x, (devices, ways.capacity), to_tokens)
    rows = launch(
        _exchange_rows_kernel,
        words,
        ways.source if of_tokens else None,
        terms,
        weights,
        ways.filled,
        ways.received,
        row_of,
        peers,
        ways.position,
        ways.capacity,
        num_results,
        len(x),
        out_type=jax.ShapeDtypeStruct((num_results, width), words.dtype),
        grid=config.readers + devices * -(-ways.capacity // config.block_rows),
        config=config,
        implementation="triton",
        WIDTH=width,
        DEVICES=devices,
        TERMS=0 if terms is None else terms.shape[1],
        SUMMED=0 if row_of is None else row_of.shape[1],
        **peer_memory.PLACES,
    )
    moved: Any = from_words(rows, x)
    return jnp.asarray(moved)
