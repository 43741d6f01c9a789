"""The public names, and what importing them may cost."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from tests.interrupts import run_program

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = {
    "triax": [
        "Benchmark",
        "Explanation",
        "Records",
        "TensorDescriptor",
        "TriaxError",
        "__version__",
        "benchmark",
        "errors",
        "explain",
        "export_checks",
        "moe",
        "record",
        "same_bits",
        "sharded",
        "strides_from_shape",
        "testing",
        "triton_call",
        "triton_call_lowering",
        "tune",
        "tuning_mode",
    ],
    "triax.testing": [
        "TOLERANCES",
        "assert_close",
        "assert_same_bits",
        "checked",
        "hostile_values",
        "poison",
        "sanitized",
    ],
    "triax.moe": [
        "Checkpoint",
        "DispatchPlan",
        "Dispatched",
        "Experts",
        "FeedForward",
        "Permuted",
        "Plan",
        "Recipe",
        "Router",
        "Routing",
        "ScaledArray",
        "Sorted",
        "Swiglu",
        "combine",
        "dispatch",
        "feed_forward",
        "from_8_bits",
        "from_awq",
        "from_compressed_tensors",
        "from_gptq",
        "from_mxfp4",
        "from_nvfp4",
        "glu",
        "linear_from_checkpoint",
        "load_balancing_loss",
        "make_plan",
        "make_plan_from_mask",
        "permute",
        "quantize",
        "ragged_dot",
        "route",
        "router_z_loss",
        "sort_chunks_by_index",
        "unpermute",
    ],
    "triax.moe.transformer_engine": [
        "PureJaxPermState",
        "RoutingMapFormat",
        "ScoreFunction",
        "TokenDispatch",
        "compute_ragged_all_to_all_params",
        "compute_reverse_ragged_all_to_all_params",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
        "grouped_dense",
        "local_permute_after_a2a",
        "local_unpermute_before_a2a",
        "pure_jax_token_combine",
        "pure_jax_token_dispatch",
        "routing_map_to_selected_experts",
        "sort_chunks_by_index",
        "token_combine",
        "token_dispatch",
    ],
}

# Run in a fresh interpreter: what `import triax` adds to a program that uses JAX already.
IMPORT_PROBE = """
import json, sys, time
import jax, jax.numpy
start = time.process_time()
import triax
seconds = time.process_time() - start
from triax.compat import jax_private
triton, platforms = "triton" in sys.modules, [jax_private.default_platform()]
jax.devices()
platforms.append(jax_private.default_platform())
for device in (jax.devices()[0], "cpu"):
    with jax.default_device(device):
        platforms.append(jax_private.default_platform())
print(json.dumps({"seconds": seconds, "triton": triton, "platforms": platforms}))
"""


def probe_import() -> dict:
    done = run_program(IMPORT_PROBE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", PUBLIC)
def test_names_are_pinned(module):
    assert sorted(importlib.import_module(module).__all__) == PUBLIC[module]


@pytest.mark.parametrize("module", ["triax", "triax.moe"])
def test_dir_shows_the_public_names(module):
    names = [name for name in dir(importlib.import_module(module)) if not name.startswith("_")]
    assert names == sorted(name for name in PUBLIC[module] if not name.startswith("_"))


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in PUBLIC.items() for n in names if n[0] != "_"]
)
def test_name_is_documented(module, name):
    assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.parametrize("module", PUBLIC)
def test_names_are_in_the_reference(module):
    pages = (ROOT / "docs" / "reference").glob("*.md")
    # Under its public name, where a module hides it.
    entry = re.compile(r"^(?:<!-- ::: |      heading: )(\S+)", re.MULTILINE)
    shown = set(entry.findall("\n".join(p.read_text() for p in pages)))
    # Modules are shown whole (`errors`, which has TriaxError), or name by name (`moe`, `testing`).
    others = {"__version__", "moe", "testing", "TriaxError"}
    names = {f"{module}.{name}" for name in PUBLIC[module] if name not in others}
    assert module in shown or names <= shown


@pytest.mark.parametrize(
    ("file", "stated"),
    [
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("docs/guides/packaging-kernels.md", r"/triax-(.+)-py3-none-any\.whl"),
    ],
)
def test_version_is_the_project_s(file, stated):
    found = re.findall(stated, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [importlib.import_module("triax").__version__]


@pytest.mark.parametrize("file", ["README.md", "SECURITY.md", "CHANGELOG.md"])
def test_what_is_promised_is_said_once(file):
    assert "## What is promised\n" in (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert "(docs/versions.md#what-is-promised)" in (ROOT / file).read_text(encoding="utf-8")


def test_import_is_light():
    """No Triton, no JAX backend, and under a second of CPU time beyond JAX itself, in one of five
    tries."""
    first = probe_import()
    assert not first["triton"], "`import triax` imports triton"
    # None where there is no backend: to ask for the platform does not start one, either.
    assert first["platforms"] == [None, "cpu", "cpu", "cpu"]
    seconds = first["seconds"]
    for _ in range(4):
        if seconds >= 1:
            seconds = min(seconds, probe_import()["seconds"])
    assert seconds < 1


def test_signatures_of_moe_name_their_types():
    module = importlib.import_module("triax.moe")
    found = {
        f"{name}({parameter.name})"
        for name in PUBLIC["triax.moe"]
        if inspect.isfunction(function := getattr(module, name))
        for parameter in inspect.signature(function).parameters.values()
        if "Any" in str(parameter.annotation)
    }
    assert not found
