"""Marlin's layout: where each number of the weights, and each scale, is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode_rivals import FORMATS, weights
from benchmarks.harness.rivals import marlin_layout


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bfloat16", "NVFP4")])
def test_marlin_layout(name):
    columns, depth = 192, 256 if "128" in name else 320
    w = weights(name, 2, depth, columns)
    words, scales = (np.asarray(a[1]) for a in marlin_layout(w))
    assert words.shape == (-(-depth // 128) * 8, 256 * (2 if w.packed else 4))
    k, n = np.arange(depth)[:, None], np.arange(columns)
    thread, part, second = n % 8 * 4 + k % 8 // 2, n % 64 // 16, n % 16 // 8
    if w.packed:
        word = n // 64 * 128 + thread * 4 + part
        shift, mask = 4 * (k % 2 * 4 + second * 2 + k % 16 // 8), 15
    else:
        word = n // 64 * 256 + thread * 8 + part * 2 + second
        shift, mask = 8 * (k % 2 * 2 + k % 16 // 8), 255
    found = words[k // 16, word] >> shift & mask
    stored = np.asarray(jax.lax.bitcast_convert_type(w.values, jnp.uint8)[1])
    if w.packed:
        stored = np.stack([stored & 15, stored >> 4], -1).reshape(columns, depth)
    added = {"int4": 8, "int8": 128}.get(w.dtype.name, 0)
    np.testing.assert_array_equal(found, (stored.T + np.int32(added)) & mask)

    groups = -(-depth // 128) * 128 // (w.block[1] or depth)
    assert scales.shape == (groups, 256)
    order = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
    if groups == 1:
        order = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
    if name == "MXFP4":
        order = order // 4 * 4 + np.array([0, 2, 1, 3])[order % 4]
    wide = FORMATS[name][2]
    wanted = np.asarray(w.scales[1])[n // wide].T
    wanted = wanted.view(np.uint8) if name == "MXFP4" else wanted.astype(np.float32)
    times = 2.0**120 if w.dtype.name == "float8_e4m3fn" else 1
    got = scales[: len(wanted), order].astype(wanted.dtype)
    np.testing.assert_array_equal(got, wanted * np.asarray(times, wanted.dtype))
