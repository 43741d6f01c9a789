"""What needs a process of its own: caches across processes, and what XLA dumps."""

import glob
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import buffers

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


def child_environment():
    """This process holds most of the GPU's memory: children take what they need, when they do."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def run(program, *args, cwd=ROOT, **environment):
    env = {**child_environment(), **environment}
    result = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *map(str, args)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_second_process_hits_the_persistent_cache(tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    cache = tmp_path / "xla"
    first = json.loads(
        run("cached.py", cache, PYTHONHASHSEED="1", TRITON_CACHE_DIR=str(tmp_path / "a"))
    )
    second = json.loads(
        run("cached.py", cache, cwd=other, PYTHONHASHSEED="2", TRITON_CACHE_DIR=str(tmp_path / "b"))
    )
    assert first["opaque"] == second["opaque"]
    assert first["misses"] >= 3
    assert second["misses"] == 0
    assert second["hits"] >= 3


def thunks(tmp_path, kind, *flags):
    run(
        "thunks.py",
        kind,
        XLA_FLAGS=" ".join([f"--xla_dump_to={tmp_path}", "--xla_dump_hlo_as_text", *flags]),
    )
    (name,) = [
        f
        for f in glob.glob(f"{tmp_path}/*thunk_sequence_after_thunk_passes*")
        if re.search(r"jit_(five|eight|vector_add)", f)
    ]
    return Path(name).read_text()


@pytest.mark.parametrize(
    ("kind", "flags", "calls"),
    [
        ("five", [], 3),
        ("single", ["--xla_gpu_graph_min_graph_size=1"], 1),
        ("eight", [], 8),
        ("eight", ["--xla_gpu_graph_min_graph_size=1"], 8),
    ],
)
def test_calls_stand_inside_the_command_buffer(tmp_path, kind, flags, calls):
    text = thunks(tmp_path, kind, *flags)
    print(text)
    top = [line for line in text.splitlines() if re.match(r"\d+:", line)]
    assert sum("kCommandBuffer" in line for line in top) == 1, text
    assert not [line for line in top if "kCustomCall" in line], text
    assert text.count("triton_kernel_call_ffi") >= calls or text.count("kCustomCall") >= calls, text


@pytest.mark.parametrize(
    ("program", "function", "calls"),
    [
        ("chunks.py", "forward", 2),
        ("chunks.py", "backward", 2),
        ("moe_step.py", "routed", 5),
        ("moe_step.py", "routed_grad", 6),
    ],
)
def test_outputs_share_no_memory_with_inputs(tmp_path, program, function, calls):
    """No output of a Triton call lies where one of its operands does, unless it is aliased."""
    run(program, XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    found = buffers.triton_calls(tmp_path, function)
    assert len(found) >= calls, found
    for name, (inputs, outputs, aliased) in found.items():
        assert inputs, name
        assert outputs or aliased, name
        for place in outputs:
            assert not any(place.overlaps(other) for other in inputs), (name, inputs, outputs)
