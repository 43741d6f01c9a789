"""The numbers of rows at which another kernel, or other blocks, become faster.

Each is compared with the rows of a group, on average, unless it says otherwise. Titles in quotes
are sections of `benchmarks/what-was-tried.md`, which say what was measured; behind them is the GPU.
The blocks of `DotConfig` follow from the rows themselves, which are rounded up to a power of two.
"""

LARGEST_TILE = 128
"""The rows of a tile if groups have many rows. "Other blocks", H200."""

HALF_A_TILE = 64
"""Up to this, the kernels in Gluon for Hopper are not used: they have rows for one of their two
warp groups alone."""

MOST_ROWS = 256
"""Up to this, kernels widen weights in tiles, and weights of 8 bits, while they multiply. With more
rows weights are dequantized first, because each row tile would widen them again. "4-bit weights
widened in memory by a kernel", H200."""

VERY_FEW_ROWS = 8
"""Up to this, weights in tiles are multiplied by `mma.sync` on Hopper; with more rows `wgmma` is
faster. "Tiles of 4-bit weights without shared memory", "More programs for tiles from 9 rows on",
H100 and H200."""

VERY_FEW_ROWS_BY_HALVES = 40
"""The same where each 32 of the depth has a scale that multiplies sums. In the same sections."""

VERY_FEW_ROWS_FROM_REGISTERS = 64
"""The same where tensor cores read registers alone, as on GPUs before Hopper. Not measured."""

MOST_SCHEDULED = 512
"""Up to so many rows in all, and so many groups, programs for weights in tiles may find their tiles
from the sizes of groups. "Programs that find their tiles", H200."""

HALF_OF_A_WARP_GROUP = 24
"""Up to this, blocks for weights in tiles have 32 rows; with more rows they have 64. "More programs
for tiles from 9 rows on", H200."""

NARROW_ROWS_OF_8_BITS = 16
"""Up to this, blocks for 8-bit rows have 16 rows; with more rows they have 64. No figures were kept
(commit b95bd91)."""
