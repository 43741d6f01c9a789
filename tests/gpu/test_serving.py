"""An exported step, loaded on a GPU where neither Triton nor Triax are."""

import importlib.util

import jax
import pytest

from tests.examples.test_moe_layer import load
from tests.examples.test_serving import NEEDED, SIZES, check_served

pytestmark = pytest.mark.gpu

OF_CUDA = ("jax_plugins", "nvidia", "jax_cuda12_plugin", "jax_cuda13_plugin")


def test_it_runs_without_triton_triax_home_path_or_network(tmp_path):
    example = load("serving/export_step")
    exported = example.export(128, example.parameters(*SIZES), ("cuda",))
    needed = (*NEEDED, *filter(importlib.util.find_spec, OF_CUDA))
    device = jax.devices()[0].device_kind
    check_served(example.decode_step, exported, tmp_path, device, platform="cuda", needed=needed)
