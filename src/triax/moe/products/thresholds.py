"""The rows at which another kernel, or another cut into programs, is faster.

Each is the most rows of a group, on average, unless it says otherwise. Titles are sections of
`benchmarks/what-was-tried.md`, which say what was measured, and on which GPU. The blocks of
`DotConfig` follow from the rows themselves: they are rounded up to a power of two.
"""

LARGEST_TILE = 128
"""Rows of a tile where groups have many. "Other blocks", H200."""

HALF_A_TILE = 64
"""With more, the kernels in Gluon for Hopper have rows for both of their warp groups."""

MOST_ROWS = 256
"""With more, weights of 8 and 4 bits are dequantized first: each row tile would do it again.
"4-bit weights widened in memory by a kernel", H200."""

ROWS_OF_TILES = 8
"""Of weights in tiles by `mma.sync` on Hopper; with more, `wgmma` is faster. "Tiles of 4-bit
weights without shared memory", "More programs for tiles from 9 rows on", H100 and H200."""

ROWS_OF_TILES_BY_HALVES = 40
"""The same if each 32 of the depth have scales that multiply sums. In the same sections."""

ROWS_OF_TILES_FROM_REGISTERS = 64
"""The same where tensor cores read registers, as on GPUs before Hopper. Not measured."""

MOST_SCHEDULED = 512
"""All rows, and groups, with which programs of weights in tiles may find their tiles from the sizes
of groups. "Programs that find their tiles", H200."""

HALF_OF_A_WARP_GROUP = 24
"""Of weights in tiles in blocks of 32 rows; with more they have 64. "More programs for tiles from 9
rows on", H200."""

NARROW_ROWS = 8
"""Of stored weights in blocks of 16 rows; with more they have 64. "Few rows times weights of 8
bits", H200."""

ROWS_OF_A_WARP_GROUP = 64
"""Of stored weights in blocks of 64 rows, by 4 warps; with more they have 128, and 8 warps. In the
same section."""

NARROW_ROWS_OF_8_BITS = 16
"""Of 8-bit rows by as many rows in a block; with more, blocks have 64. "Few rows", H200."""
