"""Draws how times change with the number of GPUs, each with as many tokens: weak scaling.

    python benchmarks/weak_scaling.py

Reads the records `expert_parallel_*.json`; writes `docs/pictures/weak_scaling.svg`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import matplotlib.style

from triax.bench.plots import INK, PALETTE, STYLE

HERE = Path(__file__).parent


def main() -> None:
    records = [json.loads(path.read_text()) for path in HERE.glob("expert_parallel_*.json")]
    records.sort(key=lambda record: record["gpus"])
    gpus = [record["gpus"] for record in records]
    results = [record["results"] for record in records]
    moves = {
        "by hand, both directions": [r["forward and backward"]["by hand"]["ms"] for r in results],
        "Triax, both directions": [r["forward and backward"]["triax"]["ms"] for r in results],
        "by hand, forward": [r["forward"]["by hand"]["ms"] for r in results],
        "Triax, forward": [r["forward"]["triax"]["ms"] for r in results],
    }
    found = [result["layer in 1 parts, ragged, forward and backward"] for result in results]
    layers = {
        "all of it": [times["ms"] for times in found],
        "exchange": [times["profile_ms"]["exchange"] for times in found],
    }
    with matplotlib.style.context(STYLE, after_reset=True):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for panel, title, lines in zip(
            axes,
            ("dispatch and combine", "the layer, forward and backward"),
            (moves, layers),
            strict=True,
        ):
            for (name, values), colour in zip(lines.items(), PALETTE, strict=False):
                panel.plot(gpus, values, "o-", color=colour)
                text = f"  {name}"
                panel.annotate(text, (gpus[-1], values[-1]), color=INK, va="center")
            panel.set(
                title=title, xlabel="GPUs", xticks=gpus, xlim=(gpus[0] * 0.95, gpus[-1] * 1.6)
            )
            panel.set_ylim(0, 1.15 * max(max(values) for values in lines.values()))
            panel.set_ylabel("ms")
            panel.grid(axis="y")
        device = f"{records[0]['device']}, {records[0]['tokens']:,} tokens on each GPU"
        figure.suptitle(device, color=INK, fontsize=9)
        picture = HERE.parent / "docs" / "pictures" / "weak_scaling.svg"
        figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
