"""`tools/sanitize`: launches as they are recorded, what the tools print, and when a run is void."""

from __future__ import annotations

import collections
import functools
import json
import pickle
import subprocess
from pathlib import Path

import jax
import pytest
import triton
from tools.sanitize import cases, planted, record, replay, report, triton_sanitizers
from tools.sanitize.__main__ import sanitize

from tests.moe.cases import NAMED
from triax.compat import jax_private, versions
from triax.tuning.worker import messages

# As compute-sanitizer prints them, in short.
PRINTED = {
    "memcheck": """\
========= COMPUTE-SANITIZER
ran {0} (layer)
========= Invalid __global__ write of size 4 bytes
=========     at {0}+0x130
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
""",
    "racecheck": """\
ran {0} (layer)
========= Error: Race reported between Write access at {0}+0xc0
=========     and Read access at {0}+0x120 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
""",
    "initcheck": """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x90 in {0}
ran {0} (layer)
========= ERROR SUMMARY: 1 error
""",
    "synccheck": """\
========= Barrier error detected. Divergent thread(s) in warp.
=========     at {0}+0x60
ran {0} (layer)
========= ERROR SUMMARY: 1 error
""",
    "canaries": """\
ran {0} (layer)
CANARY: {0} wrote past buffer 1 of 4096 bytes
""",
}


@pytest.mark.parametrize("tool", report.TOOLS)
def test_what_a_tool_prints(tool):
    found = report.read(tool, PRINTED[tool].format("_glu_kernel_0123456789abcdef0"), 0)
    assert found.ran == found.findings == {"glu": 1}
    assert found.total == 1
    lines = report.table({tool: found, "other": report.Found(found.ran, collections.Counter(), 0)})
    assert lines.split("\n")[1].split() == ["glu", "1", "1", "0"]
    cut_off = PRINTED[tool].format("glu").rpartition("=========")[0] if tool != "canaries" else ""
    assert not report.read(tool, cut_off, 1).complete


def test_long_logs_are_read_at_once():
    """Below each finding stands where the host was, and programs print, too."""
    frames = "=========         Host Frame:  [0x4cd39] in cydriver.so\n" * 40
    finding = (
        "========= Barrier error detected. Divergent thread(s) in warp.\n"
        "=========     at _glu_kernel+0x70\n=========     by thread (0,0,0) in block (0,0,0)\n"
    )
    refused = "========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) on CUDA API call.\n"
    end = "Traceback: at last\n========= Target application returned an error\n"
    output = (finding + frames + "=========\n") * 500 + refused + frames + "=========\n" + end
    found = report.read("synccheck", output + "========= ERROR SUMMARY: 501 errors\n", 1)
    assert found.findings == {"glu": 500}
    assert found.total == 501


@pytest.mark.cuda_plugin
def test_launches_have_the_operands_they_were_made_with(tmp_path):
    run = functools.partial(cases.named, "glu")
    assert record.record([("activation", run), ("again", run)], tmp_path) == 2
    jobs = pickle.loads((tmp_path / "jobs.pickle").read_bytes())
    assert [report.base_name(job.candidates[0].entry) for _, job in jobs] == ["glu", "glu_grad"]
    (_, job), _ = jobs
    job = replay.located(job, tmp_path)
    gate_up, weights, out = job.buffers
    assert (gate_up.nbytes, weights.nbytes, out.nbytes) == (7 * 80 * 4, 7 * 4, 7 * 40 * 4)
    assert (
        Path(weights.path).read_bytes() == NAMED["glu"]("interpret").inputs(0)["weights"].tobytes()
    )
    assert out.path is None
    assert job.candidates[0].cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("fault", planted.FAULTS)
def test_planted_faults_assemble(fault, tmp_path):
    planted.plant(fault, tmp_path)
    ((_, job),) = pickle.loads((tmp_path / "jobs.pickle").read_bytes())
    (candidate,) = job.candidates
    assert candidate.parameters == (messages.Pointer(0), messages.Pointer(1))
    (tmp_path / "fault.ptx").write_bytes(candidate.cubin.rstrip(b"\0"))
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [ptxas, "-arch=sm_90", tmp_path / "fault.ptx", "-o", tmp_path / "fault.cubin"]
    subprocess.run(command, check=True)
    assert fault in planted.REPORTED_BY.values()


@pytest.mark.parametrize("blind", [None, "racecheck"])
@pytest.mark.parametrize("count", [0, 2, None])
def test_a_run_in_which_a_planted_fault_goes_unseen_is_void(blind, count, tmp_path):
    ran = collections.Counter(glu=3)

    def run(tool, folder, log):
        if folder == tmp_path / "launches":
            return report.Found(ran, collections.Counter(), count if tool == "memcheck" else 0)
        ((_, job),) = pickle.loads((folder / "jobs.pickle").read_bytes())
        fault = job.candidates[0].entry
        assert fault == planted.REPORTED_BY[tool]
        seen = {} if tool == blind else {fault: 1}
        return report.Found(collections.Counter([fault]), collections.Counter(seen), len(seen))

    found = sanitize(tmp_path / "launches", tmp_path / "logs", list(report.TOOLS), run)
    problems = []
    if count is None:
        problems.append("void: memcheck did not come to its end")
    elif count:
        problems.append("memcheck: 2 findings")
    if blind:
        problems.append("void: racecheck did not report planted_race")
    assert found["problems"] == problems
    assert found["tools"]["synccheck"]["launches"] == 3


# --- Triton's sanitizers ---------------------------------------------------------------------

ASSERTION = (
    "/a/kernels.py:7: copy: block: [1,0,0], thread: [3,0,0] Assertion `Buffer being accessed has "
    "outstanding writes` failed.\n"
)


def a_run(*arguments, blind=(), fatal=(), different=()):
    """What processes on a GPU would print."""
    module, *rest = arguments
    if module == "tools.sanitize.planted_kernels":
        (fault,) = rest
        return "", "" if fault in blind else triton_sanitizers.PLANTED[fault] + "\n"
    sanitizer, *names = rest
    printed = "Some library says something.\n"
    for name in names:
        if (sanitizer, name) in fatal:
            return printed, ASSERTION + "jax.errors.JaxRuntimeError: unknown error\n"
        findings = [f"{name} differs"] if (sanitizer, name) in different else []
        printed += json.dumps({"findings": findings, "kernels": ["schedule", name[:4]]}) + "\n"
    return printed, "Exception ignored\n"


NAMES = ["glu 1", "dot 1", "dot 2", "sum 1", "dot 3"]


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_what_is_left_of_cases_runs_after_a_finding(jobs):
    run = functools.partial(
        a_run,
        fatal=[("consan", "dot 2"), ("consan", "dot 3")],
        different=[("fpsan", "glu 1")],
    )
    found = triton_sanitizers.sanitize(NAMES, jobs, run)
    died = "Assertion `Buffer being accessed has outstanding writes` failed, /a/kernels.py:7"
    assert found["sanitizers"]["consan"] == {
        "cases": 5,
        "kernels": 4,
        "by_kernel": {"dot ": 1, "glu ": 1, "schedule": 3, "sum ": 1},
        "findings": {"dot 2": died, "dot 3": died},
    }
    assert found["sanitizers"]["fpsan"]["by_kernel"]["dot "] == 3
    wanted = [f"consan: dot 2: {died}", f"consan: dot 3: {died}", "fpsan: glu 1: glu 1 differs"]
    assert sorted(found["problems"]) == wanted


@pytest.mark.parametrize("fault", triton_sanitizers.PLANTED)
def test_sanitizers_that_miss_a_planted_fault_are_void(fault):
    found = triton_sanitizers.sanitize(NAMES, 2, functools.partial(a_run, blind=[fault]))
    (problem,) = found["problems"]
    assert problem.startswith(f"void: planted_kernels {fault!r} ended with")
    assert found["sanitizers"] == {}


@pytest.mark.cuda_plugin
def test_cases_that_cover_others(monkeypatch):
    from tools.sanitize import in_jax

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    assert in_jax.launched("glu") == {
        ("_glu_kernel", "float32", "float32", "float32"),
        ("_glu_grad_kernel", *["float32"] * 5),
    }
    names = [
        "glu, no weights",
        "glu",
        "plan, no tokens",
        "ragged_dot and glu, no gate",
        "glu, no rows",
    ]
    chosen = in_jax.covering(names)
    assert len(chosen) < len(names)
    everything = set().union(*map(in_jax.launched, names))
    assert set().union(*map(in_jax.launched, chosen)) == everything


@pytest.mark.cuda_plugin
def test_others_launch_something_else(monkeypatch):
    from tools.sanitize import in_jax

    if not versions.GLUON.passes(triton.__version__) or not jax_private.supports_tensor_maps():
        pytest.skip("has no kernels in Gluon")
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")

    def products():
        jax.clear_caches()
        found = in_jax.launches("ragged_dot, several tiles")
        return [launch for launch in found if "schedule" not in launch.name]

    usual = products()
    with in_jax.others():
        others = products()
    assert [launch.kernel.is_gluon for launch in usual] == [True, True, False]
    assert [launch.kernel.is_gluon for launch in others] == [False, False, False]
    for one, other in zip(usual[2:], others[2:], strict=True):
        for constant in ("BLOCK_ROWS", "BLOCK_DEPTH"):
            assert one.constants[constant] == 2 * other.constants[constant]
        assert one.options["num_warps"] == 2 * other.options["num_warps"]
