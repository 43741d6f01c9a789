"""What `triax tune` runs on a GPU: the op and its gradient at the sizes that users have."""

import jax
import jax.numpy as jnp

from triax_example_norms.rms_norm import rms_norm

# A config also serves calls that move a quarter to four times the bytes that it was measured on, so
# these are for 64 to 16,384 rows.
ROWS = (256, 4096)
WIDTHS = (2048, 4096, 7168)


def main() -> list[jax.Array]:
    results = []
    for width in WIDTHS:
        for rows in ROWS:
            x = jnp.ones((rows, width), jnp.bfloat16)
            out, pull = jax.vjp(rms_norm, x, jnp.ones(width, jnp.bfloat16))
            results += [out, *pull(out)]
    return results
