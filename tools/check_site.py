"""Checks the built site: what its search finds.

    python tools/check_site.py site

prints what is wrong, and exits with 1. The search is asked through Node, if there is one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A word that people look for, and the pages that may come first.
WORDS = {
    "custom_vjp": "guides/transformations",
    "gradient": "guides/transformations",
    "vmap": "guides/transformations",
    "shard_map": "sharding guides/transformations",
    "heuristics": "coming-from/torch-triton",
    "torch": "coming-from/torch-triton",
    "strides": "coming-from/torch-triton reference/calling",
    "pytest": "guides/testing",
    "offline": "start/install",
    "install": "start/install",
    "fp8": "eight-bits",
    "int8": "eight-bits",
    "mxfp4": "quantized-checkpoints",
    "autotune": "tuning",
    "TRIAX_AUTOTUNE": "tuning",
    "export": "guides/exporting",
    "out of bounds": "guides/debugging",
    "donate": "guides/in-place",
    "flax": "guides/flax-and-equinox",
    "ragged_dot": "coming-from/argsort reference/moe moe",
    "jax.lax.ragged_dot": "coming-from/argsort reference/moe moe",
    "top_k": "router",
    "all_to_all": "expert-parallel",
    "capacity": "moe",
    "triton_call": "reference/calling",
    "notebook": "gallery",
    "doctor": "reference/command-line",
    "draw": "reference/command-line",
    "gluon": "guides/tma-and-gluon",
    "deepseek": "models",
    "deprecation": "versions",
}


def search(site: Path) -> Iterator[str]:
    """Words for which another page comes first."""
    if shutil.which("node") is None:
        print("check_site: no Node here, so the search is not asked", file=sys.stderr)
        return
    command = ["node", str(Path(__file__).with_name("site_search.mjs")), str(site), *WORDS]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for word, found in json.loads(done.stdout).items():
        pages = [place.partition("#")[0].rstrip("/") for place in found]
        if not pages or pages[0] not in WORDS[word].split():
            yield f"search: {word!r} finds {pages[:3]}, not {WORDS[word]}"


def main() -> int:
    site = Path(sys.argv[1])
    wrong = [*search(site)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
