"""Launches the kernel that exchanges rows between the GPUs of a host."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.compat import peer_memory
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
    def of(cls, target: Target, moves: Moves, x: jax.Array) -> ExchangeConfig:
        """Of two H200s' rows of 14 KiB: copies reach 0.81 of a copy's bandwidth by the driver."""
        width, itemsize = x.shape[1], x.dtype.itemsize
        block_width = min(1 << max(width - 1, 1).bit_length(), 2048 // itemsize)
        block_tokens = (1 << 14) // (block_width * itemsize)
        block_rows, num_warps = block_tokens, 16
        if moves.row_of is not None:  # sums, which need registers
            block_rows, num_warps = block_tokens // 2, 8
        most = peer_memory.PLACES["MOST_FLAGS"] // len(moves.received)
        while -(-moves.capacity // block_rows) > most:
            block_rows *= 2
        # At least half of the multiprocessors stay free of programs that wait.
        readers = max(1, target.multiprocessors // 2)
        return cls(block_rows, block_width, block_tokens, readers, num_warps)


class Moves(NamedTuple):
    """Which rows go where.

    Of the rows that are sent, each device has a slot of `capacity` rows, filled from its start.

    Attributes:
      position: int32 [1], this device's position along the axis.
      filled: int32 [devices], how many rows of the slot are sent to each device.
      received: int32 [devices], how many rows come from each device.
      capacity: the rows of a slot.
      source: int32 [devices * capacity], the row of `x` that is sent; None for all rows in order.
      row_of: int32 [tokens, slots], the received rows that are summed for a token, or -1; None for
        the received rows themselves.
      terms: int32 [devices * capacity, terms], the rows of `x` that are summed to a row that is
        sent, or -1; None if the rows of `x` are sent.
      weights: float [devices * capacity, terms], what the terms are multiplied by; or None.
    """

    position: jax.Array
    filled: jax.Array
    received: jax.Array
    capacity: int
    source: jax.Array | None = None
    row_of: jax.Array | None = None
    terms: jax.Array | None = None
    weights: jax.Array | None = None


def exchange_rows(
    target: Target,
    peers: jax.Array,
    x: jax.Array,
    moves: Moves,
) -> jax.Array:
    """Writes rows to other devices; returns the rows written here, or sums of them.

    Args:
      target: the GPU.
      peers: int32 [devices + 1], of this device in `peer_memory.peers`.
      x: [rows, width]; floats of up to 32 bits if there are sums, which are in float32.
      moves: which rows go where.

    Returns:
      [devices * capacity, width], by the sending device, where rows past `received` have any
      values; with `row_of` [tokens, width].
    """
    # Kernels are imported where they are launched: importing triax.moe needs no Triton.
    from triax.moe.expert_parallel.kernels import _exchange_rows_kernel

    position, filled, received, capacity, source, row_of, terms, weights = moves
    words = as_words(x) if row_of is None else x
    devices, width = len(received), x.shape[1]
    num_results = devices * capacity if row_of is None else len(row_of)
    config = ExchangeConfig.of(target, moves, x)
    rows = launch(
        _exchange_rows_kernel,
        words,
        source,
        terms,
        weights,
        filled,
        received,
        row_of,
        peers,
        position,
        capacity,
        num_results,
        len(x),
        out_type=jax.ShapeDtypeStruct((num_results, width), words.dtype),
        grid=config.readers + devices * -(-capacity // config.block_rows),
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
