"""A decode step exported here for CUDA and the CPU, and what loading it takes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples.test_moe_layer import EXAMPLES, load
from triax import moe
from triax.emitting.reading import triton_calls

pytestmark = pytest.mark.cuda_plugin

SIZES = 64, 32, 8  # hidden, width, experts
NEEDED = ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy", "flatbuffers")

# Runs a file, and ends it when it asks for the network or another process, or writes to a file.
JAIL = """
import os, resource, runpy, sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
REFUSED = "os.exec os.fork os.mkdir os.posix_spawn os.rename os.system socket. subprocess."

def refuse(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & WRITES
    if writes or event.startswith(tuple(REFUSED.split())):
        os.write(2, f"refused: {event} {args}".encode())
        os._exit(3)  # an exception might be caught

if os.environ["JAX_PLATFORMS"] == "cpu":  # on a GPU ptxas writes temporary files
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # for what Python does not see, too
sys.addaudithook(refuse)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def example():
    return load("serving/export_step")


def in_jail(tmp_path, *command, platform="cpu", needed=NEEDED):
    """Runs Python with some packages alone: no home folder, no PATH, nothing that it may write."""
    packages, nowhere = tmp_path / "packages", tmp_path / "nowhere"
    packages.mkdir()
    for name in needed:
        found = Path(importlib.util.find_spec(name).submodule_search_locations[0])
        for folder in (found, found.with_name(f"{name}.libs")):
            if folder.exists():
                (packages / folder.name).symlink_to(folder)
    nowhere.mkdir(mode=0o555)
    given = {name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ}
    given |= {"PYTHONPATH": str(packages), "JAX_PLATFORMS": platform, "PATH": ""}
    return subprocess.run(
        [sys.executable, "-S", "-s", "-B", "-c", JAIL, *map(str, command)],
        env=given | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # a parent on a GPU has most of it
        cwd=nowhere,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def exported(example):
    """The step for 128 tokens, as it comes out of its bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIAX_CUDA_ARCH", "90")
        step = example.export(128, example.parameters(*SIZES), ("cuda", "cpu"))
    return jax.export.deserialize(step.serialize())


def lowered_for_cuda(function, exported):
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    args, _ = jax.tree.unflatten(exported.in_tree, types)
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.slow("compiled for a GPU, to look at its code")
def test_its_kernels_are_those_that_are_compiled_without_exporting(example, exported):
    found = triton_calls(lowered_for_cuda(exported.call, exported))
    expected = triton_calls(lowered_for_cuda(example.decode_step, exported))
    assert {call.opaque for call in found} == {call.opaque for call in expected}
    assert {call.kernel for call in found} >= {"route", "ragged_dot", "unpermute"}
    for call in found:
        (entry,), (ptx,) = call.entries, call.ptx
        assert f".entry {entry}(" in ptx
        assert ".target sm_" in ptx


def check_served(step, exported, tmp_path, device, **how):
    """Runs an exported step in a jail, and compares the state with what the step returns here."""
    path = tmp_path / "step.bin"
    path.write_bytes(exported.serialize())
    done = in_jail(tmp_path, EXAMPLES / "serving" / "serve.py", path, **how)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == device
    random = np.random.default_rng(0)
    fill = lambda a: jnp.asarray(random.standard_normal(a.shape, np.float32) / 16, a.dtype)
    flat = [fill(aval) for aval in exported.in_avals]
    params, state, x = jax.tree.unflatten(exported.in_tree, flat)[0]
    for _ in range(2):
        state, x = step(params, state, x)
    begins = jax.tree.leaves(state)[0].ravel()[:4]
    np.testing.assert_allclose(found["state begins"], begins, rtol=0.02)


@pytest.mark.slow("it compiles the step twice and starts a process")
def test_it_runs_without_triton_triax_home_path_network_or_a_folder(example, exported, tmp_path):
    check_served(example.decode_step, exported, tmp_path, "cpu")


def test_classes_of_triax_are_not_serialized_and_their_arrays_are():
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (8, 4), (4, 16, 32))]
    scaled = jax.eval_shape(functools.partial(moe.quantize, block=(1, None, 1)), types[2])
    down = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)

    def layer(x, logits, *weights):
        return moe.feed_forward(x, logits, moe.Experts(*weights), moe.Router(2))

    def of_arrays(x, logits, values, scales, down):
        w = dataclasses.replace(scaled, values=values, scales=scales)
        return layer(x, logits, w, down).tokens

    def bytes_of(function, *args):
        export = jax.export.export(jax.jit(function), platforms=["cpu"])
        return export(*args).serialize()

    assert bytes_of(of_arrays, *types[:2], scaled.values, scaled.scales, down)
    with pytest.raises(ValueError, match=r"unregistered type .*Routing"):
        bytes_of(layer, *types, down)
    with pytest.raises(ValueError, match=r"unregistered type .*ScaledArray"):
        bytes_of(lambda *args: layer(*args).tokens, *types[:2], scaled, down)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import triax", "No module named 'triax'"),
        ("import triton", "No module named 'triton'"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "refused: socket."),
        ("import subprocess; subprocess.run(['/bin/true'])", "refused: subprocess.Popen"),
        ("open('/tmp/x', 'w')", "refused: open"),
        ("from pathlib import Path; Path.home().mkdir()", "refused: os.mkdir"),
    ],
)
def test_what_the_jail_refuses(tmp_path, program, expected):
    path = tmp_path / "program.py"
    path.write_text(program)
    done = in_jail(tmp_path, path)
    assert done.returncode != 0
    assert expected in done.stderr
