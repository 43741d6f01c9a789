"""The decoder in bfloat16, with experts in MXFP4, against transformers' logits in float32."""

import numpy as np
import pytest

from tests.examples.test_decoder import GPT_OSS, decoder, expected, recorded, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ragged_dot dequantizes its weights"),  # too small for tiles
]


@pytest.mark.parametrize("size", [1, 24])
def test_logits_differ_by_rounding(size):
    """Of most tokens: a few choose another expert."""
    given = recorded.CONFIGS[GPT_OSS]
    tensors = recorded.random_checkpoint.draw(given, dtype="bfloat16")
    config, params = decoder.load(tensors, given)
    off = run(config, params, size) - expected(GPT_OSS)
    assert np.median(np.sqrt(np.mean(off**2, axis=1))) < 0.03
