"""MoE routing: tokens to their experts and back, with gradients, at the speed of memory."""

from triax.moe.chunks.api import Sorted as Sorted
from triax.moe.chunks.api import sort_chunks_by_index as sort_chunks_by_index

__all__ = ["Sorted", "sort_chunks_by_index"]
