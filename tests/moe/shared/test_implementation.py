"""Which code the ops run where Triton is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPS = {
    "sort_chunks_by_index": "(jnp.ones((3, 1)), jnp.array([1, 2]), jnp.array([1, 0])",
    "make_plan": "(jnp.array([[1], [0]]), 2",
    "make_plan_from_mask": "(jnp.ones((2, 3), bool), 2",
    "permute": "(jnp.ones((2, 1)), plan",
    "unpermute": "(jnp.ones((2, 1)), plan",
    "route": "(jnp.ones((2, 3)), moe.Router(1)",
    "quantize": "(jnp.ones((2, 4)), block=(1, None)",
    "ragged_dot": "(jnp.ones((2, 1)), jnp.ones((1, 1, 1)), jnp.array([2])",
    "feed_forward": "(jnp.ones((3, 1)), jnp.ones((3, 2)), experts, moe.Router(1)",
}


@pytest.mark.slow("its processes take seconds")
def test_all_ops_work_without_triton():
    """As on systems that have none: plain JAX, and an error where a kernel is insisted on."""
    program = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import jax
import jax.numpy as jnp
from triax import moe
from triax.errors import MissingDependencyError
plan = moe.make_plan(jnp.array([[1], [0]]), 2, implementation="xla")
experts = moe.Experts(jnp.ones((2, 1, 2)), jnp.ones((2, 1, 1)))
"""
    for op, arguments in OPS.items():
        program += f"""
jax.jit(lambda: moe.{op}{arguments}))()
for implementation in ("interpret", "triton"):
    try:
        jax.eval_shape(lambda: moe.{op}{arguments}, implementation=implementation))
    except MissingDependencyError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(OPS)
    for line in lines:
        assert "`triton`, which is not installed" in line
