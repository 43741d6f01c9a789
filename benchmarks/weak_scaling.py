"""Draws how times change with the number of GPUs, each with as many tokens: weak scaling.

    python -m benchmarks.weak_scaling

Reads the records `expert_parallel_*.json`; writes `docs/pictures/weak_scaling.svg`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import matplotlib.style

from benchmarks.ops.plots import INK, PALETTE, STYLE

HERE = Path(__file__).parent
WAYS = {"by hand": "by hand", "Triax": "triax"}


def main() -> None:
    records = [json.loads(path.read_text()) for path in HERE.glob("expert_parallel_*.json")]
    records.sort(key=lambda record: record["gpus"])
    gpus, results = [[record[of] for record in records] for of in ("gpus", "results")]
    moves = {
        f"{name}, {what}": [r[direction][way]["ms"] for r in results]
        for direction, what in (("forward and backward", "both directions"), ("forward", "forward"))
        for name, way in WAYS.items()
    }
    found = [result["layer in 1 parts, triax, forward and backward"] for result in results]
    layers = {
        "all of it": [times["ms"] for times in found],
        "exchange": [times["profile_ms"]["exchange"] for times in found],
    }
    panels = {"dispatch and combine": moves, "the layer, forward and backward": layers}
    with matplotlib.style.context(STYLE, after_reset=True):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for panel, (title, lines) in zip(axes, panels.items(), strict=True):
            for (name, values), colour in zip(lines.items(), PALETTE, strict=False):
                panel.plot(gpus, values, "o-", color=colour)
                panel.annotate(f"  {name}", (gpus[-1], values[-1]), color=INK, va="center")
            limits = gpus[0] * 0.95, gpus[-1] * 1.6
            panel.set(title=title, xlabel="GPUs", ylabel="ms", xticks=gpus, xlim=limits)
            panel.set_ylim(0, 1.15 * max(max(values) for values in lines.values()))
            panel.grid(axis="y")
        device = f"{records[0]['device']}, {records[0]['tokens']:,} tokens on each GPU"
        figure.suptitle(device, color=INK, fontsize=9)
        picture = HERE.parent / "docs" / "pictures" / "weak_scaling.svg"
        figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
