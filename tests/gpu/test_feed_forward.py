"""The whole layer on a GPU, against its dense form in float64."""

from __future__ import annotations

import jax
import pytest

from tests.moe import flat
from tests.moe.layer.test_feed_forward import CASES, check_against_dense, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_layer_is_its_dense_form(case, dtype):
    offsets, options = CASES[case]
    check_against_dense(draw(0, dtype, offsets=offsets), implementation="triton", **options)


def test_memory_of_forward_and_backward():
    """Little more than the results, one array of rows, and one as the first matmul makes it."""
    tokens, hidden, width, experts, top_k = 2048, 1024, 512, 16, 4
    shapes = (tokens, hidden), (tokens, experts), (experts, hidden, 2 * width)
    shapes = *shapes, (experts, width, hidden)
    dtypes = "bfloat16", "float32", "bfloat16", "bfloat16"
    args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]

    def num_bytes(**options):
        def run(gradient, *args):
            layer = lambda *args: flat.layer(*args, top_k=top_k, **options).tokens
            out, pull = jax.vjp(layer, *args)
            return out, pull(gradient)

        found = jax.jit(run).lower(args[0], *args).compile().memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    least = 2 * sum(a.size for a in (args[0], args[0], args[2], args[3]))
    least += 2 * tokens * top_k * (hidden + 2 * width)
    assert least < num_bytes() < 1.05 * least
    assert num_bytes(keep=["triax_permuted_rows", "triax_glu"]) > 1.05 * least
